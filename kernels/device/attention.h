// What stands around attention in a CCA layer: the depthwise convolution and the value shift, means of queries and keys, their
// length, rotation.
// H query heads in K groups of H / K, then K key heads: G = H + K heads of d dimensions. [N, G d] is by token, [G, N, d] by head.
// The order of sums is that of src/ops/cpu/{conv,query_key}.rs.
#pragma once
#include "elements.h"
#include "rows.h"

// Rows, ascending: those at which documents begin, or that are counted.
struct Listed {
  const i64* rows;
  u32 count;
};
constexpr u32 EVERY = ~0u;  // a count that stands for all rows: a list without any has no address either
// Where a row stands in the list, or how many there are.
DEVICE u32 place_in(Listed list, u32 row) {
  u32 low = 0, high = list.count;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (list.rows[middle] < row) low = middle + 1;
    else high = middle;
  }
  return low < list.count && list.rows[low] == row ? low : list.count;
}
DEVICE bool holds(Listed list, u32 row) { return place_in(list, row) < list.count; }

// z is [N, W]: G d channels of queries and keys, then values of which the first stay with their token, up to `delayed`, and the
// others go to the next one.
struct Mixed {
  u32 rows, width, channels, delayed, columns;  // N, d, G d, G d + a, W
};
// Where c_{t-1} of a channel stands in [G, N, d, 2]; that of c_t is behind it.
DEVICE u64 place_of(Mixed by, u32 row, u32 channel) {
  return ((static_cast<u64>(channel / by.width) * by.rows + row) * by.width + channel % by.width) * 2;
}

// c_t = bias + now z_t + before z_{t-1}; both = c_{t-1}, c_t. Before a document c is the bias. Taps are before, now.
// values_t = z_t, and z_{t-1} of what goes to the next token, zeros for what comes before a document.
template <typename T>
DEVICE void mixed(const T* z, const f32* taps, const f32* bias, Listed starts, T* both, T* values, Mixed by) {
  each(by.rows, by.columns, [=](u32 row, u32 column) {
    const T* own = z + static_cast<u64>(row) * by.columns + column;
    const bool begins = holds(starts, row);
    if (column >= by.channels) {
      T value = {};
      if (column < by.delayed) value = *own;
      else if (!begins) value = *(own - by.columns);
      values[static_cast<u64>(row) * (by.columns - by.channels) + (column - by.channels)] = value;
      return;
    }
    const f32 before = taps[2 * column], now = taps[2 * column + 1], shift = bias[column];
    const auto at = [=](const T* own, bool begins) {
      f32 c = shift + now * wide(*own);
      if (!begins) c += before * wide(*(own - by.columns));
      return c;
    };
    const u64 place = place_of(by, row, column);
    put(both[place], begins ? shift : at(own - by.columns, holds(starts, row - 1)));
    put(both[place + 1], at(own, begins));
  });
}
KERNEL(conv_shift_f32, 256, LIMIT(48, 0, 8),
       (const f32* z, const f32* taps, const f32* bias, const i64* starts, u32 count, f32* both, f32* values, u32 rows, u32 width,
        u32 channels, u32 delayed, u32 columns)) {
  mixed(z, taps, bias, {starts, count}, both, values, {rows, width, channels, delayed, columns});
}
KERNEL(conv_shift_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* z, const f32* taps, const f32* bias, const i64* starts, u32 count, bf16* both, bf16* values, u32 rows,
        u32 width, u32 channels, u32 delayed, u32 columns)) {
  mixed(z, taps, bias, {starts, count}, both, values, {rows, width, channels, delayed, columns});
}

// Back: the gradient of z, and in bands, [3, bands, G d], those of taps before and now, and of the bias, over rows that are
// counted (all where there are EVERY). To the gradients of their channels goes what comes through the means, row by row.
template <typename T>
DEVICE void mixed_back(const T* z, const f32* taps, Listed starts, Listed counted, const T* grad, const T* values,
                       const f32* means, T* input, f32* partial, Mixed by) {
  const Column column = column_of(by.rows, by.columns);
  if (!column.there) return;
  const u32 channel = column.index;
  // Whether a row is the last of its document.
  const auto ends = [=](u32 row) { return row + 1 >= by.rows || holds(starts, row + 1); };
  if (channel >= by.channels) {
    const u32 width = by.columns - by.channels;
    for (u32 row = column.first; row < column.end; ++row) {
      const u64 at = static_cast<u64>(row) * width + (channel - by.channels);
      T value = {};
      if (channel < by.delayed) value = values[at];
      else if (!ends(row)) value = values[at + width];
      input[static_cast<u64>(row) * by.columns + channel] = value;
    }
    return;
  }
  const f32 before = taps[2 * channel], now = taps[2 * channel + 1];
  // What c_t gets from its own row and from the next one.
  const auto at = [=](u32 row, bool last) {
    f32 c = wide(grad[place_of(by, row, channel) + 1]);
    if (!last) c += wide(grad[place_of(by, row + 1, channel)]);
    return c;
  };
  f32 sums[3] = {0.0f, 0.0f, 0.0f};
  bool begins = holds(starts, column.first), last = ends(column.first);
  f32 c = at(column.first, last);
  for (u32 row = column.first; row < column.end; ++row) {
    const u64 place = static_cast<u64>(row) * by.columns + channel;
    const bool next_last = ends(row + 1);
    const f32 next = row + 1 < by.rows ? at(row + 1, next_last) : 0.0f;
    f32 own = c * now;
    if (!last) own += next * before;
    const u32 number = counted.count == EVERY ? row : place_in(counted, row);
    if (number < counted.count) {
      own += means[static_cast<u64>(number) * by.channels + channel];
      sums[2] += c;
      sums[1] += c * wide(z[place]);
      if (begins) sums[2] += wide(grad[place_of(by, row, channel)]);
      else sums[0] += c * wide(z[place - by.columns]);
    }
    put(input[place], own);
    c = next, begins = last, last = next_last;
  }
  const u64 size = static_cast<u64>((by.rows + BAND - 1) / BAND) * by.channels;
  const u64 place = static_cast<u64>(column.first / BAND) * by.channels + channel;
  for (u32 which = 0; which < 3; ++which) partial[place + which * size] = sums[which];
}
KERNEL(conv_shift_backward_f32, 256, LIMIT(64, 0, 8),
       (const f32* z, const f32* taps, const i64* starts, u32 count, const i64* counted, u32 counted_count, const f32* grad,
        const f32* values, const f32* means, f32* input, f32* partial, u32 rows, u32 width, u32 channels, u32 delayed,
        u32 columns)) {
  mixed_back(z, taps, {starts, count}, {counted, counted_count}, grad, values, means, input, partial,
             {rows, width, channels, delayed, columns});
}
KERNEL(conv_shift_backward_bf16, 256, LIMIT(64, 0, 8),
       (const bf16* z, const f32* taps, const i64* starts, u32 count, const i64* counted, u32 counted_count, const bf16* grad,
        const bf16* values, const f32* means, bf16* input, f32* partial, u32 rows, u32 width, u32 channels, u32 delayed,
        u32 columns)) {
  mixed_back(z, taps, {starts, count}, {counted, counted_count}, grad, values, means, input, partial,
             {rows, width, channels, delayed, columns});
}

struct Groups {
  u32 tokens, queries, keys, width;  // N, H, K, d
};

constexpr f32 LEAST_LENGTH = 1.1920929e-7f;

// raw = made + bias + the mean that belongs to it of what stands first in the `columns` of z; out = raw made sqrt(d) long, times
// the temperature for keys, its first 2 r dimensions turned: i with i + r. 16 lanes a vector. `made` may be raw.
template <typename T>
DEVICE void query_key(const T* z, const T* made, const f32* bias, f32* raw, const f32* temperature, const f32* cosines,
                      const f32* sines, f32* factors, T* out, Groups by, u32 half, u32 columns) {
  const u32 heads = by.queries + by.keys, group = by.queries / by.keys;
  const Row row = row_of(heads * by.tokens);
  const u32 head = row.index / by.tokens, token = row.index % by.tokens;
  f32* own = raw + static_cast<u64>(row.index) * by.width;
  if (row.there) {
    const u32 from = token * columns;
    for (u32 place = row.lane; place < by.width; place += PARTS) {
      const auto at = [=](u32 head) { return wide(z[from + head * by.width + place]); };
      f32 mean = 0.0f;
      if (head < by.queries) {
        mean = (at(head) + at(by.queries + head / group)) * 0.5f;
      } else {
        const u32 key = head - by.queries;
        for (u32 member = key * group; member < (key + 1) * group; ++member) mean += (at(member) + at(head)) * 0.5f;
        mean = mean / static_cast<f32>(group);
      }
      own[place] = wide(made[static_cast<u64>(row.index) * by.width + place]) + bias[head * by.width + place] + mean;
    }
  }
  // A lane turns what others of its row have written.
  barrier();
  const f32 square = along_row(row, by.width, [=](u32 place) { return own[place] * own[place]; });
  if (!row.there) return;
  const f32 length = root(square);
  const f32 factor = 1.0f / (length > LEAST_LENGTH ? length : LEAST_LENGTH) * root(static_cast<f32>(by.width));
  const f32 scale = factor * (head < by.queries ? 1.0f : temperature[head - by.queries]);
  if (row.lane == 0) factors[row.index] = factor;
  T* to = out + static_cast<u64>(row.index) * by.width;
  const u64 angles = static_cast<u64>(token) * half;
  for (u32 place = row.lane; place < half; place += PARTS) {
    const f32 a = own[place] * scale, b = own[place + half] * scale;
    const f32 cosine = cosines[angles + place], sine = sines[angles + place];
    put(to[place], a * cosine - b * sine);
    put(to[place + half], b * cosine + a * sine);
  }
  for (u32 place = 2 * half + row.lane; place < by.width; place += PARTS) put(to[place], own[place] * scale);
}
KERNEL(query_key_f32, 256, LIMIT(48, 0, 8),
       (const f32* z, const f32* made, const f32* bias, f32* raw, const f32* temperature, const f32* cosines, const f32* sines,
        f32* factors, f32* out, u32 tokens, u32 queries, u32 keys, u32 width, u32 half, u32 columns)) {
  query_key(z, made, bias, raw, temperature, cosines, sines, factors, out, {tokens, queries, keys, width}, half, columns);
}
KERNEL(query_key_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* z, const bf16* made, const f32* bias, f32* raw, const f32* temperature, const f32* cosines, const f32* sines,
        f32* factors, bf16* out, u32 tokens, u32 queries, u32 keys, u32 width, u32 half, u32 columns)) {
  query_key(z, made, bias, raw, temperature, cosines, sines, factors, out, {tokens, queries, keys, width}, half, columns);
}

// Back, in the memory of grad: the gradient of raw, and the same rounded, unless there is no memory for that; and that of z
// through the means, [N, G d]. In bands of tokens: that of the
// bias, [bands, G d], and that of the temperature, [bands, K]. A block has a band of a key head with its query heads; 16 lanes
// a token.
KERNEL(query_key_backward, 256, LIMIT(64, 128, 8),
       (const f32* raw, const f32* factors, const f32* temperature, const f32* cosines, const f32* sines, f32* grad,
        bf16* rounded, f32* means, f32* bias, f32* temperatures, u32 tokens, u32 queries, u32 keys, u32 width, u32 half)) {
  SHARED(f32, shares, 32);
  const u32 key = block_index() % keys, band = block_index() / keys, lane = thread_index() % PARTS;
  const u32 group = queries / keys, channels = (queries + keys) * width;
  // The heads of the group: its query heads, then the key head.
  const auto head_of = [=](u32 member) { return member < group ? key * group + member : queries + key; };
  const f32 whole = root(static_cast<f32>(width));
  for (u32 first = 0; first < BAND; first += ROWS) {
    const u32 own_row = first + thread_index() / PARTS, token = band * BAND + own_row;
    const bool there = token < tokens;
    const u64 angles = static_cast<u64>(token) * half;
    for (u32 member = 0; member <= group; ++member) {
      const u32 head = head_of(member);
      const Row row = {head * tokens + token, lane, there};
      const f32* own = raw + static_cast<u64>(row.index) * width;
      f32* to = grad + static_cast<u64>(row.index) * width;
      if (there)
        for (u32 place = lane; place < half; place += PARTS) {
          const f32 a = to[place], b = to[place + half], cosine = cosines[angles + place], sine = sines[angles + place];
          to[place] = a * cosine + b * sine;
          to[place + half] = b * cosine - a * sine;
        }
      barrier();  // other lanes take up what these have turned
      const f32 dot = along_row(row, width, [=](u32 place) { return to[place] * own[place]; });
      const f32 factor = there ? factors[row.index] : 0.0f, scale = member < group ? 1.0f : temperature[key];
      if (member == group && lane == 0) shares[own_row] = factor * dot;
      // Where the length was clamped, the factor is a constant.
      const bool clamped = factor >= 0.999f * whole / LEAST_LENGTH;
      const f32 along = clamped ? 0.0f : factor * factor * factor * scale * dot / -static_cast<f32>(width);
      const f32 by = factor * scale;
      if (there)
        for (u32 place = lane; place < width; place += PARTS) {
          const f32 value = to[place] * by + own[place] * along;
          to[place] = value;
          if (rounded != nullptr) put(rounded[static_cast<u64>(row.index) * width + place], value);
        }
    }
    if (there)
      for (u32 place = lane; place < width; place += PARTS) {
        const auto at = [=](u32 head) { return grad[(static_cast<u64>(head) * tokens + token) * width + place]; };
        f32* to = means + static_cast<u64>(token) * channels + place;
        const f32 of_key = at(queries + key);
        f32 sum = 0.0f;
        for (u32 head = key * group; head < (key + 1) * group; ++head) {
          const f32 mean = (at(head) + of_key / static_cast<f32>(group)) * 0.5f;
          to[head * width] = mean;
          sum += mean;
        }
        to[(queries + key) * width] = sum;
      }
  }
  barrier();  // sums go over what other lanes have written
  const u32 end = (band + 1) * BAND < tokens ? BAND : tokens - band * BAND;
  for (u32 column = thread_index(); column < (group + 1) * width; column += BLOCK) {
    const u32 head = head_of(column / width), place = column % width;
    const f32* from = grad + (static_cast<u64>(head) * tokens + band * BAND) * width + place;
    f32 sum = 0.0f;
    for (u32 row = 0; row < end; ++row) sum += from[static_cast<u64>(row) * width];
    bias[static_cast<u64>(band) * channels + head * width + place] = sum;
  }
  if (thread_index() > 0) return;
  f32 sum = 0.0f;
  for (u32 row = 0; row < end; ++row) sum += shares[row];
  temperatures[static_cast<u64>(band) * keys + key] = sum;
}

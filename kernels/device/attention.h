// What stands around attention in a CCA layer: the depthwise convolution, means of queries and keys, their length, rotation.
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
DEVICE bool holds(Listed list, u32 row) {
  u32 low = 0, high = list.count;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (list.rows[middle] < row) low = middle + 1;
    else high = middle;
  }
  return low < list.count && list.rows[low] == row;
}

struct Heads {
  u32 rows, width, channels;  // N, d, G d
};
// Where a channel of c_{t-1} stands in [G, N, 2 d]; that of c_t is `width` behind it.
DEVICE u64 place_of(Heads heads, u32 row, u32 channel) {
  return (static_cast<u64>(channel / heads.width) * heads.rows + row) * 2 * heads.width + channel % heads.width;
}

// c_t = bias + now z_t + before z_{t-1}; both = c_{t-1}, c_t. Before a document c is the bias. Taps are before, now.
template <typename T>
DEVICE void conv(const T* z, const f32* taps, const f32* bias, Listed starts, T* both, Heads heads) {
  each(heads.rows, heads.channels, [=](u32 row, u32 channel) {
    const f32 before = taps[2 * channel], now = taps[2 * channel + 1], shift = bias[channel];
    const auto at = [=](u32 row, bool begins) {
      f32 c = shift + now * wide(z[static_cast<u64>(row) * heads.channels + channel]);
      if (!begins) c += before * wide(z[static_cast<u64>(row - 1) * heads.channels + channel]);
      return c;
    };
    const u64 place = place_of(heads, row, channel);
    const bool begins = holds(starts, row);
    put(both[place], begins ? shift : at(row - 1, holds(starts, row - 1)));
    put(both[place + heads.width], at(row, begins));
  });
}
KERNEL(depthwise_conv_f32, 256, LIMIT(48, 0, 8),
       (const f32* z, const f32* taps, const f32* bias, const i64* starts, u32 count, f32* both, u32 rows, u32 width,
        u32 channels)) {
  conv(z, taps, bias, {starts, count}, both, {rows, width, channels});
}
KERNEL(depthwise_conv_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* z, const f32* taps, const f32* bias, const i64* starts, u32 count, bf16* both, u32 rows, u32 width,
        u32 channels)) {
  conv(z, taps, bias, {starts, count}, both, {rows, width, channels});
}

// Back: the gradient of z, f32, and in bands, [3, bands, G d], those of taps before and now, and of the bias, over rows that are
// counted (all where there are EVERY).
template <typename T>
DEVICE void conv_back(const T* z, const f32* taps, Listed starts, Listed counted, const T* grad, f32* input, f32* partial,
                      Heads heads) {
  const Column column = column_of(heads.rows, heads.channels);
  if (!column.there) return;
  const u32 channel = column.index;
  const f32 before = taps[2 * channel], now = taps[2 * channel + 1];
  // Whether a row is the last of its document; what c_t gets from its own row and from the next one.
  const auto ends = [=](u32 row) { return row + 1 >= heads.rows || holds(starts, row + 1); };
  const auto at = [=](u32 row, bool last) {
    f32 c = wide(grad[place_of(heads, row, channel) + heads.width]);
    if (!last) c += wide(grad[place_of(heads, row + 1, channel)]);
    return c;
  };
  f32 sums[3] = {0.0f, 0.0f, 0.0f};
  bool begins = holds(starts, column.first), last = ends(column.first);
  f32 c = at(column.first, last);
  for (u32 row = column.first; row < column.end; ++row) {
    const u64 place = static_cast<u64>(row) * heads.channels + channel;
    const bool next_last = ends(row + 1);
    const f32 next = row + 1 < heads.rows ? at(row + 1, next_last) : 0.0f;
    f32 own = c * now;
    if (!last) own += next * before;
    input[place] = own;
    if (counted.count == EVERY || holds(counted, row)) {
      sums[2] += c;
      sums[1] += c * wide(z[place]);
      if (begins) sums[2] += wide(grad[place_of(heads, row, channel)]);
      else sums[0] += c * wide(z[place - heads.channels]);
    }
    c = next, begins = last, last = next_last;
  }
  const u64 size = static_cast<u64>((heads.rows + BAND - 1) / BAND) * heads.channels;
  for (u32 which = 0; which < 3; ++which) partial[column.partial + which * size] = sums[which];
}
KERNEL(depthwise_conv_backward_f32, 256, LIMIT(64, 0, 8),
       (const f32* z, const f32* taps, const i64* starts, u32 count, const i64* counted, u32 counted_count, const f32* grad,
        f32* input, f32* partial, u32 rows, u32 width, u32 channels)) {
  conv_back(z, taps, {starts, count}, {counted, counted_count}, grad, input, partial, {rows, width, channels});
}
KERNEL(depthwise_conv_backward_bf16, 256, LIMIT(64, 0, 8),
       (const bf16* z, const f32* taps, const i64* starts, u32 count, const i64* counted, u32 counted_count, const bf16* grad,
        f32* input, f32* partial, u32 rows, u32 width, u32 channels)) {
  conv_back(z, taps, {starts, count}, {counted, counted_count}, grad, input, partial, {rows, width, channels});
}

struct Groups {
  u32 tokens, queries, keys, width;  // N, H, K, d
};

// z += what comes back through the means from the gradient of raw.
KERNEL(means_backward, 256, LIMIT(48, 0, 8), (const f32* raw, f32* z, u32 tokens, u32 queries, u32 keys, u32 width)) {
  const Groups by = {tokens, queries, keys, width};
  const u32 group = by.queries / by.keys;
  each(by.tokens * by.keys, by.width, [=](u32 pair, u32 place) {
    const u32 token = pair / by.keys, key = pair % by.keys;
    f32* own = z + static_cast<u64>(token) * (by.queries + by.keys) * by.width + place;
    const auto at = [=](u32 head) { return (static_cast<u64>(head) * by.tokens + token) * by.width + place; };
    const f32 of_key = raw[at(by.queries + key)];
    f32 sum = own[(by.queries + key) * by.width];
    for (u32 head = key * group; head < (key + 1) * group; ++head) {
      const f32 mean = (raw[at(head)] + of_key / static_cast<f32>(group)) * 0.5f;
      own[head * by.width] += mean;
      sum += mean;
    }
    own[(by.queries + key) * by.width] = sum;
  });
}

constexpr f32 LEAST_LENGTH = 1.1920929e-7f;

// raw += bias + the mean that belongs to it of what stands in z; out = raw made sqrt(d) long, times the temperature for keys, its
// first 2 r dimensions turned: i with i + r. 16 lanes a vector.
template <typename T>
DEVICE void query_key(const T* z, const f32* bias, f32* raw, const f32* temperature, const f32* cosines, const f32* sines,
                      f32* factors, f32* out, Groups by, u32 half) {
  const u32 heads = by.queries + by.keys, group = by.queries / by.keys;
  const Row row = row_of(heads * by.tokens);
  const u32 head = row.index / by.tokens, token = row.index % by.tokens;
  f32* own = raw + static_cast<u64>(row.index) * by.width;
  if (row.there) {
    const T* from = z + static_cast<u64>(token) * heads * by.width;
    for (u32 place = row.lane; place < by.width; place += PARTS) {
      const auto at = [=](u32 head) { return wide(from[head * by.width + place]); };
      f32 mean = 0.0f;
      if (head < by.queries) {
        mean = (at(head) + at(by.queries + head / group)) * 0.5f;
      } else {
        const u32 key = head - by.queries;
        for (u32 member = key * group; member < (key + 1) * group; ++member) mean += (at(member) + at(head)) * 0.5f;
        mean = mean / static_cast<f32>(group);
      }
      own[place] = own[place] + bias[head * by.width + place] + mean;
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
  f32* to = out + static_cast<u64>(row.index) * by.width;
  const u64 angles = static_cast<u64>(token) * half;
  for (u32 place = row.lane; place < half; place += PARTS) {
    const f32 a = own[place] * scale, b = own[place + half] * scale;
    const f32 cosine = cosines[angles + place], sine = sines[angles + place];
    to[place] = a * cosine - b * sine;
    to[place + half] = b * cosine + a * sine;
  }
  for (u32 place = 2 * half + row.lane; place < by.width; place += PARTS) to[place] = own[place] * scale;
}
KERNEL(query_key_f32, 256, LIMIT(48, 0, 8),
       (const f32* z, const f32* bias, f32* raw, const f32* temperature, const f32* cosines, const f32* sines, f32* factors,
        f32* out, u32 tokens, u32 queries, u32 keys, u32 width, u32 half)) {
  query_key(z, bias, raw, temperature, cosines, sines, factors, out, {tokens, queries, keys, width}, half);
}
KERNEL(query_key_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* z, const f32* bias, f32* raw, const f32* temperature, const f32* cosines, const f32* sines, f32* factors,
        f32* out, u32 tokens, u32 queries, u32 keys, u32 width, u32 half)) {
  query_key(z, bias, raw, temperature, cosines, sines, factors, out, {tokens, queries, keys, width}, half);
}

// Back, in the memory of grad: the gradient of raw. shares[h, t]: what a token adds to the gradient of a head's temperature.
KERNEL(query_key_backward, 256, LIMIT(48, 0, 8),
       (const f32* raw, const f32* factors, const f32* temperature, const f32* cosines, const f32* sines, f32* grad, f32* shares,
        u32 tokens, u32 queries, u32 keys, u32 width, u32 half)) {
  const Row row = row_of((queries + keys) * tokens);
  const u32 head = row.index / tokens, token = row.index % tokens;
  const f32* own = raw + static_cast<u64>(row.index) * width;
  f32* to = grad + static_cast<u64>(row.index) * width;
  const u64 angles = static_cast<u64>(token) * half;
  if (row.there)
    for (u32 place = row.lane; place < half; place += PARTS) {
      const f32 a = to[place], b = to[place + half], cosine = cosines[angles + place], sine = sines[angles + place];
      to[place] = a * cosine + b * sine;
      to[place + half] = b * cosine - a * sine;
    }
  barrier();  // other lanes take up what these have turned
  const f32 dot = along_row(row, width, [=](u32 place) { return to[place] * own[place]; });
  if (!row.there) return;
  const f32 factor = factors[row.index], scale = head < queries ? 1.0f : temperature[head - queries];
  if (row.lane == 0) shares[row.index] = factor * dot;
  // Where the length was clamped, the factor is a constant.
  const bool clamped = factor >= 0.999f * root(static_cast<f32>(width)) / LEAST_LENGTH;
  const f32 along = clamped ? 0.0f : factor * factor * factor * scale * dot / -static_cast<f32>(width);
  const f32 by = factor * scale;
  for (u32 place = row.lane; place < width; place += PARTS) to[place] = to[place] * by + own[place] * along;
}

// out[h] = sum of shares[h, t] over tokens in order, in f64. One thread a head.
KERNEL(head_sums, 256, LIMIT(32, 0, 8), (const f32* shares, f32* out, u32 heads, u32 tokens)) {
  const u32 head = block_index() * BLOCK + thread_index();
  if (head >= heads) return;
  f64 sum = 0.0;
  for (u32 token = 0; token < tokens; ++token) sum += static_cast<f64>(shares[static_cast<u64>(head) * tokens + token]);
  out[head] = static_cast<f32>(sum);
}

// out[t] = current[t] and delayed[t - 1] side by side, zeros for what comes before a document.
template <typename T>
DEVICE void shifted(const T* current, const T* delayed, Listed starts, T* out, u32 rows, u32 left, u32 right) {
  const u32 width = left + right;
  each(rows, width, [=](u32 row, u32 column) {
    const u64 index = static_cast<u64>(row) * width + column;
    T value = {};
    if (column < left) value = current[static_cast<u64>(row) * left + column];
    else if (!holds(starts, row)) value = delayed[static_cast<u64>(row - 1) * right + (column - left)];
    out[index] = value;
  });
}
KERNEL(value_shift_f32, 256, LIMIT(48, 0, 8),
       (const f32* current, const f32* delayed, const i64* starts, u32 count, f32* out, u32 rows, u32 left, u32 right)) {
  shifted(current, delayed, {starts, count}, out, rows, left, right);
}
KERNEL(value_shift_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* current, const bf16* delayed, const i64* starts, u32 count, bf16* out, u32 rows, u32 left, u32 right)) {
  shifted(current, delayed, {starts, count}, out, rows, left, right);
}

// Back: both sides side by side again, the right one a row earlier.
template <typename T>
DEVICE void shifted_back(const T* grad, Listed starts, T* out, u32 rows, u32 left, u32 right) {
  const u32 width = left + right;
  each(rows, width, [=](u32 row, u32 column) {
    const u64 index = static_cast<u64>(row) * width + column;
    T value = {};
    if (column < left) value = grad[index];
    else if (row + 1 < rows && !holds(starts, row + 1)) value = grad[index + width];
    out[index] = value;
  });
}
KERNEL(value_shift_backward_f32, 256, LIMIT(48, 0, 8),
       (const f32* grad, const i64* starts, u32 count, f32* out, u32 rows, u32 left, u32 right)) {
  shifted_back(grad, {starts, count}, out, rows, left, right);
}
KERNEL(value_shift_backward_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* grad, const i64* starts, u32 count, bf16* out, u32 rows, u32 left, u32 right)) {
  shifted_back(grad, {starts, count}, out, rows, left, right);
}

// What stands around attention in a CCA layer: means of queries and keys, their length, rotation.
// H query heads in K groups of H / K, then K key heads: G = H + K heads of d dimensions. [N, G d] is by token, [G, N, d] by head.
// The order of sums is that of src/ops/cpu/query_key.rs.
#pragma once
#include "rows.h"

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
// through the means, [N, G d]. In bands of tokens: that of the bias, [bands, G d], and that of the temperature, [bands, K]. The
// gradient of what is turned is read from grad, or in bf16, [H, N, d] and [K, N, d], where it is given so. A block has a band of a
// key head with its query heads; 16 lanes a token.
KERNEL(query_key_backward, 256, LIMIT(64, 128, 8),
       (const f32* raw, const f32* factors, const f32* temperature, const f32* cosines, const f32* sines, const bf16* of_queries,
        const bf16* of_keys, f32* grad, bf16* rounded, f32* means, f32* bias, f32* temperatures, u32 tokens, u32 queries, u32 keys, u32 width, u32 half)) {
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
      const bf16* given = member < group ? of_queries : of_keys;
      const u64 from = static_cast<u64>(member < group ? row.index : row.index - queries * tokens) * width;
      const auto at = [=](u32 place) { return given == nullptr ? to[place] : wide(given[from + place]); };
      if (there) {
        for (u32 place = lane; place < half; place += PARTS) {
          const f32 a = at(place), b = at(place + half), cosine = cosines[angles + place], sine = sines[angles + place];
          to[place] = a * cosine + b * sine;
          to[place + half] = b * cosine - a * sine;
        }
        if (given != nullptr)
          for (u32 place = 2 * half + lane; place < width; place += PARTS) to[place] = at(place);
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

// Rows of the embedding, and their gradient.
#pragma once
#include "sums.h"

// embedded[t] = table[tokens[t]] + bias; scaled = embedded scale. A block a token.
template <typename T>
DEVICE void embed(const T* table, const i64* tokens, const f32* bias, const f32* scale, f32* embedded, f32* scaled, u32 width) {
  const u64 from = static_cast<u64>(tokens[block_index()]) * width, to = static_cast<u64>(block_index()) * width;
  for (u32 column = thread_index(); column < width; column += BLOCK) {
    const f32 value = wide(table[from + column]) + bias[column];
    embedded[to + column] = value;
    scaled[to + column] = value * scale[column];
  }
}
KERNEL(embedding_f32, 256, LIMIT(32, 0, 8),
       (const f32* table, const i64* tokens, const f32* bias, const f32* scale, f32* embedded, f32* scaled, u32 width)) {
  embed(table, tokens, bias, scale, embedded, scaled, width);
}
KERNEL(embedding_bf16, 256, LIMIT(32, 0, 8),
       (const bf16* table, const i64* tokens, const f32* bias, const f32* scale, f32* embedded, f32* scaled, u32 width)) {
  embed(table, tokens, bias, scale, embedded, scaled, width);
}

// table[tokens[t]] += grad[t] scale, token by token in order. A block a token: the first of equal tokens adds for all of them,
// the others find an earlier one and end. Reading all tokens costs a block 8 bytes each, out of a cache.
KERNEL(embedding_backward, 256, LIMIT(48, 1088, 8),
       (const i64* tokens, const f32* scale, const f32* grad, f32* table, u32 count, u32 width)) {
  SHARED(u32, groups, 8);
  SHARED(u32, same, 256);
  const u32 own = block_index();
  const i64 token = tokens[own];
  u32 earlier = 0;
  for (u32 other = thread_index(); other < own; other += BLOCK) earlier += tokens[other] == token;
  if (over_block(earlier, groups) > 0) return;
  f32* row = table + static_cast<u64>(token) * width;
  for (u32 base = own; base < count; base += BLOCK) {
    const u32 other = base + thread_index();
    const u32 equal = other < count && tokens[other] == token;
    same[thread_index()] = equal;
    if (over_block(equal, groups) == 0) continue;  // its barriers stand between writing and reading `same`
    for (u32 place = 0; place < BLOCK; ++place) {
      if (same[place] == 0) continue;
      const f32* from = grad + static_cast<u64>(base + place) * width;
      for (u32 column = thread_index(); column < width; column += BLOCK) row[column] += from[column] * scale[column];
    }
    barrier();
  }
}

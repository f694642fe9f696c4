// Cross-entropy over a vocabulary, after the product that made the logits.
#pragma once
#include "numbers.h"
#include "sums.h"

// log_sum[t] = log of the sum of exponentials of row t; losses[t] = log_sum[t] - the label's logit, 0 where the mask is not above
// zero. A block a row: thread i adds elements i, i + 256, ..., then the block.
template <typename T>
DEVICE void loss_of_row(const T* logits, const i64* labels, const f32* mask, f32* log_sum, f32* losses, f32* groups, u32 size) {
  const T* own = logits + static_cast<u64>(block_index()) * size;
  f32 largest = from_bits(0xff800000u);  // minus infinity
  for (u32 place = thread_index(); place < size; place += BLOCK) {
    const f32 value = wide(own[place]);
    largest = largest < value ? value : largest;
  }
  largest = largest_of_block(largest, groups);
  f32 sum = 0.0f;
  for (u32 place = thread_index(); place < size; place += BLOCK) sum += exponential(wide(own[place]) - largest);
  sum = over_block(sum, groups);
  if (thread_index() != 0) return;
  const f32 all = static_cast<f32>(largest + logarithm(sum));
  log_sum[block_index()] = all;
  losses[block_index()] = mask[block_index()] > 0.0f ? all - wide(own[labels[block_index()]]) : 0.0f;
}
KERNEL(cross_entropy_f32, 256, LIMIT(64, 32, 8),
       (const f32* logits, const i64* labels, const f32* mask, f32* log_sum, f32* losses, u32 size)) {
  SHARED(f32, groups, 8);
  loss_of_row(logits, labels, mask, log_sum, losses, groups, size);
}
KERNEL(cross_entropy_bf16, 256, LIMIT(64, 32, 8),
       (const bf16* logits, const i64* labels, const f32* mask, f32* log_sum, f32* losses, u32 size)) {
  SHARED(f32, groups, 8);
  loss_of_row(logits, labels, mask, log_sum, losses, groups, size);
}

// logits <- their slope: exp(logit - log_sum), one less for the label. A block a row.
template <typename T>
DEVICE void slope_of_row(T* logits, const i64* labels, const f32* log_sum, u32 size) {
  T* own = logits + static_cast<u64>(block_index()) * size;
  const f32 all = log_sum[block_index()];
  const u32 label = static_cast<u32>(labels[block_index()]);
  for (u32 place = thread_index(); place < size; place += BLOCK) {
    const f32 value = exponential(wide(own[place]) - all);
    put(own[place], place == label ? value - 1.0f : value);
  }
}
KERNEL(cross_entropy_slope_f32, 256, LIMIT(48, 0, 8), (f32 * logits, const i64* labels, const f32* log_sum, u32 size)) {
  slope_of_row(logits, labels, log_sum, size);
}
KERNEL(cross_entropy_slope_bf16, 256, LIMIT(48, 0, 8), (bf16 * logits, const i64* labels, const f32* log_sum, u32 size)) {
  slope_of_row(logits, labels, log_sum, size);
}

// out[t] = x[t] (mask[t] / divisor). A block a row.
template <typename T>
DEVICE void row_scaled(const T* x, const f32* mask, T* out, f32 divisor, u32 width) {
  const f32 scale = mask[block_index()] / divisor;
  const u64 at = static_cast<u64>(block_index()) * width;
  for (u32 column = thread_index(); column < width; column += BLOCK) put(out[at + column], wide(x[at + column]) * scale);
}
KERNEL(scale_rows_f32, 256, LIMIT(32, 0, 8), (const f32* x, const f32* mask, f32* out, f32 divisor, u32 width)) {
  row_scaled(x, mask, out, divisor, width);
}
KERNEL(scale_rows_bf16, 256, LIMIT(32, 0, 8), (const bf16* x, const f32* mask, bf16* out, f32 divisor, u32 width)) {
  row_scaled(x, mask, out, divisor, width);
}

// Cross-entropy over a vocabulary, after the product that made the logits.
#pragma once
#include "fours.h"
#include "numbers.h"

constexpr u32 LEVELS = 32;  // of the tree over shards, of which there are fewer than 2^32

// The sum over shards in the order of the tree (src/tree.rs), of which thread 0 keeps the pending values: takes that of shard
// number `shard`, and answers with the sum of all of them where it is the last.
DEVICE f32 in_tree(f32* pending, f32 value, u32 shard, u32 shards) {
  u32 level = 0;
  for (; shard >> level & 1; ++level) value = pending[level] + value;
  pending[level] = value;
  for (++level; shard + 1 == shards && level < LEVELS; ++level)
    if (shards >> level & 1) value = pending[level] + value;
  return value;
}

template <bool WHOLE, typename T>
DEVICE f32 largest_of_row(const T* own, u32 size) {
  f32 largest = from_bits(0xff800000u);  // minus infinity
  for (u32 column = 4 * thread_index(); column < size; column += SPAN) {
    const Packed<T> values = load<WHOLE>(own, column, size);
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const f32 value = wide(values, next);
      largest = column + next < size && largest < value ? value : largest;
    }
  }
  return largest;
}
// log_sum[t] = log of the sum of exponentials of row t; losses[t] = log_sum[t] - the label's logit, 0 where the mask is not above
// zero. A block a row: of each shard of the vocabulary thread i adds elements i, i + 256, ..., then the block, then the tree over
// shards.
template <typename T>
DEVICE void loss_of_row(const T* logits, const i64* labels, const f32* mask, f32* log_sum, f32* losses, f32* groups,
                        f32* pending, u32 size, u32 shards) {
  const T* own = logits + static_cast<u64>(block_index()) * size;
  f32 largest = by_fours(size, logits) ? largest_of_row<true>(own, size) : largest_of_row<false>(own, size);
  largest = largest_of_block(largest, groups);
  f32 sum = 0.0f;
  u32 end = 0;
  for (u32 shard = 0; shard < shards; ++shard) {
    const u32 begin = end;
    end = static_cast<u32>(static_cast<u64>(size) * (shard + 1) / shards);
    sum = 0.0f;
    for (u32 place = begin + thread_index(); place < end; place += BLOCK) sum += exponential(wide(own[place]) - largest);
    sum = over_block(sum, groups);
    if (thread_index() == 0) sum = in_tree(pending, sum, shard, shards);
  }
  if (thread_index() != 0) return;
  const f32 all = static_cast<f32>(largest + logarithm(sum));
  log_sum[block_index()] = all;
  losses[block_index()] = mask[block_index()] > 0.0f ? all - wide(own[labels[block_index()]]) : 0.0f;
}
KERNEL(cross_entropy_f32, 256, LIMIT(64, 160, 8, 1),
       (const f32* logits, const i64* labels, const f32* mask, f32* log_sum, f32* losses, u32 size, u32 shards)) {
  SHARED(f32, groups, 8);
  SHARED(f32, pending, LEVELS);
  loss_of_row(logits, labels, mask, log_sum, losses, groups, pending, size, shards);
}
KERNEL(cross_entropy_bf16, 256, LIMIT(64, 160, 8),
       (const bf16* logits, const i64* labels, const f32* mask, f32* log_sum, f32* losses, u32 size, u32 shards)) {
  SHARED(f32, groups, 8);
  SHARED(f32, pending, LEVELS);
  loss_of_row(logits, labels, mask, log_sum, losses, groups, pending, size, shards);
}

// logits <- their slope: exp(logit - log_sum) (1 + 2 z_loss log_sum), one less for the label. A block a row, read and written
// once.
template <bool WHOLE, typename T>
DEVICE void slope_of_row(T* logits, const i64* labels, const f32* log_sum, f32 z_loss, u32 size) {
  T* own = logits + static_cast<u64>(block_index()) * size;
  const f32 all = log_sum[block_index()];
  const u32 label = static_cast<u32>(labels[block_index()]);
  // Without z-loss it is 1, also where log_sum is infinite.
  const f32 factor = z_loss > 0.0f ? 1.0f + 2.0f * z_loss * all : 1.0f;
  for (u32 column = 4 * thread_index(); column < size; column += SPAN) {
    const Packed<T> values = load<WHOLE>(own, column, size);
    Packed<T> slopes = {};
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const f32 value = factor * exponential(wide(values, next) - all);
      put(slopes, next, column + next == label ? value - 1.0f : value);
    }
    store<WHOLE>(own, column, size, slopes);
  }
}
KERNEL(cross_entropy_slope_f32, 256, LIMIT(48, 0, 8, 1),
       (f32 * logits, const i64* labels, const f32* log_sum, f32 z_loss, u32 size)) {
  if (by_fours(size, logits)) slope_of_row<true>(logits, labels, log_sum, z_loss, size);
  else slope_of_row<false>(logits, labels, log_sum, z_loss, size);
}
KERNEL(cross_entropy_slope_bf16, 256, LIMIT(48, 0, 8),
       (bf16 * logits, const i64* labels, const f32* log_sum, f32 z_loss, u32 size)) {
  if (by_fours(size, logits)) slope_of_row<true>(logits, labels, log_sum, z_loss, size);
  else slope_of_row<false>(logits, labels, log_sum, z_loss, size);
}

// out[t] = x[t] (mask[t] / divisor). A block a row.
template <bool WHOLE, typename T, typename Out>
DEVICE void row_scaled(const T* x, const f32* mask, Out* out, f32 divisor, u32 width) {
  const f32 scale = mask[block_index()] / divisor;
  const u64 at = static_cast<u64>(block_index()) * width;
  for (u32 column = 4 * thread_index(); column < width; column += SPAN) {
    const Packed<T> values = load<WHOLE>(x + at, column, width);
    Packed<Out> scaled = {};
    UNROLL
    for (u32 next = 0; next < 4; ++next) put(scaled, next, wide(values, next) * scale);
    store<WHOLE>(out + at, column, width, scaled);
  }
}
template <typename T, typename Out>
DEVICE void row_scaled_by(const T* x, const f32* mask, Out* out, f32 divisor, u32 width) {
  if (by_fours(width, x, out)) row_scaled<true>(x, mask, out, divisor, width);
  else row_scaled<false>(x, mask, out, divisor, width);
}
KERNEL(scale_rows_f32, 256, LIMIT(32, 0, 8, 1), (const f32* x, const f32* mask, f32* out, f32 divisor, u32 width)) {
  row_scaled_by(x, mask, out, divisor, width);
}
KERNEL(scale_rows_bf16, 256, LIMIT(32, 0, 8), (const bf16* x, const f32* mask, bf16* out, f32 divisor, u32 width)) {
  row_scaled_by(x, mask, out, divisor, width);
}
// Of f32, rounded once.
KERNEL(scale_rows_narrow, 256, LIMIT(32, 0, 8, 1), (const f32* x, const f32* mask, bf16* out, f32 divisor, u32 width)) {
  row_scaled_by(x, mask, out, divisor, width);
}

// Faults that the emulator and the sanitizers must find: out[i] is meant to be x[i] plus the first x of its block.
#pragma once
#include "../mma.h"
#include "../sums.h"

#define PLANT(name) KERNEL(name, 256, LIMIT(32, 1024, 8), (const f32* x, f32* out, u32 count))
#define INDEX const u32 index = block_index() * BLOCK + thread_index()

PLANT(faultless) {
  SHARED(f32, first, 1);
  INDEX;
  if (thread_index() == 0) first[0] = x[index];
  barrier();
  if (index < count) out[index] = x[index] + first[0];
}

// Races: seen by the thread sanitizer.
PLANT(no_barrier) {
  SHARED(f32, first, 1);
  INDEX;
  if (thread_index() == 0) first[0] = x[index];
  if (index < count) out[index] = x[index] + first[0];
}

PLANT(one_barrier) {  // the second round overwrites what others still read of the first
  SHARED(f32, first, 1);
  INDEX;
  for (u32 round = 0; round < 2; ++round) {
    if (thread_index() == 0) first[0] = x[index] + static_cast<f32>(round);
    barrier();
    if (index < count) out[index] = x[index] + first[0];
  }
}

PLANT(two_blocks) {
  INDEX;
  if (index < count) out[index] = x[index];
  if (thread_index() == 0) out[0] = x[index];
}

PLANT(shuffle_as_barrier) {  // threads of one wave go in step, but memory is not ordered by that
  SHARED(f32, all, 256);
  INDEX;
  all[thread_index()] = index < count ? x[index] : 0.0f;
  const f32 sum = shuffle<1>(all[thread_index()]);
  if (index < count) out[index] = sum + all[thread_index() ^ 1];
}

// Bytes that nobody needs: seen by the counter.
PLANT(reads_twice) {
  INDEX;
  const bool there = index < count;
  const f32 sum = there ? x[index] : 0.0f;
  barrier();
  if (there) out[index] = sum + x[index];
}

PLANT(reads_apart) {
  INDEX;
  if (index < count) out[index] = x[index * 8 % count];
}

// Strange memory: seen by the address sanitizer.
PLANT(beyond_the_end) {
  INDEX;
  if (index <= count) out[index] = 1.0f;
  (void)x;
}

PLANT(before_the_start) {
  INDEX;
  if (index < count) out[index] = x[static_cast<i64>(index) - 1];
}

PLANT(beyond_what_is_shared) {
  SHARED(f32, all, 255);
  INDEX;
  all[thread_index()] = 1.0f;
  if (index < count) out[index] = x[index];
}

// What the emulator refuses by itself.
PLANT(parted) {
  INDEX;
  if (thread_index() < 128) barrier();
  if (index < count) out[index] = x[index];
}

PLANT(early_end) {
  INDEX;
  if (index >= count) return;
  barrier();
  out[index] = x[index];
}

PLANT(half_a_wave) {  // a whole wave of 32 is half of one of 64
  INDEX;
  f32 value = index < count ? x[index] : 0.0f;
  if (thread_index() % 64 < 32) value = shuffle<1>(value);
  if (index < count) out[index] = value;
}

PLANT(too_much) {
  SHARED(f32, all, 16385);
  INDEX;
  all[thread_index()] = 0.0f;
  if (index < count) out[index] = x[index];
}

// What shows as other bits.
PLANT(unwritten) {
  SHARED(f32, all, 256);
  INDEX;
  if (thread_index() != 7) all[thread_index()] = 1.0f;
  barrier();
  if (index < count) out[index] = x[index] + all[thread_index()];
}

PLANT(order_of_threads) {
  SHARED(f32, sum, 1);
  INDEX;
  sum[0] = x[index < count ? index : 0];
  barrier();
  if (index < count) out[index] = sum[0];
}

PLANT(order_of_blocks) {
  INDEX;
  if (index < count) out[index % 256] = x[index];
}

// Not a fault: twice a product of 16 x 16 x 16, of operands that lie along and across their inner index. A wave has one.
template <Side LEFT, Side RIGHT>
DEVICE void sixteen(const bf16* lefts, const bf16* rights, u32 stride, f32* out) {
  Sums sums = {};
  multiply_add(sums, left_fragment<LEFT>(lefts, stride), right_fragment<RIGHT>(rights, stride));
  multiply_add(sums, left_fragment<LEFT>(lefts, stride), right_fragment<RIGHT>(rights, stride));
  for (u32 sum = 0; sum < 256 / lanes(); ++sum) out[row_of_sum(sum) * 16 + column_of_sum(sum)] = sums.at[sum];
}
#define SIXTEEN(name) KERNEL(name, 256, LIMIT(64, 1536, 1), (const bf16* left, const bf16* right, f32* out))
SIXTEEN(products_of_sixteen) {
  constexpr u32 STRIDE_OF_SIXTEEN = 24;
  SHARED(bf16, lefts, 16 * STRIDE_OF_SIXTEEN);
  SHARED(bf16, rights, 16 * STRIDE_OF_SIXTEEN);
  const u32 at = thread_index() / 16 * STRIDE_OF_SIXTEEN + thread_index() % 16;
  lefts[at] = left[thread_index()];
  rights[at] = right[thread_index()];
  barrier();
  const u32 wave = thread_index() / lanes();
  if (wave == 0) sixteen<Side::along, Side::along>(lefts, rights, STRIDE_OF_SIXTEEN, out);
  if (wave == 1) sixteen<Side::along, Side::across>(lefts, rights, STRIDE_OF_SIXTEEN, out + 256);
  if (wave == 2) sixteen<Side::across, Side::along>(lefts, rights, STRIDE_OF_SIXTEEN, out + 512);
  if (wave == 3) sixteen<Side::across, Side::across>(lefts, rights, STRIDE_OF_SIXTEEN, out + 768);
}

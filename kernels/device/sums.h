// Sums over lanes and blocks, in the order of the CPU's kernels (src/ops/cpu).
#pragma once
#include "ground.h"

// The CPU keeps a sum in 16 parts, element i in part i % 16, and adds neighbours first at its end. Here 16 lanes hold a part
// each: lane l of a row takes elements l, l + 16, ..., and these four steps are the CPU's.
constexpr u32 PARTS = 16;
constexpr u32 BLOCK = 256;
constexpr u32 ROWS = BLOCK / PARTS;  // rows of a block where 16 lanes have one

template <typename T>
DEVICE T together(T part) {
  part += shuffle<1>(part);
  part += shuffle<2>(part);
  part += shuffle<4>(part);
  part += shuffle<8>(part);
  return part;
}

// The sum over a block of 256 threads, the same in each: 5 steps over 32 lanes, then the 8 groups, neighbours first.
// `groups` is shared memory of 8; it may be used again afterwards.
template <typename T>
DEVICE T over_block(T value, T* groups) {
  value = together(value);
  value += shuffle<16>(value);
  if (thread_index() % 32 == 0) groups[thread_index() / 32] = value;
  barrier();
  value = ((groups[0] + groups[1]) + (groups[2] + groups[3])) + ((groups[4] + groups[5]) + (groups[6] + groups[7]));
  barrier();
  return value;
}

// The largest over a block of 256 threads, the same in each.
DEVICE f32 largest_of_block(f32 value, f32* groups) {
  const auto larger = [](f32 a, f32 b) { return a < b ? b : a; };
  value = larger(value, shuffle<1>(value));
  value = larger(value, shuffle<2>(value));
  value = larger(value, shuffle<4>(value));
  value = larger(value, shuffle<8>(value));
  value = larger(value, shuffle<16>(value));
  if (thread_index() % 32 == 0) groups[thread_index() / 32] = value;
  barrier();
  value = groups[0];
  for (u32 group = 1; group < BLOCK / 32; ++group) value = larger(value, groups[group]);
  barrier();
  return value;
}

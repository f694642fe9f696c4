// What is left to do for gradients, each kind by one launch over a table: sums over bands of rows are added up, and what libraries
// made is widened, added and checked in one pass.
#pragma once
#include "exact.h"
#include "fours.h"

// A gradient, as the host writes it into device memory: a sum over rows from those over their bands.
struct Unfinished {
  u64 from;    // address of [bands, width], f32
  u64 other;   // of another sum's, or 0
  u64 factor;  // of [width], f32, or 0: what the other sum is multiplied with, or without one the sum
  u64 out;     // where column 0 goes
  u32 bands, width;
  u32 stride;  // from one column of the outcome to the next
  u32 block;   // the first of its blocks; it has one for each 32 columns begun
};
static_assert(sizeof(Unfinished) == 48, "as the host lays it out");

// A block has 32 columns, and this many bands at once in shared memory: all threads bring them, so that the lanes that add, one for
// each column, wait for no memory but that.
constexpr u32 COLUMNS = 32, AT_ONCE = 128;

// The sum of partial[band, c] over bands, in order and in f64, in the lanes that add.
DEVICE f32 over_bands(u64 partial, const Unfinished& one, u32 column, f32* brought) {
  const u32 lane = thread_index() % COLUMNS, group = thread_index() / COLUMNS;
  const f32* from = reinterpret_cast<const f32*>(partial) + column;
  f64 all = 0.0;
  for (u32 first = 0; first < one.bands; first += AT_ONCE) {
    f32 own[AT_ONCE * COLUMNS / BLOCK];
    UNROLL
    for (u32 next = 0; next < AT_ONCE * COLUMNS / BLOCK; ++next) {
      const u32 band = first + group + next * (BLOCK / COLUMNS);
      own[next] = band < one.bands && column < one.width ? from[static_cast<u64>(band) * one.width] : 0.0f;
    }
    barrier();
    UNROLL
    for (u32 next = 0; next < AT_ONCE * COLUMNS / BLOCK; ++next)
      brought[(group + next * (BLOCK / COLUMNS)) * COLUMNS + lane] = own[next];
    barrier();
    if (group > 0) continue;
    const u32 count = one.bands - first < AT_ONCE ? one.bands - first : AT_ONCE;
    for (u32 band = 0; band < count; ++band) all += static_cast<f64>(brought[band * COLUMNS + lane]);
  }
  return static_cast<f32>(all);
}

// out[c] = sum over bands, times the factor, or plus the factor times the other sum.
KERNEL(finish, 256, LIMIT(48, 16384, 4), (const Unfinished* all, u32 count)) {
  SHARED(f32, brought, AT_ONCE * COLUMNS);
  const Unfinished one = all[piece_of_block(all, count)];
  const u32 column = (block_index() - one.block) * COLUMNS + thread_index() % COLUMNS;
  f32 sum = over_bands(one.from, one, column, brought);
  const f32 other = one.other != 0 ? over_bands(one.other, one, column, brought) : 0.0f;
  if (column >= one.width || thread_index() >= COLUMNS) return;
  if (one.factor != 0) {
    const f32 factor = reinterpret_cast<const f32*>(one.factor)[column];
    if (one.other != 0) sum += factor * other;
    else sum *= factor;
  }
  reinterpret_cast<f32*>(one.out)[static_cast<u64>(column) * one.stride] = sum;
}

// Two nodes of the tree that meet, or one that meets nobody, as the host writes them into device memory.
struct Addition {
  u64 left, right;            // addresses of what is added to, and of what is added; no right: the left is only widened
  u64 out;                    // where the sum goes, f32, which may be where a node of f32 stands; 0: nowhere, it is only checked
  u64 left_ends, right_ends;  // addresses of where the rows of each expert end, or 0; one without rows has zeros, whatever stands there
  u64 elements;
  u64 first;  // number of the first element in its tensor
  u64 salt;   // of both checksums
  u64 each;   // elements of an expert
  u32 asked;  // NARROW: that side is bf16, not f32. CHECKED: its checksum is asked for
  u32 block;  // the first of its blocks; it has one for each ELEMENTS begun
};
static_assert(sizeof(Addition) == 80, "as the host lays it out");
constexpr u32 NARROW[] = {1, 2}, CHECKED[] = {4, 8};

// Elements that a thread holds, four beside each other and the next four behind those of the whole block.
constexpr u32 HELD = ELEMENTS / BLOCK;
DEVICE u32 place_of_held(u32 number) { return number / 4 * (4 * BLOCK) + 4 * thread_index() + number % 4; }

// Whether this block may take four elements at once: all that it has are there, and the piece begins where four may.
template <typename T>
DEVICE bool is_whole(const Addition& one, u64 address, u64 base) {
  return address % (4 * sizeof(T)) == 0 && base + ELEMENTS <= one.elements;
}

// What this thread has of a side, widened: zeros behind its end.
template <typename T>
DEVICE void read_side(f32 (&values)[HELD], const Addition& one, u64 address, u64 base) {
  const T* numbers = reinterpret_cast<const T*>(address) + base;
  if (is_whole<T>(one, address, base)) {
    UNROLL
    for (u32 number = 0; number < HELD; number += 4) {
      const Packed<T> four = load<true>(numbers, place_of_held(number), ELEMENTS);
      UNROLL
      for (u32 next = 0; next < 4; ++next) values[number + next] = wide(four, next);
    }
    return;
  }
  UNROLL
  for (u32 number = 0; number < HELD; ++number) {
    const u32 place = place_of_held(number);
    values[number] = base + place < one.elements ? wide(numbers[place]) : 0.0f;
  }
}

// Zeros for experts without rows, where a library may leave what stood there.
DEVICE void leave_out_idle(f32 (&values)[HELD], const Addition& one, u64 address, u64 base) {
  if (address == 0) return;
  const int* ends = reinterpret_cast<const int*>(address);
  const u64 start = one.first + base, end = one.first + one.elements;
  u64 expert = start / one.each, next = 0;  // the first element of another expert
  bool idle = false;
  UNROLL
  for (u32 number = 0; number < HELD; ++number) {
    const u64 index = start + place_of_held(number);
    if (index >= next && index < end) {
      while ((expert + 1) * one.each <= index) ++expert;
      next = (expert + 1) * one.each;
      idle = ends[expert] == (expert > 0 ? ends[expert - 1] : 0);
    }
    if (idle) values[number] = 0.0f;
  }
}

DEVICE void read_side(f32 (&values)[HELD], const Addition& one, u32 side, u64 base) {
  const u64 address = side == 0 ? one.left : one.right;
  if ((one.asked & NARROW[side]) != 0) read_side<bf16>(values, one, address, base);
  else read_side<f32>(values, one, address, base);
}

// out = left + right, or left, f32; and in partial[b] and partial[blocks + b] what block b adds to the checksums of left and right as
// they are widened, where they are asked for. Bytes an element: 8 where two leaves of bf16 meet, of which one would be 4 were the
// first one not kept; 12 where nodes of f32 do; 6 for a leaf of bf16 that meets nobody. Each is read once and the sum written once:
// checksums are made of what stands in registers.
KERNEL(finish_add, 256, LIMIT(64, 64, 8), (const Addition* all, u32 count, u32 blocks, u64* partial)) {
  SHARED(u64, groups, 8);
  const Addition one = all[piece_of_block(all, count)];
  const u64 base = static_cast<u64>(block_index() - one.block) * ELEMENTS;
  const bool two = one.right != 0;
  f32 left[HELD], right[HELD];
  read_side(left, one, 0, base);
  if (two) read_side(right, one, 1, base);
  leave_out_idle(left, one, one.left_ends, base);
  if (two) leave_out_idle(right, one, one.right_ends, base);
  u64 sums[2] = {0, 0};
  if ((one.asked & (CHECKED[0] | CHECKED[1])) != 0) {
    UNROLL
    for (u32 number = 0; number < HELD; ++number) {
      const u64 weight = weight_of(one.first + base + place_of_held(number), one.salt);
      sums[0] += bits_of(left[number]) * weight;
      if (two) sums[1] += bits_of(right[number]) * weight;
    }
  }
  if (two) {
    UNROLL
    for (u32 number = 0; number < HELD; ++number) left[number] += right[number];
  }
  if (one.out != 0) {
    f32* out = reinterpret_cast<f32*>(one.out) + base;
    const bool whole = is_whole<f32>(one, one.out, base);
    UNROLL
    for (u32 number = 0; number < HELD; number += 4) {
      const u32 place = place_of_held(number);
      if (whole) {
        store<true>(out, place, ELEMENTS, Packed<f32>{{{left[number], left[number + 1], left[number + 2], left[number + 3]}}});
        continue;
      }
      UNROLL
      for (u32 next = 0; next < 4; ++next)
        if (base + place + next < one.elements) out[place + next] = left[number + next];
    }
  }
  UNROLL
  for (u32 side = 0; side < 2; ++side) {
    if ((one.asked & CHECKED[side]) == 0) continue;
    const u64 sum = over_block(sums[side], groups);
    if (thread_index() == 0) partial[side * blocks + block_index()] = sum;
  }
}

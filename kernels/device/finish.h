// What is left to do for the gradients of a layer: one launch over a table for all of them.
#pragma once
#include "exact.h"

// A gradient, as the host writes it into device memory: a sum over rows from those over their bands, or a tensor that a library has
// made.
struct Unfinished {
  u64 from;    // address of [bands, width], f32; or of the tensor
  u64 other;   // of another sum's, or 0; or of where the rows of each expert end, or 0
  u64 factor;  // of [width], f32, or 0: what the other sum is multiplied with, or without one the sum; or elements of the tensor
  u64 out;     // where column 0 or element 0 goes
  u32 bands, width;  // no bands: a tensor, of which an expert has this many elements
  u32 stride;        // from one column of the outcome to the next; or bytes of an element of the tensor
  u32 block;         // the first of its blocks; it has one for each 256 columns begun, or for each ELEMENTS
};
static_assert(sizeof(Unfinished) == 48, "as the host lays it out");

// The sum of partial[band, c] over bands, in f64.
DEVICE f32 over_bands(u64 partial, const Unfinished& one, u32 column) {
  const f32* from = reinterpret_cast<const f32*>(partial) + column;
  f64 all = 0.0;
  for (u32 band = 0; band < one.bands; ++band) all += static_cast<f64>(from[static_cast<u64>(band) * one.width]);
  return static_cast<f32>(all);
}

// out[c] = sum over bands, times the factor, or plus the factor times the other sum.
DEVICE void add_bands(const Unfinished& one, u32 block) {
  const u32 column = block * BLOCK + thread_index();
  if (column >= one.width) return;
  f32 all = over_bands(one.from, one, column);
  if (one.factor != 0) {
    const f32 factor = reinterpret_cast<const f32*>(one.factor)[column];
    if (one.other != 0) all += factor * over_bands(one.other, one, column);
    else all *= factor;
  }
  reinterpret_cast<f32*>(one.out)[static_cast<u64>(column) * one.stride] = all;
}

// out = from, exactly; zeros for experts without rows, where a library may leave what stood there.
template <typename T>
DEVICE void widen(const Unfinished& one, u32 block) {
  const T* from = reinterpret_cast<const T*>(one.from);
  const int* ends = reinterpret_cast<const int*>(one.other);
  f32* out = reinterpret_cast<f32*>(one.out);
  const u64 base = static_cast<u64>(block) * ELEMENTS + thread_index();
  u64 expert = one.width == 0 ? 0 : base / one.width, next = 0;  // the first element of another expert
  bool idle = false;
  for (u32 place = 0; place < ELEMENTS; place += BLOCK) {
    const u64 index = base + place;
    if (index >= one.factor) return;
    if (ends != nullptr && index >= next) {
      while ((expert + 1) * one.width <= index) ++expert;
      next = (expert + 1) * one.width;
      idle = ends[expert] == (expert > 0 ? ends[expert - 1] : 0);
    }
    out[index] = idle ? 0.0f : wide(from[index]);
  }
}

KERNEL(finish, 256, LIMIT(48, 0, 8), (const Unfinished* all, u32 count)) {
  u32 low = 0, high = count;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (all[middle].block <= block_index()) low = middle;
    else high = middle;
  }
  const Unfinished one = all[low];
  const u32 block = block_index() - one.block;
  if (one.bands > 0) add_bands(one, block);
  else if (one.stride == sizeof(bf16)) widen<bf16>(one, block);
  else widen<f32>(one, block);
}

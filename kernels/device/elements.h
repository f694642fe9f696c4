// Element by element.
#pragma once
#include "ground.h"

constexpr u32 EACH = 1024;  // elements of a block of 256 threads

// what(row, column) for each element of a matrix, whose elements are fewer than 2^32: a division of 64 bits would cost more than
// most of what is done here. The host refuses larger ones.
template <typename Do>
DEVICE void each(u32 rows, u32 width, Do what) {
  const u32 count = rows * width, base = block_index() * EACH;
  for (u32 place = thread_index(); place < EACH && place < count - base; place += 256)
    what((base + place) / width, (base + place) % width);
}

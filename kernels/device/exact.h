// What a step is checked by: checksums, sums of squares; and additions of what experts that have rows in both made. All take a
// table of pieces, so that one launch serves every tensor of a model. Same values as src/checksum.rs and ops::cpu.
#pragma once
#include "sums.h"

// A piece of a tensor, as the host writes it into device memory.
struct Piece {
  u64 left;   // its address: what is summed; for an addition also where the outcome goes
  u64 right;  // address of what is added to it
  u64 elements;
  u64 first;  // number of its first element in its tensor
  u64 salt;
  u32 width;  // bytes of an element: 1, 2, 4 or 8
  u32 block;  // the first of its blocks; it has one for each ELEMENTS begun
};
static_assert(sizeof(Piece) == 48, "as the host lays it out");

constexpr u32 ELEMENTS = 4096;

DEVICE u32 blocks_of(const Piece& piece) { return static_cast<u32>((piece.elements + ELEMENTS - 1) / ELEMENTS); }

// The last row of a table that begins at or before this block and has blocks at all.
template <typename Row>
DEVICE u32 piece_of_block(const Row* pieces, u32 count) {
  u32 low = 0, high = count;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (pieces[middle].block <= block_index()) low = middle;
    else high = middle;
  }
  return low;
}

// The weight of an element, by the formula at the head of src/checksum.rs.
DEVICE u32 weight_of(u64 index, u64 salt) {
  u32 h = static_cast<u32>(index) + static_cast<u32>(index >> 32) * 0xC2B2AE3Du;
  h += static_cast<u32>(salt) + static_cast<u32>(salt >> 32) * 0x27D4EB2Fu;
  h *= 0x9E3779B1u;
  h ^= h >> 15;
  h *= 0x85EBCA77u;
  h ^= h >> 13;
  return h | 1u;
}

// What this thread's elements of the block come to; `element(i)` is the bits of element i of the piece.
template <typename Element>
DEVICE u64 weighed(const Piece& piece, Element element) {
  const u64 base = static_cast<u64>(block_index() - piece.block) * ELEMENTS;
  u64 sum = 0;
  for (u32 place = thread_index(); place < ELEMENTS; place += BLOCK) {
    const u64 index = base + place;
    if (index < piece.elements) sum += element(index) * weight_of(piece.first + index, piece.salt);
  }
  return sum;
}

// what(i) for the elements of the piece that this block has.
template <typename Do>
DEVICE void each_of_piece(const Piece& piece, Do what) {
  const u64 base = static_cast<u64>(block_index() - piece.block) * ELEMENTS;
  for (u32 place = thread_index(); place < ELEMENTS; place += BLOCK)
    if (base + place < piece.elements) what(base + place);
}

template <typename T>
DEVICE u64 weighed_bits(const Piece& piece) {
  const T* values = reinterpret_cast<const T*>(piece.left);
  return weighed(piece, [=](u64 index) { return static_cast<u64>(values[index]); });
}

// partial[b]: what block b adds to the checksum of its piece. Integers: any order gives the same.
KERNEL(checksum_blocks, 256, LIMIT(64, 64, 8), (const Piece* pieces, u32 count, u64* partial)) {
  SHARED(u64, groups, 8);
  const Piece piece = pieces[piece_of_block(pieces, count)];
  u64 sum = 0;
  if (piece.width == 4) sum = weighed_bits<u32>(piece);
  else if (piece.width == 2) sum = weighed_bits<u16>(piece);
  else if (piece.width == 8) sum = weighed_bits<u64>(piece);
  else sum = weighed_bits<u8>(piece);
  sum = over_block(sum, groups);
  if (thread_index() == 0) partial[block_index()] = sum;
}

// out[p]: the checksum of piece p, one block each.
KERNEL(checksum_pieces, 256, LIMIT(32, 64, 8), (const Piece* pieces, const u64* partial, u64* out)) {
  SHARED(u64, groups, 8);
  const Piece piece = pieces[block_index()];
  u64 sum = 0;
  for (u32 block = thread_index(); block < blocks_of(piece); block += BLOCK) sum += partial[piece.block + block];
  sum = over_block(sum, groups);
  if (thread_index() == 0) out[block_index()] = sum;
}

// Whether an expert has rows, whose number stands at an address; what is of no expert is there.
DEVICE bool present(u64 rows) { return rows == 0 || *reinterpret_cast<const i64*>(rows) > 0; }

// left += right, f32, where both sides have a part in the sum: `first` and `salt` are addresses of how many rows each is of, or 0.
// Without a part on the left right is copied, without one on the right left stays: nothing is added to zero, which would turn -0.0
// into 0.0. Pieces 8 bytes wide are such numbers: their sum goes to `first`, which nobody reads in this launch.
KERNEL(add_present, 256, LIMIT(64, 0, 8), (const Piece* pieces, u32 count)) {
  const Piece piece = pieces[piece_of_block(pieces, count)];
  if (piece.width == 8) {
    const i64* left = reinterpret_cast<const i64*>(piece.left);
    const i64* right = reinterpret_cast<const i64*>(piece.right);
    i64* out = reinterpret_cast<i64*>(piece.first);
    each_of_piece(piece, [=](u64 index) { out[index] = left[index] + right[index]; });
    return;
  }
  if (!present(piece.salt)) return;
  const bool here = present(piece.first);
  f32* left = reinterpret_cast<f32*>(piece.left);
  const f32* right = reinterpret_cast<const f32*>(piece.right);
  each_of_piece(piece, [=](u64 index) { left[index] = here ? left[index] + right[index] : right[index]; });
}

// Adds to the part of each of 16 threads the squares of those of `count` numbers that are its own, in their order.
DEVICE void add_squares(const f32* tile, u32 count, f64& part) {
  u32 place = thread_index();
  for (; place + 7 * PARTS < count; place += 8 * PARTS) {
    f32 values[8];
    UNROLL
    for (u32 next = 0; next < 8; ++next) values[next] = tile[place + next * PARTS];
    UNROLL
    for (u32 next = 0; next < 8; ++next) part += static_cast<f64>(values[next]) * static_cast<f64>(values[next]);
  }
  for (; place < count; place += PARTS) part += static_cast<f64>(tile[place]) * static_cast<f64>(tile[place]);
}

// out[p]: the sum of the squares of value(p, i) over the elements of piece p, f32, in f64, one block each, so that a long tensor is
// given in pieces: the chunks of the norm are those. The order is the CPU's, in 16 parts. So all threads of a block read, a tile
// ahead, and 16 of them add what stands in shared memory.
constexpr u32 AHEAD = 2048;
template <typename Value>
DEVICE void squared(const Piece* pieces, u32 count, f64* out, f32* tile, Value value) {
  if (block_index() >= count) return;
  const Piece piece = pieces[block_index()];
  const u32 lane = thread_index();
  f32 ahead[AHEAD / BLOCK];
  const auto read = [&](u64 start) {
    UNROLL
    for (u32 next = 0; next < AHEAD / BLOCK; ++next) {
      const u64 place = start + next * BLOCK + lane;
      ahead[next] = place < piece.elements ? value(piece, place) : 0.0f;
    }
  };
  f64 part = 0.0;
  read(0);
  for (u64 start = 0; start < piece.elements; start += AHEAD) {
    UNROLL
    for (u32 next = 0; next < AHEAD / BLOCK; ++next) tile[next * BLOCK + lane] = ahead[next];
    barrier();
    read(start + AHEAD);
    const u64 left = piece.elements - start;
    if (lane < PARTS) add_squares(tile, left < AHEAD ? static_cast<u32>(left) : AHEAD, part);
    barrier();
  }
  part = together(part);
  if (lane == 0) out[block_index()] = part;
}

// The same of the elements themselves; and sums[p], unless it is null, what piece p adds to the checksum of its tensor. 4 bytes an
// element: clipping needs the squares before anything moves, and the checksum rides along.
KERNEL(squares, 256, LIMIT(64, 8192, 8), (const Piece* pieces, u32 count, f64* out, u64* sums)) {
  SHARED(u64, groups, AHEAD / 2);  // the tile's memory: with more of its own one block less fits in
  f32* tile = reinterpret_cast<f32*>(groups);
  u64 sum = 0;
  squared(pieces, count, out, tile, [&](const Piece& piece, u64 place) {
    const f32 value = reinterpret_cast<const f32*>(piece.left)[place];
    if (sums != nullptr) sum += static_cast<u64>(bits_of(value)) * weight_of(piece.first + place, piece.salt);
    return value;
  });
  if (sums == nullptr || block_index() >= count) return;
  sum = over_block(sum, groups);
  if (thread_index() == 0) sums[block_index()] = sum;
}

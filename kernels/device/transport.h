// Pieces of tensors into one buffer and out of it again, and into fewer bits, by the table of pieces of exact.h: from `left` to `right`.
#pragma once
#include "exact.h"

// store(right[i], left[i]) for the elements of the piece that this block has. A thread asks for four before it writes the first: for all
// that a compiler knows, what is written may lie where the next is read, so it would wait for the memory after each.
template <typename From, typename To, typename Store>
DEVICE void travel(const Piece& piece, Store store) {
  const From* from = reinterpret_cast<const From*>(piece.left);
  To* to = reinterpret_cast<To*>(piece.right);
  const u64 base = static_cast<u64>(block_index() - piece.block) * ELEMENTS + thread_index();
  for (u32 place = 0; place < ELEMENTS; place += 4 * BLOCK) {
    From values[4];
    UNROLL
    for (u32 next = 0; next < 4; ++next)
      if (base + place + next * BLOCK < piece.elements) values[next] = from[base + place + next * BLOCK];
    UNROLL
    for (u32 next = 0; next < 4; ++next)
      if (base + place + next * BLOCK < piece.elements) store(to[base + place + next * BLOCK], values[next]);
  }
}

// Elements of 2 or 4 bytes, as they are: the same kernel packs and unpacks.
KERNEL(copy_blocks, 256, LIMIT(32, 0, 8), (const Piece* pieces, u32 count)) {
  const Piece piece = pieces[piece_of_block(pieces, count)];
  if (piece.width == 4) travel<u32, u32>(piece, [](u32& to, u32 value) { to = value; });
  else travel<u16, u16>(piece, [](u16& to, u16 value) { to = value; });
}

// f32 to bf16: what the model reads of the weights.
KERNEL(round_blocks, 256, LIMIT(32, 0, 8), (const Piece* pieces, u32 count)) {
  travel<f32, bf16>(pieces[piece_of_block(pieces, count)], [](bf16& to, f32 value) { put(to, value); });
}

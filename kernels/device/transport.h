// Pieces of tensors into one buffer and out of it again, by the table of pieces of exact.h: from `left` to `right`.
#pragma once
#include "exact.h"

// Elements of 2 or 4 bytes, as they are: the same kernel packs and unpacks.
KERNEL(copy_blocks, 256, LIMIT(32, 0, 8), (const Piece* pieces, u32 count)) {
  const Piece piece = pieces[piece_of_block(pieces, count)];
  const u64 base = static_cast<u64>(block_index() - piece.block) * ELEMENTS;
  for (u32 place = thread_index(); place < ELEMENTS; place += BLOCK) {
    const u64 index = base + place;
    if (index >= piece.elements) continue;
    if (piece.width == 4) reinterpret_cast<u32*>(piece.right)[index] = reinterpret_cast<const u32*>(piece.left)[index];
    else reinterpret_cast<u16*>(piece.right)[index] = reinterpret_cast<const u16*>(piece.left)[index];
  }
}

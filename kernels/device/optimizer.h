// The elementwise parts of AdamW, Muon and Newton-Schulz, with the bits of the CPU's. Tensors come in a table, so that one
// launch moves all of a model.
#pragma once
#include "elements.h"
#include "products.h"
#include "exact.h"

// A tensor to be moved, f32 all of it.
struct Move {
  u64 weight, first, second, gradient;  // addresses; `second` is AdamW's alone
  u64 elements;
  f32 keep, rate;     // w <- keep w - rate step
  u32 block, unused;  // the first of its blocks; it has one for each EACH elements begun
};
static_assert(sizeof(Move) == 56, "as the host lays it out");

DEVICE Move move_of_block(const Move* moves, u32 count) {
  u32 low = 0, high = count;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (moves[middle].block <= block_index()) low = middle;
    else high = middle;
  }
  return moves[low];
}

template <typename Do>
DEVICE void each_of(const Move& move, Do what) {
  const u64 base = static_cast<u64>(block_index() - move.block) * EACH;
  for (u32 place = thread_index(); place < EACH; place += 256)
    if (base + place < move.elements) what(base + place);
}

// m <- m + first (g - m); v <- v + second (g g - v); w <- keep w - rate (m / (sqrt(v) / root + eps)), with g = scale gradient.
KERNEL(adamw, 256, LIMIT(48, 0, 8), (const Move* moves, u32 count, f32 scale, f32 first, f32 second, f32 bias, f32 eps)) {
  const Move move = move_of_block(moves, count);
  f32* weight = reinterpret_cast<f32*>(move.weight);
  f32* one = reinterpret_cast<f32*>(move.first);
  f32* two = reinterpret_cast<f32*>(move.second);
  const f32* gradient = reinterpret_cast<const f32*>(move.gradient);
  each_of(move, [=](u64 index) {
    const f32 g = scale * gradient[index];
    f32 m = one[index], v = two[index];
    m += first * (g - m);
    v += second * (g * g - v);
    const f32 step = m / (root(v) / bias + eps);
    one[index] = m;
    two[index] = v;
    weight[index] = move.keep * weight[index] - move.rate * step;
  });
}

// Muon before the orthogonalisation: m <- by m + g; the gradient's memory gets g + by m.
KERNEL(nesterov, 256, LIMIT(48, 0, 8), (const Move* moves, u32 count, f32 scale, f32 by)) {
  const Move move = move_of_block(moves, count);
  f32* momentum = reinterpret_cast<f32*>(move.first);
  f32* gradient = reinterpret_cast<f32*>(move.gradient);
  each_of(move, [=](u64 index) {
    const f32 g = scale * gradient[index];
    const f32 m = by * momentum[index] + g;
    momentum[index] = m;
    gradient[index] = g + by * m;
  });
}

// And after it: w <- keep w - rate direction, which stands where the gradient stood.
KERNEL(descend, 256, LIMIT(48, 0, 8), (const Move* moves, u32 count)) {
  const Move move = move_of_block(moves, count);
  f32* weight = reinterpret_cast<f32*>(move.weight);
  const f32* direction = reinterpret_cast<const f32*>(move.gradient);
  each_of(move, [=](u64 index) { weight[index] = move.keep * weight[index] - move.rate * direction[index]; });
}

// right = left / (sqrt(squares) + eps), for each matrix, which is a piece.
KERNEL(unit_blocks, 256, LIMIT(48, 0, 8), (const Piece* pieces, u32 count, const f64* squares, f32 eps)) {
  const u32 index = piece_of_block(pieces, count);
  const Piece piece = pieces[index];
  const f32 length = static_cast<f32>(root(squares[index])) + eps;
  each_of_piece(piece, [=](u64 place) {
    reinterpret_cast<f32*>(piece.right)[place] = reinterpret_cast<const f32*>(piece.left)[place] / length;
  });
}

// right <- b left + c right, and a more on the diagonal: square matrices, which are pieces; `first` is the number of rows.
KERNEL(polynomial_blocks, 256, LIMIT(48, 0, 8), (const Piece* pieces, u32 count, f32 a, f32 b, f32 c)) {
  const Piece piece = pieces[piece_of_block(pieces, count)];
  const u32 side = static_cast<u32>(piece.first);
  each_of_piece(piece, [=](u64 place) {
    f32& fourth = reinterpret_cast<f32*>(piece.right)[place];
    const f32 value = b * reinterpret_cast<const f32*>(piece.left)[place] + c * fourth;
    const u32 at = static_cast<u32>(place);
    fourth = at / side == at % side ? value + a : value;
  });
}

// A product of two matrices, as the host writes it into device memory: out[i, j] = sum over k of left[i, k] right[j, k]; `row`
// and `step` are how far rows lie apart, and the elements of one. `out` lies row by row.
struct Product {
  u64 left, right, out;
  u32 rows, columns, inner;
  u32 block;  // the first of its blocks; it has one for each tile of SIDE x SIDE, but for those below a symmetric one's diagonal
  u32 left_row, left_step, right_row, right_step;
  u32 symmetric, unused;  // what lies below the diagonal is copied from above it
};
static_assert(sizeof(Product) == 64, "as the host lays it out");

// Many products in one launch. An element is one chain of fused multiplications and additions.
KERNEL(stacked_products, 256, LIMIT(64, 8704, 7), (const Product* products, u32 count)) {
  SHARED(f32, lefts, DEEP* PADDED);
  SHARED(f32, rights, DEEP* PADDED);
  u32 low = 0, high = count;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (products[middle].block <= block_index()) low = middle;
    else high = middle;
  }
  const Product by = products[low];
  const u32 across = (by.columns + SIDE - 1) / SIDE;
  u32 down = 0, right_of = block_index() - by.block;
  // A row of tiles has as many as there are columns of them, or one less than the row above.
  for (; right_of >= across - (by.symmetric ? down : 0); ++down) right_of -= across - (by.symmetric ? down : 0);
  const u32 row = down * SIDE, column = (by.symmetric ? down + right_of : right_of) * SIDE;
  const f32 *left = reinterpret_cast<const f32*>(by.left), *right = reinterpret_cast<const f32*>(by.right);
  f32* out = reinterpret_cast<f32*>(by.out);
  multiply<Side::along, Side::along>(
      lefts, rights, by.inner,
      [=](u32 index, u32 depth) {
        const bool there = row + index < by.rows && depth < by.inner;
        const u64 at = static_cast<u64>(row + index) * by.left_row + static_cast<u64>(depth) * by.left_step;
        return there ? left[at] : 0.0f;
      },
      [=](u32 index, u32 depth) {
        const bool there = column + index < by.columns && depth < by.inner;
        const u64 at = static_cast<u64>(column + index) * by.right_row + static_cast<u64>(depth) * by.right_step;
        return there ? right[at] : 0.0f;
      },
      [=](u32 i, u32 j, f32 sum) {
        const u32 y = row + i, x = column + j;
        if (y >= by.rows || x >= by.columns || (by.symmetric && y > x)) return;
        out[static_cast<u64>(y) * by.columns + x] = sum;
        if (by.symmetric && y < x) out[static_cast<u64>(x) * by.columns + y] = sum;
      });
}

// fourth <- b square + c fourth, and a more on the diagonal: a stack of square matrices of `side` rows.
KERNEL(newton_schulz_polynomial, 256, LIMIT(48, 0, 8),
       (const f32* square, f32* fourth, u32 side, u32 stack, f32 a, f32 b, f32 c)) {
  each(stack * side, side, [=](u32 row, u32 column) {
    const u64 at = static_cast<u64>(row) * side + column;
    const f32 value = b * square[at] + c * fourth[at];
    fourth[at] = row % side == column ? value + a : value;
  });
}

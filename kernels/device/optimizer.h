// The elementwise parts of AdamW, Muon and Newton-Schulz, with the bits of the CPU's. Tensors come in a table, so that one
// launch moves all of a model.
#pragma once
#include "elements.h"

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

// out = x / (sqrt(squares) + eps), for each matrix of a stack by itself.
KERNEL(newton_schulz_unit, 256, LIMIT(48, 0, 8), (const f32* x, const f64* squares, f32* out, u32 size, u32 stack, f32 eps)) {
  each(stack, size, [=](u32 matrix, u32 place) {
    const u64 at = static_cast<u64>(matrix) * size + place;
    const f32 length = static_cast<f32>(root(squares[matrix])) + eps;
    out[at] = x[at] / length;
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

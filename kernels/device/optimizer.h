// The elementwise parts of AdamW, Muon and Newton-Schulz, with the bits of the CPU's. Tensors come in a table, so that one
// launch moves all of a model.
#pragma once
#include "elements.h"
#include "products.h"
#include "exact.h"
#include "fours.h"

// A tensor to be moved, f32 but for what the model reads of it. Before Muon's orthogonalisation `weight` is where the direction goes.
struct Move {
  u64 weight, first, second, gradient, rounded;  // addresses; `second` is AdamW's alone, and `rounded`, bf16, may be 0
  u64 elements;
  u64 number;    // of its first element in its tensor
  u64 salts[3];  // of the checksums of weights, first and second moments
  f32 keep, rate, scale, to_first, to_second, bias, eps;
  u32 block;  // the first of its blocks; it has one for each CHUNK elements begun, or for each EACH before the orthogonalisation
};
static_assert(sizeof(Move) == 112, "as the host lays it out");

DEVICE Move move_of_block(const Move* moves, u32 count) {
  u32 low = 0, high = count;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (moves[middle].block <= block_index()) low = middle;
    else high = middle;
  }
  return moves[low];
}

static_assert(EACH == 4 * BLOCK, "a thread has four elements at a time");

// Which four of `left` elements a thread has: neighbours, by one access, where every address allows that and there are EACH; else one
// of each quarter.
struct Spread {
  u32 base, step, left;
  bool wide;
};
DEVICE Spread spread_of(bool aligned, u32 left) {
  const bool wide = aligned && left >= EACH;
  return {wide ? 4 * thread_index() : thread_index(), wide ? 1u : BLOCK, left, wide};
}
DEVICE u32 place_of(const Spread& spread, u32 next) { return spread.base + next * spread.step; }

DEVICE void fetch(f32 (&into)[4], const f32* from, const Spread& spread) {
  if (spread.wide) {
    const Packed<f32> four = load<true>(from, spread.base, EACH);
    UNROLL
    for (u32 next = 0; next < 4; ++next) into[next] = wide(four, next);
    return;
  }
  UNROLL
  for (u32 next = 0; next < 4; ++next) {
    const u32 place = place_of(spread, next);
    into[next] = place < spread.left ? from[place] : 0.0f;
  }
}

template <typename T>
DEVICE void store(T* to, const f32 (&from)[4], const Spread& spread) {
  if (spread.wide) {
    Packed<T> four = {};
    UNROLL
    for (u32 next = 0; next < 4; ++next) put(four, next, from[next]);
    store<true>(to, spread.base, EACH, four);
    return;
  }
  UNROLL
  for (u32 next = 0; next < 4; ++next) {
    const u32 place = place_of(spread, next);
    if (place < spread.left) put(to[place], from[next]);
  }
}

// Elements of a block: the chunk of the norms, so that a sum of squares is complete in one.
constexpr u32 CHUNK = 65536;

// All that a step does to weights that it moves, in one pass. With g = scale gradient, AdamW:
//   m <- m + to_first (g - m); v <- v + to_second (g g - v); w <- keep w - rate (m / (sqrt(v) / bias + eps))
// and Muon, where there are no second moments and the direction stands where the gradient would: w <- keep w - rate direction.
// What the model reads is rounded. out[4 b]: the bits of chunk b's sum of squares of new weights less old ones, f64, in the order of
// `squares`; then what it adds to the checksums of weights, first and second moments: integers, any order gives the same.
//
// Bytes of an element, AdamW: w, m, v and g read (16), w, m and v written (12), bf16 written (2): 30. Nothing is read twice, and what is
// written is what changes, so fewer would leave something undone. Muon: w, m and direction read (12), w and bf16 written (6): 18, of
// which 4 are for the checksum of m.
KERNEL(update_chunks, 256, LIMIT(64, 8256, 7), (const Move* moves, u32 count, u64* out)) {
  SHARED(Four, tiles, 2 * EACH / 4);
  SHARED(u64, groups, 8);
  const Move move = move_of_block(moves, count);
  const bool adamw = move.second != 0;
  const bool aligned = ((move.weight | move.first | move.second | move.gradient) % 16 | move.rounded % 8) == 0;
  const u64 start = static_cast<u64>(block_index() - move.block) * CHUNK;
  const u32 length = move.elements - start < CHUNK ? static_cast<u32>(move.elements - start) : CHUNK;
  f32* weight = reinterpret_cast<f32*>(move.weight) + start;
  f32* first = reinterpret_cast<f32*>(move.first) + start;
  f32* second = reinterpret_cast<f32*>(move.second) + start;
  const f32* gradient = reinterpret_cast<const f32*>(move.gradient) + start;
  f32 w[4], m[4], v[4], g[4], far[4];
  const auto ask = [&](u32 from) {
    const Spread spread = spread_of(aligned, length - from);
    fetch(w, weight + from, spread);
    fetch(m, first + from, spread);
    if (adamw) fetch(v, second + from, spread);
    fetch(g, gradient + from, spread);
  };
  u64 sums[3] = {0, 0, 0};
  f64 part = 0.0;
  ask(0);
  for (u32 from = 0; from < length; from += EACH) {
    const Spread spread = spread_of(aligned, length - from);
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const f32 old = w[next];
      f32 step = g[next];
      if (adamw) {
        const f32 scaled = move.scale * g[next];
        m[next] += move.to_first * (scaled - m[next]);
        v[next] += move.to_second * (scaled * scaled - v[next]);
        step = m[next] / (root(v[next]) / move.bias + move.eps);
      }
      w[next] = move.keep * old - move.rate * step;
      far[next] = old - w[next];
      const u32 place = place_of(spread, next);
      if (place >= spread.left) continue;
      const u64 number = move.number + start + from + place;
      sums[0] += static_cast<u64>(bits_of(w[next])) * weight_of(number, move.salts[0]);
      sums[1] += static_cast<u64>(bits_of(m[next])) * weight_of(number, move.salts[1]);
      if (adamw) sums[2] += static_cast<u64>(bits_of(v[next])) * weight_of(number, move.salts[2]);
    }
    store(weight + from, w, spread);
    if (adamw) {
      store(first + from, m, spread);
      store(second + from, v, spread);
    }
    if (move.rounded != 0) store(reinterpret_cast<bf16*>(move.rounded) + start + from, w, spread);
    // Two tiles in turn: while 16 threads add up one, the others go on to fill the other.
    f32* tile = reinterpret_cast<f32*>(tiles) + from % (2 * EACH);
    store(tile, far, spread);
    barrier();
    if (from + EACH < length) ask(from + EACH);
    if (thread_index() < PARTS) add_squares(tile, spread.left < EACH ? spread.left : EACH, part);
  }
  part = together(part);
  UNROLL
  for (u32 which = 0; which < 3; ++which) sums[which] = over_block(sums[which], groups);
  if (thread_index() != 0) return;
  u64* own = out + 4ull * block_index();
  own[0] = bits_of(part);
  UNROLL
  for (u32 which = 0; which < 3; ++which) own[1 + which] = sums[which];
}

// Muon before the orthogonalisation, by a block for EACH elements: m <- by m + g; the direction is g + by m. Gradient and m read, m and the
// direction written: 16 bytes of an element.
KERNEL(nesterov, 256, LIMIT(48, 0, 8), (const Move* moves, u32 count, f32 scale, f32 by)) {
  const Move move = move_of_block(moves, count);
  const u64 start = static_cast<u64>(block_index() - move.block) * EACH;
  const u64 left = move.elements - start;
  const bool aligned = (move.weight | move.first | move.gradient) % 16 == 0;
  const Spread spread = spread_of(aligned, left < EACH ? static_cast<u32>(left) : EACH);
  f32* momentum = reinterpret_cast<f32*>(move.first) + start;
  f32 m[4], g[4], direction[4];
  fetch(m, momentum, spread);
  fetch(g, reinterpret_cast<const f32*>(move.gradient) + start, spread);
  UNROLL
  for (u32 next = 0; next < 4; ++next) {
    const f32 scaled = scale * g[next];
    m[next] = by * m[next] + scaled;
    direction[next] = scaled + by * m[next];
  }
  store(momentum, m, spread);
  store(reinterpret_cast<f32*>(move.weight) + start, direction, spread);
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
  u32 block;  // the first of its blocks: one for each tile of SMALL x SMALL, but for those below a symmetric one's diagonal
  u32 left_row, left_step, right_row, right_step;
  u32 symmetric, unused;  // what lies below the diagonal is copied from above it
};
static_assert(sizeof(Product) == 64, "as the host lays it out");

// Many products in one launch. An element is one chain of fused multiplications and additions.
KERNEL(stacked_products, 256, LIMIT(64, 8704, 7), (const Product* products, u32 count)) {
  TILES(SMALL);
  u32 low = 0, high = count;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (products[middle].block <= block_index()) low = middle;
    else high = middle;
  }
  const Product by = products[low];
  const u32 across = (by.columns + SMALL - 1) / SMALL;
  u32 down = 0, right_of = block_index() - by.block;
  // A row of tiles has as many as there are columns of them, or one less than the row above.
  for (; right_of >= across - (by.symmetric ? down : 0); ++down) right_of -= across - (by.symmetric ? down : 0);
  const u32 row = down * SMALL, column = (by.symmetric ? down + right_of : right_of) * SMALL;
  const f32 *lefts_of = reinterpret_cast<const f32*>(by.left), *rights_of = reinterpret_cast<const f32*>(by.right);
  const Strided<Side::along> left = {lefts_of + static_cast<u64>(row) * by.left_row, by.left_row, by.left_step,
                                     of_tile<SMALL>(by.rows - row)};
  const Strided<Side::along> right = {rights_of + static_cast<u64>(column) * by.right_row, by.right_row, by.right_step,
                                      of_tile<SMALL>(by.columns - column)};
  f32* out = reinterpret_cast<f32*>(by.out);
  multiply<SMALL>(lefts, rights, by.inner, left, right, [=](u32 i, u32 j, f32 sum) {
    const u32 y = row + i, x = column + j;
    if (by.symmetric && y > x) return;
    out[static_cast<u64>(y) * by.columns + x] = sum;
    if (by.symmetric && y < x) out[static_cast<u64>(x) * by.columns + y] = sum;
  });
}
#undef TILES

// fourth <- b square + c fourth, and a more on the diagonal: a stack of square matrices of `side` rows.
KERNEL(newton_schulz_polynomial, 256, LIMIT(48, 0, 8),
       (const f32* square, f32* fourth, u32 side, u32 stack, f32 a, f32 b, f32 c)) {
  each(stack * side, side, [=](u32 row, u32 column) {
    const u64 at = static_cast<u64>(row) * side + column;
    const f32 value = b * square[at] + c * fourth[at];
    fourth[at] = row % side == column ? value + a : value;
  });
}

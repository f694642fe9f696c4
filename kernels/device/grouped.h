// Products of each expert's rows in bf16, on matrix units (mma.h): all experts in one launch, as in products.h.
//
// A block computes a tile of 128 x 128 elements with sums in f32, a wave 64 of these rows and as many columns as it has
// lanes. The inner index ascends by 16, from the expert's first row where it counts rows, and what is missing in the
// last 16 is zero. So an element's bits depend neither on other experts, nor on where its rows lie, nor on what else is
// in the launch.
//
// While a block multiplies, the next 32 of the inner index are on their way into registers.
#pragma once
#include "experts.h"
#include "fours.h"
#include "products.h"

constexpr u32 BROAD = 128;
constexpr u32 AHEAD_OF_INNER = 32;
// Neighbouring rows in shared memory begin in different banks.
template <Side SIDE_BY_SIDE>
constexpr u32 STRIDE_OF = (SIDE_BY_SIDE == Side::along ? AHEAD_OF_INNER : BROAD) + 8;
constexpr u32 ROWS_OF_WAVE = 64, TALL = ROWS_OF_WAVE / 16, WIDE = MOST_LANES / 16;
// 16 bytes of each operand, per thread.
constexpr u32 BROUGHT = BROAD * AHEAD_OF_INNER / 8 / BLOCK;

// The row in memory of row or column `index` of an operand, NO_ROW for zeros.
constexpr u32 NO_ROW = ~0u;
struct InOrder {};
DEVICE u32 row_of(const InOrder&, u32 index) { return index; }
// Rows of experts: those of their tokens where there is an order, which has -1 for a row without a token.
struct OfExpert {
  const int* order;
  u32 first;
};
DEVICE u32 row_of(const OfExpert& by, u32 index) {
  return by.order == nullptr ? by.first + index : static_cast<u32>(by.order[by.first + index]);
}
// 16 columns of a gate and the same ones of up, in turn: a wave has sums of both.
struct GateAndUp {
  u32 first, width;
};
DEVICE u32 row_of(const GateAndUp& by, u32 index) {
  const u32 column = by.first + index / 32 * 16 + index % 16;
  return column < by.width ? column + (index % 32 < 16 ? 0 : by.width) : NO_ROW;
}

// A part of a matrix: `count` rows or columns, with their inner index along or across the memory. `pitch` is the
// distance of rows in memory.
template <Side SIDE_BY_SIDE, typename Rows = InOrder>
struct Part {
  const bf16* first;
  u32 pitch, count;
  Rows rows = {};
};

// What a thread has of them: eight elements side by side, number `number` of the thread.
template <Side SIDE_BY_SIDE>
DEVICE Place place_of_eight(u32 number) {
  const u32 eight = thread_index() + number * BLOCK;
  if (SIDE_BY_SIDE == Side::along) return {eight / (AHEAD_OF_INNER / 8), eight % (AHEAD_OF_INNER / 8) * 8};
  return {eight % (BROAD / 8) * 8, eight / (BROAD / 8)};
}

// Their rows in memory, at `begin` of the inner index.
template <Side SIDE_BY_SIDE, typename Rows>
DEVICE void find_rows(const Part<SIDE_BY_SIDE, Rows>& part, u32 begin, u32 inner, u32* rows) {
  UNROLL
  for (u32 number = 0; number < BROUGHT; ++number) {
    const Place place = place_of_eight<SIDE_BY_SIDE>(number);
    const bool along = SIDE_BY_SIDE == Side::along;
    const u32 row = along ? place.index : begin + place.inner;
    rows[number] = row < (along ? part.count : inner) ? row_of(part.rows, row) : NO_ROW;
  }
}

// The next of the inner index, from `begin` on; zeros beyond the matrix. WHOLE: no eight elements are cut, and each
// begins where it must.
template <Side SIDE_BY_SIDE, typename Rows>
DEVICE void load_part(const Part<SIDE_BY_SIDE, Rows>& part, const u32* rows, u32 begin, u32 inner, bool whole, Four* into) {
  UNROLL
  for (u32 number = 0; number < BROUGHT; ++number) {
    const Place place = place_of_eight<SIDE_BY_SIDE>(number);
    const bool along = SIDE_BY_SIDE == Side::along;
    const u32 column = along ? begin + place.inner : place.index, width = along ? inner : part.count;
    const bf16* from = part.first + static_cast<u64>(rows[number]) * part.pitch + column;
    const bool begins = rows[number] != NO_ROW && column < width;
    Four found = {};
    if (whole) {
      if (begins) found = at_once(reinterpret_cast<const f32*>(from));
    } else if (begins) {
      const u32 there = width - column;
      // For elements beyond the matrix the first is read, so that eight loads are one branch.
      UNROLL
      for (u32 pair = 0; pair < 4; ++pair) {
        const u32 at = 2 * pair, low = from[at < there ? at : 0].bits, high = from[at + 1 < there ? at + 1 : 0].bits;
        found.at[pair] = from_bits((at + 1 < there ? high << 16 : 0u) | (at < there ? low : 0u));
      }
    }
    into[number] = found;
  }
}
template <Side SIDE_BY_SIDE>
DEVICE void store_part(bf16* shared, const Four* brought) {
  UNROLL
  for (u32 number = 0; number < BROUGHT; ++number) {
    const u32 at = offset_of<SIDE_BY_SIDE>(place_of_eight<SIDE_BY_SIDE>(number), STRIDE_OF<SIDE_BY_SIDE>);
    at_once(reinterpret_cast<f32*>(shared + at), brought[number]);
  }
}
// Of 16 rows or columns from `index`, at `inner`.
template <bool LEFT, Side SIDE_BY_SIDE>
DEVICE Fragment fragment_of_part(const bf16* shared, u32 index, u32 inner) {
  constexpr u32 STRIDE = STRIDE_OF<SIDE_BY_SIDE>;
  return fragment<LEFT, SIDE_BY_SIDE>(shared + offset_of<SIDE_BY_SIDE>({index, inner}, STRIDE), STRIDE);
}

// what(i, sum, row, column) for each two sums side by side in the first of a wave's tiles of 16 columns.
template <typename Do>
DEVICE void each_two_sums(u32 rows, Do what) {
  UNROLL
  for (u32 i = 0; i < TALL; ++i) {
    UNROLL
    for (u32 sum = 0; sum < 256 / lanes(); sum += 2) {
      const u32 row = 16 * i + row_of_sum(sum);
      if (row < rows) what(i, sum, row, column_of_sum(sum));
    }
  }
}

// Two elements of a row, rounded to bf16. PAIRS: no two are cut, and they are one access.
struct Two {
  bf16 low, high;
};
DEVICE Two two(f32 low, f32 high) {
  Two made;
  put(made.low, low);
  put(made.high, high);
  return made;
}
template <bool PAIRS>
DEVICE void put_two(bf16* to, const Two& made, bool both) {
  if constexpr (PAIRS) {
    *reinterpret_cast<u32*>(to) = made.low.bits | static_cast<u32>(made.high.bits) << 16;
  } else {
    to[0] = made.low;
    if (both) to[1] = made.high;
  }
}
template <bool PAIRS>
DEVICE Two get_two(const bf16* from, bool both) {
  if constexpr (PAIRS) {
    const u32 all = *reinterpret_cast<const u32*>(from);
    return {{static_cast<u16>(all)}, {static_cast<u16>(all >> 16)}};
  } else {
    return {from[0], both ? from[1] : bf16{0}};
  }
}

typedef Sums SumsOfWave[TALL][WIDE];

DEVICE bool in_twos(const bf16* matrix) { return reinterpret_cast<u64>(matrix) % 4 == 0; }

// What becomes of a wave's sums, from `row` and `column` of the tile on, of which `rows` and `columns` are there.
//
// Rounded to bf16.
struct Plain {
  bf16* out;
  u32 width;
};
DEVICE bool in_twos(const Plain& by) { return by.width % 2 == 0 && in_twos(by.out); }
template <bool PAIRS>
DEVICE void put_sums(const Plain& by, const SumsOfWave& sums, u32 row, u32 column, u32 rows, u32 columns) {
  bf16* const first = by.out + static_cast<u64>(row) * by.width + column;
  each_two_sums(rows, [&](u32 i, u32 sum, u32 down, u32 across) {
    UNROLL
    for (u32 j = 0; j < lanes() / 16; ++j) {
      const u32 at = across + 16 * j;
      if (at >= columns) continue;
      const Two made = two(sums[i][j].at[sum], sums[i][j].at[sum + 1]);
      put_two<PAIRS>(first + static_cast<u64>(down) * by.width + at, made, at + 1 < columns);
    }
  });
}
// Gate and up, rounded to `both`, and from the rounded ones silu(gate) up. The tile's columns are GateAndUp's.
struct Gated {
  bf16 *both, *product;
  u32 first, width;
};
DEVICE bool in_twos(const Gated& by) { return by.width % 2 == 0 && in_twos(by.both) && in_twos(by.product); }
template <bool PAIRS>
DEVICE void put_sums(const Gated& by, const SumsOfWave& sums, u32 row, u32 column, u32 rows, u32) {
  each_two_sums(rows, [&](u32 i, u32 sum, u32 down, u32 across) {
    UNROLL
    for (u32 j = 0; j < lanes() / 16; j += 2) {
      const u32 at = by.first + column / 2 + 8 * j + across;
      if (at >= by.width) continue;
      const bool all = at + 1 < by.width;
      const u64 begin = static_cast<u64>(row + down) * by.width;
      bf16* const gates = by.both + 2 * begin + at;
      const Two gate = two(sums[i][j].at[sum], sums[i][j].at[sum + 1]);
      const Two up = two(sums[i][j + 1].at[sum], sums[i][j + 1].at[sum + 1]);
      put_two<PAIRS>(gates, gate, all);
      put_two<PAIRS>(gates + by.width, up, all);
      const Two made = two(gated(wide(gate.low), wide(up.low)), gated(wide(gate.high), wide(up.high)));
      put_two<PAIRS>(by.product + begin + at, made, all);
    }
  });
}
// Back: from the gradient of silu(gate) up, rounded, to those of gate and up.
struct GatedBack {
  const bf16* both;
  bf16* out;
  u32 width;
};
DEVICE bool in_twos(const GatedBack& by) { return by.width % 2 == 0 && in_twos(by.both) && in_twos(by.out); }
template <bool PAIRS>
DEVICE void put_sums(const GatedBack& by, const SumsOfWave& sums, u32 row, u32 column, u32 rows, u32 columns) {
  each_two_sums(rows, [&](u32 i, u32 sum, u32 down, u32 across) {
    UNROLL
    for (u32 j = 0; j < lanes() / 16; ++j) {
      const u32 at = across + 16 * j;
      if (at >= columns) continue;
      const bool all = at + 1 < columns;
      const u64 here = static_cast<u64>(row + down) * 2 * by.width + column + at;
      const Two gate = get_two<PAIRS>(by.both + here, all), up = get_two<PAIRS>(by.both + here + by.width, all);
      const Two grad = two(sums[i][j].at[sum], sums[i][j].at[sum + 1]);
      const GatedGrads low = gated_back(wide(gate.low), wide(up.low), wide(grad.low));
      const GatedGrads high = gated_back(wide(gate.high), wide(up.high), wide(grad.high));
      put_two<PAIRS>(by.out + here, two(low.gate, high.gate), all);
      put_two<PAIRS>(by.out + here + by.width, two(low.up, high.up), all);
    }
  });
}

// Sums over `inner` of left(i, k) right(j, k), of as many rows and columns as the parts have, for `become`.
template <Side LEFT, typename Lefts, Side RIGHT, typename Rights, typename Become>
DEVICE void multiply_broad(const Part<LEFT, Lefts>& left, const Part<RIGHT, Rights>& right, u32 inner, const Become& become,
                           Four* lefts, Four* rights) {
  bf16 *const shared_left = reinterpret_cast<bf16*>(lefts), *const shared_right = reinterpret_cast<bf16*>(rights);
  const u32 wave = thread_index() / lanes(), side_by_side = BROAD / lanes();
  const u32 row = wave / side_by_side * ROWS_OF_WAVE, column = wave % side_by_side * lanes();
  const bool busy = row < left.count && column < right.count;
  const bool whole = left.pitch % 8 == 0 && right.pitch % 8 == 0 && reinterpret_cast<u64>(left.first) % 16 == 0 &&
                     reinterpret_cast<u64>(right.first) % 16 == 0;
  SumsOfWave sums = {};
  u32 left_rows[BROUGHT], right_rows[BROUGHT];
  Four next_left[BROUGHT], next_right[BROUGHT];
  find_rows(left, 0, inner, left_rows);
  find_rows(right, 0, inner, right_rows);
  load_part(left, left_rows, 0, inner, whole, next_left);
  load_part(right, right_rows, 0, inner, whole, next_right);
  for (u32 begin = AHEAD_OF_INNER; begin < inner + AHEAD_OF_INNER; begin += AHEAD_OF_INNER) {
    // Before the barrier, as an order is in memory.
    if (LEFT == Side::across) find_rows(left, begin, inner, left_rows);
    if (RIGHT == Side::across) find_rows(right, begin, inner, right_rows);
    barrier();
    store_part<LEFT>(shared_left, next_left);
    store_part<RIGHT>(shared_right, next_right);
    barrier();
    if (begin < inner) {
      load_part(left, left_rows, begin, inner, whole, next_left);
      load_part(right, right_rows, begin, inner, whole, next_right);
    }
    if (!busy) continue;
    UNROLL
    for (u32 deep = 0; deep < AHEAD_OF_INNER; deep += 16) {
      Fragment rows[TALL];
      UNROLL
      for (u32 i = 0; i < TALL; ++i) rows[i] = fragment_of_part<true, LEFT>(shared_left, row + 16 * i, deep);
      UNROLL
      for (u32 j = 0; j < lanes() / 16; ++j) {
        const Fragment columns = fragment_of_part<false, RIGHT>(shared_right, column + 16 * j, deep);
        UNROLL
        for (u32 i = 0; i < TALL; ++i) multiply_add(sums[i][j], rows[i], columns);
      }
    }
  }
  if (!busy) return;
  const u32 rows = left.count - row, columns = right.count - column;
  if (in_twos(become)) put_sums<true>(become, sums, row, column, rows, columns);
  else put_sums<false>(become, sums, row, column, rows, columns);
}

#define BROAD_TILES                                       \
  SHARED(Four, lefts, BROAD* STRIDE_OF<Side::along> / 8); \
  SHARED(Four, rights, BROAD* STRIDE_OF<Side::along> / 8)

DEVICE u32 at_most_broad(u32 size) { return size < BROAD ? size : BROAD; }
DEVICE Part<Side::along> rows_of_tile(const bf16* rows, const Tile& tile, u32 width) {
  return {rows + static_cast<u64>(tile.first) * width, width, tile.end - tile.first};
}

// out[p, b] = rows[p] . weights[e, b], of [P, A] and [E, B, A]; rows without an expert stay as they are.
KERNEL(grouped_bf16, 256, LIMIT(168, 20480, 3, 4, 32),
       (const bf16* rows, const bf16* weights, const int* ends, bf16* out, u32 experts, u32 inner, u32 width)) {
  BROAD_TILES;
  const Tile tile = tile_of<BROAD>(ends, experts, width);
  if (!tile.there) return;
  const bf16* own = weights + (static_cast<u64>(tile.expert) * width + tile.column) * inner;
  const Part<Side::along> right = {own, inner, at_most_broad(width - tile.column)};
  const Plain plain = {out + static_cast<u64>(tile.first) * width + tile.column, width};
  multiply_broad(rows_of_tile(rows, tile, inner), right, inner, plain, lefts, rights);
}

// both[p] = [gate, up] = weights[e] rows[order[p]] and product[p] = silu(gate) up, of [E, 2 B, A] and [N, A]; without an
// order of rows[p].
KERNEL(grouped_swiglu_bf16, 256, LIMIT(168, 20480, 3, 4, 32),
       (const bf16* rows, const int* order, const bf16* weights, const int* ends, bf16* both, bf16* product, u32 experts,
        u32 inner, u32 width)) {
  BROAD_TILES;
  const Tile tile = tile_of<BROAD>(ends, experts, 2 * width);
  if (!tile.there) return;
  const u32 column = tile.column / 2;
  const Part<Side::along, OfExpert> left = {rows, inner, tile.end - tile.first, {order, tile.first}};
  const Part<Side::along, GateAndUp> right = {weights + static_cast<u64>(tile.expert) * 2 * width * inner, inner,
                                              at_most_broad((width - column + 15) / 16 * 32), {column, width}};
  const u64 first = static_cast<u64>(tile.first) * width;
  const Gated become = {both + 2 * first, product + first, column, width};
  multiply_broad(left, right, inner, become, lefts, rights);
}

// Back: out[p, a] = sum over b of grad[p, b] weights[e, b, a].
KERNEL(grouped_input_bf16, 256, LIMIT(168, 20480, 3, 4, 32),
       (const bf16* grad, const bf16* weights, const int* ends, bf16* out, u32 experts, u32 inner, u32 width)) {
  BROAD_TILES;
  const Tile tile = tile_of<BROAD>(ends, experts, width);
  if (!tile.there) return;
  const bf16* own = weights + static_cast<u64>(tile.expert) * width * inner + tile.column;
  const Part<Side::across> right = {own, width, at_most_broad(width - tile.column)};
  const Plain plain = {out + static_cast<u64>(tile.first) * width + tile.column, width};
  multiply_broad(rows_of_tile(grad, tile, inner), right, inner, plain, lefts, rights);
}

// The same for the weights of a matmul of silu(gate) up: out[p], of [P, 2 A], are the gradients of gate and up, which are
// both[p].
KERNEL(grouped_swiglu_backward_bf16, 256, LIMIT(168, 20480, 3, 4, 32, 2),
       (const bf16* grad, const bf16* weights, const int* ends, const bf16* both, bf16* out, u32 experts, u32 inner, u32 width)) {
  BROAD_TILES;
  const Tile tile = tile_of<BROAD>(ends, experts, width);
  if (!tile.there) return;
  const bf16* own = weights + static_cast<u64>(tile.expert) * width * inner + tile.column;
  const Part<Side::across> right = {own, width, at_most_broad(width - tile.column)};
  const u64 first = static_cast<u64>(tile.first) * 2 * width + tile.column;
  const GatedBack become = {both + first, out + first, width};
  multiply_broad(rows_of_tile(grad, tile, inner), right, inner, become, lefts, rights);
}

// Back: out[e, b, a] = sum over the rows p of expert e of grad[p, b] rows[order[p], a], without an order of rows[p, a]; zeros
// for an expert without rows.
KERNEL(grouped_weights_bf16, 256, LIMIT(168, 20480, 3, 4, 32, 2),
       (const bf16* grad, const bf16* rows, const int* order, const int* ends, bf16* out, u32 height, u32 width)) {
  BROAD_TILES;
  const u32 across = (width + BROAD - 1) / BROAD, down = (height + BROAD - 1) / BROAD;
  const u32 column = block_index() % across * BROAD, row = block_index() / across % down * BROAD;
  const u32 expert = block_index() / across / down;
  const u32 begin = expert > 0 ? static_cast<u32>(ends[expert - 1]) : 0, inner = static_cast<u32>(ends[expert]) - begin;
  const Part<Side::across> left = {grad + static_cast<u64>(begin) * height + row, height, at_most_broad(height - row)};
  const Part<Side::across, OfExpert> right = {rows + column, width, at_most_broad(width - column), {order, begin}};
  const Plain plain = {out + (static_cast<u64>(expert) * height + row) * width + column, width};
  multiply_broad(left, right, inner, plain, lefts, rights);
}
#undef BROAD_TILES

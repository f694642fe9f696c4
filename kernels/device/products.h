// Products of each expert's rows in f32, all experts in one launch: offsets stay on the device. Rows lie expert by expert
// (dispatch.h): ends[e] is where those of expert e end.
//
// An element is one chain of fused multiplications and additions over the inner index, so its bits depend neither on tiles nor on
// what else is in the launch. A block has a tile of `SIDE` rows and columns, a thread a sixteenth of each, by fours that lie 64
// apart. While a block multiplies, the next DEEP of the inner index are on their way into registers.
#pragma once
#include "fours.h"
#include "mma.h"

constexpr u32 LARGE = 128, SMALL = 64;  // sides of tiles
constexpr u32 DEEP = 16;                // of the inner index stand in shared memory at once
template <u32 SIDE>
constexpr u32 PADDED = SIDE + 4;
template <u32 SIDE>
constexpr u32 BROUGHT_BY_FOURS = SIDE * DEEP / 4 / BLOCK;  // fours of each operand that a thread brings

// Rows of the tile of this block and where it begins among the columns; `there` where there is one.
struct Tile {
  u32 expert, first, end, column;
  bool there;
};

// Tiles of rows of all experts, one behind the other, each with all tiles of columns: as many blocks as there can be.
template <u32 SIDE>
DEVICE Tile tile_of(const int* ends, u32 experts, u32 width) {
  const u32 across = (width + SIDE - 1) / SIDE, column = block_index() % across * SIDE;
  u32 left = block_index() / across, begin = 0;
  for (u32 expert = 0; expert < experts; ++expert) {
    const u32 end = static_cast<u32>(ends[expert]), tiles = (end - begin + SIDE - 1) / SIDE;
    if (left < tiles) {
      const u32 first = begin + left * SIDE;
      return {expert, first, first + SIDE < end ? first + SIDE : end, column, true};
    }
    left -= tiles;
    begin = end;
  }
  return {0, 0, 0, 0, false};
}

// Element (i, k) of an operand is first[i row + k step], for i below `count`; zero beyond it. Threads bring four elements along the
// one or the other index, by one access where those lie side by side and begin where they must.
template <Side SIDE_BY_SIDE>
struct Strided {
  const f32* first;
  u32 row, step, count;
};
template <Side SIDE_BY_SIDE>
DEVICE bool by_fours(const Strided<SIDE_BY_SIDE>& by) {
  const u32 along = SIDE_BY_SIDE == Side::along ? by.step : by.row, across = SIDE_BY_SIDE == Side::along ? by.row : by.step;
  return along == 1 && by_fours(across, by.first);
}
template <u32 SIDE, Side SIDE_BY_SIDE>
DEVICE Place place_of_four(u32 number) {
  const u32 four = thread_index() + number * BLOCK;
  if (SIDE_BY_SIDE == Side::along) return {four / (DEEP / 4), four % (DEEP / 4) * 4};
  return {four % (SIDE / 4) * 4, four / (SIDE / 4)};
}
template <u32 SIDE, Side SIDE_BY_SIDE>
DEVICE void ask(const Strided<SIDE_BY_SIDE>& by, u32 begin, u32 inner, bool whole, Four (&into)[BROUGHT_BY_FOURS<SIDE>]) {
  UNROLL
  for (u32 number = 0; number < BROUGHT_BY_FOURS<SIDE>; ++number) {
    const Place place = place_of_four<SIDE, SIDE_BY_SIDE>(number);
    const u32 index = place.index, depth = begin + place.inner;
    const bool is_along = SIDE_BY_SIDE == Side::along;
    const bool there = index < by.count && depth < inner;
    const u32 left = !there ? 0 : is_along ? inner - depth : by.count - index;
    const f32* from = by.first + static_cast<u64>(index) * by.row + static_cast<u64>(depth) * by.step;
    Four found = {};
    if (whole && left >= 4) {
      found = at_once(from);
    } else if (left > 0) {
      const u64 next_one = is_along ? by.step : by.row;
      UNROLL
      for (u32 next = 0; next < 4; ++next) {
        const f32 value = from[next < left ? next * next_one : 0];
        found.at[next] = next < left ? value : 0.0f;
      }
    }
    into[number] = found;
  }
}
template <u32 SIDE, Side SIDE_BY_SIDE>
DEVICE void bring(f32* shared, const Four (&brought)[BROUGHT_BY_FOURS<SIDE>]) {
  UNROLL
  for (u32 number = 0; number < BROUGHT_BY_FOURS<SIDE>; ++number) {
    const Place place = place_of_four<SIDE, SIDE_BY_SIDE>(number);
    f32* to = shared + place.inner * PADDED<SIDE> + place.index;
    if constexpr (SIDE_BY_SIDE == Side::across) {
      at_once(to, brought[number]);
    } else {
      UNROLL
      for (u32 next = 0; next < 4; ++next) to[next * PADDED<SIDE>] = brought[number].at[next];
    }
  }
}

// Sums over `inner` of left(i, k) right(j, k) for the tile: what(i, j, sum), of those that are there.
template <u32 SIDE, Side LEFT, Side RIGHT, typename Do>
DEVICE void multiply(Four* lefts, Four* rights, u32 inner, const Strided<LEFT>& left, const Strided<RIGHT>& right, Do what) {
  f32 *const shared_left = reinterpret_cast<f32*>(lefts), *const shared_right = reinterpret_cast<f32*>(rights);
  const u32 row = thread_index() / 16 * 4, column = thread_index() % 16 * 4;
  const bool left_whole = by_fours(left), right_whole = by_fours(right);
  constexpr u32 OWN = SIDE / 16, FOURS = OWN / 4;
  f32 sums[OWN][OWN] = {};
  Four next_left[BROUGHT_BY_FOURS<SIDE>], next_right[BROUGHT_BY_FOURS<SIDE>];
  ask<SIDE>(left, 0, inner, left_whole, next_left);
  ask<SIDE>(right, 0, inner, right_whole, next_right);
  for (u32 begin = 0; begin < inner; begin += DEEP) {
    barrier();
    bring<SIDE, LEFT>(shared_left, next_left);
    bring<SIDE, RIGHT>(shared_right, next_right);
    barrier();
    if (begin + DEEP < inner) {
      ask<SIDE>(left, begin + DEEP, inner, left_whole, next_left);
      ask<SIDE>(right, begin + DEEP, inner, right_whole, next_right);
    }
    const u32 deep = begin + DEEP < inner ? DEEP : inner - begin;
    ROLLED
    for (u32 k = 0; k < deep; ++k) {
      Four own[FOURS], other[FOURS];
      UNROLL
      for (u32 four = 0; four < FOURS; ++four) {
        own[four] = at_once(shared_left + k * PADDED<SIDE> + row + 64 * four);
        other[four] = at_once(shared_right + k * PADDED<SIDE> + column + 64 * four);
      }
      UNROLL
      for (u32 i = 0; i < OWN; ++i) {
        UNROLL
        for (u32 j = 0; j < OWN; ++j) sums[i][j] = fused(own[i / 4].at[i % 4], other[j / 4].at[j % 4], sums[i][j]);
      }
    }
  }
  UNROLL
  for (u32 i = 0; i < OWN; ++i) {
    UNROLL
    for (u32 j = 0; j < OWN; ++j) {
      const u32 down = row + i % 4 + i / 4 * 64, across = column + j % 4 + j / 4 * 64;
      if (down < left.count && across < right.count) what(down, across, sums[i][j]);
    }
  }
}

#define TILES(side)                            \
  SHARED(Four, lefts, DEEP* PADDED<side> / 4);  \
  SHARED(Four, rights, DEEP* PADDED<side> / 4)

template <u32 SIDE>
DEVICE u32 of_tile(u32 size) {
  return size < SIDE ? size : SIDE;
}
DEVICE Strided<Side::along> rows_of_tile(const f32* rows, const Tile& tile, u32 width) {
  return {rows + static_cast<u64>(tile.first) * width, width, 1, tile.end - tile.first};
}

// out[p, b] = rows[p] . weights[e, b], of [P, A] and [E, B, A]; rows without an expert stay as they are.
KERNEL(grouped_f32, 256, LIMIT(128, 16896, 3, 4, 0, 2),
       (const f32* rows, const f32* weights, const int* ends, f32* out, u32 experts, u32 inner, u32 width)) {
  TILES(LARGE);
  const Tile tile = tile_of<LARGE>(ends, experts, width);
  if (!tile.there) return;
  const f32* own = weights + (static_cast<u64>(tile.expert) * width + tile.column) * inner;
  const Strided<Side::along> right = {own, inner, 1, of_tile<LARGE>(width - tile.column)};
  f32* const to = out + static_cast<u64>(tile.first) * width + tile.column;
  multiply<LARGE>(lefts, rights, inner, rows_of_tile(rows, tile, inner), right,
           [=](u32 i, u32 j, f32 sum) { put(to[static_cast<u64>(i) * width + j], sum); });
}

// Back: out[p, a] = sum over b of grad[p, b] weights[e, b, a].
KERNEL(grouped_input_f32, 256, LIMIT(128, 16896, 3, 4, 0, 2),
       (const f32* grad, const f32* weights, const int* ends, f32* out, u32 experts, u32 inner, u32 width)) {
  TILES(LARGE);
  const Tile tile = tile_of<LARGE>(ends, experts, width);
  if (!tile.there) return;
  const f32* own = weights + static_cast<u64>(tile.expert) * width * inner + tile.column;
  const Strided<Side::across> right = {own, 1, width, of_tile<LARGE>(width - tile.column)};
  f32* const to = out + static_cast<u64>(tile.first) * width + tile.column;
  multiply<LARGE>(lefts, rights, inner, rows_of_tile(grad, tile, inner), right,
           [=](u32 i, u32 j, f32 sum) { put(to[static_cast<u64>(i) * width + j], sum); });
}

// Back: out[e, b, a] = sum over the rows p of expert e of grad[p, b] rows[p, a]; zeros for an expert without rows.
KERNEL(grouped_weights_f32, 256, LIMIT(128, 16896, 3, 4, 0, 2),
       (const f32* grad, const f32* rows, const int* ends, f32* out, u32 height, u32 width)) {
  TILES(LARGE);
  const u32 across = (width + LARGE - 1) / LARGE, down = (height + LARGE - 1) / LARGE;
  const u32 column = block_index() % across * LARGE, row = block_index() / across % down * LARGE;
  const u32 expert = block_index() / across / down;
  const u32 begin = expert > 0 ? static_cast<u32>(ends[expert - 1]) : 0, inner = static_cast<u32>(ends[expert]) - begin;
  const Strided<Side::across> left = {grad + static_cast<u64>(begin) * height + row, 1, height, of_tile<LARGE>(height - row)};
  const Strided<Side::across> right = {rows + static_cast<u64>(begin) * width + column, 1, width, of_tile<LARGE>(width - column)};
  f32* const to = out + (static_cast<u64>(expert) * height + row) * width + column;
  multiply<LARGE>(lefts, rights, inner, left, right, [=](u32 i, u32 j, f32 sum) { put(to[static_cast<u64>(i) * width + j], sum); });
}

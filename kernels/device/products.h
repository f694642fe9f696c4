// Products of each expert's rows, all experts in one launch: offsets stay on the device. Rows lie expert by expert (dispatch.h):
// ends[e] is where those of expert e end.
//
// An element is one chain of fused multiplications and additions over the inner index, so its bits depend neither on tiles nor on
// what else is in the launch. A block has a tile of SIDE x SIDE elements, a thread 4 x 4 of them.
#pragma once
#include "sums.h"

constexpr u32 SIDE = 64;
constexpr u32 DEEP = 16;  // of the inner index stand in shared memory at once
constexpr u32 PADDED = SIDE + 4;

// Rows of the tile of this block and where it begins among the columns; `there` where there is one.
struct Tile {
  u32 expert, first, end, column;
  bool there;
};

// Tiles of rows of all experts, one behind the other, each with all tiles of columns: as many blocks as there can be.
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

// How a matrix lies in memory: its elements side by side along the inner index, or across it. The threads that bring a part of it
// into shared memory go along it.
enum class Side { along, across };
template <Side SIDE_BY_SIDE, typename Element>
DEVICE void bring(f32* into, u32 first, Element element) {
  for (u32 place = thread_index(); place < SIDE * DEEP; place += BLOCK) {
    const u32 index = SIDE_BY_SIDE == Side::along ? place / DEEP : place % SIDE;
    const u32 depth = SIDE_BY_SIDE == Side::along ? place % DEEP : place / SIDE;
    into[depth * PADDED + index] = element(index, first + depth);
  }
}

// Sums over `inner` of left(i, k) right(j, k) for the tile: what(i, j, sum). Both are zero outside of their matrices.
template <Side LEFT, Side RIGHT, typename Left, typename Right, typename Do>
DEVICE void multiply(f32* lefts, f32* rights, u32 inner, Left left, Right right, Do what) {
  const u32 row = thread_index() / 16, column = thread_index() % 16;
  f32 sums[4][4] = {};
  for (u32 first = 0; first < inner; first += DEEP) {
    barrier();
    bring<LEFT>(lefts, first, left);
    bring<RIGHT>(rights, first, right);
    barrier();
    const u32 deep = first + DEEP < inner ? DEEP : inner - first;
    for (u32 k = 0; k < deep; ++k) {
      f32 own[4], other[4];
      UNROLL
      for (u32 i = 0; i < 4; ++i) {
        own[i] = lefts[k * PADDED + row + 16 * i];
        other[i] = rights[k * PADDED + column + 16 * i];
      }
      UNROLL
      for (u32 i = 0; i < 4; ++i) {
        UNROLL
        for (u32 j = 0; j < 4; ++j) sums[i][j] = fused(own[i], other[j], sums[i][j]);
      }
    }
  }
  UNROLL
  for (u32 i = 0; i < 4; ++i) {
    UNROLL
    for (u32 j = 0; j < 4; ++j) what(row + 16 * i, column + 16 * j, sums[i][j]);
  }
}

// out[p, b] = rows[p] . weights[e, b], of [P, A] and [E, B, A]; rows without an expert stay as they are.
template <typename T>
DEVICE void grouped(const T* rows, const T* weights, const int* ends, T* out, u32 experts, u32 inner, u32 width, f32* lefts,
                    f32* rights) {
  const Tile tile = tile_of(ends, experts, width);
  if (!tile.there) return;
  const T* own = weights + static_cast<u64>(tile.expert) * width * inner;
  multiply<Side::along, Side::along>(
      lefts, rights, inner,
      [=](u32 index, u32 depth) {
        const bool there = tile.first + index < tile.end && depth < inner;
        return there ? wide(rows[static_cast<u64>(tile.first + index) * inner + depth]) : 0.0f;
      },
      [=](u32 index, u32 depth) {
        const bool there = tile.column + index < width && depth < inner;
        return there ? wide(own[static_cast<u64>(tile.column + index) * inner + depth]) : 0.0f;
      },
      [=](u32 i, u32 j, f32 sum) {
        const u32 row = tile.first + i, column = tile.column + j;
        if (row < tile.end && column < width) put(out[static_cast<u64>(row) * width + column], sum);
      });
}

// Back: out[p, a] = sum over b of grad[p, b] weights[e, b, a].
template <typename T>
DEVICE void grouped_input(const T* grad, const T* weights, const int* ends, T* out, u32 experts, u32 inner, u32 width, f32* lefts,
                          f32* rights) {
  const Tile tile = tile_of(ends, experts, width);
  if (!tile.there) return;
  const T* own = weights + static_cast<u64>(tile.expert) * width * inner;
  multiply<Side::along, Side::across>(
      lefts, rights, inner,
      [=](u32 index, u32 depth) {
        const bool there = tile.first + index < tile.end && depth < inner;
        return there ? wide(grad[static_cast<u64>(tile.first + index) * inner + depth]) : 0.0f;
      },
      [=](u32 index, u32 depth) {
        const bool there = tile.column + index < width && depth < inner;
        return there ? wide(own[static_cast<u64>(depth) * width + tile.column + index]) : 0.0f;
      },
      [=](u32 i, u32 j, f32 sum) {
        const u32 row = tile.first + i, column = tile.column + j;
        if (row < tile.end && column < width) put(out[static_cast<u64>(row) * width + column], sum);
      });
}

// Back: out[e, b, a] = sum over the rows p of expert e of grad[p, b] rows[p, a]; zeros for an expert without rows.
template <typename T>
DEVICE void grouped_weights(const T* grad, const T* rows, const int* ends, T* out, u32 height, u32 width, f32* lefts,
                            f32* rights) {
  const u32 across = (width + SIDE - 1) / SIDE, down = (height + SIDE - 1) / SIDE;
  const u32 column = block_index() % across * SIDE, row = block_index() / across % down * SIDE;
  const u32 expert = block_index() / across / down;
  const u32 begin = expert > 0 ? static_cast<u32>(ends[expert - 1]) : 0, inner = static_cast<u32>(ends[expert]) - begin;
  const T *grads = grad + static_cast<u64>(begin) * height, *others = rows + static_cast<u64>(begin) * width;
  T* own = out + static_cast<u64>(expert) * height * width;
  multiply<Side::across, Side::across>(
      lefts, rights, inner,
      [=](u32 index, u32 depth) {
        return row + index < height && depth < inner ? wide(grads[static_cast<u64>(depth) * height + row + index]) : 0.0f;
      },
      [=](u32 index, u32 depth) {
        return column + index < width && depth < inner ? wide(others[static_cast<u64>(depth) * width + column + index]) : 0.0f;
      },
      [=](u32 i, u32 j, f32 sum) {
        if (row + i < height && column + j < width) put(own[static_cast<u64>(row + i) * width + column + j], sum);
      });
}

#define TILES                       \
  SHARED(f32, lefts, DEEP* PADDED); \
  SHARED(f32, rights, DEEP* PADDED)

KERNEL(grouped_f32, 256, LIMIT(48, 8704, 7),
       (const f32* rows, const f32* weights, const int* ends, f32* out, u32 experts, u32 inner, u32 width)) {
  TILES;
  grouped(rows, weights, ends, out, experts, inner, width, lefts, rights);
}
KERNEL(grouped_bf16, 256, LIMIT(48, 8704, 7),
       (const bf16* rows, const bf16* weights, const int* ends, bf16* out, u32 experts, u32 inner, u32 width)) {
  TILES;
  grouped(rows, weights, ends, out, experts, inner, width, lefts, rights);
}
KERNEL(grouped_input_f32, 256, LIMIT(48, 8704, 7),
       (const f32* grad, const f32* weights, const int* ends, f32* out, u32 experts, u32 inner, u32 width)) {
  TILES;
  grouped_input(grad, weights, ends, out, experts, inner, width, lefts, rights);
}
KERNEL(grouped_input_bf16, 256, LIMIT(48, 8704, 7),
       (const bf16* grad, const bf16* weights, const int* ends, bf16* out, u32 experts, u32 inner, u32 width)) {
  TILES;
  grouped_input(grad, weights, ends, out, experts, inner, width, lefts, rights);
}
KERNEL(grouped_weights_f32, 256, LIMIT(48, 8704, 7),
       (const f32* grad, const f32* rows, const int* ends, f32* out, u32 height, u32 width)) {
  TILES;
  grouped_weights(grad, rows, ends, out, height, width, lefts, rights);
}
KERNEL(grouped_weights_bf16, 256, LIMIT(48, 8704, 7),
       (const bf16* grad, const bf16* rows, const int* ends, bf16* out, u32 height, u32 width)) {
  TILES;
  grouped_weights(grad, rows, ends, out, height, width, lefts, rights);
}
#undef TILES

// Tokens sorted by expert, with counts and offsets that stay on the device; rows on their way to experts and back.
//
// Places are laid out for the worst case, so that shapes do not depend on numbers: N + FILL * (classes - 1) rows at most. An
// expert's rows are filled up to a multiple of FILL + 1, as the CPU does; the last class has no expert and is not filled up.
// Rows that hold no token have -1 for one, and zeros. Same places as ops::cpu.
#pragma once
#include "sums.h"

constexpr u32 FILL = 7;
constexpr u32 CLASSES = 1024;  // at most

// counts[b, c]: tokens of block b of 256 tokens that go to class c.
KERNEL(dispatch_counts, 256, LIMIT(48, 1024, 8), (const i64* choice, u32* counts, u32 tokens, u32 classes)) {
  SHARED(u32, chosen, 256);
  const u32 token = block_index() * BLOCK + thread_index();
  chosen[thread_index()] = token < tokens ? static_cast<u32>(choice[token]) : ~0u;
  barrier();
  for (u32 own = thread_index(); own < classes; own += BLOCK) {
    u32 count = 0;
    for (u32 place = 0; place < BLOCK; ++place) count += chosen[place] == own;
    counts[static_cast<u64>(block_index()) * classes + own] = count;
  }
}

// places[t]: the row of token t; order[p]: the token of row p, -1 where there is none. Every block works out from the counts of all
// of them where its tokens go. The first one writes what belongs to no token, too: totals[c], tokens of a class, i64; ends[c],
// where the rows of class c end, as a grouped product wants them; and the rows without a token. At least one block.
KERNEL(dispatch_places, 256, LIMIT(32, 5136, 8),
       (const i64* choice, const u32* counts, i64* totals, int* ends, i64* places, int* order, u32 tokens, u32 classes, u32 rows)) {
  SHARED(u32, chosen, 256);
  SHARED(u32, start, CLASSES + 1);  // of each class, and where the last one ends
  const u32 token = block_index() * BLOCK + thread_index(), blocks = (tokens + BLOCK - 1) / BLOCK;
  const u32 own = token < tokens ? static_cast<u32>(choice[token]) : ~0u;
  chosen[thread_index()] = own;
  for (u32 each = thread_index(); each < classes; each += BLOCK) {
    u32 sum = 0;
    for (u32 block = 0; block < blocks; ++block) sum += counts[static_cast<u64>(block) * classes + each];
    start[each] = sum;
    if (block_index() == 0) totals[each] = sum;
  }
  barrier();
  if (thread_index() == 0) {
    u32 end = 0;
    for (u32 each = 0; each < classes; ++each) {
      const u32 count = start[each];
      start[each] = end;
      end += each + 1 < classes ? (count + FILL) / (FILL + 1) * (FILL + 1) : count;
    }
    start[classes] = end;
  }
  barrier();
  if (block_index() == 0) {
    for (u32 each = thread_index(); each < classes; each += BLOCK) {
      const u32 end = start[each + 1];
      ends[each] = static_cast<int>(end);
      // The thread reads a total that it has written itself.
      for (u32 row = start[each] + static_cast<u32>(totals[each]); row < end; ++row) order[row] = -1;
    }
    for (u32 row = start[classes] + thread_index(); row < rows; row += BLOCK) order[row] = -1;
  }
  if (token >= tokens) return;
  u32 row = start[own];
  for (u32 block = 0; block < block_index(); ++block) row += counts[static_cast<u64>(block) * classes + own];
  for (u32 before = 0; before < thread_index(); ++before) row += chosen[before] == own;
  places[token] = row;
  order[row] = static_cast<int>(token);
}

// out[p] = x[order[p]], zeros where there is no token. A block a row.
template <typename T>
DEVICE void permuted(const T* x, const int* order, T* out, u32 width) {
  const int token = order[block_index()];
  for (u32 column = thread_index(); column < width; column += BLOCK) {
    T value = {};
    if (token >= 0) value = x[static_cast<u64>(token) * width + column];
    out[static_cast<u64>(block_index()) * width + column] = value;
  }
}
KERNEL(permute_f32, 256, LIMIT(32, 0, 8), (const f32* x, const int* order, f32* out, u32 width)) {
  permuted(x, order, out, width);
}
KERNEL(permute_bf16, 256, LIMIT(32, 0, 8), (const bf16* x, const int* order, bf16* out, u32 width)) {
  permuted(x, order, out, width);
}

// The first place behind those of experts.
DEVICE u32 end_of_experts(const int* ends, u32 experts) { return experts > 0 ? static_cast<u32>(ends[experts - 1]) : 0; }

// The row of a place: of x, or where no expert computes it of `passed`, which is null where zeros stand in.
template <typename T>
DEVICE const T* row_at(u32 place, const T* x, const T* passed, const int* ends, u32 experts, u32 width) {
  const T* rows = place < end_of_experts(ends, experts) ? x : passed;
  return rows == nullptr ? nullptr : rows + static_cast<u64>(place) * width;
}
template <typename T>
DEVICE f32 or_zero(const T* row, u32 column) {
  return row == nullptr ? 0.0f : wide(row[column]);
}

// out[t] = the row of t + beside[t]. A block a token.
template <typename T>
DEVICE void unpermuted(const i64* places, const T* x, const T* passed, const int* ends, const T* beside, T* out, u32 experts,
                       u32 width) {
  const T* row = row_at(static_cast<u32>(places[block_index()]), x, passed, ends, experts, width);
  const u64 to = static_cast<u64>(block_index()) * width;
  for (u32 column = thread_index(); column < width; column += BLOCK)
    put(out[to + column], or_zero(row, column) + wide(beside[to + column]));
}
KERNEL(unpermute_f32, 256, LIMIT(32, 0, 8),
       (const i64* places, const f32* x, const f32* passed, const int* ends, const f32* beside, f32* out, u32 experts,
        u32 width)) {
  unpermuted(places, x, passed, ends, beside, out, experts, width);
}
KERNEL(unpermute_bf16, 256, LIMIT(32, 0, 8),
       (const i64* places, const bf16* x, const bf16* passed, const int* ends, const bf16* beside, bf16* out, u32 experts,
        u32 width)) {
  unpermuted(places, x, passed, ends, beside, out, experts, width);
}

// out[t] = the row of t times weight[t]. A block a token.
template <typename T>
DEVICE void gathered(const i64* places, const T* x, const T* passed, const int* ends, const f32* weight, T* out, u32 experts,
                     u32 width) {
  const T* row = row_at(static_cast<u32>(places[block_index()]), x, passed, ends, experts, width);
  const u64 to = static_cast<u64>(block_index()) * width;
  const f32 by = weight[block_index()];
  for (u32 column = thread_index(); column < width; column += BLOCK) put(out[to + column], or_zero(row, column) * by);
}
KERNEL(gather_f32, 256, LIMIT(32, 0, 8),
       (const i64* places, const f32* x, const f32* passed, const int* ends, const f32* weight, f32* out, u32 experts,
        u32 width)) {
  gathered(places, x, passed, ends, weight, out, experts, width);
}
KERNEL(gather_bf16, 256, LIMIT(32, 0, 8),
       (const i64* places, const bf16* x, const bf16* passed, const int* ends, const f32* weight, bf16* out, u32 experts,
        u32 width)) {
  gathered(places, x, passed, ends, weight, out, experts, width);
}

// Back, place by place: out[p] = grad[t] weight[t] of its token t = order[p], and to_weight[t] = grad[t] . the row of t; zeros
// where there is no token. 16 lanes a place.
template <typename T>
DEVICE void gathered_back(const int* order, const T* x, const T* passed, const int* ends, const f32* weight, const T* grad,
                          T* out, f32* to_weight, u32 places, u32 experts, u32 width) {
  const u32 place = block_index() * ROWS + thread_index() / PARTS, lane = thread_index() % PARTS;
  const int token = place < places ? order[place] : -1;
  const bool there = token >= 0;
  const T* row = there ? row_at(place, x, passed, ends, experts, width) : nullptr;
  const u64 from = there ? static_cast<u64>(token) * width : 0, to = static_cast<u64>(place) * width;
  const f32 by = there ? weight[token] : 0.0f;
  f32 part = 0.0f;
  if (place < places)
    for (u32 column = lane; column < width; column += PARTS) {
      f32 value = 0.0f;
      if (there) {
        const f32 own = wide(grad[from + column]);
        part += own * or_zero(row, column);
        value = own * by;
      }
      put(out[to + column], value);
    }
  part = together(part);
  if (there && lane == 0) to_weight[token] = part;
}
KERNEL(gather_backward_f32, 256, LIMIT(48, 0, 8),
       (const int* order, const f32* x, const f32* passed, const int* ends, const f32* weight, const f32* grad, f32* out,
        f32* to_weight, u32 places, u32 experts, u32 width)) {
  gathered_back(order, x, passed, ends, weight, grad, out, to_weight, places, experts, width);
}
KERNEL(gather_backward_bf16, 256, LIMIT(48, 0, 8),
       (const int* order, const bf16* x, const bf16* passed, const int* ends, const f32* weight, const bf16* grad, bf16* out,
        f32* to_weight, u32 places, u32 experts, u32 width)) {
  gathered_back(order, x, passed, ends, weight, grad, out, to_weight, places, experts, width);
}

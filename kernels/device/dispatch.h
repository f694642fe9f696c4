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

// One block. first[b, c], in the memory of counts: the place of the first token of block b and class c; totals[c]: tokens of a
// class, i64; ends[c]: where the rows of class c end, as a grouped product wants them; order: all places without a token.
KERNEL(dispatch_offsets, 256, LIMIT(32, 4096, 8),
       (u32 * counts, i64* totals, int* ends, int* order, u32 blocks, u32 classes, u32 places)) {
  SHARED(u32, start, 1024);
  for (u32 own = thread_index(); own < classes; own += BLOCK) {
    u32 sum = 0;
    for (u32 block = 0; block < blocks; ++block) sum += counts[static_cast<u64>(block) * classes + own];
    start[own] = sum;
    totals[own] = sum;
  }
  for (u32 place = thread_index(); place < places; place += BLOCK) order[place] = -1;
  barrier();
  if (thread_index() == 0) {
    u32 end = 0;
    for (u32 own = 0; own < classes; ++own) {
      const u32 count = start[own];
      start[own] = end;
      end += own + 1 < classes ? (count + FILL) / (FILL + 1) * (FILL + 1) : count;
      ends[own] = static_cast<int>(end);
    }
  }
  barrier();
  for (u32 own = thread_index(); own < classes; own += BLOCK) {
    u32 next = start[own];
    for (u32 block = 0; block < blocks; ++block) {
      u32& count = counts[static_cast<u64>(block) * classes + own];
      const u32 here = count;
      count = next;
      next += here;
    }
  }
}

// places[t]: the row of token t; order[p]: the token of row p.
KERNEL(dispatch_places, 256, LIMIT(32, 1024, 8),
       (const i64* choice, const u32* first, i64* places, int* order, u32 tokens, u32 classes)) {
  SHARED(u32, chosen, 256);
  const u32 token = block_index() * BLOCK + thread_index();
  const u32 own = token < tokens ? static_cast<u32>(choice[token]) : ~0u;
  chosen[thread_index()] = own;
  barrier();
  if (token >= tokens) return;
  u32 before = 0;
  for (u32 place = 0; place < thread_index(); ++place) before += chosen[place] == own;
  const u32 place = first[static_cast<u64>(block_index()) * classes + own] + before;
  places[token] = place;
  order[place] = static_cast<int>(token);
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

// out[t] = x[places[t]] + beside[t], f32. A block a token.
template <typename T>
DEVICE void unpermuted(const T* x, const i64* places, const T* beside, f32* out, u32 width) {
  const u64 from = static_cast<u64>(places[block_index()]) * width, to = static_cast<u64>(block_index()) * width;
  for (u32 column = thread_index(); column < width; column += BLOCK)
    out[to + column] = wide(x[from + column]) + wide(beside[to + column]);
}
KERNEL(unpermute_f32, 256, LIMIT(32, 0, 8), (const f32* x, const i64* places, const f32* beside, f32* out, u32 width)) {
  unpermuted(x, places, beside, out, width);
}
KERNEL(unpermute_bf16, 256, LIMIT(32, 0, 8), (const bf16* x, const i64* places, const bf16* beside, f32* out, u32 width)) {
  unpermuted(x, places, beside, out, width);
}

// out[t] = x[places[t]] weight[t], f32.
template <typename T>
DEVICE void gathered(const T* x, const i64* places, const f32* weight, f32* out, u32 width) {
  const u64 from = static_cast<u64>(places[block_index()]) * width, to = static_cast<u64>(block_index()) * width;
  const f32 by = weight[block_index()];
  for (u32 column = thread_index(); column < width; column += BLOCK) out[to + column] = wide(x[from + column]) * by;
}
KERNEL(gather_f32, 256, LIMIT(32, 0, 8), (const f32* x, const i64* places, const f32* weight, f32* out, u32 width)) {
  gathered(x, places, weight, out, width);
}
KERNEL(gather_bf16, 256, LIMIT(32, 0, 8), (const bf16* x, const i64* places, const f32* weight, f32* out, u32 width)) {
  gathered(x, places, weight, out, width);
}

// Back: out[places[t]] = grad[t] weight[t]; rows that nobody gathered stay as they are, zeros.
// to_weight[t] = grad[t] . x[places[t]]. 16 lanes a token.
template <typename T>
DEVICE void gathered_back(const T* x, const i64* places, const f32* weight, const f32* grad, f32* out, f32* to_weight, u32 tokens,
                          u32 width) {
  const u32 token = block_index() * ROWS + thread_index() / PARTS, lane = thread_index() % PARTS;
  const bool there = token < tokens;
  const u64 at = there ? static_cast<u64>(places[token]) * width : 0, from = there ? static_cast<u64>(token) * width : 0;
  const f32 by = there ? weight[token] : 0.0f;
  f32 part = 0.0f;
  if (there)
    for (u32 column = lane; column < width; column += PARTS) {
      const f32 own = grad[from + column];
      part += own * wide(x[at + column]);
      out[at + column] = own * by;
    }
  part = together(part);
  if (there && lane == 0) to_weight[token] = part;
}
KERNEL(gather_backward_f32, 256, LIMIT(48, 0, 8),
       (const f32* x, const i64* places, const f32* weight, const f32* grad, f32* out, f32* to_weight, u32 tokens, u32 width)) {
  gathered_back(x, places, weight, grad, out, to_weight, tokens, width);
}
KERNEL(gather_backward_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* x, const i64* places, const f32* weight, const f32* grad, f32* out, f32* to_weight, u32 tokens, u32 width)) {
  gathered_back(x, places, weight, grad, out, to_weight, tokens, width);
}

// Rows without an expert: into = from, or zeros where that is null; behind them stand rows without a token. A block a row.
template <typename T>
DEVICE void passed_by(const T* from, const int* ends, T* into, u32 experts, u32 width) {
  if (block_index() < static_cast<u32>(ends[experts - 1])) return;
  const u64 at = static_cast<u64>(block_index()) * width;
  for (u32 column = thread_index(); column < width; column += BLOCK) {
    T value = {};
    if (from != nullptr) value = from[at + column];
    into[at + column] = value;
  }
}
KERNEL(pass_by_f32, 256, LIMIT(32, 0, 8), (const f32* from, const int* ends, f32* into, u32 experts, u32 width)) {
  passed_by(from, ends, into, experts, width);
}
KERNEL(pass_by_bf16, 256, LIMIT(32, 0, 8), (const bf16* from, const int* ends, bf16* into, u32 experts, u32 width)) {
  passed_by(from, ends, into, experts, width);
}

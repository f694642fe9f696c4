// Tokens sorted by expert, with counts and offsets that stay on the device; rows on their way to experts and back.
//
// Places are laid out for the worst case, so that shapes do not depend on numbers: N + FILL * (classes - 1) rows at most. An
// expert's rows are filled up to a multiple of FILL + 1, as the CPU does; the last class has no expert and is not filled up.
// Rows that hold no token have -1 for one, and zeros. Same places as ops::cpu.
#pragma once
#include "fours.h"

constexpr u32 FILL = 7;
constexpr u32 CLASSES = 1024;  // at most

// A block has so many `rounds` of 256 tokens that there are at most 128 blocks: each of them reads the counts of all, which
// so do not grow with the square of the tokens.

// counts[b, c]: tokens of block b that go to class c, where no router has counted them.
KERNEL(dispatch_counts, 256, LIMIT(48, 1024, 8), (const i64* choice, u32* counts, u32 tokens, u32 classes, u32 rounds)) {
  SHARED(u32, chosen, 256);
  for (u32 round = 0; round < rounds; ++round) {
    const u32 token = (block_index() * rounds + round) * BLOCK + thread_index();
    chosen[thread_index()] = token < tokens ? static_cast<u32>(choice[token]) : ~0u;
    barrier();
    for (u32 own = thread_index(); own < classes; own += BLOCK) {
      u32& count = counts[static_cast<u64>(block_index()) * classes + own];
      u32 sum = round > 0 ? count : 0;
      for (u32 place = 0; place < BLOCK; ++place) sum += chosen[place] == own;
      count = sum;
    }
    barrier();
  }
}

// places[t]: the row of token t; order[p]: the token of row p, -1 where there is none. Every block works out from counts of
// each `part` tokens, a divisor of 256 or a block's, where its own go, 16 lanes a class. The first one writes what belongs to
// no token, too: totals[c], tokens of a class, i64; ends[c], where the rows of class c end, as a grouped product wants them;
// and the rows without a token. At least one block.
KERNEL(dispatch_places, 256, LIMIT(48, 9232, 7),
       (const i64* choice, const u32* counts, i64* totals, int* ends, i64* places, int* order, u32 tokens, u32 classes, u32 rows,
        u32 rounds, u32 part)) {
  SHARED(u32, chosen, 256);
  SHARED(u32, start, CLASSES + 1);  // of each class, and where the last one ends
  SHARED(u32, next, CLASSES);       // where the next token of each class goes
  const u32 parts = (tokens + part - 1) / part, earlier = block_index() * (BLOCK * rounds / part), lane = thread_index() % PARTS;
  for (u32 base = 0; base < classes; base += ROWS) {
    const u32 each = base + thread_index() / PARTS;
    u32 sum = 0, before = 0;
    for (u32 index = lane; index < parts && each < classes; index += PARTS) {
      const u32 count = counts[static_cast<u64>(index) * classes + each];
      sum += count;
      before += index < earlier ? count : 0;
    }
    sum = together(sum);
    before = together(before);
    if (lane > 0 || each >= classes) continue;
    start[each] = sum;
    next[each] = before;
    if (block_index() == 0) totals[each] = sum;
  }
  barrier();
  if (thread_index() == 0) {
    u32 end = 0;
    for (u32 each = 0; each < classes; ++each) {
      const u32 count = start[each];
      start[each] = end;
      next[each] += end;
      end += each + 1 < classes ? (count + FILL) / (FILL + 1) * (FILL + 1) : count;
    }
    start[classes] = end;
  }
  barrier();
  if (block_index() == 0) {
    for (u32 each = thread_index(); each < classes; each += BLOCK) {
      const u32 end = start[each + 1];
      ends[each] = static_cast<int>(end);
      // The block reads totals that it has written itself.
      for (u32 row = start[each] + static_cast<u32>(totals[each]); row < end; ++row) order[row] = -1;
    }
    for (u32 row = start[classes] + thread_index(); row < rows; row += BLOCK) order[row] = -1;
  }
  for (u32 round = 0; round < rounds; ++round) {
    const u32 token = (block_index() * rounds + round) * BLOCK + thread_index();
    const u32 own = token < tokens ? static_cast<u32>(choice[token]) : ~0u;
    chosen[thread_index()] = own;
    barrier();
    if (token < tokens) {
      u32 row = next[own];
      for (u32 before = 0; before < thread_index(); ++before) row += chosen[before] == own;
      places[token] = row;
      order[row] = static_cast<int>(token);
    }
    if (round + 1 == rounds) return;
    barrier();
    for (u32 each = thread_index(); each < classes; each += BLOCK) {
      u32 count = 0;
      for (u32 place = 0; place < BLOCK; ++place) count += chosen[place] == each;
      next[each] += count;
    }
    barrier();
  }
}

// A row of a place or of zeros, which has no columns in memory.
template <typename T>
struct RowView {
  const T* row;
  u32 width;
};

// Rows on their way: out[r] = make(columns of from(r), those of beside[r], r), zeros where there is nothing beside.
// A block has 16 of `count` rows and asks for four at once. What is moved is read once and written once.
template <bool WHOLE, typename T, typename From, typename Make>
DEVICE void moved(T* out, const T* beside, u32 count, u32 width, From from, Make make) {
  constexpr u32 AHEAD = WHOLE ? 4 : 1;
  const u32 first = block_index() * ROWS;
  for (u32 column = 4 * thread_index(); column < width; column += SPAN)
    for (u32 row = first; row < first + ROWS && row < count; row += AHEAD) {
      Packed<T> values[AHEAD], others[AHEAD];
      UNROLL
      for (u32 next = 0; next < AHEAD; ++next) {
        const bool there = row + next < count;
        const RowView<T> own = from(there ? row + next : first);
        values[next] = load<WHOLE>(own.row, column, own.width);
        const u64 at = static_cast<u64>(row + next) * width;
        others[next] = load<WHOLE>(beside + at, column, beside == nullptr || !there ? 0 : width);
      }
      UNROLL
      for (u32 next = 0; next < AHEAD; ++next) {
        if (row + next >= count) continue;
        const u64 at = static_cast<u64>(row + next) * width;
        store<WHOLE>(out + at, column, width, make(values[next], others[next], row + next));
      }
    }
}
template <typename T, typename From, typename Make>
DEVICE void moved_by(bool whole, T* out, const T* beside, u32 count, u32 width, From from, Make make) {
  if (whole) moved<true>(out, beside, count, width, from, make);
  else moved<false>(out, beside, count, width, from, make);
}

// out[p] = x[order[p]], zeros where there is no token.
template <typename T>
DEVICE void permuted(const T* x, const int* order, T* out, u32 places, u32 width) {
  const T* none = nullptr;
  moved_by(
      by_fours(width, x, out), out, none, places, width,
      [=](u32 place) -> RowView<T> {
        const int token = order[place];
        return {x + (token >= 0 ? static_cast<u64>(token) * width : 0), token >= 0 ? width : 0};
      },
      [=](const Packed<T>& value, const Packed<T>&, u32) { return value; });
}
KERNEL(permute_f32, 256, LIMIT(32, 0, 8, 4), (const f32* x, const int* order, f32* out, u32 places, u32 width)) {
  permuted(x, order, out, places, width);
}
KERNEL(permute_bf16, 256, LIMIT(32, 0, 8), (const bf16* x, const int* order, bf16* out, u32 places, u32 width)) {
  permuted(x, order, out, places, width);
}

// The first place behind those of experts.
DEVICE u32 end_of_experts(const int* ends, u32 experts) { return experts > 0 ? static_cast<u32>(ends[experts - 1]) : 0; }

// The row of a place: of x, or where no expert computes it of `passed`, which is null where zeros stand in.
template <typename T>
DEVICE RowView<T> row_at(u32 place, const T* x, const T* passed, const int* ends, u32 experts, u32 width) {
  const T* rows = place < end_of_experts(ends, experts) ? x : passed;
  return {rows + static_cast<u64>(place) * width, rows == nullptr ? 0 : width};
}

// out[t] = the row of t + beside[t].
template <typename T>
DEVICE void unpermuted(const i64* places, const T* x, const T* passed, const int* ends, const T* beside, T* out, u32 tokens,
                       u32 experts, u32 width) {
  moved_by(
      by_fours(width, x, passed, beside, out), out, beside, tokens, width,
      [=](u32 token) { return row_at(static_cast<u32>(places[token]), x, passed, ends, experts, width); },
      [=](const Packed<T>& value, const Packed<T>& other, u32) { return plus(value, other); });
}
KERNEL(unpermute_f32, 256, LIMIT(64, 0, 8, 8),
       (const i64* places, const f32* x, const f32* passed, const int* ends, const f32* beside, f32* out, u32 tokens, u32 experts,
        u32 width)) {
  unpermuted(places, x, passed, ends, beside, out, tokens, experts, width);
}
KERNEL(unpermute_bf16, 256, LIMIT(48, 0, 8),
       (const i64* places, const bf16* x, const bf16* passed, const int* ends, const bf16* beside, bf16* out, u32 tokens, u32 experts,
        u32 width)) {
  unpermuted(places, x, passed, ends, beside, out, tokens, experts, width);
}

// out[t] = the row of t times weight[t].
template <typename T>
DEVICE void gathered(const i64* places, const T* x, const T* passed, const int* ends, const f32* weight, T* out, u32 tokens,
                     u32 experts, u32 width) {
  const T* none = nullptr;
  moved_by(
      by_fours(width, x, passed, out), out, none, tokens, width,
      [=](u32 token) { return row_at(static_cast<u32>(places[token]), x, passed, ends, experts, width); },
      [=](const Packed<T>& value, const Packed<T>&, u32 token) { return times(value, weight[token]); });
}
KERNEL(gather_f32, 256, LIMIT(48, 0, 8, 4),
       (const i64* places, const f32* x, const f32* passed, const int* ends, const f32* weight, f32* out, u32 tokens, u32 experts,
        u32 width)) {
  gathered(places, x, passed, ends, weight, out, tokens, experts, width);
}
KERNEL(gather_bf16, 256, LIMIT(48, 0, 8),
       (const i64* places, const bf16* x, const bf16* passed, const int* ends, const f32* weight, bf16* out, u32 tokens, u32 experts,
        u32 width)) {
  gathered(places, x, passed, ends, weight, out, tokens, experts, width);
}

// Back, place by place: out[p] = grad[t] weight[t] of its token t = order[p], and to_weight[t] = grad[t] . the row of t; zeros
// where there is no token. A block has 16 places; of an element in bf16 are read 2 + 2 bytes and written 2.
template <bool WHOLE, typename T>
DEVICE void gathered_back(const int* order, const T* x, const T* passed, const int* ends, const f32* weight, const T* grad,
                          T* out, f32* to_weight, Four* products, u32 places, u32 experts, u32 width) {
  constexpr u32 AHEAD = WHOLE ? 4 : 1;
  const u32 first = block_index() * ROWS;
  const auto token_of = [=](u32 place) { return place < places ? order[place] : -1; };
  for (u32 place = first; place < first + ROWS && place < places; place += AHEAD) {
    f32 part = 0.0f;
    for (u32 base = 0; base < width; base += SPAN) {
      const u32 column = base + 4 * thread_index();
      Packed<T> grads[AHEAD], rows[AHEAD];
      f32 by[AHEAD];
      UNROLL
      for (u32 next = 0; next < AHEAD; ++next) {
        const int token = token_of(place + next);
        const RowView<T> row = row_at(place + next, x, passed, ends, experts, width);
        rows[next] = load<WHOLE>(row.row, column, token >= 0 ? row.width : 0);
        grads[next] = load<WHOLE>(grad + (token >= 0 ? static_cast<u64>(token) * width : 0), column, token >= 0 ? width : 0);
        by[next] = token >= 0 ? weight[token] : 0.0f;
      }
      UNROLL
      for (u32 next = 0; next < AHEAD; ++next) {
        Four product;
        UNROLL
        for (u32 each = 0; each < 4; ++each) product.at[each] = wide(grads[next], each) * wide(rows[next], each);
        put_summands(products, next, product);
        if (place + next >= places) continue;
        store<WHOLE>(out + static_cast<u64>(place + next) * width, column, width, times(grads[next], by[next]));
      }
      barrier();
      part = added<AHEAD>(products, part, width - base);
      barrier();
    }
    summed<AHEAD>(part, [=](u32 next, f32 sum) {
      const int token = token_of(place + next);
      if (token >= 0) to_weight[token] = sum;
    });
  }
}
KERNEL(gather_backward_f32, 256, LIMIT(64, 16640, 3, 8),
       (const int* order, const f32* x, const f32* passed, const int* ends, const f32* weight, const f32* grad, f32* out,
        f32* to_weight, u32 places, u32 experts, u32 width)) {
  SUMMANDS(products, 4);
  const bool whole = by_fours(width, x, passed, grad, out);
  if (whole) gathered_back<true>(order, x, passed, ends, weight, grad, out, to_weight, products, places, experts, width);
  else gathered_back<false>(order, x, passed, ends, weight, grad, out, to_weight, products, places, experts, width);
}
KERNEL(gather_backward_bf16, 256, LIMIT(64, 16640, 3),
       (const int* order, const bf16* x, const bf16* passed, const int* ends, const f32* weight, const bf16* grad, bf16* out,
        f32* to_weight, u32 places, u32 experts, u32 width)) {
  SUMMANDS(products, 4);
  const bool whole = by_fours(width, x, passed, grad, out);
  if (whole) gathered_back<true>(order, x, passed, ends, weight, grad, out, to_weight, products, places, experts, width);
  else gathered_back<false>(order, x, passed, ends, weight, grad, out, to_weight, products, places, experts, width);
}

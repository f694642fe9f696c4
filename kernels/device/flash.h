// The attention of spans.h in bf16, by matrix units (the tiling of FlashAttention-2, arXiv:2307.08691): scores and sums
// are f32, and the chances that multiply values, and their gradients, are rounded to bf16.
//
// A block has OWN_ROWS queries of one document and head, or on the way back to keys and values as many keys of one
// document and key head. The other side passes through shared memory, some rows at once, counted from the document's
// first key or the span's first query. Rows that nothing is seen of change no bit, so that a token's bits depend on
// what it sees alone.
#pragma once
#include "own_rows.h"

#define LOWEST from_bits(0xff800000u)  // below every score

// What a wave knows of its queries while keys pass.
template <u32 COLUMNS>
struct Softening {
  OwnSums<COLUMNS> sums = {};
  OfRows largest;
  f32 totals[MOST_GROUPS][MOST_SLOTS][2] = {};
};

// Turns scores of a group into chances. What was summed up so far shrinks where a score is the largest.
template <u32 COLUMNS, u32 PARTS_OF_ROWS, typename Sees>
DEVICE void soften(Softening<COLUMNS>& own, GroupSums (&scores)[PARTS_OF_ROWS], u32 group, f32 scale, Sees sees) {
  f32(&largest)[MOST_SLOTS] = own.largest.of[group];
  f32 most[MOST_SLOTS], shrink[MOST_SLOTS], sums[MOST_SLOTS][2] = {};
  UNROLL
  for (u32 slot = 0; slot < slots(); ++slot) most[slot] = largest[slot];
  UNROLL
  for (u32 part = 0; part < PARTS_OF_ROWS; ++part) {
    UNROLL
    for (u32 sum = 0; sum < 256 / lanes(); ++sum) {
      f32& score = scores[part].of[group].at[sum];
      const u32 slot = slot_of_sum(sum);
      score = sees(group, slot, 16 * part + column_of_sum(sum)) ? score * scale : LOWEST;
      if (most[slot] < score) most[slot] = score;
    }
  }
  UNROLL
  for (u32 slot = 0; slot < slots(); ++slot) {
    most[slot] = largest_of_row(most[slot]);
    shrink[slot] = largest[slot] == LOWEST ? 0.0f : exponential(largest[slot] - most[slot]);
    largest[slot] = most[slot];
  }
  UNROLL
  for (u32 part = 0; part < PARTS_OF_ROWS; ++part) {
    UNROLL
    for (u32 sum = 0; sum < 256 / lanes(); ++sum) {
      f32& score = scores[part].of[group].at[sum];
      score = score == LOWEST ? 0.0f : exponential(score - most[slot_of_sum(sum)]);
    }
    UNROLL
    for (u32 pair = 0; pair < 128 / lanes(); ++pair) {
      const f32* const two = scores[part].of[group].at + 2 * pair;
      sums[slot_of_sum(2 * pair)][lanes() == 64 ? pair : pair / 2] += two[0] + two[1];
    }
  }
  UNROLL
  for (u32 slot = 0; slot < slots(); ++slot) {
    UNROLL
    for (u32 half = 0; half < 2; ++half) {
      f32& total = own.totals[group][slot][half];
      total = total * shrink[slot] + sums[slot][half];
    }
  }
  UNROLL
  for (u32 c = 0; c < COLUMNS / 16; ++c) {
    UNROLL
    for (u32 sum = 0; sum < 256 / lanes(); ++sum) own.sums.of[group][c].at[sum] *= shrink[slot_of_sum(sum)];
  }
}

// Forward, as `attended` of spans.h, COLUMNS of the outcome at once.
template <typename Of, u32 COLUMNS>
DEVICE void flash(const bf16* query, const bf16* key, const bf16* value, const Span* spans, bf16* out, f32* logs, Attending by,
                  f32 scale, bf16* shared) {
  const Queries queries = queries_of<OWN_ROWS, Of::ROWS>(spans, by);
  const u32 token = queries.span.start + queries.first;
  const bool whole = by_eights(by.width, query, key, value);
  Own<Of::DEEP> own;
  take_own<Of>(own, shared, query_rows(query, by, queries.head, token, queries.count), by.width, whole);
  Passing<Of> keys, values;
  const auto next = [&](u32 at) {
    const u32 first = queries.span.first + at, count = lesser(Of::ROWS, queries.all - at);
    fetch(keys, key_rows(key, by, queries.key_head, first, count), by.width, whole);
    fetch(values, side_by_side(value, by, by.key_heads, queries.key_head, first, count), by.width, whole);
  };
  for (u32 column = 0; column < Of::columns(by, COLUMNS); column += COLUMNS) {
    Softening<COLUMNS> state;
    each_slot([&](u32 group, u32 slot) { state.largest.of[group][slot] = LOWEST; });
    if (Of::AHEAD) next(queries.from);
    for (u32 at = queries.from; at < queries.all; at += Of::ROWS) {
      if (!Of::AHEAD) next(at);
      barrier();
      lay(shared, keys);
      lay(shared + Of::STEP, values);
      barrier();
      const auto reaches = [&](u32 part, u32 parts) {
        const u32 low = queries.base + first_own_row();
        return low < queries.all && any_sees(low, 16 * groups(), at + 16 * part, 16 * parts, by.window);
      };
      GroupFragments chances[Of::ROWS / 16] = {};
      if (reaches(0, Of::ROWS / 16)) {
        GroupSums scores[Of::ROWS / 16] = {};
        UNROLL
        for (u32 part = 0; part < Of::ROWS / 16; ++part)
          if (reaches(part, 1)) compare<Of>(scores[part], own, shared + 16 * part * Of::STRIDE);
        UNROLL
        for (u32 group = 0; group < groups(); ++group)
          soften(state, scores, group, scale, [&](u32 group, u32 slot, u32 row) {
            return sees(queries.base + own_row(group, slot), at + row, by.window);
          });
        UNROLL
        for (u32 part = 0; part < Of::ROWS / 16; ++part) chances[part] = as_left(scores[part]);
      }
      // Scores are registers no more: what comes next has these.
      if (Of::AHEAD && at + Of::ROWS < queries.all) next(at + Of::ROWS);
      UNROLL
      for (u32 part = 0; part < Of::ROWS / 16; ++part)
        if (reaches(part, 1)) gather<Of>(state.sums, chances[part], shared + Of::STEP + 16 * part * Of::STRIDE + column);
    }
    OfRows factors;
    each_slot([&](u32 group, u32 slot) {
      const f32 total = total_of_row(state.totals[group][slot][0], state.totals[group][slot][1]);
      factors.of[group][slot] = 1.0f / total;
      const u32 row = own_row(group, slot);
      if (row < queries.count && column_of_sum(0) == 0)
        logs[static_cast<u64>(queries.head) * by.tokens + token + row] =
            state.largest.of[group][slot] + static_cast<f32>(logarithm(total));
    });
    const u64 pitch = static_cast<u64>(by.heads) * by.width;
    put_rows(out + token * pitch + queries.head * by.width + column, pitch, queries.count, state.sums, by.width - column,
             [&](u32 group, u32 slot) { return factors.of[group][slot]; });
  }
}

// grad . out of each row, as the way back to keys reads it too: 16 lanes have a row.
DEVICE void put_along(f32* shared, f32* along, const Rows<bf16>& grads, const Rows<bf16>& outs, u32 width, bool whole) {
  for (u32 row = thread_index() / PARTS; row < OWN_ROWS; row += ROWS) {
    f32 part = 0.0f;
    for (u32 column = thread_index() % PARTS * 8; column < width; column += PARTS * 8) {
      const Four left = eight_of(grads, row, column, width, whole), right = eight_of(outs, row, column, width, whole);
      UNROLL
      for (u32 pair = 0; pair < 4; ++pair) {
        const u32 a = bits_of(left.at[pair]), b = bits_of(right.at[pair]);
        part = fused(from_bits(a << 16), from_bits(b << 16), part);
        part = fused(from_bits(a & 0xffff0000u), from_bits(b & 0xffff0000u), part);
      }
    }
    part = together(part);
    if (thread_index() % PARTS != 0) continue;
    shared[row] = part;
    if (row < grads.count) along[row] = part;
  }
}

// Shared memory: rows that pass, and of each query the logarithm of `attended` and grad . out.
struct Memory {
  bf16* rows;
  f32 *logs, *along;
};

// Back to queries, as `attended_queries` of spans.h.
template <typename Of, u32 COLUMNS>
DEVICE void flash_queries(const bf16* query, const bf16* key, const bf16* value, const Span* spans, const bf16* out,
                          const f32* logs, const bf16* grad, f32* to_query, f32* along, Attending by, f32 scale,
                          Memory memory) {
  const Queries queries = queries_of<OWN_ROWS, Of::ROWS>(spans, by);
  const u32 token = queries.span.start + queries.first, low = queries.base + first_own_row();
  const u64 place = static_cast<u64>(queries.head) * by.tokens + token;
  const bool whole = by_eights(by.width, query, key, value, grad, out);
  const Rows<bf16> grads = side_by_side(grad, by, by.heads, queries.head, token, queries.count);
  const Rows<bf16> outs = side_by_side(out, by, by.heads, queries.head, token, queries.count);
  put_along(memory.along, along + place, grads, outs, by.width, whole);
  for (u32 row = thread_index(); row < OWN_ROWS; row += BLOCK) memory.logs[row] = row < queries.count ? logs[place + row] : 0.0f;
  Own<Of::DEEP> own, own_grads;
  take_own<Of>(own, memory.rows, query_rows(query, by, queries.head, token, queries.count), by.width, whole);
  take_own<Of>(own_grads, memory.rows, grads, by.width, whole);
  for (u32 column = 0; column < Of::columns(by, COLUMNS); column += COLUMNS) {
    OwnSums<COLUMNS> sums = {};
    Passing<Of> keys, values;
    const auto next = [&](u32 at) {
      const u32 first = queries.span.first + at, count = lesser(Of::ROWS, queries.all - at);
      fetch(keys, key_rows(key, by, queries.key_head, first, count), by.width, whole);
      fetch(values, side_by_side(value, by, by.key_heads, queries.key_head, first, count), by.width, whole);
    };
    if (Of::AHEAD) next(queries.from);
    for (u32 at = queries.from; at < queries.all; at += Of::ROWS) {
      if (!Of::AHEAD) next(at);
      barrier();
      lay(memory.rows, keys);
      lay(memory.rows + Of::STEP, values);
      barrier();
      if (Of::AHEAD && at + Of::ROWS < queries.all) next(at + Of::ROWS);
      if (first_own_row() >= queries.count) continue;
      ROLLED
      for (u32 first = 0; first < Of::ROWS; first += 16) {
        if (!any_sees(low, 16 * groups(), at + first, 16, by.window)) continue;
        GroupSums scores = {}, slopes = {};
        compare<Of>(scores, own, memory.rows + first * Of::STRIDE);
        compare<Of>(slopes, own_grads, memory.rows + Of::STEP + first * Of::STRIDE);
        each_sum([&](u32 group, u32 sum) {
          const u32 row = own_row(group, slot_of_sum(sum));
          const bool seen = sees(queries.base + row, at + first + column_of_sum(sum), by.window);
          const f32 chance = seen ? exponential(scores.of[group].at[sum] * scale - memory.logs[row]) : 0.0f;
          f32& slope = slopes.of[group].at[sum];
          slope = chance * (slope - memory.along[row]);
        });
        gather<Of>(sums, as_left(slopes), memory.rows + first * Of::STRIDE + column);
      }
    }
    // Looked up again: registers that hold it all the while are spilled.
    const Queries same = queries_of<OWN_ROWS, Of::ROWS>(spans, by);
    const u64 row = static_cast<u64>(same.head) * by.tokens + same.span.start + same.first;
    put_rows(to_query + row * by.width + column, by.width, same.count, sums, by.width - column, [&](u32, u32) { return scale; });
  }
}

// Writes gradients from a column on. Where they are is looked up again: registers that hold it all the while are
// spilled.
template <typename Of, u32 COLUMNS>
DEVICE void put_keys(const Span* spans, const OwnSums<COLUMNS>& of_key, const OwnSums<COLUMNS>& of_value, f32* to_key,
                     bf16* to_value, f32* wide_value, Attending by, f32 scale, u32 column) {
  const Keys keys = keys_of<OWN_ROWS, Of::ROWS>(spans, by);
  const u32 first = keys.span.first + keys.at, rest = by.width - column;
  const u64 key_at = (static_cast<u64>(keys.head) * by.keys_in_all + first) * by.width + column;
  put_rows(to_key + key_at, by.width, keys.count, of_key, rest, [=](u32, u32) { return scale; });
  const u64 pitch = static_cast<u64>(by.key_heads) * by.width, value_at = first * pitch + keys.head * by.width + column;
  const auto one = [](u32, u32) { return 1.0f; };
  if (wide_value != nullptr) put_rows(wide_value + value_at, pitch, keys.count, of_value, rest, one);
  else put_rows(to_value + value_at, pitch, keys.count, of_value, rest, one);
}

// Back to keys and values, as `attended_keys` of spans.h.
template <typename Of, u32 COLUMNS>
DEVICE void flash_keys(const bf16* query, const bf16* key, const bf16* value, const Span* spans, const f32* logs,
                       const f32* along, const bf16* grad, f32* to_key, bf16* to_value, f32* wide_value, Attending by, f32 scale,
                       Memory memory) {
  const Keys keys = keys_of<OWN_ROWS, Of::ROWS>(spans, by);
  const u32 first_key = keys.span.first + keys.at, low = keys.at + first_own_row();
  const bool whole = by_eights(by.width, query, key, value, grad);
  Own<Of::DEEP> own, own_values;
  take_own<Of>(own_values, memory.rows, side_by_side(value, by, by.key_heads, keys.head, first_key, keys.count), by.width, whole);
  take_own<Of>(own, memory.rows, key_rows(key, by, keys.head, first_key, keys.count), by.width, whole);
  const u32 group = by.heads / by.key_heads, end = (keys.head + 1) * group;
  for (u32 column = 0; column < Of::columns(by, COLUMNS); column += COLUMNS) {
    OwnSums<COLUMNS> of_key = {}, of_value = {};
    Passing<Of> queries, grads;
    f32 log = 0.0f, part = 0.0f;
    const auto next = [&](u32 head, u32 first) {
      const u32 token = keys.span.start + first, count = lesser(Of::ROWS, keys.span.len - first);
      fetch(queries, query_rows(query, by, head, token, count), by.width, whole);
      fetch(grads, side_by_side(grad, by, by.heads, head, token, count), by.width, whole);
      const bool there = thread_index() < count;
      const u64 place = static_cast<u64>(head) * by.tokens + token + thread_index();
      log = there ? logs[place] : 0.0f;
      part = there ? along[place] : 0.0f;
    };
    u32 head = keys.head * group, first = keys.from;
    if (Of::AHEAD && first < keys.end) next(head, first);
    while (head < end && first < keys.end) {
      if (!Of::AHEAD) next(head, first);
      barrier();
      lay(memory.rows, queries);
      lay(memory.rows + Of::STEP, grads);
      if (thread_index() < Of::ROWS) {
        memory.logs[thread_index()] = log;
        memory.along[thread_index()] = part;
      }
      barrier();
      const u32 at = keys.span.before + first;
      first += Of::ROWS;
      if (first >= keys.end) {
        first = keys.from;
        ++head;
      }
      if (Of::AHEAD && head < end) next(head, first);
      if (first_own_row() >= keys.count) continue;
      ROLLED
      for (u32 row = 0; row < Of::ROWS; row += 16) {
        if (!any_sees(at + row, 16, low, 16 * groups(), by.window)) continue;
        GroupSums scores = {}, slopes = {};
        compare<Of>(scores, own, memory.rows + row * Of::STRIDE);
        in_order();
        compare<Of>(slopes, own_values, memory.rows + Of::STEP + row * Of::STRIDE);
        in_order();
        each_sum([&](u32 group, u32 sum) {
          const u32 other = row + column_of_sum(sum);
          const bool seen = sees(at + other, keys.at + own_row(group, slot_of_sum(sum)), by.window);
          f32 &score = scores.of[group].at[sum], &slope = slopes.of[group].at[sum];
          score = seen ? exponential(score * scale - memory.logs[other]) : 0.0f;
          slope = score * (slope - memory.along[other]);
        });
        in_order();
        gather<Of>(of_value, as_left(scores), memory.rows + Of::STEP + row * Of::STRIDE + column);
        in_order();
        gather<Of>(of_key, as_left(slopes), memory.rows + row * Of::STRIDE + column);
      }
    }
    put_keys<Of>(spans, of_key, of_value, to_key, to_value, wide_value, by, scale, column);
  }
}

using Forward64 = Flash<64, 32, true>;
using Forward128 = Flash<128, 32, true>;
using Forward256 = Flash<256, 16, false>;
using Queries64 = Flash<64, 64, false>;
using Queries128 = Flash<128, 32, true>;
using Queries256 = Flash<256, 16, false>;
using Keys64 = Flash<64, 32, true>;
using Keys128 = Flash<128, 16, true>;
using Keys256 = Flash<256, 16, false>;
#define SHARED_ROWS(kind) SHARED(Four, rows, 2 * kind::STEP / 8)
#define SHARED_NUMBERS(count)       \
  SHARED(f32, own_logs, count);     \
  SHARED(f32, own_along, count);    \
  const Memory memory = {reinterpret_cast<bf16*>(rows), own_logs, own_along}
#define ATTENDING {count, tokens, keys, heads, key_heads, width, window}

KERNEL(attention_64_bf16, 256, LIMIT(136, 9216, 2, 2, 32, 2),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, bf16* out, f32* logs, u32 count, u32 tokens,
        u32 keys, u32 heads, u32 key_heads, u32 width, u32 window, f32 scale)) {
  SHARED_ROWS(Forward64);
  flash<Forward64, 64>(query, key, value, spans, out, logs, ATTENDING, scale,
                         reinterpret_cast<bf16*>(rows));
}
KERNEL(attention_queries_64_bf16, 256, LIMIT(144, 19456, 2, 2, 24, 2),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, const bf16* out, const f32* logs,
        const bf16* grad, f32* to_query, f32* along, u32 count, u32 tokens, u32 keys, u32 heads, u32 key_heads, u32 width,
        u32 window, f32 scale)) {
  SHARED_ROWS(Queries64);
  SHARED_NUMBERS(OWN_ROWS);
  flash_queries<Queries64, 64>(query, key, value, spans, out, logs, grad, to_query, along, ATTENDING, scale, memory);
}
KERNEL(attention_keys_64_bf16, 256, LIMIT(168, 9472, 2, 2, 32, 1),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, const f32* logs, const f32* along,
        const bf16* grad, f32* to_key, bf16* to_value, f32* wide_value, u32 count, u32 tokens, u32 keys, u32 heads, u32 key_heads,
        u32 width, u32 window, f32 scale)) {
  SHARED_ROWS(Keys64);
  SHARED_NUMBERS(Keys64::ROWS);
  flash_keys<Keys64, 64>(query, key, value, spans, logs, along, grad, to_key, to_value, wide_value, ATTENDING, scale, memory);
}
KERNEL(attention_128_bf16, 256, LIMIT(216, 17408, 2, 2, 64, 1),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, bf16* out, f32* logs, u32 count, u32 tokens,
        u32 keys, u32 heads, u32 key_heads, u32 width, u32 window, f32 scale)) {
  SHARED_ROWS(Forward128);
  flash<Forward128, 128>(query, key, value, spans, out, logs, ATTENDING, scale,
                         reinterpret_cast<bf16*>(rows));
}
KERNEL(attention_queries_128_bf16, 256, LIMIT(232, 18432, 2, 2, 48, 1),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, const bf16* out, const f32* logs,
        const bf16* grad, f32* to_query, f32* along, u32 count, u32 tokens, u32 keys, u32 heads, u32 key_heads, u32 width,
        u32 window, f32 scale)) {
  SHARED_ROWS(Queries128);
  SHARED_NUMBERS(OWN_ROWS);
  flash_queries<Queries128, 128>(query, key, value, spans, out, logs, grad, to_query, along, ATTENDING, scale, memory);
}
KERNEL(attention_keys_128_bf16, 256, LIMIT(256, 8832, 2, 2, 48, 1),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, const f32* logs, const f32* along,
        const bf16* grad, f32* to_key, bf16* to_value, f32* wide_value, u32 count, u32 tokens, u32 keys, u32 heads, u32 key_heads,
        u32 width, u32 window, f32 scale)) {
  SHARED_ROWS(Keys128);
  SHARED_NUMBERS(Keys128::ROWS);
  flash_keys<Keys128, 64>(query, key, value, spans, logs, along, grad, to_key, to_value, wide_value, ATTENDING, scale, memory);
}
KERNEL(attention_256_bf16, 256, LIMIT(328, 16896, 1, 2, 48, 1),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, bf16* out, f32* logs, u32 count, u32 tokens,
        u32 keys, u32 heads, u32 key_heads, u32 width, u32 window, f32 scale)) {
  SHARED_ROWS(Forward256);
  flash<Forward256, 128>(query, key, value, spans, out, logs, ATTENDING, scale,
                         reinterpret_cast<bf16*>(rows));
}
KERNEL(attention_queries_256_bf16, 256, LIMIT(320, 17920, 1, 2, 72, 1),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, const bf16* out, const f32* logs,
        const bf16* grad, f32* to_query, f32* along, u32 count, u32 tokens, u32 keys, u32 heads, u32 key_heads, u32 width,
        u32 window, f32 scale)) {
  SHARED_ROWS(Queries256);
  SHARED_NUMBERS(OWN_ROWS);
  flash_queries<Queries256, 64>(query, key, value, spans, out, logs, grad, to_query, along, ATTENDING, scale, memory);
}
KERNEL(attention_keys_256_bf16, 256, LIMIT(320, 17024, 1, 2, 72, 1),
       (const bf16* query, const bf16* key, const bf16* value, const Span* spans, const f32* logs, const f32* along,
        const bf16* grad, f32* to_key, bf16* to_value, f32* wide_value, u32 count, u32 tokens, u32 keys, u32 heads, u32 key_heads,
        u32 width, u32 window, f32 scale)) {
  SHARED_ROWS(Keys256);
  SHARED_NUMBERS(Keys256::ROWS);
  flash_keys<Keys256, 32>(query, key, value, spans, logs, along, grad, to_key, to_value, wide_value, ATTENDING, scale, memory);
}
#undef SHARED_ROWS
#undef SHARED_NUMBERS
#undef ATTENDING
#undef LOWEST

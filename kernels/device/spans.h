// Causal softmax attention over the documents of a chunk, all of them in one launch; forward and back. All numbers f32;
// flash.h has it in bf16.
//
// A block has TILE queries of one document and one head, and looks at TILE keys at a time; on the way back to keys and
// values it has TILE keys of one document and one key head, and looks at the queries that see them, head after head. 8
// lanes have a row. A document is cut into tiles from its own first token on, so that its bits do not depend on what
// stands beside it. H query heads in K groups: query [H, N, d], key [K, M, d], value [M, K d], out [N, H d].
#pragma once
#include "numbers.h"
#include "sums.h"

// Tokens that see each other and what came before them in their document, as the host writes them into device memory.
struct Span {
  u32 start, len;      // its queries
  u32 before, first;   // keys that come before its own, and the first of all of them
  u32 tile, key_tile;  // the first of its tiles of queries, and of keys
};
static_assert(sizeof(Span) == 24, "as the host lays it out");

constexpr u32 TILE = 32;
constexpr u32 LANES = BLOCK / TILE;   // of a row
constexpr u32 EACH_LANE = TILE / LANES;  // keys that a lane compares with its row
constexpr u32 SLICE = 64;             // columns that stand in shared memory at once
constexpr u32 PITCH = SLICE + 1;
constexpr u32 SLICES = 4;             // of the widest head: 256 dimensions
constexpr u32 EACH_SLICE = SLICE / LANES;

struct Attending {
  u32 spans, tokens, keys_in_all, heads, key_heads, width;
  u32 window;  // keys that a query sees, its own included; below 2^31, as all positions are
};
struct Ground {
  f32 *own, *other, *chance;  // shared memory of TILE * PITCH, TILE * PITCH and TILE * (TILE + 1)
};
// A matrix of rows that lie `pitch` elements apart.
template <typename T>
struct Rows {
  const T* at;
  u64 pitch;
  u32 count;
};

// The last span whose first tile is not behind this one; `of` says which tiles are meant.
template <typename Of>
DEVICE Span span_of(const Span* spans, u32 count, u32 tile, Of of) {
  u32 low = 0, high = count;
  while (high - low > 1) {
    const u32 middle = low + (high - low) / 2;
    if (of(spans[middle]) <= tile) low = middle;
    else high = middle;
  }
  return spans[low];
}
DEVICE u32 lesser(u32 a, u32 b) { return a < b ? a : b; }

// A slice of some rows into shared memory; zeros where there are none.
template <typename T>
DEVICE void stage(f32* into, Rows<T> rows, u32 first, u32 width) {
  for (u32 place = thread_index(); place < TILE * SLICE; place += BLOCK) {
    const u32 row = place / SLICE, column = first + place % SLICE;
    const bool there = row < rows.count && column < width;
    into[row * PITCH + place % SLICE] = there ? wide(rows.at[row * rows.pitch + column]) : 0.0f;
  }
}

// dots[c] = own row . other row `lane + 8 c`, for the row of this thread.
template <typename T>
DEVICE void compare(f32* dots, Ground ground, Rows<T> own, Rows<T> other, u32 width) {
  const u32 row = thread_index() / LANES, lane = thread_index() % LANES;
  UNROLL
  for (u32 c = 0; c < EACH_LANE; ++c) dots[c] = 0.0f;
  for (u32 first = 0; first < width; first += SLICE) {
    barrier();
    stage(ground.own, own, first, width);
    stage(ground.other, other, first, width);
    barrier();
    const u32 columns = lesser(SLICE, width - first);
    for (u32 column = 0; column < columns; ++column) {
      const f32 x = ground.own[row * PITCH + column];
      UNROLL
      for (u32 c = 0; c < EACH_LANE; ++c) dots[c] = fused(x, ground.other[(lane + LANES * c) * PITCH + column], dots[c]);
    }
  }
}

// sums[column] += sum over other rows of what this row's `chance` says of each, times it.
template <typename T>
DEVICE void gather(f32* sums, Ground ground, Rows<T> other, u32 width) {
  const u32 row = thread_index() / LANES, lane = thread_index() % LANES;
  UNROLL
  for (u32 slice = 0; slice < SLICES; ++slice) {
    if (slice * SLICE >= width) break;
    barrier();
    stage(ground.other, other, slice * SLICE, width);
    barrier();
    for (u32 place = 0; place < other.count; ++place) {
      const f32 chance = ground.chance[row * (TILE + 1) + place];
      UNROLL
      for (u32 i = 0; i < EACH_SLICE; ++i) {
        f32& sum = sums[slice * EACH_SLICE + i];
        sum = fused(chance, ground.other[place * PITCH + lane + LANES * i], sum);
      }
    }
  }
}

// Calls what(column, number of its sum) for the columns that this thread sums up.
template <typename Do>
DEVICE void columns(u32 width, Do what) {
  const u32 lane = thread_index() % LANES;
  UNROLL
  for (u32 index = 0; index < SLICES * EACH_SLICE; ++index) {
    const u32 column = index / EACH_SLICE * SLICE + index % EACH_SLICE * LANES + lane;
    if (column < width) what(column, index);
  }
}

// Over the lanes of a row.
DEVICE f32 over_lanes(f32 value) {
  value += shuffle<1>(value);
  value += shuffle<2>(value);
  value += shuffle<4>(value);
  return value;
}
DEVICE f32 largest_over_lanes(f32 value) {
  const auto larger = [](f32 a, f32 b) { return a < b ? b : a; };
  value = larger(value, shuffle<1>(value));
  value = larger(value, shuffle<2>(value));
  return larger(value, shuffle<4>(value));
}

// The queries of a block of ROWS: which span and head, and the first of them in it.
struct Queries {
  Span span;
  u32 head, key_head, first, count;
  u32 base, all;  // where the first of them is in its document, and the end of the keys that any of them sees
  u32 from;       // the first of the keys that pass, STEP at once, with one that any of them sees
};
template <u32 ROWS, u32 STEP>
DEVICE Queries queries_of(const Span* spans, Attending by) {
  const u32 head = block_index() % by.heads, tile = block_index() / by.heads;
  const Span span = span_of(spans, by.spans, tile, [](const Span& span) { return span.tile; });
  const u32 first = (tile - span.tile) * ROWS, count = lesser(ROWS, span.len - first), base = span.before + first;
  const u32 from = base + 1 > by.window ? (base + 1 - by.window) / STEP * STEP : 0;
  return {span, head, head / (by.heads / by.key_heads), first, count, base, base + count, from};
}
// The keys of a block of ROWS: which span and key head, the first of them in the document, and the queries of the span,
// STEP at once, that see any of them.
struct Keys {
  Span span;
  u32 head, at, count, from, end;
};
template <u32 ROWS, u32 STEP>
DEVICE Keys keys_of(const Span* spans, Attending by) {
  const u32 head = block_index() % by.key_heads, tile = block_index() / by.key_heads;
  const Span span = span_of(spans, by.spans, tile, [](const Span& span) { return span.key_tile; });
  const u32 at = (tile - span.key_tile) * ROWS, count = lesser(ROWS, span.before + span.len - at);
  const u32 from = at < span.before ? 0 : (at - span.before) / STEP * STEP, reach = at + count - 1 + by.window;
  return {span, head, at, count, from, reach > span.before ? lesser(span.len, reach - span.before) : 0};
}
// Whether a query sees a key of its document.
DEVICE bool sees(u32 query, u32 key, u32 window) { return key <= query && query < key + window; }
template <typename T>
DEVICE Rows<T> query_rows(const T* query, Attending by, u32 head, u32 token, u32 count) {
  return {query + (static_cast<u64>(head) * by.tokens + token) * by.width, by.width, count};
}
template <typename T>
DEVICE Rows<T> key_rows(const T* key, Attending by, u32 head, u32 first, u32 count) {
  return {key + (static_cast<u64>(head) * by.keys_in_all + first) * by.width, by.width, count};
}
// Of values or heads: `heads` side by side.
template <typename T>
DEVICE Rows<T> side_by_side(const T* x, Attending by, u32 heads, u32 head, u32 first, u32 count) {
  const u64 pitch = static_cast<u64>(heads) * by.width;
  return {x + first * pitch + head * by.width, pitch, count};
}

// Forward: out, and logs[h, n] the logarithm of the sum of what a query's scores are raised to.
template <typename T>
DEVICE void attended(const T* query, const T* key, const T* value, const Span* spans, T* out, f32* logs, Attending by, f32 scale,
                     Ground ground) {
  const u32 row = thread_index() / LANES, lane = thread_index() % LANES;
  const Queries queries = queries_of<TILE, TILE>(spans, by);
  const u32 token = queries.span.start + queries.first;
  const Rows<T> own = query_rows(query, by, queries.head, token, queries.count);
  // Below every score until a tile has a key that the query sees.
  f32 sums[SLICES * EACH_SLICE] = {}, largest = from_bits(0xff800000u), total = 0.0f;
  for (u32 at = queries.from; at < queries.all; at += TILE) {
    const u32 first = queries.span.first + at, count = lesser(TILE, queries.all - at);
    f32 scores[EACH_LANE];
    compare(scores, ground, own, key_rows(key, by, queries.key_head, first, count), by.width);
    f32 most = largest;
    UNROLL
    for (u32 c = 0; c < EACH_LANE; ++c) {
      scores[c] *= scale;
      if (sees(queries.base + row, at + lane + LANES * c, by.window) && most < scores[c]) most = scores[c];
    }
    most = largest_over_lanes(most);
    const f32 shrink = total > 0.0f ? exponential(largest - most) : 0.0f;
    f32 part = 0.0f;
    UNROLL
    for (u32 c = 0; c < EACH_LANE; ++c) {
      const f32 chance = sees(queries.base + row, at + lane + LANES * c, by.window) ? exponential(scores[c] - most) : 0.0f;
      ground.chance[row * (TILE + 1) + lane + LANES * c] = chance;
      part += chance;
    }
    total = total * shrink + over_lanes(part);
    UNROLL
    for (u32 index = 0; index < SLICES * EACH_SLICE; ++index) sums[index] *= shrink;
    largest = most;
    gather(sums, ground, side_by_side(value, by, by.key_heads, queries.key_head, first, count), by.width);
  }
  if (row >= queries.count) return;
  T* to = out + (static_cast<u64>(token + row) * by.heads + queries.head) * by.width;
  columns(by.width, [&](u32 column, u32 index) { put(to[column], sums[index] / total); });
  if (lane == 0)
    logs[static_cast<u64>(queries.head) * by.tokens + token + row] = largest + static_cast<f32>(logarithm(total));
}

// Back to queries: their gradient, f32, and along[h, n] = grad . out, which the way back to keys reads.
template <typename T>
DEVICE void attended_queries(const T* query, const T* key, const T* value, const Span* spans, const T* out, const f32* logs,
                             const T* grad, f32* to_query, f32* along, Attending by, f32 scale, Ground ground) {
  const u32 row = thread_index() / LANES, lane = thread_index() % LANES;
  const Queries queries = queries_of<TILE, TILE>(spans, by);
  const u32 token = queries.span.start + queries.first;
  const Rows<T> own = query_rows(query, by, queries.head, token, queries.count);
  const Rows<T> grads = side_by_side(grad, by, by.heads, queries.head, token, queries.count);
  const bool there = row < queries.count;
  const u64 place = static_cast<u64>(queries.head) * by.tokens + token + (there ? row : 0);
  f32 part = 0.0f;
  if (there) {
    const Rows<T> outs = side_by_side(out, by, by.heads, queries.head, token, queries.count);
    for (u32 column = lane; column < by.width; column += LANES)
      part = fused(wide(grads.at[row * grads.pitch + column]), wide(outs.at[row * outs.pitch + column]), part);
  }
  part = over_lanes(part);
  if (there && lane == 0) along[place] = part;
  const f32 log = logs[place];
  f32 sums[SLICES * EACH_SLICE] = {};
  for (u32 at = queries.from; at < queries.all; at += TILE) {
    const u32 first = queries.span.first + at, count = lesser(TILE, queries.all - at);
    const Rows<T> keys = key_rows(key, by, queries.key_head, first, count);
    f32 scores[EACH_LANE], slopes[EACH_LANE];
    compare(scores, ground, own, keys, by.width);
    compare(slopes, ground, grads, side_by_side(value, by, by.key_heads, queries.key_head, first, count), by.width);
    UNROLL
    for (u32 c = 0; c < EACH_LANE; ++c) {
      const bool seen = there && sees(queries.base + row, at + lane + LANES * c, by.window);
      const f32 chance = seen ? exponential(scores[c] * scale - log) : 0.0f;
      ground.chance[row * (TILE + 1) + lane + LANES * c] = chance * (slopes[c] - part) * scale;
    }
    gather(sums, ground, keys, by.width);
  }
  if (!there) return;
  columns(by.width, [&](u32 column, u32 index) { to_query[place * by.width + column] = sums[index]; });
}

// Back to keys and values: sums over the queries that see them, in order, head after head of the group. The gradient of
// values goes to `wide_value`, f32, or where that is null to `to_value`.
template <typename T>
DEVICE void attended_keys(const T* query, const T* key, const T* value, const Span* spans, const f32* logs, const f32* along,
                          const T* grad, f32* to_key, T* to_value, f32* wide_value, Attending by, f32 scale, Ground ground) {
  const u32 row = thread_index() / LANES, lane = thread_index() % LANES;
  const u32 group = by.heads / by.key_heads;
  const Keys keys = keys_of<TILE, TILE>(spans, by);
  const Span& span = keys.span;
  const u32 head = keys.head, own = keys.at + row, first_key = span.first + keys.at;
  const Rows<T> key_tile = key_rows(key, by, head, first_key, keys.count);
  const Rows<T> value_tile = side_by_side(value, by, by.key_heads, head, first_key, keys.count);
  f32 of_key[SLICES * EACH_SLICE] = {}, of_value[SLICES * EACH_SLICE] = {};
  for (u32 member = 0; member < group; ++member) {
    const u32 query_head = head * group + member;
    for (u32 first = keys.from; first < keys.end; first += TILE) {
      const u32 token = span.start + first, queries = lesser(TILE, span.len - first);
      const Rows<T> rows = query_rows(query, by, query_head, token, queries);
      const Rows<T> grads = side_by_side(grad, by, by.heads, query_head, token, queries);
      f32 scores[EACH_LANE], slopes[EACH_LANE];
      compare(scores, ground, key_tile, rows, by.width);
      compare(slopes, ground, value_tile, grads, by.width);
      UNROLL
      for (u32 c = 0; c < EACH_LANE; ++c) {
        const u32 other = lane + LANES * c;
        const bool seen = other < queries && row < keys.count && sees(span.before + first + other, own, by.window);
        const u64 place = static_cast<u64>(query_head) * by.tokens + token + (seen ? other : 0);
        const f32 chance = seen ? exponential(scores[c] * scale - logs[place]) : 0.0f;
        slopes[c] = chance * (slopes[c] - along[place]) * scale;
        ground.chance[row * (TILE + 1) + other] = chance;
      }
      gather(of_value, ground, grads, by.width);
      barrier();
      UNROLL
      for (u32 c = 0; c < EACH_LANE; ++c) ground.chance[row * (TILE + 1) + lane + LANES * c] = slopes[c];
      gather(of_key, ground, rows, by.width);
    }
  }
  if (row >= keys.count) return;
  const u64 key_at = (static_cast<u64>(head) * by.keys_in_all + span.first + own) * by.width;
  const u64 value_at = (static_cast<u64>(span.first + own) * by.key_heads + head) * by.width;
  columns(by.width, [&](u32 column, u32 index) {
    to_key[key_at + column] = of_key[index];
    if (wide_value != nullptr) wide_value[value_at + column] = of_value[index];
    else put(to_value[value_at + column], of_value[index]);
  });
}

#define GROUND                      \
  SHARED(f32, own, TILE * PITCH);   \
  SHARED(f32, other, TILE * PITCH); \
  SHARED(f32, chance, TILE*(TILE + 1))

KERNEL(attention_f32, 256, LIMIT(96, 20864, 3),
       (const f32* query, const f32* key, const f32* value, const Span* spans, f32* out, f32* logs, u32 count, u32 tokens,
        u32 keys, u32 heads, u32 key_heads, u32 width, u32 window, f32 scale)) {
  GROUND;
  attended(query, key, value, spans, out, logs, {count, tokens, keys, heads, key_heads, width, window}, scale,
           {own, other, chance});
}
KERNEL(attention_queries_f32, 256, LIMIT(96, 20864, 3),
       (const f32* query, const f32* key, const f32* value, const Span* spans, const f32* out, const f32* logs, const f32* grad,
        f32* to_query, f32* along, u32 count, u32 tokens, u32 keys, u32 heads, u32 key_heads, u32 width, u32 window, f32 scale)) {
  GROUND;
  attended_queries(query, key, value, spans, out, logs, grad, to_query, along,
                   {count, tokens, keys, heads, key_heads, width, window}, scale, {own, other, chance});
}
KERNEL(attention_keys_f32, 256, LIMIT(160, 20864, 3),
       (const f32* query, const f32* key, const f32* value, const Span* spans, const f32* logs, const f32* along, const f32* grad,
        f32* to_key, f32* to_value, f32* wide_value, u32 count, u32 tokens, u32 keys, u32 heads, u32 key_heads, u32 width,
        u32 window, f32 scale)) {
  GROUND;
  attended_keys(query, key, value, spans, logs, along, grad, to_key, to_value, wide_value,
                {count, tokens, keys, heads, key_heads, width, window}, scale, {own, other, chance});
}
#undef GROUND

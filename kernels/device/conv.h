// The depthwise convolution and the value shift before attention in a CCA layer: G heads of d dimensions, [N, G d] by token,
// [G, N, d] by head. The order of sums is that of src/ops/cpu/conv.rs.
#pragma once
#include "rows.h"

// Rows, ascending: those at which documents begin, or that are counted.
struct Listed {
  const i64* rows;
  u32 count;
};
constexpr u32 EVERY = ~0u;  // a count that stands for all rows: a list without any has no address either

// A walk along a list with rows that ascend by one: a thread searches once.
struct Walk {
  Listed list;
  u32 place;  // of the first listed row that was not met
  i64 row;    // that row; -1 behind the last one
};
DEVICE void look(Walk& walk) { walk.row = walk.place < walk.list.count ? walk.list.rows[walk.place] : -1; }
DEVICE Walk walk_from(Listed list, u32 row) {
  if (list.count == EVERY) list.count = 0;
  u32 low = 0, high = list.count;
  while (low < high) {
    const u32 middle = low + (high - low) / 2;
    if (list.rows[middle] < row) low = middle + 1;
    else high = middle;
  }
  Walk walk = {list, low, -1};
  look(walk);
  return walk;
}
// Whether a row is listed. Each row is asked for once.
DEVICE bool meets(Walk& walk, u32 row) {
  if (walk.row != row) return false;
  ++walk.place;
  look(walk);
  return true;
}

// z is [N, W]: G d channels of queries and keys, then values of which the first stay with their token, up to `delayed`, and the
// others go to the next one.
struct Mixed {
  u32 rows, width, channels, delayed, columns;  // N, d, G d, G d + a, W
};
// Where c_{t-1} of a channel stands in [G, N, d, 2]; that of c_t is behind it.
DEVICE u64 place_of(const Mixed& by, u32 row, u32 channel) {
  return ((static_cast<u64>(channel / by.width) * by.rows + row) * by.width + channel % by.width) * 2;
}
// Whether no four columns, the first of which is a multiple of four, belong to two heads, or to queries and values.
template <typename... T>
DEVICE bool by_fours(const Mixed& by, const T*... matrices) {
  return by_fours(by.columns | by.width | by.delayed, matrices...);
}

// c_{t-1} and c_t of four channels, or of the first one alone.
template <typename T>
struct Pairs {
  Packed<T> low, high;
};
template <typename T>
DEVICE f32 wide(const Pairs<T>& from, u32 channel, u32 which) {
  return channel < 2 ? wide(from.low, 2 * channel + which) : wide(from.high, 2 * channel - 4 + which);
}
template <typename T>
DEVICE void put(Pairs<T>& out, u32 channel, u32 which, f32 value) {
  if (channel < 2) put(out.low, 2 * channel + which, value);
  else put(out.high, 2 * channel - 4 + which, value);
}
template <bool WHOLE, typename T>
DEVICE Pairs<T> load_pairs(const T* from, bool there) {
  Pairs<T> found = {};
  if (!there) return found;
  if constexpr (WHOLE) load_eight(from, found.low, found.high);
  else found.low = load<false>(from, 0, 2);
  return found;
}

struct Taps {
  f32 before[4], now[4];
};
template <bool WHOLE>
DEVICE Taps taps_of(const f32* taps, u32 column, u32 limit) {
  const u32 end = 2 * limit;
  const Four low = of_vector_at_once<WHOLE>(taps, 2 * column, end);
  const Four high = of_vector_at_once<WHOLE>(taps, 2 * column + 4, end);
  return {{low.at[0], low.at[2], high.at[0], high.at[2]}, {low.at[1], low.at[3], high.at[1], high.at[3]}};
}

constexpr u32 STRIP = 8;  // rows of a thread

// c_t = bias + now z_t + before z_{t-1}; both = c_{t-1}, c_t. Before a document c is the bias. Taps are before, now.
// values_t = z_t, and z_{t-1} of what goes to the next token, zeros for what comes before a document.
template <typename T>
struct Mix {
  const T* z;
  const f32 *taps, *bias;
  Listed starts;
  T *both, *values;
};

// STRIP rows from `first` on: of columns `column` to `column` + 3, or of one that ends at `limit`. A thread asks for four rows at
// once. Of a channel in bf16 it reads 2 bytes, and again those of the two rows before, which its neighbours read, and writes 4.
template <bool WHOLE, typename T>
DEVICE void mixed_values(const Mix<T>& of, const Mixed& by, u32 first, u32 column, u32 limit) {
  const u32 end = first + STRIP < by.rows ? first + STRIP : by.rows;
  const u32 shifted = by.columns - by.channels;
  const auto of_row = [=](u32 row) {
    return load<WHOLE>(of.z + static_cast<u64>(row) * by.columns, column, row < end ? limit : 0);
  };
  Walk starts = walk_from(of.starts, first);
  Packed<T> last = {};
  if (first > 0) last = of_row(first - 1);
  for (u32 base = first; base < end; base += 4) {
    Packed<T> own[4];
    UNROLL
    for (u32 next = 0; next < 4; ++next) own[next] = of_row(base + next);
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const u32 row = base + next;
      if (row >= end) return;
      if (meets(starts, row)) last = {};
      store<WHOLE>(of.values + static_cast<u64>(row) * shifted, column - by.channels, limit - by.channels,
                   column < by.delayed ? own[next] : last);
      last = own[next];
    }
  }
}
template <bool WHOLE, typename T>
DEVICE void mixed_channels(const Mix<T>& of, const Mixed& by, u32 first, u32 column, u32 limit) {
  const u32 end = first + STRIP < by.rows ? first + STRIP : by.rows;
  const auto of_row = [=](u32 row) {
    return load<WHOLE>(of.z + static_cast<u64>(row) * by.columns, column, row < end ? limit : 0);
  };
  const Taps taps = taps_of<WHOLE>(of.taps, column, limit);
  const Four bias = of_vector_at_once<WHOLE>(of.bias, column, limit);
  const auto mixed = [&](const Packed<T>& last, const Packed<T>& own, bool begins) {
    Four c;
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      c.at[next] = bias.at[next] + taps.now[next] * wide(own, next);
      if (!begins) c.at[next] += taps.before[next] * wide(last, next);
    }
    return c;
  };
  Walk starts = walk_from(of.starts, first > 0 ? first - 1 : 0);
  Packed<T> last = {};
  Four c = bias;
  if (first > 0) {
    last = of_row(first - 1);
    const bool begins = meets(starts, first - 1);
    c = mixed(begins ? last : of_row(first - 2), last, begins);
  }
  for (u32 base = first; base < end; base += 4) {
    Packed<T> own[4];
    UNROLL
    for (u32 next = 0; next < 4; ++next) own[next] = of_row(base + next);
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const u32 row = base + next;
      if (row >= end) return;
      const bool begins = meets(starts, row);
      Pairs<T> both = {};
      if (begins) c = bias;
      UNROLL
      for (u32 place = 0; place < 4; ++place) put(both, place, 0, c.at[place]);
      c = mixed(last, own[next], begins);
      UNROLL
      for (u32 place = 0; place < 4; ++place) put(both, place, 1, c.at[place]);
      T* to = of.both + place_of(by, row, column);
      if constexpr (WHOLE) store_eight(to, both.low, both.high);
      else store<false>(to, 0, 2, both.low);
      last = own[next];
    }
  }
}
template <bool WHOLE, typename T>
DEVICE void mixed_strip(const Mix<T>& of, const Mixed& by, u32 first, u32 column, u32 limit) {
  if (column < by.channels) mixed_channels<WHOLE>(of, by, first, column, limit);
  else mixed_values<WHOLE>(of, by, first, column, limit);
}
template <typename T>
DEVICE void mixed(const Mix<T>& of, const Mixed& by) {
  const u32 fours = (by.columns + 3) / 4, index = block_index() * BLOCK + thread_index();
  const u32 first = index / fours * STRIP, column = index % fours * 4;
  if (first >= by.rows) return;
  if (by_fours(by, of.z, reinterpret_cast<const f32*>(of.both), of.values)) {
    mixed_strip<true>(of, by, first, column, by.columns);
  } else {
    for (u32 own = column; own < column + 4 && own < by.columns; ++own) mixed_strip<false>(of, by, first, own, own + 1);
  }
}
KERNEL(conv_shift_f32, 256, LIMIT(96, 0, 5, 4),
       (const f32* z, const f32* taps, const f32* bias, const i64* starts, u32 count, f32* both, f32* values, u32 rows,
        u32 width, u32 channels, u32 delayed, u32 columns)) {
  const Mix<f32> of = {z, taps, bias, {starts, count}, both, values};
  mixed(of, {rows, width, channels, delayed, columns});
}
KERNEL(conv_shift_bf16, 256, LIMIT(96, 0, 5),
       (const bf16* z, const f32* taps, const f32* bias, const i64* starts, u32 count, bf16* both, bf16* values, u32 rows,
        u32 width, u32 channels, u32 delayed, u32 columns)) {
  const Mix<bf16> of = {z, taps, bias, {starts, count}, both, values};
  mixed(of, {rows, width, channels, delayed, columns});
}

// Back: the gradient of z, and in bands, [3, bands, G d], those of taps before and now, and of the bias, over rows that are
// counted (all where there are EVERY). To the gradients of their channels goes what comes through the means, row by row.
template <typename T>
struct MixBack {
  const T* z;
  const f32* taps;
  Listed starts, counted;
  const T *grad, *values;
  const f32* means;
  T* input;
  f32* partial;
};

// The rows of a band, AHEAD at once. Of a channel in bf16 are read 2 + 4 + 4 bytes and written 2.
template <bool WHOLE, typename T>
DEVICE void mixed_values_back(const MixBack<T>& of, const Mixed& by, u32 band, u32 column, u32 limit) {
  const u32 first = band * BAND, end = first + BAND < by.rows ? first + BAND : by.rows;
  const u32 shifted = by.columns - by.channels;
  const auto of_row = [=](u32 row) {
    return load<WHOLE>(of.values + static_cast<u64>(row) * shifted, column - by.channels, row < by.rows ? limit - by.channels : 0);
  };
  Walk starts = walk_from(of.starts, first + 1);
  Packed<T> own = of_row(first);
  for (u32 base = first; base < end; base += 4) {
    Packed<T> after[4];
    UNROLL
    for (u32 next = 0; next < 4; ++next) after[next] = of_row(base + next + 1);
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const u32 row = base + next;
      if (row >= end) return;
      const bool last = row + 1 >= by.rows || meets(starts, row + 1);
      const Packed<T> delayed = last ? Packed<T>{} : after[next];
      store<WHOLE>(of.input + static_cast<u64>(row) * by.columns, column, limit, column < by.delayed ? own : delayed);
      own = after[next];
    }
  }
}
template <bool WHOLE, typename T>
DEVICE void mixed_channels_back(const MixBack<T>& of, const Mixed& by, u32 band, u32 column, u32 limit) {
  constexpr u32 AHEAD = WHOLE ? 2 : 1;
  const u32 first = band * BAND, end = first + BAND < by.rows ? first + BAND : by.rows;
  const auto pairs_of = [=](u32 row) { return load_pairs<WHOLE>(of.grad + place_of(by, row, column), row < by.rows); };
  const auto of_row = [=](u32 row) {
    return load<WHOLE>(of.z + static_cast<u64>(row) * by.columns, column, row < end ? limit : 0);
  };
  const Taps taps = taps_of<WHOLE>(of.taps, column, limit);
  Walk starts = walk_from(of.starts, first), counted = walk_from(of.counted, first);
  // Whether a row is the last of its document: asked of each row once.
  const auto ends = [&](u32 row) { return row + 1 >= by.rows || meets(starts, row + 1); };
  // What c of a row gets from that row and from the next one.
  const auto joined = [](const Pairs<T>& own, const Pairs<T>& next, bool last) {
    Four c;
    UNROLL
    for (u32 place = 0; place < 4; ++place) {
      c.at[place] = wide(own, place, 1);
      if (!last) c.at[place] += wide(next, place, 0);
    }
    return c;
  };
  Pairs<T> own = pairs_of(first), next = pairs_of(first + 1);
  bool begins = meets(starts, first), last = ends(first);
  Four c = joined(own, next, last);
  Packed<T> z_before = {};
  if (first > 0) z_before = of_row(first - 1);
  Packed<f32> sums[3] = {};
  for (u32 base = first; base < end; base += AHEAD) {
    Pairs<T> after[AHEAD];
    Packed<T> z[AHEAD];
    Packed<f32> means[AHEAD];
    bool counts[AHEAD];
    UNROLL
    for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
      const u32 row = base + ahead;
      after[ahead] = pairs_of(row + 2);
      z[ahead] = of_row(row);
      const bool every = of.counted.count == EVERY;
      const u32 number = every ? row : counted.place;
      counts[ahead] = row < end && (every || meets(counted, row));
      means[ahead] = load<WHOLE>(of.means + static_cast<u64>(number) * by.channels, column, counts[ahead] ? limit : 0);
    }
    UNROLL
    for (u32 ahead = 0; ahead < AHEAD; ++ahead) {
      const u32 row = base + ahead;
      if (row >= end) break;
      const bool next_last = ends(row + 1);
      const Four c_next = joined(next, after[ahead], next_last);
      Packed<T> input = {};
      UNROLL
      for (u32 place = 0; place < 4; ++place) {
        f32 grad = c.at[place] * taps.now[place];
        if (!last) grad += c_next.at[place] * taps.before[place];
        if (counts[ahead]) {
          grad += wide(means[ahead], place);
          sums[2].all.at[place] += c.at[place];
          sums[1].all.at[place] += c.at[place] * wide(z[ahead], place);
          if (begins) sums[2].all.at[place] += wide(own, place, 0);
          else sums[0].all.at[place] += c.at[place] * wide(z_before, place);
        }
        put(input, place, grad);
      }
      store<WHOLE>(of.input + static_cast<u64>(row) * by.columns, column, limit, input);
      own = next, next = after[ahead], z_before = z[ahead], c = c_next, begins = last, last = next_last;
    }
  }
  const u64 bands = (by.rows + BAND - 1) / BAND;
  UNROLL
  for (u32 which = 0; which < 3; ++which)
    store<WHOLE>(of.partial + (which * bands + band) * by.channels, column, limit, sums[which]);
}
template <bool WHOLE, typename T>
DEVICE void mixed_band_back(const MixBack<T>& of, const Mixed& by, u32 band, u32 column, u32 limit) {
  if (column < by.channels) mixed_channels_back<WHOLE>(of, by, band, column, limit);
  else mixed_values_back<WHOLE>(of, by, band, column, limit);
}
template <typename T>
DEVICE void mixed_back(const MixBack<T>& of, const Mixed& by) {
  const u32 fours = (by.columns + 3) / 4, index = block_index() * BLOCK + thread_index();
  const u32 band = index / fours, column = index % fours * 4;
  if (band * BAND >= by.rows) return;
  if (by_fours(by, of.z, reinterpret_cast<const f32*>(of.grad), of.values, of.means, of.input, of.partial)) {
    mixed_band_back<true>(of, by, band, column, by.columns);
  } else {
    for (u32 own = column; own < column + 4 && own < by.columns; ++own) mixed_band_back<false>(of, by, band, own, own + 1);
  }
}
KERNEL(conv_shift_backward_f32, 256, LIMIT(128, 0, 4, 4),
       (const f32* z, const f32* taps, const i64* starts, u32 count, const i64* counted, u32 counted_count, const f32* grad,
        const f32* values, const f32* means, f32* input, f32* partial, u32 rows, u32 width, u32 channels, u32 delayed,
        u32 columns)) {
  const MixBack<f32> of = {z, taps, {starts, count}, {counted, counted_count}, grad, values, means, input, partial};
  mixed_back(of, {rows, width, channels, delayed, columns});
}
KERNEL(conv_shift_backward_bf16, 256, LIMIT(128, 0, 4, 4),
       (const bf16* z, const f32* taps, const i64* starts, u32 count, const i64* counted, u32 counted_count, const bf16* grad,
        const bf16* values, const f32* means, bf16* input, f32* partial, u32 rows, u32 width, u32 channels, u32 delayed,
        u32 columns)) {
  const MixBack<bf16> of = {z, taps, {starts, count}, {counted, counted_count}, grad, values, means, input, partial};
  mixed_back(of, {rows, width, channels, delayed, columns});
}

// Rows of bf16 that a block keeps as the left operand of matrix products (mma.h), while other rows pass through shared
// memory as the right one.
//
// A block has OWN_ROWS rows, 16 for each 32 lanes: a wave of 32 has one group of 16 of them, a wave of 64 two.
#pragma once
#include "fours.h"
#include "mma.h"
#include "spans.h"

constexpr u32 OWN_ROWS = 128;
#if defined(BY_MFMA) || defined(BY_EMULATOR)
constexpr u32 MOST_GROUPS = 2;  // of 16 rows that a wave has
#else
constexpr u32 MOST_GROUPS = 1;
#endif
DEVICE u32 groups() { return OWN_ROWS / 16 / (BLOCK / lanes()); }
constexpr u32 MOST_SLOTS = 2;  // rows of 16 of which a lane has sums
DEVICE u32 slots() { return 64 / lanes(); }
DEVICE u32 slot_of_sum(u32 sum) { return lanes() == 64 ? 0 : sum / 2 % 2; }
template <typename Do>
DEVICE void each_sum(Do what) {
  UNROLL
  for (u32 group = 0; group < groups(); ++group) {
    UNROLL
    for (u32 sum = 0; sum < 256 / lanes(); ++sum) what(group, sum);
  }
}
template <typename Do>
DEVICE void each_slot(Do what) {
  UNROLL
  for (u32 group = 0; group < groups(); ++group) {
    UNROLL
    for (u32 slot = 0; slot < slots(); ++slot) what(group, slot);
  }
}
// The first of the rows of this wave, and the row of one of its slots.
DEVICE u32 first_own_row() { return thread_index() / lanes() * groups() * 16; }
DEVICE u32 own_row(u32 group, u32 slot) { return first_own_row() + 16 * group + row_of_sum(2 * slot); }

// What follows from the width of the widest head that a kernel takes.
template <u32 WIDTH, u32 PASS, bool BEFORE>
struct Flash {
  static constexpr u32 ROWS = PASS;                      // that pass through shared memory at once
  static constexpr bool AHEAD = BEFORE;                  // loads the next of these before it uses the last
  static constexpr u32 EACH = ROWS * WIDTH / 8 / BLOCK;  // loads of 8 elements by a thread
  static constexpr u32 STRIDE = WIDTH + 8;               // between rows in shared memory, without bank conflicts
  static constexpr u32 DEEP = WIDTH / 16;                // fragments of a row
  static constexpr u32 STEP = ROWS * STRIDE;             // elements of shared memory
  // Where all columns are summed up at once, the compilers know it.
  DEVICE u32 columns(const Attending& by, u32 at_once) { return at_once == WIDTH ? 1 : by.width; }
};
template <u32 DEEP>
struct Own {
  Fragment of[MOST_GROUPS][DEEP];
};
template <u32 COLUMNS>
struct OwnSums {
  Sums of[MOST_GROUPS][COLUMNS / 16];
};
struct GroupSums {
  Sums of[MOST_GROUPS];
};
struct GroupFragments {
  Fragment of[MOST_GROUPS];
};
struct OfRows {
  f32 of[MOST_GROUPS][MOST_SLOTS];
};

// Eight elements of a row, zeros where it has none. WHOLE rows are cut by eights, and begin at multiples of 16 bytes.
DEVICE Four eight_of(const Rows<bf16>& rows, u32 row, u32 column, u32 width, bool whole) {
  Four found = {{0.0f, 0.0f, 0.0f, 0.0f}};
  if (row >= rows.count || column >= width) return found;
  const bf16* const from = rows.at + (row * static_cast<u32>(rows.pitch) + column);
  if (whole) return at_once(reinterpret_cast<const f32*>(from));
  u64 low = 0, high = 0;
  ROLLED
  for (u32 i = 0; i < 8; ++i) {
    const u64 value = column + i < width ? from[i].bits : 0;
    low = low >> 16 | high << 48;
    high = high >> 16 | value << 48;
  }
  const auto half = [](u64 all, u32 shift) { return from_bits(static_cast<u32>(all >> shift)); };
  return {{half(low, 0), half(low, 32), half(high, 0), half(high, 32)}};
}
template <typename... T>
DEVICE bool by_eights(u32 width, const T*... matrices) {
  return width % 8 == 0 && ((reinterpret_cast<u64>(matrices) % 16 == 0) && ...);
}

// What a thread brings of the rows that pass, between memory and shared memory.
template <typename Of>
struct Passing {
  Four eights[Of::EACH];
};
template <typename Of>
DEVICE void fetch(Passing<Of>& into, const Rows<bf16>& rows, u32 width, bool whole) {
  UNROLL
  for (u32 i = 0; i < Of::EACH; ++i) {
    const u32 place = thread_index() + BLOCK * i;
    into.eights[i] = eight_of(rows, place / (2 * Of::DEEP), place % (2 * Of::DEEP) * 8, width, whole);
  }
}
template <typename Of>
DEVICE void lay(bf16* into, const Passing<Of>& passing) {
  UNROLL
  for (u32 i = 0; i < Of::EACH; ++i) {
    const u32 place = thread_index() + BLOCK * i;
    bf16* const to = into + place / (2 * Of::DEEP) * Of::STRIDE + place % (2 * Of::DEEP) * 8;
    at_once(reinterpret_cast<f32*>(to), passing.eights[i]);
  }
}

// The fragments of the block's own rows, which pass through both parts of shared memory.
template <typename Of>
DEVICE void take_own(Own<Of::DEEP>& own, bf16* shared, const Rows<bf16>& rows, u32 width, bool whole) {
  for (u32 first = 0; first < OWN_ROWS; first += 2 * Of::ROWS) {
    barrier();
    for (u32 part = 0; part < 2; ++part) {
      const u32 from = first + part * Of::ROWS, count = rows.count > from ? rows.count - from : 0;
      Passing<Of> passing;
      fetch(passing, {rows.at + from * rows.pitch, rows.pitch, count}, width, whole);
      lay(shared + part * Of::STEP, passing);
    }
    barrier();
    UNROLL
    for (u32 group = 0; group < groups(); ++group) {
      const u32 row = first_own_row() + 16 * group;
      if (row < first || row >= first + 2 * Of::ROWS) continue;
      UNROLL
      for (u32 c = 0; c < Of::DEEP; ++c)
        own.of[group][c] = left_fragment<Side::along>(shared + (row - first) * Of::STRIDE + 16 * c, Of::STRIDE);
    }
  }
}

// A compiler that loads the fragments of one product during the product before runs out of registers.
DEVICE void in_order() {
#ifdef BY_MFMA
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// dots[i, j] += own row i . row j of 16 in shared memory.
template <typename Of>
DEVICE void compare(GroupSums& dots, const Own<Of::DEEP>& own, const bf16* rows) {
  UNROLL
  for (u32 c = 0; c < Of::DEEP; ++c) {
    const Fragment other = right_fragment<Side::along>(rows + 16 * c, Of::STRIDE);
    UNROLL
    for (u32 group = 0; group < groups(); ++group) multiply_add(dots.of[group], own.of[group][c], other);
  }
}

// sums[i, column] += sum over 16 rows j in shared memory of chances[i, j] row[j, column].
template <typename Of, u32 COLUMNS>
DEVICE void gather(OwnSums<COLUMNS>& sums, const GroupFragments& chances, const bf16* rows) {
  UNROLL
  for (u32 c = 0; c < COLUMNS / 16; ++c) {
    const Fragment other = right_fragment<Side::across>(rows + 16 * c, Of::STRIDE);
    UNROLL
    for (u32 group = 0; group < groups(); ++group) multiply_add(sums.of[group][c], chances.of[group], other);
  }
}

// Sums as the left operand of another product: a lane has the same elements of both.
DEVICE u32 pair_of(f32 low, f32 high) {
  bf16 narrow[2];
  put(narrow[0], low);
  put(narrow[1], high);
  return narrow[0].bits | static_cast<u32>(narrow[1].bits) << 16;
}
DEVICE GroupFragments as_left(const GroupSums& sums) {
  GroupFragments found;
  UNROLL
  for (u32 group = 0; group < groups(); ++group) {
    const f32* const at = sums.of[group].at;
    UNROLL
    for (u32 pair = 0; pair < 128 / lanes(); ++pair) found.of[group].pairs[pair] = pair_of(at[2 * pair], at[2 * pair + 1]);
  }
  return found;
}
DEVICE constexpr bool sums_lie_as_left_operands(u32 wave) {
  for (u32 lane = 0; lane < wave; ++lane)
    for (u32 sum = 0; sum < 256 / wave; ++sum) {
      const Place place = place_of<true>(wave, lane, sum / 2);
      if (place.index != row_of_sum(wave, lane, sum) || place.inner + sum % 2 != column_of_sum(wave, lane, sum)) return false;
    }
  return true;
}
static_assert(sums_lie_as_left_operands(32) && sums_lie_as_left_operands(64), "as_left");

// The value of the lane 32 further, or 32 back, in waves of 64.
#if defined(BY_MFMA)
DEVICE f32 other_half(f32 value) {
  const u32 from = own_lane() ^ 32;
  return from_bits(static_cast<u32>(__builtin_amdgcn_ds_bpermute(static_cast<int>(4 * from), static_cast<int>(bits_of(value)))));
}
#elif defined(BY_EMULATOR)
__attribute__((no_sanitize("thread"))) inline void halves_exchanged(void* const* of_lanes, u32 wave) {
  for (u32 lane = 0; lane < wave; ++lane)
    static_cast<f32*>(of_lanes[lane])[1] = static_cast<const f32*>(of_lanes[lane ^ 32])[0];
}
DEVICE f32 other_half(f32 value PLACE) {
  f32 both[2] = {value, value};
  emulator::together({file, line}, both, &halves_exchanged);
  return both[1];
}
#else
DEVICE f32 other_half(f32 value) { return value; }
#endif

// Over the lanes that have sums of one row.
DEVICE f32 largest_of_row(f32 value) {
  const auto larger = [](f32 a, f32 b) { return a < b ? b : a; };
  if (lanes() == 64) {
    value = larger(value, shuffle<16>(value));
    return larger(value, other_half(value));
  }
  value = larger(value, shuffle<1>(value));
  return larger(value, shuffle<2>(value));
}
// A lane of 32 has pairs of columns q and q + 4 of the 8, one of 64 pairs 2 q and 2 q + 1: both add neighbours first.
DEVICE f32 total_of_row(f32 low, f32 high) {
  if (lanes() == 64) {
    low += high;
    low += shuffle<16>(low);
    return low + other_half(low);
  }
  low += shuffle<1>(low);
  high += shuffle<1>(high);
  low += shuffle<2>(low);
  high += shuffle<2>(high);
  return low + high;
}

// Whether any query of [query, query + queries) sees any key of [key, key + keys).
DEVICE bool any_sees(u32 query, u32 queries, u32 key, u32 keys, u32 window) {
  return query + queries > key && query < key + keys - 1 + window;
}

// Two neighbouring elements of a row of sums.
DEVICE void put_pair(f32* to, f32 low, f32 high) {
  *reinterpret_cast<u64*>(to) = static_cast<u64>(bits_of(high)) << 32 | bits_of(low);
}
DEVICE void put_pair(bf16* to, f32 low, f32 high) { *reinterpret_cast<u32*>(to) = pair_of(low, high); }

// The sums of this lane into rows that lie `pitch` apart, `count` of them, each times by(group, slot).
template <bool WHOLE, u32 COLUMNS, typename T, typename By>
DEVICE void put_each(T* out, u64 pitch, u32 count, const OwnSums<COLUMNS>& sums, u32 width, By by) {
  UNROLL
  for (u32 group = 0; group < groups(); ++group) {
    UNROLL
    for (u32 sum = 0; sum < 256 / lanes(); sum += 2) {
      const u32 slot = slot_of_sum(sum), row = own_row(group, slot);
      if (row >= count) continue;
      UNROLL
      for (u32 c = 0; c < COLUMNS / 16; ++c) {
        const u32 column = 16 * c + column_of_sum(sum);
        if (column >= width) continue;
        const f32* const own = sums.of[group][c].at + sum;
        const f32 factor = by(group, slot), low = own[0] * factor, high = own[1] * factor;
        T* const to = out + row * pitch + column;
        if constexpr (WHOLE) put_pair(to, low, high);
        else {
          put(to[0], low);
          if (column + 1 < width) put(to[1], high);
        }
      }
    }
  }
}
template <u32 COLUMNS, typename T, typename By>
DEVICE void put_rows(T* out, u64 pitch, u32 count, const OwnSums<COLUMNS>& sums, u32 width, By by) {
  if (by_eights(width, out) && pitch % 8 == 0) put_each<true>(out, pitch, count, sums, width, by);
  else put_each<false>(out, pitch, count, sums, width, by);
}


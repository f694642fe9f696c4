// Four numbers side by side, which a thread reads and writes at once where it may: 16 bytes of f32, 8 of bf16.
#pragma once
#include "sums.h"

struct alignas(16) Four {
  f32 at[4];
};

// As they lie in memory, so that what is on its way takes no more registers than that.
template <typename T>
struct Packed;
template <>
struct Packed<f32> {
  Four all;
};
template <>
struct Packed<bf16> {
  u64 all;
};
DEVICE f32 wide(const Packed<f32>& from, u32 index) { return from.all.at[index]; }
DEVICE f32 wide(const Packed<bf16>& from, u32 index) {
  const u32 half = static_cast<u32>(from.all >> (index / 2 * 32));
  return from_bits(index % 2 == 0 ? half << 16 : half & 0xffff0000u);
}
DEVICE void put(Packed<f32>& out, u32 index, f32 value) { out.all.at[index] = value; }
DEVICE void put(Packed<bf16>& out, u32 index, f32 value) {
  bf16 narrow;
  put(narrow, value);
  out.all |= static_cast<u64>(narrow.bits) << (16 * index);
}

// Rounded once.
template <typename T>
DEVICE Packed<T> times(const Packed<T>& value, f32 by) {
  Packed<T> out = {};
  UNROLL
  for (u32 next = 0; next < 4; ++next) put(out, next, wide(value, next) * by);
  return out;
}
template <typename T>
DEVICE Packed<T> plus(const Packed<T>& value, const Packed<T>& other) {
  Packed<T> out = {};
  UNROLL
  for (u32 next = 0; next < 4; ++next) put(out, next, wide(value, next) + wide(other, next));
  return out;
}

// One access each, at an address that is a multiple of its size.
#if defined(__CUDACC_RTC__) || defined(__NVCC__)
DEVICE Four at_once(const f32* from) {
  const float4 all = *reinterpret_cast<const float4*>(from);
  return {{all.x, all.y, all.z, all.w}};
}
DEVICE void at_once(f32* to, const Four& all) {
  *reinterpret_cast<float4*>(to) = make_float4(all.at[0], all.at[1], all.at[2], all.at[3]);
}
#else
typedef f32 Vector __attribute__((vector_size(16), may_alias));
DEVICE Four at_once(const f32* from) {
  const Vector all = *reinterpret_cast<const Vector*>(from);
  return {{all[0], all[1], all[2], all[3]}};
}
DEVICE void at_once(f32* to, const Four& all) {
  const Vector value = {all.at[0], all.at[1], all.at[2], all.at[3]};
  *reinterpret_cast<Vector*>(to) = value;
}
#endif

// Eight side by side, as two of those: bf16 by one access.
DEVICE void load_eight(const f32* from, Packed<f32>& low, Packed<f32>& high) {
  low.all = at_once(from);
  high.all = at_once(from + 4);
}
DEVICE void load_eight(const bf16* from, Packed<bf16>& low, Packed<bf16>& high) {
  const Four all = at_once(reinterpret_cast<const f32*>(from));
  low.all = static_cast<u64>(bits_of(all.at[1])) << 32 | bits_of(all.at[0]);
  high.all = static_cast<u64>(bits_of(all.at[3])) << 32 | bits_of(all.at[2]);
}
DEVICE void store_eight(f32* to, const Packed<f32>& low, const Packed<f32>& high) {
  at_once(to, low.all);
  at_once(to + 4, high.all);
}
DEVICE void store_eight(bf16* to, const Packed<bf16>& low, const Packed<bf16>& high) {
  const auto half = [](u64 all, u32 shift) { return from_bits(static_cast<u32>(all >> shift)); };
  at_once(reinterpret_cast<f32*>(to), {{half(low.all, 0), half(low.all, 32), half(high.all, 0), half(high.all, 32)}});
}

// Whether all rows of matrices of such a width may be read and written by fours: no row is cut, and each begins where it must.
template <typename... T>
DEVICE bool by_fours(u32 width, const T*... matrices) {
  return width % 4 == 0 && ((reinterpret_cast<u64>(matrices) % (4 * sizeof(T)) == 0) && ...);
}

// Columns `column` to `column` + 3 of a row, zeros beyond its width. WHOLE: by fours. Otherwise a thread asks for what it has no
// column for in its first one: so that four loads are one branch.
template <bool WHOLE>
DEVICE Packed<f32> load(const f32* row, u32 column, u32 width) {
  Packed<f32> found = {{{0.0f, 0.0f, 0.0f, 0.0f}}};
  if constexpr (WHOLE) {
    if (column < width) found.all = at_once(row + column);
  } else {
    if (column >= width) return found;
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const bool there = column + next < width;
      const f32 value = row[there ? column + next : column];
      found.all.at[next] = there ? value : 0.0f;
    }
  }
  return found;
}
template <bool WHOLE>
DEVICE Packed<bf16> load(const bf16* row, u32 column, u32 width) {
  Packed<bf16> found = {0};
  if constexpr (WHOLE) {
    if (column < width) found.all = *reinterpret_cast<const u64*>(row + column);
  } else {
    if (column >= width) return found;
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const bool there = column + next < width;
      const u64 value = row[there ? column + next : column].bits;
      found.all |= (there ? value : 0) << (16 * next);
    }
  }
  return found;
}

// The same of a vector, which may begin anywhere: a block reads it once.
template <bool WHOLE>
DEVICE Four of_vector(const f32* vector, u32 column, u32 width) {
  if constexpr (WHOLE) {
    Four found = {};
    if (column < width) found = {{vector[column], vector[column + 1], vector[column + 2], vector[column + 3]}};
    return found;
  } else {
    return load<false>(vector, column, width).all;
  }
}

// The same, by one access where it begins where it must: a wave that asks for its columns one by one asks four times for each sector.
template <bool WHOLE>
DEVICE Four of_vector_at_once(const f32* vector, u32 column, u32 width) {
  const bool aligned = WHOLE && column < width && reinterpret_cast<u64>(vector + column) % sizeof(Four) == 0;
  return aligned ? at_once(vector + column) : of_vector<WHOLE>(vector, column, width);
}

template <bool WHOLE>
DEVICE void store(f32* row, u32 column, u32 width, const Packed<f32>& value) {
  if constexpr (WHOLE) {
    if (column < width) at_once(row + column, value.all);
  } else {
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      if (column + next >= width) return;
      row[column + next] = value.all.at[next];
    }
  }
}
template <bool WHOLE>
DEVICE void store(bf16* row, u32 column, u32 width, const Packed<bf16>& value) {
  if constexpr (WHOLE) {
    if (column < width) *reinterpret_cast<u64*>(row + column) = value.all;
  } else {
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      if (column + next >= width) return;
      row[column + next].bits = static_cast<u16>(value.all >> (16 * next));
    }
  }
}

// A block has this many columns of a row at once, of wider rows one such piece after the other.
constexpr u32 SPAN = 4 * BLOCK;

// Sums over rows, which are the CPU's whoever makes what is summed: a block puts it into shared memory, AHEAD rows at once, and 64
// threads, which are whole waves, add it up, 16 lanes a row. Two rows, which 32 lanes read, have no bank in common.
constexpr u32 STRIDE = SPAN + PARTS, ADDERS = 4 * PARTS;
#define SUMMANDS(name, ahead) SHARED(Four, name, (ahead) * STRIDE / 4)

// What this thread has of row number `row` of those; zeros in columns that are not there.
DEVICE void put_summands(Four* summands, u32 row, const Four& values) { summands[row * (STRIDE / 4) + thread_index()] = values; }

// `part` of a lane and its elements l, l + 16, ... of these `count` columns, in order. Eight are asked for at once: zeros that stand
// behind the last change no part, which is never -0.
template <u32 AHEAD>
DEVICE f32 added(const Four* summands, f32 part, u32 count) {
  if (thread_index() >= ADDERS) return part;
  const f32* own =
      reinterpret_cast<const f32*>(summands) + thread_index() / PARTS % AHEAD * STRIDE + thread_index() % PARTS;
  if (count > SPAN) count = SPAN;
  for (u32 column = 0; column < count; column += 8 * PARTS) {
    f32 next[8];
    UNROLL
    for (u32 step = 0; step < 8; ++step) next[step] = own[column + step * PARTS];
    UNROLL
    for (u32 step = 0; step < 8; ++step) part += next[step];
  }
  return part;
}

// store(row, sum) for each of the AHEAD rows, by one thread each.
template <u32 AHEAD, typename Store>
DEVICE void summed(f32 part, Store store) {
  if (thread_index() >= ADDERS) return;
  const f32 sum = together(part);
  if (thread_index() % PARTS == 0 && thread_index() / PARTS < AHEAD) store(thread_index() / PARTS, sum);
}

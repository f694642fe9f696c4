// A 16 x 16 x 16 product of bf16 into f32, which the lanes of a wave compute together. There are three ways:
//
// - gfx90a, gfx942, gfx950: `v_mfma_f32_16x16x16_bf16` by 64 lanes (AMD CDNA3 ISA, "Matrix Arithmetic Instructions").
// - NVIDIA from sm_80 on: two `mma.sync.m16n8k16` by 32 lanes (PTX ISA, "Matrix Fragments for mma.m16n8k16").
// - Other GPUs have no matrix units for bf16: 32 lanes shuffle their operands, and add with ascending inner index.
//
// The emulator computes with the lanes' fragments in the layout of its wave, also with ascending inner index: waves of
// 32 and 64 have equal bits there. Vendors do not document the order of additions inside an instruction, so a GPU's
// bits are its own. They are a function of the 16 values of the row and of the column, and of the sum that was there
// before.
#pragma once
#include "ground.h"

#if defined(WITHOUT_MATRIX_UNITS)  // a test compares this way with the emulator's matrix unit
#define BY_SHUFFLES
#elif defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define BY_MFMA
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define BY_MMA_SYNC
#elif defined(ON_A_CPU)
#define BY_EMULATOR
#else
#define BY_SHUFFLES
#endif

// How many lanes compute a product together. A block of T threads has T / lanes() such waves.
#if defined(BY_MFMA)
DEVICE constexpr u32 lanes() { return 64; }
constexpr u32 FEWEST_LANES = 64, MOST_LANES = 64;
#elif defined(BY_EMULATOR)
DEVICE u32 lanes() { return emulator::wave(); }
constexpr u32 FEWEST_LANES = 32, MOST_LANES = 64;
#else
DEVICE constexpr u32 lanes() { return 32; }
constexpr u32 FEWEST_LANES = 32, MOST_LANES = 32;
#endif
DEVICE u32 own_lane() { return thread_index() % lanes(); }

// What a lane has of 16 rows (the left operand) or 16 columns (the right one): pairs of bf16 with neighbouring inner
// indices, the lower one in the lower half. In waves of 64 the first two pairs are used.
struct Fragment {
  u32 pairs[128 / FEWEST_LANES];
};
// What a lane has of the 16 x 16 sums. In waves of 64 the first four are used.
struct Sums {
  f32 at[256 / FEWEST_LANES];
};

// Which element is where: `index` is the row of the left operand, or the column of the right one.
struct Place {
  u32 index, inner;
};
template <bool LEFT>
DEVICE constexpr Place place_of(u32 wave, u32 lane, u32 pair) {
  if (wave == 64) return {lane % 16, lane / 16 * 4 + 2 * pair};
  const u32 high = LEFT ? pair % 2 : pair / 2, deep = LEFT ? pair / 2 : pair % 2;
  return {lane / 4 + 8 * high, lane % 4 * 2 + 8 * deep};
}
// A lane's sums are neighbours in a row: four of one row in waves of 64, where an instruction gets the right operand
// first, and two of each of four half rows in waves of 32.
DEVICE constexpr u32 row_of_sum(u32 wave, u32 lane, u32 sum) { return wave == 64 ? lane % 16 : lane / 4 + sum / 2 % 2 * 8; }
DEVICE constexpr u32 column_of_sum(u32 wave, u32 lane, u32 sum) {
  return wave == 64 ? lane / 16 * 4 + sum : lane % 4 * 2 + sum % 2 + sum / 4 * 8;
}
DEVICE u32 row_of_sum(u32 sum) { return row_of_sum(lanes(), own_lane(), sum); }
DEVICE u32 column_of_sum(u32 sum) { return column_of_sum(lanes(), own_lane(), sum); }

// How a matrix lies in memory: its elements side by side along the inner index, or across it.
enum class Side { along, across };
template <Side SIDE_BY_SIDE>
DEVICE u32 offset_of(Place place, u32 stride) {
  return SIDE_BY_SIDE == Side::along ? place.index * stride + place.inner : place.inner * stride + place.index;
}

// Where a lane of `ldmatrix` begins to read eight elements side by side: lanes 8 p to 8 p + 7 name the rows of the
// matrix that becomes pair p (PTX ISA, "ldmatrix").
template <bool LEFT, Side SIDE_BY_SIDE>
DEVICE constexpr Place row_of_lane(u32 lane) {
  const Place first = place_of<LEFT>(32, 0, lane / 8);
  return SIDE_BY_SIDE == Side::along ? Place{first.index + lane % 8, first.inner} : Place{first.index, first.inner + lane % 8};
}

// The fragment of 16 rows or columns that begin at `from` in shared memory: `from[index * stride + inner]` where they
// lie along the inner index, `from[inner * stride + index]` across it. `from` is a multiple of 16 bytes, `stride` of 8
// elements; with an odd multiple of 8 there are no bank conflicts on NVIDIA.
template <bool LEFT, Side SIDE_BY_SIDE>
DEVICE Fragment fragment(const bf16* from, u32 stride) {
  Fragment found;
#ifdef BY_MMA_SYNC
  const bf16* row = from + offset_of<SIDE_BY_SIDE>(row_of_lane<LEFT, SIDE_BY_SIDE>(own_lane()), stride);
  u32 address;
  asm("{ .reg .u64 at; cvta.to.shared.u64 at, %1; cvt.u32.u64 %0, at; }" : "=r"(address) : "l"(row));
  u32* pairs = found.pairs;
  if constexpr (SIDE_BY_SIDE == Side::along) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(address)
                 : "memory");
  }
#else
  UNROLL
  for (u32 pair = 0; pair < 128 / lanes(); ++pair) {
    const bf16* at = from + offset_of<SIDE_BY_SIDE>(place_of<LEFT>(lanes(), own_lane(), pair), stride);
    if constexpr (SIDE_BY_SIDE == Side::along) {
      found.pairs[pair] = *reinterpret_cast<const u32*>(at);
    } else {
      found.pairs[pair] = at[0].bits | static_cast<u32>(at[stride].bits) << 16;
    }
  }
#endif
  return found;
}
template <Side SIDE_BY_SIDE>
DEVICE Fragment left_fragment(const bf16* from, u32 stride) {
  return fragment<true, SIDE_BY_SIDE>(from, stride);
}
template <Side SIDE_BY_SIDE>
DEVICE Fragment right_fragment(const bf16* from, u32 stride) {
  return fragment<false, SIDE_BY_SIDE>(from, stride);
}

// sums[i, j] += sum over k of left[i, k] right[k, j], by all lanes of the wave.
#if defined(BY_MFMA)
typedef short FourHalves __attribute__((ext_vector_type(4)));
typedef f32 FourSums __attribute__((ext_vector_type(4)));
DEVICE void multiply_add(Sums& sums, const Fragment& left, const Fragment& right) {
  const FourSums made = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
      __builtin_bit_cast(FourHalves, right), __builtin_bit_cast(FourHalves, left), __builtin_bit_cast(FourSums, sums), 0, 0, 0);
  sums = __builtin_bit_cast(Sums, made);
}
#elif defined(BY_MMA_SYNC)
DEVICE void multiply_add(Sums& sums, const Fragment& left, const Fragment& right) {
  const u32* rows = left.pairs;
  UNROLL
  for (u32 half = 0; half < 2; ++half) {
    f32* at = sums.at + 4 * half;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(at[0]), "+f"(at[1]), "+f"(at[2]), "+f"(at[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(right.pairs[2 * half]), "r"(right.pairs[2 * half + 1]));
  }
}
#elif defined(BY_EMULATOR)
struct WaveOperands {
  Sums* sums;
  const Fragment *left, *right;
};
// No sanitizer looks into it: it stands for hardware, which reads registers.
__attribute__((no_sanitize("thread"))) inline void matrix_unit(void* const* of_lanes, u32 wave) {
  typedef f32 Row __attribute__((vector_size(64)));
  f32 left[16][16];
  Row right[16], sums[16];
  const auto half = [](u32 pair, u32 high) { return from_bits(high != 0 ? pair & 0xffff0000u : pair << 16); };
  for (u32 lane = 0; lane < wave; ++lane) {
    const WaveOperands& own = *static_cast<const WaveOperands*>(of_lanes[lane]);
    for (u32 pair = 0; pair < 128 / wave; ++pair) {
      const Place row = place_of<true>(wave, lane, pair), column = place_of<false>(wave, lane, pair);
      for (u32 high = 0; high < 2; ++high) {
        left[row.index][row.inner + high] = half(own.left->pairs[pair], high);
        right[column.inner + high][column.index] = half(own.right->pairs[pair], high);
      }
    }
    for (u32 sum = 0; sum < 256 / wave; ++sum)
      sums[row_of_sum(wave, lane, sum)][column_of_sum(wave, lane, sum)] = own.sums->at[sum];
  }
  // A product of two bf16 is exact in f32 (if it does not underflow), so the addition rounds as a fused one does.
  for (u32 row = 0; row < 16; ++row)
    for (u32 inner = 0; inner < 16; ++inner) sums[row] += left[row][inner] * right[inner];
  for (u32 lane = 0; lane < wave; ++lane)
    for (u32 sum = 0; sum < 256 / wave; ++sum)
      static_cast<const WaveOperands*>(of_lanes[lane])->sums->at[sum] =
          sums[row_of_sum(wave, lane, sum)][column_of_sum(wave, lane, sum)];
}
DEVICE void multiply_add(Sums& sums, const Fragment& left, const Fragment& right PLACE) {
  WaveOperands own = {&sums, &left, &right};
  emulator::together({file, line}, &own, &matrix_unit);
}

// The rows that `ldmatrix` is given are those of the layout: lane l gets elements 2 (l % 4) and the next of row l / 4
// of each matrix, of the transposed matrix where that is asked for.
template <bool LEFT>
constexpr bool rows_are_those_of_the_layout() {
  for (u32 lane = 0; lane < 32; ++lane)
    for (u32 pair = 0; pair < 4; ++pair) {
      const Place wanted = place_of<LEFT>(32, lane, pair);
      const Place along = row_of_lane<LEFT, Side::along>(8 * pair + lane / 4);
      const Place across = row_of_lane<LEFT, Side::across>(8 * pair + lane % 4 * 2);
      if (along.index != wanted.index || along.inner + lane % 4 * 2 != wanted.inner) return false;
      if (across.index + lane / 4 != wanted.index || across.inner != wanted.inner) return false;
    }
  return true;
}
static_assert(rows_are_those_of_the_layout<true>() && rows_are_those_of_the_layout<false>(), "ldmatrix");
#else
DEVICE void multiply_add(Sums& sums, const Fragment& left, const Fragment& right PLACE) {
  const u32 lane = own_lane();
  const auto half = [](u32 pair, u32 high) { return from_bits(high != 0 ? pair & 0xffff0000u : pair << 16); };
  for (u32 inner = 0; inner < 16; inner += 2) {
    const u32 from = inner % 8 / 2, deep = inner / 8;
    u32 rows[2], columns[4];
    UNROLL
    for (u32 high = 0; high < 2; ++high)
      rows[high] = of_lane(left.pairs[high + 2 * deep], lane / 4 * 4 + from HERE);
    UNROLL
    for (u32 next = 0; next < 4; ++next)
      columns[next] = of_lane(right.pairs[next / 2 * 2 + deep], (lane % 4 * 2 + next % 2) * 4 + from HERE);
    UNROLL
    for (u32 sum = 0; sum < 8; ++sum) {
      const u32 row = rows[sum / 2 % 2], column = columns[sum % 2 + sum / 4 * 2];
      UNROLL
      for (u32 high = 0; high < 2; ++high) sums.at[sum] = fused(half(row, high), half(column, high), sums.at[sum]);
    }
  }
}
#endif

// The words that a kernel may use, for five compilers: NVRTC, hipRTC, clang -x cuda, clang -x hip, and any C++ compiler for
// a CPU, where the threads of a block are fibers (emulator/). No header of a vendor is read.
//
// What makes a kernel's bits the same everywhere:
// - No atomics; no block reads what another block of the same launch wrote. A sum over blocks is a launch of its own.
// - Grids are one-dimensional and follow from shapes alone, never from the device.
// - Shuffles stay within 32 lanes, and all lanes of a wave take part: waves of 32 and 64 add in the same order.
// - Nothing is contracted (-ffp-contract=off, --fmad=false); where a multiplication and an addition round once, it says `fused`.
// - exp, log and erf are ours (numbers.h). Division and square root are rounded correctly by all five.
#pragma once

#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;
typedef double f64;
struct bf16 {
  u16 bits;
};

// KERNEL(name, threads, LIMIT(registers, shared, waves), (parameters)) { ... }
//
// `threads` is the size of a block, a multiple of 64. The limits are what the kernel may take on gfx942 (resources.py holds
// the compiler's report against them): vector registers of a thread, accumulation registers included; bytes of shared memory
// of a block; and the waves that a SIMD must be able to hold at once. Registers are never spilled. A fourth number says how many
// loads of 16 bytes the code must have at least, a fifth how many products by matrix units; with a sixth, the blocks that a
// multiprocessor of NVIDIA must be able to hold, the compilers are given this number and that of the waves.
#define SEVENTH(a, b, c, d, e, f, g, ...) g
#define LIMIT(...) SEVENTH(__VA_ARGS__, GIVEN, USUAL, USUAL, USUAL, )(__VA_ARGS__)

#if defined(__CUDACC_RTC__) || defined(__NVCC__)  // NVRTC, nvcc
#define KERNEL(name, threads, limits, parameters) extern "C" __global__ void __launch_bounds__(threads limits) name parameters
#define USUAL(...)
#define GIVEN(registers, shared, waves, loads, products, blocks) , blocks
#define DEVICE static __device__ __forceinline__
#define SHARED(type, name, count) __shared__ type name[count]
#define CONSTANT static __constant__ const
DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE void barrier() { __syncthreads(); }
template <u32 MASK>
DEVICE u32 exchange(u32 value) {
  return __shfl_xor_sync(0xffffffffu, value, MASK, 32);
}
DEVICE u32 of_lane(u32 value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane, 32); }
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }
DEVICE f32 root(f32 value) { return __fsqrt_rn(value); }
DEVICE f64 root(f64 value) { return __dsqrt_rn(value); }
DEVICE u32 bits_of(f32 value) { return __float_as_uint(value); }
DEVICE f32 from_bits(u32 value) { return __uint_as_float(value); }
DEVICE u64 bits_of(f64 value) { return static_cast<u64>(__double_as_longlong(value)); }
DEVICE f64 from_bits(u64 value) { return __longlong_as_double(static_cast<i64>(value)); }

#elif defined(__HIP__) || defined(__CUDA__)  // hipRTC, clang
#ifndef __HIPCC_RTC__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#endif
#define DEVICE static __device__ inline __attribute__((always_inline))
#define SHARED(type, name, count) __shared__ type name[count]
#define CONSTANT static __constant__ const
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
DEVICE u32 bits_of(f32 value) { return __builtin_bit_cast(u32, value); }
DEVICE f32 from_bits(u32 value) { return __builtin_bit_cast(f32, value); }
DEVICE u64 bits_of(f64 value) { return __builtin_bit_cast(u64, value); }
DEVICE f64 from_bits(u64 value) { return __builtin_bit_cast(f64, value); }
#ifdef __HIP__
#define KERNEL(name, threads, limits, parameters) \
  extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(threads, threads) limits)) name parameters
// A SIMD holds two waves or more: with more registers than that allows, matrix units would have sums of their own, and copy them.
#define USUAL(...) , amdgpu_waves_per_eu(2)
#define GIVEN(registers, shared, waves, loads, products, blocks) , amdgpu_waves_per_eu(waves)
#ifdef __HIP_DEVICE_COMPILE__
DEVICE f32 root(f32 value) { return __builtin_sqrtf(value); }
DEVICE f64 root(f64 value) { return __builtin_sqrt(value); }
DEVICE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
template <u32 MASK>
DEVICE u32 exchange(u32 value) {  // a pattern over 32 lanes that costs no register for addresses
  return static_cast<u32>(__builtin_amdgcn_ds_swizzle(static_cast<int>(value), (MASK << 10) | 0x1f));
}
DEVICE u32 of_lane(u32 value, u32 lane) {
  const u32 from = (thread_index() & ~31u) + lane;
  return static_cast<u32>(__builtin_amdgcn_ds_bpermute(static_cast<int>(4 * from), static_cast<int>(value)));
}
#endif
#else
#define KERNEL(name, threads, limits, parameters) \
  extern "C" __global__ void __attribute__((launch_bounds(threads limits))) name parameters
#define USUAL(...)
#define GIVEN(registers, shared, waves, loads, products, blocks) , blocks
DEVICE f32 root(f32 value) { return __nvvm_sqrt_rn_f(value); }
DEVICE f64 root(f64 value) { return __nvvm_sqrt_rn_d(value); }
DEVICE u32 thread_index() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE u32 block_index() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE void barrier() { __syncthreads(); }
template <u32 MASK>
DEVICE u32 exchange(u32 value) {
  return static_cast<u32>(__nvvm_shfl_sync_bfly_i32(0xffffffffu, static_cast<int>(value), MASK, 0x1f));
}
DEVICE u32 of_lane(u32 value, u32 lane) {
  return static_cast<u32>(__nvvm_shfl_sync_idx_i32(0xffffffffu, static_cast<int>(value), static_cast<int>(lane), 0x1f));
}
#endif

#else
#define ON_A_CPU
#undef UNROLL
#undef ROLLED
#define UNROLL
#define ROLLED
#include "emulator/emulator.h"
#define KERNEL(name, threads, limits, parameters)                                                                                \
  extern "C" void name parameters;                                                                                               \
  static const emulator::Kernel kernel_##name(#name, threads, &emulator::call<&name>, emulator::Signature<&name>::whole);        \
  extern "C" void name parameters
#define DEVICE static inline
#define CONSTANT static const
#define SHARED(type, name, count)                         \
  type* const name = static_cast<type*>(emulator::shared( \
      []() -> const void* {                               \
        static char here;                                 \
        return &here;                                     \
      }(),                                                \
      sizeof(type) * (count)))
DEVICE u32 thread_index() { return emulator::thread(); }
DEVICE u32 block_index() { return emulator::block(); }
DEVICE f64 root(f64 value) { return __builtin_sqrt(value); }
DEVICE void barrier(const char* file = __builtin_FILE(), u32 line = __builtin_LINE()) { emulator::barrier({file, line}); }
// Where a shuffle stands goes with it, so that threads that meet at different ones are told apart.
#define PLACE , const char *file = __builtin_FILE(), u32 line = __builtin_LINE()
#define HERE , file, line
template <u32 MASK>
DEVICE u32 exchange(u32 value PLACE) {
  static_assert(MASK < 32, "shuffles stay within 32 lanes");
  return emulator::exchange({file, line}, value, MASK);
}
DEVICE u32 of_lane(u32 value, u32 lane PLACE) {
  return emulator::exchange({file, line}, value, emulator::thread() % 32 ^ lane);
}
DEVICE f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
DEVICE f32 root(f32 value) { return __builtin_sqrtf(value); }
DEVICE u32 bits_of(f32 value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
DEVICE f32 from_bits(u32 bits) {
  f32 value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
DEVICE u64 bits_of(f64 value) {
  u64 bits;
  __builtin_memcpy(&bits, &value, 8);
  return bits;
}
DEVICE f64 from_bits(u64 bits) {
  f64 value;
  __builtin_memcpy(&value, &bits, 8);
  return value;
}
#endif

#ifndef PLACE
#define PLACE
#define HERE
#endif

// `of_lane`: the value of lane `lane` of these 32. `shuffle`: of the lane whose number differs by MASK.
template <u32 MASK>
DEVICE u32 shuffle(u32 value PLACE) {
  return exchange<MASK>(value HERE);
}
template <u32 MASK>
DEVICE f32 shuffle(f32 value PLACE) {
  return from_bits(exchange<MASK>(bits_of(value) HERE));
}
template <u32 MASK>
DEVICE u64 shuffle(u64 value PLACE) {
  const u64 high = exchange<MASK>(static_cast<u32>(value >> 32) HERE);
  return (high << 32) | exchange<MASK>(static_cast<u32>(value) HERE);
}
template <u32 MASK>
DEVICE f64 shuffle(f64 value PLACE) {
  return from_bits(shuffle<MASK>(bits_of(value) HERE));
}

DEVICE f32 wide(f32 value) { return value; }
DEVICE f32 wide(bf16 value) { return from_bits(static_cast<u32>(value.bits) << 16); }

// Rounded to the kind of `out`: bf16 to nearest, ties to even, and a NaN stays one.
DEVICE void put(f32& out, f32 value) { out = value; }
DEVICE void put(bf16& out, f32 value) {
  const u32 bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) out.bits = static_cast<u16>((bits >> 16) | 0x40u);
  else out.bits = static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

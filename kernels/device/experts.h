// The gated linear unit of an expert. f32 with the bits of the CPU's; bf16 computed in f32 and rounded once.
#pragma once
#include "fours.h"
#include "numbers.h"

DEVICE f32 sigmoid(f32 x) { return 1.0f / (1.0f + exponential(-x)); }
DEVICE f32 gated(f32 gate, f32 up) { return gate * sigmoid(gate) * up; }
struct GatedGrads {
  f32 gate, up;
};
DEVICE GatedGrads gated_back(f32 gate, f32 up, f32 grad) {
  const f32 open = sigmoid(gate);
  return {grad * up * (open * (1.0f + gate * (1.0f - open))), grad * (gate * open)};
}

// what(row, column) for each four columns of a row of a matrix with fewer than 2^32 elements, which the host ensures. A block
// has 256 of them.
template <typename Do>
DEVICE void each_four(u32 rows, u32 width, Do what) {
  const u32 across = (width + 3) / 4, place = block_index() * BLOCK + thread_index();
  if (place < rows * across) what(place / across, place % across * 4);
}

// out = silu(gate) up, of x [P, 2 I], the gate first.
template <bool WHOLE, typename T>
DEVICE void gate_all(const T* x, T* out, u32 rows, u32 width) {
  each_four(rows, width, [=](u32 row, u32 column) {
    const T* own = x + static_cast<u64>(row) * 2 * width;
    const Packed<T> gates = load<WHOLE>(own, column, width), ups = load<WHOLE>(own + width, column, width);
    Packed<T> made = {};
    UNROLL
    for (u32 next = 0; next < 4; ++next) put(made, next, gated(wide(gates, next), wide(ups, next)));
    store<WHOLE>(out + static_cast<u64>(row) * width, column, width, made);
  });
}
template <typename T>
DEVICE void gate_by_fours(const T* x, T* out, u32 rows, u32 width) {
  if (by_fours(width, x, out)) gate_all<true>(x, out, rows, width);
  else gate_all<false>(x, out, rows, width);
}
KERNEL(swiglu_f32, 256, LIMIT(48, 0, 8, 2), (const f32* x, f32* out, u32 rows, u32 width)) { gate_by_fours(x, out, rows, width); }
KERNEL(swiglu_bf16, 256, LIMIT(48, 0, 8), (const bf16* x, bf16* out, u32 rows, u32 width)) { gate_by_fours(x, out, rows, width); }

template <bool WHOLE, typename T>
DEVICE void gate_all_back(const T* x, const T* grad, T* out, u32 rows, u32 width) {
  each_four(rows, width, [=](u32 row, u32 column) {
    const T* own = x + static_cast<u64>(row) * 2 * width;
    const Packed<T> gates = load<WHOLE>(own, column, width), ups = load<WHOLE>(own + width, column, width);
    const Packed<T> grads = load<WHOLE>(grad + static_cast<u64>(row) * width, column, width);
    Packed<T> to_gate = {}, to_up = {};
    UNROLL
    for (u32 next = 0; next < 4; ++next) {
      const GatedGrads made = gated_back(wide(gates, next), wide(ups, next), wide(grads, next));
      put(to_gate, next, made.gate);
      put(to_up, next, made.up);
    }
    T* to = out + static_cast<u64>(row) * 2 * width;
    store<WHOLE>(to, column, width, to_gate);
    store<WHOLE>(to + width, column, width, to_up);
  });
}
template <typename T>
DEVICE void gate_back_by_fours(const T* x, const T* grad, T* out, u32 rows, u32 width) {
  if (by_fours(width, x, grad, out)) gate_all_back<true>(x, grad, out, rows, width);
  else gate_all_back<false>(x, grad, out, rows, width);
}
KERNEL(swiglu_backward_f32, 256, LIMIT(64, 0, 8, 3), (const f32* x, const f32* grad, f32* out, u32 rows, u32 width)) {
  gate_back_by_fours(x, grad, out, rows, width);
}
KERNEL(swiglu_backward_bf16, 256, LIMIT(64, 0, 8), (const bf16* x, const bf16* grad, bf16* out, u32 rows, u32 width)) {
  gate_back_by_fours(x, grad, out, rows, width);
}

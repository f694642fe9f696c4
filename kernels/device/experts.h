// The gated linear unit of an expert. f32 with the bits of the CPU's; bf16 computed in f32 and rounded once.
#pragma once
#include "elements.h"
#include "numbers.h"

DEVICE f32 sigmoid(f32 x) { return 1.0f / (1.0f + exponential(-x)); }

// out = silu(gate) up, of x [P, 2 I], the gate first.
template <typename T>
DEVICE void gated(const T* x, T* out, u32 rows, u32 width) {
  each(rows, width, [=](u32 row, u32 column) {
    const u64 index = static_cast<u64>(row) * width + column, at = index + static_cast<u64>(row) * width;
    const f32 gate = wide(x[at]);
    put(out[index], gate * sigmoid(gate) * wide(x[at + width]));
  });
}
KERNEL(swiglu_f32, 256, LIMIT(48, 0, 8), (const f32* x, f32* out, u32 rows, u32 width)) { gated(x, out, rows, width); }
KERNEL(swiglu_bf16, 256, LIMIT(48, 0, 8), (const bf16* x, bf16* out, u32 rows, u32 width)) { gated(x, out, rows, width); }

template <typename T>
DEVICE void gated_back(const T* x, const T* grad, T* out, u32 rows, u32 width) {
  each(rows, width, [=](u32 row, u32 column) {
    const u64 index = static_cast<u64>(row) * width + column, at = index + static_cast<u64>(row) * width;
    const f32 gate = wide(x[at]), up = wide(x[at + width]), own = wide(grad[index]), open = sigmoid(gate);
    put(out[at], own * up * (open * (1.0f + gate * (1.0f - open))));
    put(out[at + width], own * (gate * open));
  });
}
KERNEL(swiglu_backward_f32, 256, LIMIT(48, 0, 8), (const f32* x, const f32* grad, f32* out, u32 rows, u32 width)) {
  gated_back(x, grad, out, rows, width);
}
KERNEL(swiglu_backward_bf16, 256, LIMIT(48, 0, 8), (const bf16* x, const bf16* grad, bf16* out, u32 rows, u32 width)) {
  gated_back(x, grad, out, rows, width);
}

// Residual additions and norms next to a layer of experts. They read its rows in the order of experts and write
// gradients in that order, so that no kernel moves rows first. The bits are those of dispatch.h followed by rows.h.
// The host launches them only where all matrices can be read by fours.
#pragma once
#include "rows.h"

KERNEL(residual_norm_gathered_f32, 256, LIMIT(96, 16784, 3, 12),
       (const i64* places, const f32* branch, const f32* passed, const int* ends, const f32* gates, const f32* residual,
        const f32* scale, const f32* bias, const f32* residual_scale, const f32* residual_bias, const f32* weight, f32* sum,
        f32* out, f32* factors, u32 rows, u32 experts, u32 width, f32 eps)) {
  SUMMANDS(squares, 4);
  SHARED(f32, found, 4);
  SHARED(u32, found_places, ROWS);
  SHARED(f32, found_gates, ROWS);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Routes<f32> routes = {places, passed, ends, experts, gates};
  const Forward<f32> by = {branch, residual, scaling, sum, weight, out, factors, rows, width, eps, routes};
  forward<true, true, true, true>(by, squares, found, {found_places, found_gates});
}
KERNEL(residual_norm_gathered_bf16, 256, LIMIT(80, 16784, 3, 8),
       (const i64* places, const bf16* branch, const bf16* passed, const int* ends, const f32* gates, const f32* residual,
        const f32* scale, const f32* bias, const f32* residual_scale, const f32* residual_bias, const f32* weight, f32* sum,
        bf16* out, f32* factors, u32 rows, u32 experts, u32 width, f32 eps)) {
  SUMMANDS(squares, 4);
  SHARED(f32, found, 4);
  SHARED(u32, found_places, ROWS);
  SHARED(f32, found_gates, ROWS);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Routes<bf16> routes = {places, passed, ends, experts, gates};
  const Forward<bf16> by = {branch, residual, scaling, sum, weight, out, factors, rows, width, eps, routes};
  forward<true, true, true, true>(by, squares, found, {found_places, found_gates});
}
KERNEL(residual_norm_gathered_backward_f32, 256, LIMIT(136, 10752, 3, 14),
       (const int* order, const i64* places, const f32* branch, const f32* passed, const int* ends, const f32* gates,
        const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale, const f32* residual_bias,
        const f32* factors, const f32* weight, const f32* grad, const f32* beside, f32* to_branch, f32* to_residual,
        f32* of_norm, f32* partial, f32* to_gates, u32 all, u32 rows, u32 experts, u32 width)) {
  SUMMANDS(products, 2);
  SHARED(f32, along, BAND);
  SHARED(f32, parts, BAND * PARTS);
  SHARED(u32, found_places, BAND);
  SHARED(f32, found_gates, BAND);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Routes<f32> routes = {places, passed, ends, experts, gates, order, to_gates, all};
  const Back<f32, f32> by = {grad, factors, weight, beside, branch, residual, scaling, to_branch, to_residual, of_norm, partial,
                            rows, width, routes};
  band_back<true, true, true, BRANCH>(by, {products, along, parts, {found_places, found_gates}});
}
KERNEL(residual_norm_gathered_backward_bf16, 256, LIMIT(136, 10752, 3, 6),
       (const int* order, const i64* places, const bf16* branch, const bf16* passed, const int* ends, const f32* gates,
        const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale, const f32* residual_bias,
        const f32* factors, const f32* weight, const bf16* grad, const f32* beside, bf16* to_branch, f32* to_residual,
        f32* of_norm, f32* partial, f32* to_gates, u32 all, u32 rows, u32 experts, u32 width)) {
  SUMMANDS(products, 2);
  SHARED(f32, along, BAND);
  SHARED(f32, parts, BAND * PARTS);
  SHARED(u32, found_places, BAND);
  SHARED(f32, found_gates, BAND);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Routes<bf16> routes = {places, passed, ends, experts, gates, order, to_gates, all};
  const Back<bf16, bf16> by = {grad, factors, weight, beside, branch, residual, scaling, to_branch, to_residual, of_norm, partial,
                            rows, width, routes};
  band_back<true, true, true, BRANCH>(by, {products, along, parts, {found_places, found_gates}});
}
KERNEL(residual_norm_unpermuted_backward_f32, 256, LIMIT(128, 8576, 4, 14),
       (const f32* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, const f32* factors, const f32* weight, const i64* places, const f32* grad, const f32* passed,
        const int* ends, const f32* more, const f32* beside, f32* to_branch, f32* to_residual, f32* of_norm, f32* partial,
        u32 rows, u32 experts, u32 width)) {
  SUMMANDS(products, 2);
  SHARED(f32, along, BAND);
  SHARED(u32, found_places, BAND);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Routes<f32> routes = {places, passed, ends, experts};
  const Back<f32, f32> by = {grad, factors, weight, beside, branch, residual, scaling, to_branch, to_residual, of_norm, partial,
                            rows, width, routes, more};
  band_back<true, true, true, GRADIENT>(by, {products, along, nullptr, {found_places}});
}
KERNEL(residual_norm_unpermuted_backward_bf16, 256, LIMIT(128, 8576, 4, 6),
       (const bf16* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, const f32* factors, const f32* weight, const i64* places, const bf16* grad, const bf16* passed,
        const int* ends, const bf16* more, const f32* beside, bf16* to_branch, f32* to_residual, f32* of_norm, f32* partial,
        u32 rows, u32 experts, u32 width)) {
  SUMMANDS(products, 2);
  SHARED(f32, along, BAND);
  SHARED(u32, found_places, BAND);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Routes<bf16> routes = {places, passed, ends, experts};
  const Back<bf16, bf16> by = {grad, factors, weight, beside, branch, residual, scaling, to_branch, to_residual, of_norm, partial,
                            rows, width, routes, more};
  band_back<true, true, true, GRADIENT>(by, {products, along, nullptr, {found_places}});
}

// Row by row and column by column over matrices [N, D]: norms, residual additions, sums over rows. The order of sums is that of
// src/ops/cpu/norm.rs, so that the outcomes are the CPU's, to the bit.
#pragma once
#include "elements.h"
#include "sums.h"

// Sums over rows are kept in f32 over this many rows, and in f64 over those blocks of rows.
constexpr u32 BAND = 32;

// 16 lanes a row.
struct Row {
  u32 index, lane;
  bool there;
};
DEVICE Row row_of(u32 rows) {
  const u32 index = block_index() * ROWS + thread_index() / PARTS;
  return {index, thread_index() % PARTS, index < rows};
}

// The sum of value(column) over the columns of a row, the same in its 16 lanes; 0 where there is no row.
template <typename Value>
DEVICE f32 along_row(Row row, u32 width, Value value) {
  f32 part = 0.0f;
  if (row.there)
    for (u32 column = row.lane; column < width; column += PARTS) part += value(column);
  return together(part);
}

// value(column) of each column of a row, to be stored. A lane asks for all that four columns need before it writes the first: what
// is written may lie where the next is read, for all that a compiler knows, so it would wait for the memory after each.
template <typename Value, typename Store>
DEVICE void each_of_row(Row row, u32 width, Value value, Store store) {
  if (!row.there) return;
  for (u64 column = row.lane; column < width; column += 4 * PARTS) {
    f32 values[4];
    UNROLL
    for (u64 next = 0; next < 4; ++next)
      if (column + next * PARTS < width) values[next] = value(column + next * PARTS);
    UNROLL
    for (u64 next = 0; next < 4; ++next)
      if (column + next * PARTS < width) store(column + next * PARTS, values[next]);
  }
}

// A thread a column, over a band of rows. Blocks go over tiles of 256 columns first, then over bands, then over the matrices
// of a stack.
struct Column {
  u32 index, first, end;  // column; its rows in the whole stack
  u64 partial;            // where its sum stands: [stack, bands, width]
  bool there;
};
DEVICE Column column_of(u32 rows, u32 width) {
  const u32 tiles = (width + BLOCK - 1) / BLOCK, bands = (rows + BAND - 1) / BAND;
  const u32 index = block_index() % tiles * BLOCK + thread_index(), band = block_index() / tiles;
  const u32 first = band / bands * rows + band % bands * BAND, last = (band / bands + 1) * rows;
  return {index, first, first + BAND < last ? first + BAND : last, static_cast<u64>(band) * width + index, index < width};
}

// partial[s, band, c] = sum of x[s, r, c] over the rows of a band.
KERNEL(column_sums, 256, LIMIT(32, 0, 8), (const f32* x, f32* partial, u32 rows, u32 width)) {
  const Column column = column_of(rows, width);
  if (!column.there) return;
  f32 sum = 0.0f;
  for (u32 row = column.first; row < column.end; ++row) sum += x[static_cast<u64>(row) * width + column.index];
  partial[column.partial] = sum;
}

// The same of x times y.
KERNEL(column_products, 256, LIMIT(32, 0, 8), (const f32* x, const f32* y, f32* partial, u32 rows, u32 width)) {
  const Column column = column_of(rows, width);
  if (!column.there) return;
  f32 sum = 0.0f;
  for (u32 row = column.first; row < column.end; ++row) {
    const u64 at = static_cast<u64>(row) * width + column.index;
    sum += x[at] * y[at];
  }
  partial[column.partial] = sum;
}

// From the sum of the squares of x over the row, the same in its lanes.
template <typename T>
DEVICE void norm_row(Row row, u32 width, f32 eps, f32 square, const f32* x, const f32* weight, f32* factors, T* out) {
  const f32 factor = 1.0f / root(square / static_cast<f32>(width) + eps);
  if (row.there && row.lane == 0) factors[row.index] = factor;
  const u64 at = static_cast<u64>(row.index) * width;
  each_of_row(
      row, width, [=](u64 column) { return x[at + column] * factor * weight[column]; },
      [=](u64 column, f32 value) { put(out[at + column], value); });
}

// out = x f weight with f = 1 / sqrt(mean of x^2 + eps) for each row, which goes into factors.
template <typename T>
DEVICE void norm(const f32* x, const f32* weight, T* out, f32* factors, u32 rows, u32 width, f32 eps) {
  const Row row = row_of(rows);
  const f32* own = x + static_cast<u64>(row.index) * width;
  const f32 square = along_row(row, width, [=](u64 column) { return own[column] * own[column]; });
  norm_row(row, width, eps, square, x, weight, factors, out);
}
KERNEL(rms_norm_f32, 256, LIMIT(32, 0, 8),
       (const f32* x, const f32* weight, f32* out, f32* factors, u32 rows, u32 width, f32 eps)) {
  norm(x, weight, out, factors, rows, width, eps);
}
KERNEL(rms_norm_bf16, 256, LIMIT(32, 0, 8),
       (const f32* x, const f32* weight, bf16* out, f32* factors, u32 rows, u32 width, f32 eps)) {
  norm(x, weight, out, factors, rows, width, eps);
}

struct Scaling {
  const f32 *scale, *bias, *residual_scale, *residual_bias;
};

// sum = (branch + bias) scale + (residual + residual_bias) residual_scale.
template <typename T>
DEVICE void residual_sum(const T* branch, const f32* residual, Scaling by, f32* sum, u32 rows, u32 width) {
  each(rows, width, [=](u32 row, u32 column) {
    const u64 at = static_cast<u64>(row) * width + column;
    sum[at] = (wide(branch[at]) + by.bias[column]) * by.scale[column] +
              (residual[at] + by.residual_bias[column]) * by.residual_scale[column];
  });
}
KERNEL(residual_sum_f32, 256, LIMIT(48, 0, 8),
       (const f32* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, f32* sum, u32 rows, u32 width)) {
  residual_sum(branch, residual, {scale, bias, residual_scale, residual_bias}, sum, rows, width);
}
KERNEL(residual_sum_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, f32* sum, u32 rows, u32 width)) {
  residual_sum(branch, residual, {scale, bias, residual_scale, residual_bias}, sum, rows, width);
}

// The same, and its norm.
template <typename T>
DEVICE void residual_and_norm(const T* branch, const f32* residual, Scaling by, const f32* weight, f32* sum, T* out, f32* factors,
                              u32 rows, u32 width, f32 eps) {
  const Row row = row_of(rows);
  const u64 at = static_cast<u64>(row.index) * width;
  // A lane reads of the sum only what it has written itself.
  f32 part = 0.0f;
  each_of_row(
      row, width,
      [=](u64 column) {
        return (wide(branch[at + column]) + by.bias[column]) * by.scale[column] +
               (residual[at + column] + by.residual_bias[column]) * by.residual_scale[column];
      },
      [=, &part](u64 column, f32 value) {
        sum[at + column] = value;
        part += value * value;
      });
  norm_row(row, width, eps, together(part), sum, weight, factors, out);
}
KERNEL(residual_norm_f32, 256, LIMIT(48, 0, 8),
       (const f32* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, const f32* weight, f32* sum, f32* out, f32* factors, u32 rows, u32 width, f32 eps)) {
  residual_and_norm(branch, residual, {scale, bias, residual_scale, residual_bias}, weight, sum, out, factors, rows, width, eps);
}
KERNEL(residual_norm_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, const f32* weight, f32* sum, bf16* out, f32* factors, u32 rows, u32 width, f32 eps)) {
  residual_and_norm(branch, residual, {scale, bias, residual_scale, residual_bias}, weight, sum, out, factors, rows, width, eps);
}

// Back through a row of the norm, from the gradient of its outcome: store(column, gradient of x), with `beside` added to it unless that is
// null.
template <typename G, typename Store>
DEVICE void norm_row_back(Row row, u32 width, const f32* x, const f32* factors, const f32* weight, const G* grad, const f32* beside,
                          Store store) {
  const u64 at = static_cast<u64>(row.index) * width;
  const f32 factor = row.there ? factors[row.index] : 0.0f;
  const f32 sum =
      along_row(row, width, [=](u64 column) { return wide(grad[at + column]) * (x[at + column] * factor) * weight[column]; });
  const f32 along = sum / -static_cast<f32>(width);
  each_of_row(
      row, width,
      [=](u64 column) {
        const f32 own = (wide(grad[at + column]) * weight[column] + x[at + column] * factor * along) * factor;
        return beside == nullptr ? own : beside[at + column] + own;
      },
      store);
}

// Back through a band of rows of the norm, and the gradient of the weight. A block has a band.
template <typename G>
DEVICE void norm_band_back(const f32* x, const f32* factors, const f32* weight, const G* grad, const f32* beside, f32* input,
                           f32* partial, u32 rows, u32 width) {
  const u32 first = block_index() * BAND, end = first + BAND < rows ? first + BAND : rows;
  for (u32 start = first; start < first + BAND; start += ROWS) {
    const u32 index = start + thread_index() / PARTS;
    const u64 at = static_cast<u64>(index) * width;
    norm_row_back({index, thread_index() % PARTS, index < rows}, width, x, factors, weight, grad, beside,
                  [=](u64 column, f32 value) { input[at + column] = value; });
  }
  for (u32 column = thread_index(); column < width; column += BLOCK) {
    f32 sum = 0.0f;
    for (u32 row = first; row < end; ++row) {
      const u64 at = static_cast<u64>(row) * width + column;
      sum += wide(grad[at]) * (x[at] * factors[row]);
    }
    partial[static_cast<u64>(block_index()) * width + column] = sum;
  }
}
KERNEL(rms_norm_backward_f32, 256, LIMIT(48, 0, 8),
       (const f32* x, const f32* factors, const f32* weight, const f32* grad, const f32* beside, f32* input, f32* partial,
        u32 rows, u32 width)) {
  norm_band_back(x, factors, weight, grad, beside, input, partial, rows, width);
}
KERNEL(rms_norm_backward_bf16, 256, LIMIT(48, 0, 8),
       (const f32* x, const f32* factors, const f32* weight, const bf16* grad, const f32* beside, f32* input, f32* partial,
        u32 rows, u32 width)) {
  norm_band_back(x, factors, weight, grad, beside, input, partial, rows, width);
}

// Back through the residual addition: gradients of both sides, and in bands, [3, bands, width], the sums of the gradient, of
// the gradient times the branch, and of the gradient times the residual. The gradient may stand where that of the residual goes.
template <typename T>
DEVICE void residual_column_back(Column column, const T* branch, const f32* residual, const f32* grad, const f32* scale,
                                 const f32* residual_scale, T* to_branch, f32* to_residual, f32* partial, u32 rows, u32 width) {
  const f32 by = scale[column.index], residual_by = residual_scale[column.index];
  f32 all = 0.0f, branches = 0.0f, residuals = 0.0f;
  // As `each_of_row`: what four rows need is asked for before the first is written.
  for (u32 row = column.first; row < column.end; row += 4) {
    const u64 at = static_cast<u64>(row) * width;
    f32 owns[4], of_branch[4], of_residual[4];
    UNROLL
    for (u32 next = 0; next < 4; ++next)
      if (row + next < column.end) {
        const u64 here = at + next * width;
        owns[next] = (grad + here)[column.index];
        of_branch[next] = wide((branch + here)[column.index]);
        of_residual[next] = (residual + here)[column.index];
      }
    UNROLL
    for (u32 next = 0; next < 4; ++next)
      if (row + next < column.end) {
        const u64 here = at + next * width;
        all += owns[next];
        branches += owns[next] * of_branch[next];
        residuals += owns[next] * of_residual[next];
        put((to_branch + here)[column.index], owns[next] * by);
        (to_residual + here)[column.index] = owns[next] * residual_by;
      }
  }
  const u64 size = static_cast<u64>((rows + BAND - 1) / BAND) * width;
  partial[column.partial] = all;
  partial[column.partial + size] = branches;
  partial[column.partial + 2 * size] = residuals;
}
template <typename T>
DEVICE void residual_back(const T* branch, const f32* residual, const f32* grad, const f32* scale, const f32* residual_scale,
                          T* to_branch, f32* to_residual, f32* partial, u32 rows, u32 width) {
  const Column column = column_of(rows, width);
  if (!column.there) return;
  residual_column_back(column, branch, residual, grad, scale, residual_scale, to_branch, to_residual, partial, rows, width);
}
KERNEL(residual_backward_f32, 256, LIMIT(48, 0, 8),
       (const f32* branch, const f32* residual, const f32* grad, const f32* scale, const f32* residual_scale, f32* to_branch,
        f32* to_residual, f32* partial, u32 rows, u32 width)) {
  residual_back(branch, residual, grad, scale, residual_scale, to_branch, to_residual, partial, rows, width);
}
KERNEL(residual_backward_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* branch, const f32* residual, const f32* grad, const f32* scale, const f32* residual_scale, bf16* to_branch,
        f32* to_residual, f32* partial, u32 rows, u32 width)) {
  residual_back(branch, residual, grad, scale, residual_scale, to_branch, to_residual, partial, rows, width);
}

// Back through the norm of a sum and the residual addition that made it, in one pass. A block has a band.
template <typename T>
DEVICE void residual_and_norm_back(const f32* x, const f32* factors, const f32* weight, const T* grad, const f32* beside,
                                   const T* branch, const f32* residual, const f32* scale, const f32* residual_scale,
                                   T* to_branch, f32* to_residual, f32* of_norm, f32* partial, u32 rows, u32 width) {
  norm_band_back(x, factors, weight, grad, beside, to_residual, of_norm, rows, width);
  barrier();
  const u32 first = block_index() * BAND, end = first + BAND < rows ? first + BAND : rows;
  for (u32 index = thread_index(); index < width; index += BLOCK) {
    const Column column = {index, first, end, static_cast<u64>(block_index()) * width + index, true};
    residual_column_back(column, branch, residual, to_residual, scale, residual_scale, to_branch, to_residual, partial, rows,
                         width);
  }
}
KERNEL(residual_norm_backward_f32, 256, LIMIT(48, 0, 7),
       (const f32* x, const f32* factors, const f32* weight, const f32* grad, const f32* beside, const f32* branch,
        const f32* residual, const f32* scale, const f32* residual_scale, f32* to_branch, f32* to_residual, f32* of_norm,
        f32* partial, u32 rows, u32 width)) {
  residual_and_norm_back(x, factors, weight, grad, beside, branch, residual, scale, residual_scale, to_branch, to_residual, of_norm,
                         partial, rows, width);
}
KERNEL(residual_norm_backward_bf16, 256, LIMIT(48, 0, 7),
       (const f32* x, const f32* factors, const f32* weight, const bf16* grad, const f32* beside, const bf16* branch,
        const f32* residual, const f32* scale, const f32* residual_scale, bf16* to_branch, f32* to_residual, f32* of_norm,
        f32* partial, u32 rows, u32 width)) {
  residual_and_norm_back(x, factors, weight, grad, beside, branch, residual, scale, residual_scale, to_branch, to_residual, of_norm,
                         partial, rows, width);
}

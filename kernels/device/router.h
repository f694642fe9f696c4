// The router: depth averaging, GELU, probabilities, the choice of a class, and back. f32.
#pragma once
#include "elements.h"
#include "numbers.h"
#include "rows.h"

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

// state = projected + bias, and with the state of the layer before, + before decay; and its norm. 16 lanes a row, each of which
// reads of the state only what it has written itself.
template <typename T>
DEVICE void averaged(const T* projected, f32* state, const f32* bias, const f32* before, const f32* decay, const f32* weight,
                     f32* out, f32* factors, u32 rows, u32 width, f32 eps) {
  const Row row = row_of(rows);
  const u64 at = static_cast<u64>(row.index) * width;
  f32 part = 0.0f;
  each_of_row(
      row, width,
      [=](u64 column) {
        const f32 own = wide(projected[at + column]) + bias[column];
        return before == nullptr ? own : own + before[at + column] * decay[column];
      },
      [=, &part](u64 column, f32 value) {
        state[at + column] = value;
        part += value * value;
      });
  norm_row(row, width, eps, together(part), state, weight, factors, out);
}
KERNEL(router_norm_f32, 256, LIMIT(48, 0, 8),
       (const f32* projected, f32* state, const f32* bias, const f32* before, const f32* decay, const f32* weight, f32* out,
        f32* factors, u32 rows, u32 width, f32 eps)) {
  averaged(projected, state, bias, before, decay, weight, out, factors, rows, width, eps);
}
KERNEL(router_norm_bf16, 256, LIMIT(48, 0, 8),
       (const bf16* projected, f32* state, const f32* bias, const f32* before, const f32* decay, const f32* weight, f32* out,
        f32* factors, u32 rows, u32 width, f32 eps)) {
  averaged(projected, state, bias, before, decay, weight, out, factors, rows, width, eps);
}

// Back: the gradient of the state, with that from the layer after it, `later`, unless it is null; the same rounded, unless there
// is no memory for that; and of the state before, unless there is none.
KERNEL(router_norm_backward, 256, LIMIT(48, 0, 8),
       (const f32* state, const f32* factors, const f32* weight, const f32* grad, const f32* later, const f32* decay, f32* own,
        bf16* rounded, f32* before, u32 rows, u32 width)) {
  const Row row = row_of(rows);
  const u64 at = static_cast<u64>(row.index) * width;
  norm_row_back(row, width, state, factors, weight, grad, later, [=](u64 column, f32 value) {
    own[at + column] = value;
    if (rounded != nullptr) put(rounded[at + column], value);
    if (before != nullptr) before[at + column] = value * decay[column];
  });
}

// In bands, [5, bands, width], the gradients of the vectors: of the norm's weight, of the bias before it, of the decay (zeros
// without a state before), and of the biases of both hidden layers. `grad` is the gradient of what the norm came to.
KERNEL(router_vectors, 256, LIMIT(32, 0, 8),
       (const f32* state, const f32* factors, const f32* grad, const f32* own, const f32* before, const f32* first,
        const f32* second, f32* partial, u32 rows, u32 width)) {
  const Column column = column_of(rows, width);
  if (!column.there) return;
  f32 sums[5] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  for (u32 row = column.first; row < column.end; ++row) {
    const u64 at = static_cast<u64>(row) * width + column.index;
    sums[0] += grad[at] * (state[at] * factors[row]);
    sums[1] += own[at];
    if (before != nullptr) sums[2] += own[at] * before[at];
    sums[3] += first[at];
    sums[4] += second[at];
  }
  const u64 size = static_cast<u64>((rows + BAND - 1) / BAND) * width;
  UNROLL
  for (u32 which = 0; which < 5; ++which) partial[column.partial + which * size] = sums[which];
}

// x += bias; out = gelu(x), the exact one: x times the normal distribution's integral up to x.
KERNEL(bias_gelu, 256, LIMIT(64, 0, 8), (f32 * x, const f32* bias, f32* out, u32 rows, u32 width)) {
  one(rows, width, [=](u32 row, u32 column) {
    const u64 at = static_cast<u64>(row) * width + column;
    const f32 value = x[at] + bias[column];
    x[at] = value;
    out[at] = static_cast<f32>(value * (0.5 + 0.5 * error_function(value * 0.7071067811865476)));
  });
}

KERNEL(gelu_backward, 256, LIMIT(64, 0, 8), (const f32* x, const f32* grad, f32* out, u32 rows, u32 width)) {
  one(rows, width, [=](u32 row, u32 column) {
    const u64 at = static_cast<u64>(row) * width + column;
    const f64 value = x[at];
    const f64 integral = 0.5 + 0.5 * error_function(value * 0.7071067811865476);
    const f64 density = 0.3989422804014327 * exponential(static_cast<f32>(-0.5 * value * value));
    out[at] = static_cast<f32>(grad[at] * (integral + value * density));
  });
}

// Of two numbers and their places: the larger, the first of equals, and a NaN before all numbers, as libtorch has it.
struct Best {
  f32 value;
  u32 place;
};
DEVICE Best better(Best a, Best b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  const bool equal = a_nan ? b_nan : a.value == b.value;
  if (equal) return a.place < b.place ? a : b;
  if (a_nan || b_nan) return a_nan ? a : b;
  return a.value > b.value ? a : b;
}
template <u32 MASK>
DEVICE Best better_of(Best own) {
  return better(own, {shuffle<MASK>(own.value), shuffle<MASK>(own.place)});
}
DEVICE Best best_of_row(Best own) { return better_of<8>(better_of<4>(better_of<2>(better_of<1>(own)))); }

// probabilities = softmax(logits), [N, C]; choice = the place of the largest sum with balance; weight = its probability.
KERNEL(router_choice, 256, LIMIT(48, 0, 8),
       (const f32* logits, const f32* balance, f32* probabilities, i64* choice, f32* weight, u32 rows, u32 classes)) {
  const f32 LEAST = from_bits(0xff800000u);  // minus infinity
  const Row row = row_of(rows);
  const f32* x = logits + static_cast<u64>(row.index) * classes;
  f32* own = probabilities + static_cast<u64>(row.index) * classes;
  Best largest = {LEAST, ~0u};
  if (row.there)
    for (u32 place = row.lane; place < classes; place += PARTS) largest = better(largest, {x[place], place});
  largest = best_of_row(largest);
  const f32 sum = along_row(row, classes, [=](u32 place) { return exponential(x[place] - largest.value); });
  Best best = {LEAST, ~0u};
  if (row.there)
    for (u32 place = row.lane; place < classes; place += PARTS) {
      const f32 value = exponential(x[place] - largest.value) / sum;
      own[place] = value;
      best = better(best, {value + balance[place], place});
    }
  best = best_of_row(best);
  if (!row.there || best.place % PARTS != row.lane) return;  // the lane that wrote the probability
  choice[row.index] = best.place;
  weight[row.index] = own[best.place];
}

// From the gradient of the weight: that of the logits.
KERNEL(router_backward, 256, LIMIT(32, 0, 8),
       (const f32* probabilities, const i64* choice, const f32* grad, f32* logits, u32 rows, u32 classes)) {
  each(rows, classes, [=](u32 row, u32 place) {
    const u64 first = static_cast<u64>(row) * classes;
    const u32 chosen = static_cast<u32>(choice[row]);
    const f32 scaled = grad[row] * probabilities[first + chosen];
    const f32 all = probabilities[first + place] * -scaled;
    logits[first + place] = place == chosen ? all + scaled : all;
  });
}

// The router: depth averaging, GELU, probabilities, the choice of a class, and back. f32.
#pragma once
#include "elements.h"
#include "numbers.h"
#include "rows.h"

// state = state + bias, and with the state of the layer before, + before decay.
KERNEL(depth_average, 256, LIMIT(32, 0, 8),
       (f32 * state, const f32* bias, const f32* before, const f32* decay, u32 rows, u32 width)) {
  each(rows, width, [=](u32 row, u32 column) {
    const u64 at = static_cast<u64>(row) * width + column;
    const f32 own = state[at] + bias[column];
    state[at] = before == nullptr ? own : own + before[at] * decay[column];
  });
}

// The gradient of the state before.
KERNEL(depth_average_backward, 256, LIMIT(32, 0, 8), (const f32* grad, const f32* decay, f32* before, u32 rows, u32 width)) {
  each(rows, width, [=](u32 row, u32 column) {
    const u64 at = static_cast<u64>(row) * width + column;
    before[at] = grad[at] * decay[column];
  });
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

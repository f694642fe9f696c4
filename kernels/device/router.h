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

constexpr u32 STEPS = BAND / ROWS, PAIR = 2 * PARTS;

// what(number, row of the band, column of those, index) for the four elements of a thread among PAIR columns of a band.
template <typename Do>
DEVICE void of_band(u32 first, u32 end, u32 base, u32 width, Do what) {
  UNROLL
  for (u32 number = 0; number < 2 * STEPS; ++number) {
    const u32 row = number / 2 * ROWS + thread_index() / PARTS, place = number % 2 * PARTS + thread_index() % PARTS;
    if (first + row >= end || base + place >= width) continue;
    what(number, row, place, static_cast<u64>(first + row) * width + base + place);
  }
}

// Back: the gradient of the state, with that from the layer after it, `later`, unless it is null; in f32 or rounded, whichever there
// is memory for; and of the state before, unless there is none. In bands, [3, bands, width], the gradients of the norm's weight, of
// the bias before it, and of the decay (zeros without a state before). `grad` is the gradient of what the norm came to. A block has
// a band, of which it puts two columns of each lane at once into shared memory, where a thread adds up a column.
KERNEL(router_norm_backward, 256, LIMIT(64, 12288, 5),
       (const f32* state, const f32* factors, const f32* weight, const f32* grad, const f32* later, const f32* decay,
        const f32* before, f32* own, bf16* rounded, f32* to_before, f32* partial, u32 rows, u32 width)) {
  SHARED(f32, summands, 3 * BAND * PAIR);
  const u32 first = block_index() * BAND, end = first + BAND < rows ? first + BAND : rows, lane = thread_index() % PARTS;
  f32 factor[STEPS], along[STEPS];
  UNROLL
  for (u32 step = 0; step < STEPS; ++step) {
    const u32 index = first + step * ROWS + thread_index() / PARTS;
    const u64 at = static_cast<u64>(index) * width;
    const f32 by = index < end ? factors[index] : 0.0f;
    const f32 sum = along_row({index, lane, index < end}, width,
                              [=](u64 column) { return grad[at + column] * (state[at + column] * by) * weight[column]; });
    factor[step] = by;
    along[step] = sum / -static_cast<f32>(width);
  }
  // All that is read is asked for before the first outcome is written: a compiler cannot know that the one is not where the other is.
  for (u32 base = 0; base < width; base += PAIR) {
    f32 slope[2 * STEPS], normed[2 * STEPS], beyond[2 * STEPS], entered[2 * STEPS];
    of_band(first, end, base, width, [&](u32 which, u32, u32, u64 at) {
      slope[which] = grad[at];
      normed[which] = state[at] * factor[which / 2];
      beyond[which] = later != nullptr ? later[at] : 0.0f;
      entered[which] = before != nullptr ? before[at] : 0.0f;
    });
    of_band(first, end, base, width, [&](u32 which, u32 row, u32 place, u64 at) {
      f32 value = (slope[which] * weight[base + place] + normed[which] * along[which / 2]) * factor[which / 2];
      if (later != nullptr) value = beyond[which] + value;
      f32* all = summands + row * PAIR + place;
      all[0] = slope[which] * normed[which];
      all[BAND * PAIR] = value;
      all[2 * BAND * PAIR] = before != nullptr ? value * entered[which] : 0.0f;
      if (own != nullptr) own[at] = value;
      if (rounded != nullptr) put(rounded[at], value);
      if (to_before != nullptr) to_before[at] = value * decay[base + place];
    });
    barrier();
    const u32 which = thread_index() / PAIR, place = thread_index() % PAIR;
    if (which < 3 && base + place < width) {
      f32 sum = 0.0f;
      for (u32 row = 0; row < end - first; ++row) sum += summands[(which * BAND + row) * PAIR + place];
      const u64 bands = (rows + BAND - 1) / BAND;
      partial[(which * bands + block_index()) * width + base + place] = sum;
    }
    barrier();
  }
}

// 32 columns of a band: blocks go over the columns first.
struct Patch {
  u32 band, column, first, end;
};
DEVICE Patch patch_of(u32 rows, u32 width) {
  const u32 tiles = (width + BAND - 1) / BAND, band = block_index() / tiles, first = band * BAND;
  return {band, block_index() % tiles * BAND + thread_index() % BAND, first, first + BAND < rows ? first + BAND : rows};
}

// out = gelu(x + bias), the exact one: x times the normal distribution's integral up to x.
KERNEL(bias_gelu, 256, LIMIT(64, 0, 8), (const f32* x, const f32* bias, f32* out, u32 rows, u32 width)) {
  const Patch patch = patch_of(rows, width);
  if (patch.column >= width) return;
  const f32 own = bias[patch.column];
  for (u32 row = patch.first + thread_index() / BAND; row < patch.end; row += BLOCK / BAND) {
    const u64 at = static_cast<u64>(row) * width + patch.column;
    const f32 value = x[at] + own;
    out[at] = static_cast<f32>(value * (0.5 + 0.5 * error_function(value * 0.7071067811865476)));
  }
}

// Back; and in bands the sum of out over the rows.
KERNEL(gelu_backward, 256, LIMIT(64, 4096, 8),
       (const f32* x, const f32* bias, const f32* grad, f32* out, f32* partial, u32 rows, u32 width)) {
  SHARED(f32, values, BAND * BAND);
  const Patch patch = patch_of(rows, width);
  const bool there = patch.column < width;
  const f32 shift = there ? bias[patch.column] : 0.0f;
  for (u32 row = patch.first + thread_index() / BAND; there && row < patch.end; row += BLOCK / BAND) {
    const u64 at = static_cast<u64>(row) * width + patch.column;
    const f64 value = x[at] + shift;
    const f64 integral = 0.5 + 0.5 * error_function(value * 0.7071067811865476);
    const f64 density = 0.3989422804014327 * exponential(static_cast<f32>(-0.5 * value * value));
    const f32 own = static_cast<f32>(grad[at] * (integral + value * density));
    out[at] = own;
    values[(row - patch.first) * BAND + thread_index() % BAND] = own;
  }
  barrier();
  if (thread_index() >= BAND || !there) return;
  f32 sum = 0.0f;
  for (u32 row = 0; row < patch.end - patch.first; ++row) sum += values[row * BAND + thread_index()];
  partial[static_cast<u64>(patch.band) * width + patch.column] = sum;
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

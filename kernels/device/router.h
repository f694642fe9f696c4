// The router: depth averaging, a norm, two hidden layers with GELU, probabilities and the choice of a class; and back. f32. One
// launch each way: a block has a band of rows, whose values pass from layer to layer in shared memory.
//
// An element of a matmul is one chain of fused multiplications and additions over the inner index, ascending; zeros after its end
// add nothing. Other sums are those of rows.h.
#pragma once
#include "fours.h"
#include "numbers.h"
#include "rows.h"

// A band of rows in shared memory, zeros beyond their columns, of which there are at most WIDE; and a part of a matrix.
template <u32 WIDE>
struct RouterBand {
  static constexpr u32 PITCH = WIDE + 4;  // rows that are read at once begin in different banks
  u32 first, end;                         // its rows in the matrix
  f32 *rows, *weights;
};
template <u32 WIDE>
DEVICE RouterBand<WIDE> band_of(u32 rows, Four* own, Four* weights) {
  const u32 first = block_index() * BAND;
  return {first, first + BAND < rows ? first + BAND : rows, reinterpret_cast<f32*>(own), reinterpret_cast<f32*>(weights)};
}
constexpr u32 PART = 64 * (32 + 4);  // of weights: the largest of `product`
#define BAND_OF(wide)                               \
  SHARED(Four, own_rows, BAND*((wide) + 4) / 4);    \
  SHARED(Four, part_of_weights, PART / 4);          \
  const RouterBand<wide> band = band_of<wide>(rows, own_rows, part_of_weights)

// what(row of the band, column, index in the matrix, value) for each element of the band's rows that are there.
template <u32 WIDE, typename Do>
DEVICE void each_of_band(const RouterBand<WIDE>& band, u32 width, Do what) {
  ROLLED
  for (u32 place = thread_index(); place < (band.end - band.first) * width; place += BLOCK) {
    const u32 row = place / width, column = place % width;
    what(row, column, static_cast<u64>(band.first + row) * width + column, band.rows[row * RouterBand<WIDE>::PITCH + column]);
  }
}

// partial[which, band, c] = the sum of column c over the band's rows.
template <u32 WIDE>
DEVICE void sum_band(const RouterBand<WIDE>& band, u32 which, u32 rows, u32 width, f32* partial) {
  barrier();
  const u64 bands = (rows + BAND - 1) / BAND;
  for (u32 column = thread_index(); column < width; column += BLOCK) {
    f32 sum = 0.0f;
    for (u32 row = 0; row < band.end - band.first; ++row) sum += band.rows[row * RouterBand<WIDE>::PITCH + column];
    partial[(which * bands + block_index()) * width + column] = sum;
  }
}

// Weights as a matmul reads them: forward [width, inner], back [inner, width].
enum class Way { forward, back };
struct Matrix {
  const f32* all;
  u32 inner, width;
};

// A block has 32 OWN columns of a matmul at once, a thread OWN rows and four columns side by side. Of the weights' inner index it
// brings 64 / OWN into shared memory at once, two fours a thread, which `number` tells apart.
template <u32 OWN>
constexpr u32 DEPTH = 64 / OWN;
template <u32 OWN>
constexpr u32 ACROSS = 32 * OWN;
struct WeightPlace {
  u32 inner, column;
};
template <u32 OWN, Way WAY>
DEVICE WeightPlace place_of(u32 number) {
  const u32 at = thread_index() + number * BLOCK;
  if (WAY == Way::forward) return {at % (DEPTH<OWN> / 4) * 4, at / (DEPTH<OWN> / 4)};
  return {at / (ACROSS<OWN> / 4), at % (ACROSS<OWN> / 4) * 4};
}
template <u32 OWN, Way WAY, bool WHOLE>
DEVICE void ask(const Matrix& weights, u32 base, u32 first, Four (&fours)[2]) {
  UNROLL
  for (u32 number = 0; number < 2; ++number) {
    const WeightPlace own = place_of<OWN, WAY>(number);
    const u32 inner = first + own.inner, column = base + own.column;
    const u32 row = WAY == Way::forward ? column : inner, along = WAY == Way::forward ? inner : column;
    const u32 height = WAY == Way::forward ? weights.width : weights.inner;
    const u32 length = WAY == Way::forward ? weights.inner : weights.width;
    fours[number] = load<WHOLE>(weights.all + static_cast<u64>(row) * length, along, row < height ? length : 0).all;
  }
}
template <u32 OWN, Way WAY>
DEVICE void ask(const Matrix& weights, u32 base, u32 first, bool whole, Four (&fours)[2]) {
  whole ? ask<OWN, WAY, true>(weights, base, first, fours) : ask<OWN, WAY, false>(weights, base, first, fours);
}
template <u32 OWN, Way WAY>
DEVICE void bring(const Four (&fours)[2], f32* into) {
  UNROLL
  for (u32 number = 0; number < 2; ++number) {
    const WeightPlace own = place_of<OWN, WAY>(number);
    f32* to = into + own.inner * (ACROSS<OWN> + 4) + own.column;
    if constexpr (WAY == Way::back) {
      at_once(to, fours[number]);
    } else {
      UNROLL
      for (u32 next = 0; next < 4; ++next) to[next * (ACROSS<OWN> + 4)] = fours[number].at[next];
    }
  }
}

// The row of the band that a thread has as its `next`, and its first column.
template <u32 OWN>
DEVICE u32 row_of_thread(u32 next) {
  return thread_index() / (8 * OWN) + BAND / OWN * next;
}
template <u32 OWN>
DEVICE u32 column_of_thread() {
  return thread_index() % (8 * OWN) * 4;
}

// Adds the matmul of the band's rows with columns `base` and later of the weights to the sums. The next part of the weights is on
// its way while one is multiplied.
template <u32 OWN, Way WAY, u32 WIDE>
DEVICE void product(const RouterBand<WIDE>& band, const Matrix& weights, u32 base, Four (&sums)[OWN]) {
  const bool whole = by_fours(WAY == Way::forward ? weights.inner : weights.width, weights.all);
  const f32 *rows = band.rows, *across = band.weights + column_of_thread<OWN>();
  Four fours[2];
  ask<OWN, WAY>(weights, base, 0, whole, fours);
  for (u32 first = 0; first < weights.inner; first += DEPTH<OWN>) {
    barrier();
    bring<OWN, WAY>(fours, band.weights);
    barrier();
    if (first + DEPTH<OWN> < weights.inner) ask<OWN, WAY>(weights, base, first + DEPTH<OWN>, whole, fours);
    ROLLED
    for (u32 inner = 0; inner < DEPTH<OWN>; inner += 4) {
      Four own[OWN];
      UNROLL
      for (u32 row = 0; row < OWN; ++row)
        own[row] = at_once(rows + row_of_thread<OWN>(row) * RouterBand<WIDE>::PITCH + first + inner);
      UNROLL
      for (u32 next = 0; next < 4; ++next) {
        const Four other = at_once(across + (inner + next) * (ACROSS<OWN> + 4));
        UNROLL
        for (u32 row = 0; row < OWN; ++row) {
          UNROLL
          for (u32 column = 0; column < 4; ++column)
            sums[row].at[column] = fused(own[row].at[next], other.at[column], sums[row].at[column]);
        }
      }
    }
  }
}

// Puts a matmul in the place of the rows of which it was made.
template <u32 WIDE>
DEVICE void replace(const RouterBand<WIDE>& band, u32 width, Four (&sums)[WIDE / 32]) {
  constexpr u32 OWN = WIDE / 32;
  const u32 column = column_of_thread<OWN>();
  barrier();
  UNROLL
  for (u32 row = 0; row < OWN; ++row) {
    UNROLL
    for (u32 next = 0; next < 4; ++next)
      if (column + next >= width) sums[row].at[next] = 0.0f;  // not infinity times zero
    at_once(band.rows + row_of_thread<OWN>(row) * RouterBand<WIDE>::PITCH + column, sums[row]);
  }
  barrier();
}

// GELU, the exact one: x times the normal distribution's integral up to x, which it also finds.
DEVICE f32 gelu(f64 x, f64& integral) {
  integral = 0.5 + 0.5 * error_function(x * 0.7071067811865476);
  return static_cast<f32>(x * integral);
}

// rows = gelu(rows weights^T + bias); what the GELU is of, without the bias, goes into `before`.
template <u32 WIDE>
DEVICE void hidden(const RouterBand<WIDE>& band, const f32* weights, const f32* bias, u32 width, f32* before) {
  Four sums[WIDE / 32] = {};
  product<WIDE / 32, Way::forward>(band, {weights, width, width}, 0, sums);
  replace(band, width, sums);
  each_of_band(band, width, [=](u32 row, u32 column, u64 at, f32 value) {
    f64 integral;
    before[at] = value;
    band.rows[row * RouterBand<WIDE>::PITCH + column] = gelu(value + bias[column], integral);
  });
}

// rows = grad of what a GELU is of, from that of what it makes. Into `out` and `slope` go what it makes and the former again, and
// into partial[which] its sums.
template <u32 WIDE>
DEVICE void hidden_back(const RouterBand<WIDE>& band, const f32* before, const f32* bias, u32 rows, u32 width, f32* out,
                        f32* slope, u32 which, f32* partial) {
  each_of_band(band, width, [=](u32 row, u32 column, u64 at, f32 grad) {
    const f64 value = before[at] + bias[column];
    f64 integral;
    out[at] = gelu(value, integral);
    const f64 density = 0.3989422804014327 * exponential(static_cast<f32>(-0.5 * value * value));
    const f32 own = static_cast<f32>(grad * (integral + value * density));
    slope[at] = own;
    band.rows[row * RouterBand<WIDE>::PITCH + column] = own;
  });
  sum_band(band, which, rows, width, partial);
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

// probabilities = softmax of the logits that stand there, [N, C]; choice = the place of the largest sum with balance; weight =
// the probability there; the choice also goes to `chosen`. 16 lanes a row, each of which reads only where it writes.
DEVICE void choose(Row row, const f32* balance, f32* probabilities, i64* choice, f32* weight, u32 classes, f32& chosen) {
  const f32 LEAST = from_bits(0xff800000u);  // minus infinity
  f32* own = probabilities + static_cast<u64>(row.index) * classes;
  Best largest = {LEAST, ~0u};
  if (row.there)
    for (u32 place = row.lane; place < classes; place += PARTS) largest = better(largest, {own[place], place});
  largest = best_of_row(largest);
  const f32 sum = along_row(row, classes, [=](u32 place) { return exponential(own[place] - largest.value); });
  Best best = {LEAST, ~0u};
  if (row.there)
    for (u32 place = row.lane; place < classes; place += PARTS) {
      const f32 value = exponential(own[place] - largest.value) / sum;
      own[place] = value;
      best = better(best, {value + balance[place], place});
    }
  best = best_of_row(best);
  if (!row.there || best.place % PARTS != row.lane) return;  // the lane that wrote the probability
  choice[row.index] = best.place;
  chosen = static_cast<f32>(best.place);
  weight[row.index] = own[best.place];
}

// The rows of a band that 16 lanes have one after the other, and how many columns a lane has of them at most.
constexpr u32 STEPS = BAND / ROWS;
template <u32 WIDE>
DEVICE Row row_of_band(const RouterBand<WIDE>& band, u32 step) {
  const u32 index = band.first + step * ROWS + thread_index() / PARTS;
  return {index, thread_index() % PARTS, index < band.end};
}
template <u32 WIDE>
constexpr u32 OF_LANE = WIDE / PARTS;

// Forward. `before` and `decay` are null without a router in an earlier layer. What is projected may stand where the state goes.
// hidden: [2, N, R], what both GELUs are of, without their biases. counts: [bands, C], tokens of each class in a band.
template <typename T>
struct Router {
  const T* projected;
  f32* state;
  const f32 *bias, *before, *decay, *norm;
  f32* factors;
  const f32 *fc1, *fc1_bias, *fc2, *fc2_bias, *out, *balance;
  f32* hidden;
  f32* probabilities;
  i64* choice;
  f32* weight;
  u32* counts;
  u32 rows, width, classes;
  f32 eps;
};

// state = projected + bias + before decay; rows = its norm.
template <u32 WIDE, typename T>
DEVICE void averaged(const RouterBand<WIDE>& band, const Router<T>& by) {
  UNROLL
  for (u32 step = 0; step < STEPS; ++step) {
    const Row row = row_of_band(band, step);
    const u64 at = static_cast<u64>(row.index) * by.width;
    f32* own = band.rows + (row.index - band.first) * RouterBand<WIDE>::PITCH;
    // All is asked for before the first is written: for all that a compiler knows the one may stand where the other is.
    f32 values[OF_LANE<WIDE>];
    UNROLL
    for (u32 next = 0; next < OF_LANE<WIDE>; ++next) {
      const u32 column = row.lane + next * PARTS;
      values[next] = 0.0f;
      if (!row.there || column >= by.width) continue;
      values[next] = wide(by.projected[at + column]) + by.bias[column];
      if (by.before != nullptr) values[next] += by.before[at + column] * by.decay[column];
    }
    f32 part = 0.0f;
    UNROLL
    for (u32 next = 0; next < OF_LANE<WIDE>; ++next) {
      const u32 column = row.lane + next * PARTS;
      if (row.there && column < by.width) by.state[at + column] = values[next];
      part += values[next] * values[next];
    }
    const f32 factor = 1.0f / root(together(part) / static_cast<f32>(by.width) + by.eps);
    if (row.there && row.lane == 0) by.factors[row.index] = factor;
    UNROLL
    for (u32 next = 0; next < OF_LANE<WIDE>; ++next) {
      const u32 column = row.lane + next * PARTS;
      const bool there = row.there && column < by.width;
      own[column] = there ? values[next] * factor * by.norm[column] : 0.0f;
    }
  }
}

template <u32 WIDE, typename T>
DEVICE void router(const RouterBand<WIDE>& band, const Router<T>& by) {
  averaged(band, by);
  hidden(band, by.fc1, by.fc1_bias, by.width, by.hidden);
  hidden(band, by.fc2, by.fc2_bias, by.width, by.hidden + static_cast<u64>(by.rows) * by.width);
  for (u32 base = 0; base < by.classes; base += ACROSS<1>) {
    Four logits[1] = {};
    product<1, Way::forward>(band, {by.out, by.width, by.classes}, base, logits);
    const u32 row = band.first + row_of_thread<1>(0), column = base + column_of_thread<1>();
    if (row >= band.end) continue;
    UNROLL
    for (u32 next = 0; next < 4; ++next)
      if (column + next < by.classes) by.probabilities[static_cast<u64>(row) * by.classes + column + next] = logits[0].at[next];
  }
  barrier();
  f32* const chosen = band.weights;  // which nobody reads any more
  for (u32 step = 0; step < STEPS; ++step) {
    const Row row = row_of_band(band, step);
    choose(row, by.balance, by.probabilities, by.choice, by.weight, by.classes, chosen[row.index - band.first]);
  }
  barrier();
  for (u32 own = thread_index(); own < by.classes; own += BLOCK) {
    u32 count = 0;
    for (u32 row = 0; row < band.end - band.first; ++row) count += chosen[row] == static_cast<f32>(own);
    by.counts[static_cast<u64>(block_index()) * by.classes + own] = count;
  }
}
KERNEL(router_f32, 256, LIMIT(96, 26112, 2, 4, 0, 2),
       (const f32* projected, f32* state, const f32* bias, const f32* before, const f32* decay, const f32* norm, f32* factors,
        const f32* fc1, const f32* fc1_bias, const f32* fc2, const f32* fc2_bias, const f32* out, const f32* balance, f32* hidden,
        f32* probabilities, i64* choice, f32* weight, u32* counts, u32 rows, u32 width, u32 classes, f32 eps)) {
  BAND_OF(128);
  router(band, Router<f32>{projected, state, bias, before, decay, norm, factors, fc1, fc1_bias, fc2, fc2_bias, out, balance,
                           hidden, probabilities, choice, weight, counts, rows, width, classes, eps});
}
KERNEL(router_bf16, 256, LIMIT(96, 26112, 2, 4, 0, 2),
       (const bf16* projected, f32* state, const f32* bias, const f32* before, const f32* decay, const f32* norm, f32* factors,
        const f32* fc1, const f32* fc1_bias, const f32* fc2, const f32* fc2_bias, const f32* out, const f32* balance, f32* hidden,
        f32* probabilities, i64* choice, f32* weight, u32* counts, u32 rows, u32 width, u32 classes, f32 eps)) {
  BAND_OF(128);
  router(band, Router<bf16>{projected, state, bias, before, decay, norm, factors, fc1, fc1_bias, fc2, fc2_bias, out, balance,
                           hidden, probabilities, choice, weight, counts, rows, width, classes, eps});
}
KERNEL(router_wide_f32, 256, LIMIT(144, 42496, 1, 4, 0, 1),
       (const f32* projected, f32* state, const f32* bias, const f32* before, const f32* decay, const f32* norm, f32* factors,
        const f32* fc1, const f32* fc1_bias, const f32* fc2, const f32* fc2_bias, const f32* out, const f32* balance, f32* hidden,
        f32* probabilities, i64* choice, f32* weight, u32* counts, u32 rows, u32 width, u32 classes, f32 eps)) {
  BAND_OF(256);
  router(band, Router<f32>{projected, state, bias, before, decay, norm, factors, fc1, fc1_bias, fc2, fc2_bias, out, balance,
                           hidden, probabilities, choice, weight, counts, rows, width, classes, eps});
}
KERNEL(router_wide_bf16, 256, LIMIT(144, 42496, 1, 4, 0, 1),
       (const bf16* projected, f32* state, const f32* bias, const f32* before, const f32* decay, const f32* norm, f32* factors,
        const f32* fc1, const f32* fc1_bias, const f32* fc2, const f32* fc2_bias, const f32* out, const f32* balance, f32* hidden,
        f32* probabilities, i64* choice, f32* weight, u32* counts, u32 rows, u32 width, u32 classes, f32 eps)) {
  BAND_OF(256);
  router(band, Router<bf16>{projected, state, bias, before, decay, norm, factors, fc1, fc1_bias, fc2, fc2_bias, out, balance,
                           hidden, probabilities, choice, weight, counts, rows, width, classes, eps});
}

// Back. `grad` is that of the weight; `later` is the gradient of the state from the router after this one, or null; `before`,
// `decay` and `to_before` are null without one before. The gradient of the state is written to `narrow`, rounded, or to `own`.
// Both hidden layers leave in `layers` what comes to them, [2, N, R], and behind it the gradients of their matmuls, likewise; the
// logits leave theirs, `last` and `logits`: from those a library makes the gradients of weights. partial: sums over a band,
// [5, bands, R], for the norm's weight, the bias of the projection, the decay, and the biases of both layers.
struct RouterBack {
  const f32* probabilities;
  const i64* choice;
  const f32 *grad, *out;
  f32 *logits, *last;
  const f32 *hidden, *fc2_bias, *fc2, *fc1_bias, *fc1;
  f32* layers;
  const f32 *state, *factors, *norm, *later, *decay, *before;
  f32* own;
  bf16* narrow;
  f32 *to_before, *partial;
  u32 rows, width, classes;
};

// rows = the gradient of what comes to the logits.
template <u32 WIDE>
DEVICE void logits_back(const RouterBand<WIDE>& band, const RouterBack& by) {
  Four sums[WIDE / 32] = {};
  ROLLED
  for (u32 base = 0; base < by.classes; base += WIDE) {
    const u32 count = by.classes - base < WIDE ? by.classes - base : WIDE;
    barrier();
    ROLLED
    for (u32 place = thread_index(); place < BAND * WIDE; place += BLOCK) {
      const u32 row = place / WIDE, column = place % WIDE, index = band.first + row;
      f32 value = 0.0f;
      if (index < band.end && column < count) {
        const u64 at = static_cast<u64>(index) * by.classes;
        const u32 chosen = static_cast<u32>(by.choice[index]);
        const f32 scaled = by.grad[index] * by.probabilities[at + chosen];
        const f32 all = by.probabilities[at + base + column] * -scaled;
        value = base + column == chosen ? all + scaled : all;
        by.logits[at + base + column] = value;
      }
      band.rows[row * RouterBand<WIDE>::PITCH + column] = value;
    }
    product<WIDE / 32, Way::back>(band, {by.out + static_cast<u64>(base) * by.width, count, by.width}, 0, sums);
  }
  replace(band, by.width, sums);
}

// rows = rows weights.
template <u32 WIDE>
DEVICE void matmul_back(const RouterBand<WIDE>& band, const f32* weights, u32 width) {
  Four sums[WIDE / 32] = {};
  product<WIDE / 32, Way::back>(band, {weights, width, width}, 0, sums);
  replace(band, width, sums);
}

// What a thread has of the band's rows, 16 lanes a row.
template <u32 WIDE>
struct OfThread {
  f32 at[STEPS][OF_LANE<WIDE>];
};
// what(step, next, row, column, index in the matrix, place in shared memory) for each.
template <u32 WIDE, typename Do>
DEVICE void each_of_thread(const RouterBand<WIDE>& band, u32 width, Do what) {
  UNROLL
  for (u32 step = 0; step < STEPS; ++step) {
    const Row row = row_of_band(band, step);
    UNROLL
    for (u32 next = 0; next < OF_LANE<WIDE>; ++next) {
      const u32 column = row.lane + next * PARTS;
      if (!row.there || column >= width) continue;
      what(step, next, column, static_cast<u64>(row.index) * width + column,
           (row.index - band.first) * RouterBand<WIDE>::PITCH + column);
    }
  }
}

// From the gradient of what the norm makes, which the rows are: that of the state.
template <u32 WIDE>
DEVICE void norm_back(const RouterBand<WIDE>& band, const RouterBack& by) {
  const u32 width = by.width;
  OfThread<WIDE> slope = {}, normed = {};
  each_of_thread(band, width, [&](u32 step, u32 next, u32, u64 at, u32 place) {
    slope.at[step][next] = band.rows[place];
    normed.at[step][next] = by.state[at];
  });
  f32 factor[STEPS], along[STEPS];
  UNROLL
  for (u32 step = 0; step < STEPS; ++step) {
    const Row row = row_of_band(band, step);
    factor[step] = row.there ? by.factors[row.index] : 0.0f;
    f32 part = 0.0f;
    UNROLL
    for (u32 next = 0; next < OF_LANE<WIDE>; ++next) {
      const u32 column = row.lane + next * PARTS;
      normed.at[step][next] *= factor[step];
      if (row.there && column < width) part += slope.at[step][next] * normed.at[step][next] * by.norm[column];
    }
    along[step] = together(part) / -static_cast<f32>(width);
  }
  each_of_thread(band, width, [&](u32 step, u32 next, u32 column, u64 at, u32 place) {
    by.layers[at] = normed.at[step][next] * by.norm[column];
    band.rows[place] = slope.at[step][next] * normed.at[step][next];
  });
  sum_band(band, 0, by.rows, width, by.partial);
  barrier();
  // All that is read is asked for before the first is written, as in `averaged`.
  each_of_thread(band, width, [&](u32 step, u32 next, u32 column, u64 at, u32) {
    f32& value = slope.at[step][next];
    value = (value * by.norm[column] + normed.at[step][next] * along[step]) * factor[step];
    if (by.later != nullptr) value = by.later[at] + value;
  });
  each_of_thread(band, width, [&](u32 step, u32 next, u32 column, u64 at, u32 place) {
    const f32 value = slope.at[step][next];
    if (by.narrow != nullptr) put(by.narrow[at], value);
    else by.own[at] = value;
    if (by.to_before != nullptr) by.to_before[at] = value * by.decay[column];
    band.rows[place] = value;
  });
  sum_band(band, 1, by.rows, width, by.partial);
  if (by.before == nullptr) return;
  barrier();
  each_of_thread(band, width, [&](u32 step, u32 next, u32, u64 at, u32 place) {
    band.rows[place] = slope.at[step][next] * by.before[at];
  });
  sum_band(band, 2, by.rows, width, by.partial);
}

template <u32 WIDE>
DEVICE void router_back(const RouterBand<WIDE>& band, const RouterBack& by) {
  const u64 whole = static_cast<u64>(by.rows) * by.width;
  logits_back(band, by);
  hidden_back(band, by.hidden + whole, by.fc2_bias, by.rows, by.width, by.last, by.layers + 3 * whole, 4, by.partial);
  matmul_back(band, by.fc2, by.width);
  hidden_back(band, by.hidden, by.fc1_bias, by.rows, by.width, by.layers + whole, by.layers + 2 * whole, 3, by.partial);
  matmul_back(band, by.fc1, by.width);
  norm_back(band, by);
}
KERNEL(router_backward, 256, LIMIT(104, 26112, 2, 4, 0, 2),
       (const f32* probabilities, const i64* choice, const f32* grad, const f32* out, f32* logits, f32* last, const f32* hidden,
        const f32* fc2_bias, const f32* fc2, const f32* fc1_bias, const f32* fc1, f32* layers,
        const f32* state, const f32* factors, const f32* norm, const f32* later, const f32* decay, const f32* before, f32* own,
        bf16* narrow, f32* to_before, f32* partial, u32 rows, u32 width, u32 classes)) {
  BAND_OF(128);
  router_back(band, {probabilities, choice, grad, out, logits, last, hidden, fc2_bias, fc2, fc1_bias, fc1, layers,
                     state, factors, norm, later, decay, before, own, narrow, to_before, partial, rows, width, classes});
}
KERNEL(router_wide_backward, 256, LIMIT(144, 42496, 1, 4, 0, 1),
       (const f32* probabilities, const i64* choice, const f32* grad, const f32* out, f32* logits, f32* last, const f32* hidden,
        const f32* fc2_bias, const f32* fc2, const f32* fc1_bias, const f32* fc1, f32* layers,
        const f32* state, const f32* factors, const f32* norm, const f32* later, const f32* decay, const f32* before, f32* own,
        bf16* narrow, f32* to_before, f32* partial, u32 rows, u32 width, u32 classes)) {
  BAND_OF(256);
  router_back(band, {probabilities, choice, grad, out, logits, last, hidden, fc2_bias, fc2, fc1_bias, fc1, layers,
                     state, factors, norm, later, decay, before, own, narrow, to_before, partial, rows, width, classes});
}

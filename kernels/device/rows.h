// Row by row and column by column over matrices [N, D]: norms, residual additions, sums over rows. The order of sums is that of
// src/ops/cpu/norm.rs, so that the outcomes are the CPU's, to the bit.
#pragma once
#include "dispatch.h"

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

struct Scaling {
  const f32 *scale, *bias, *residual_scale, *residual_bias;
};

// Four columns of its vectors.
struct Scales {
  Four scale, bias, residual_scale, residual_bias;
};
template <bool WHOLE>
DEVICE Scales scales_of(const Scaling& by, u32 column, u32 width) {
  return {of_vector<WHOLE>(by.scale, column, width), of_vector<WHOLE>(by.bias, column, width),
          of_vector<WHOLE>(by.residual_scale, column, width), of_vector<WHOLE>(by.residual_bias, column, width)};
}

// (branch + bias) scale + (residual + residual_bias) residual_scale, of four columns.
template <typename T>
DEVICE Four added_up(const Packed<T>& branch, const Packed<f32>& residual, const Scales& by) {
  Four sum;
  UNROLL
  for (u32 next = 0; next < 4; ++next)
    sum.at[next] = (wide(branch, next) + by.bias.at[next]) * by.scale.at[next] +
                   (wide(residual, next) + by.residual_bias.at[next]) * by.residual_scale.at[next];
  return sum;
}

// How rows in the order of experts become a matrix [N, D] (dispatch.h): the place of each token, the rows of tokens
// without an expert or null, where the places of experts end, and for a branch the gate of each token. The way back
// of a branch also needs the token of each of `all` places, and writes gradients of the gates.
template <typename T>
struct Routes {
  const i64* places;
  const T* passed;
  const int* ends;
  u32 experts;
  const f32* gates = nullptr;
  const int* order = nullptr;
  f32* to_gates = nullptr;
  u32 all = 0;
};

// The places of the tokens of a block, with SKIPPED added where no expert computes the row, and their gates, if
// there are any. They are in shared memory, as registers for the addresses of all lists would spill on gfx942.
struct Places {
  u32* at = nullptr;
  f32* gates = nullptr;
};
constexpr u32 SKIPPED = 1u << 31;
template <typename T>
DEVICE void find_places(const Places& found, const Routes<T>& by, u32 first, u32 end) {
  const u32 token = first + thread_index();
  if (token < end) {
    const u32 place = static_cast<u32>(by.places[token]);
    found.at[thread_index()] = place + (place < end_of_experts(by.ends, by.experts) ? 0 : SKIPPED);
    if (by.gates != nullptr) found.gates[thread_index()] = by.gates[token];
  }
  barrier();
}
template <typename T>
DEVICE RowView<T> row_found(u32 place, const T* x, const T* passed, u32 width) {
  const T* rows = place < SKIPPED ? x : passed;
  return {rows + static_cast<u64>(place % SKIPPED) * width, rows == nullptr ? 0 : width};
}

// Forward, over rows that stand in `residual`, or that come to be there by the addition of a branch. ROUTED: the
// branch has rows of experts, and each is multiplied by the gate of its token and rounded, as by `gather`.
template <typename T>
struct Forward {
  const T* branch;
  const f32* residual;
  Scaling scaling;
  f32* sum;
  const f32* weight;
  T* out;
  f32* factors;
  u32 rows, width;
  f32 eps;
  Routes<T> routes = {};
};

// ADD: sum = what branch and residual come to. NORM: of the sum, or of the residual, out = x f weight with f = 1 / sqrt(mean of x^2
// + eps) for each row, which goes into factors. A block has 16 rows, of which it asks for four at once. Each operand is read once
// and each outcome written once: of an element 12 bytes with a branch in bf16 (2 + 4 and 4 + 2), and nothing can be left out. Of
// rows wider than SPAN the sum is read again.
template <bool WHOLE, bool ADD, bool NORM, bool ROUTED, typename T>
DEVICE void forward(const Forward<T>& by, Four* squares, f32* found, const Places& places = {}) {
  constexpr u32 AHEAD = WHOLE ? 4 : 1;
  const u32 first = block_index() * ROWS, own = 4 * thread_index(), rows = by.rows, width = by.width;
  const bool once = width <= SPAN;
  if constexpr (ROUTED) find_places(places, by.routes, first, first + ROWS < rows ? first + ROWS : rows);
  Scales scales = {};
  Four weight = {};
  for (u32 row = first; row < first + ROWS && row < rows; row += AHEAD) {
    Packed<f32> x[AHEAD];
    f32 part = 0.0f;
    for (u32 base = 0; base < width; base += SPAN) {
      const u32 column = base + own;
      Packed<T> branch[AHEAD];
      f32 gates[AHEAD];
      UNROLL
      for (u32 next = 0; next < AHEAD; ++next) {
        const u64 at = static_cast<u64>(row + next) * width;
        const u32 limit = row + next < rows ? width : 0;  // nothing is there of a row that is not
        x[next] = load<WHOLE>(by.residual + at, column, limit);
        if constexpr (ROUTED) {
          const u32 at = limit > 0 ? row - first + next : 0;
          const RowView<T> from = row_found(places.at[at], by.branch, by.routes.passed, width);
          branch[next] = load<WHOLE>(from.row, column, limit > 0 ? from.width : 0);
          gates[next] = places.gates[at];
        } else if constexpr (ADD) {
          branch[next] = load<WHOLE>(by.branch + at, column, limit);
        }
      }
      if constexpr (ADD) {
        if (row == first || !once) scales = scales_of<WHOLE>(by.scaling, column, width);
        UNROLL
        for (u32 next = 0; next < AHEAD; ++next) {
          if constexpr (ROUTED) branch[next] = times(branch[next], gates[next]);
          x[next].all = added_up(branch[next], x[next], scales);
          if (row + next < rows) store<WHOLE>(by.sum + static_cast<u64>(row + next) * width, column, width, x[next]);
        }
      }
      if constexpr (NORM) {
        UNROLL
        for (u32 next = 0; next < AHEAD; ++next) {
          Four square;
          UNROLL
          for (u32 place = 0; place < 4; ++place) square.at[place] = x[next].all.at[place] * x[next].all.at[place];
          put_summands(squares, next, square);
        }
        barrier();
        part = added<AHEAD>(squares, part, width - base);
        if (base + SPAN < width) barrier();
      }
    }
    if constexpr (NORM) {
      summed<AHEAD>(part, [=](u32 next, f32 square) {
        if (row + next >= rows) return;
        const f32 factor = 1.0f / root(square / static_cast<f32>(width) + by.eps);
        found[next] = factor;
        by.factors[row + next] = factor;
      });
      barrier();
      for (u32 base = 0; base < width; base += SPAN) {
        const u32 column = base + own;
        if (row == first || !once) weight = of_vector<WHOLE>(by.weight, column, width);
        UNROLL
        for (u32 next = 0; next < AHEAD; ++next) {
          if (row + next >= rows) continue;
          const u64 at = static_cast<u64>(row + next) * width;
          // A thread reads of the sum only what it has written itself.
          if (!once) x[next] = load<WHOLE>((ADD ? by.sum : by.residual) + at, column, width);
          Packed<T> out = {};
          UNROLL
          for (u32 place = 0; place < 4; ++place)
            put(out, place, x[next].all.at[place] * found[next] * weight.at[place]);
          store<WHOLE>(by.out + at, column, width, out);
        }
      }
    }
  }
}
template <bool ADD, bool NORM, typename T>
DEVICE void forward_by(const Forward<T>& by, Four* squares, f32* found) {
  if (by_fours(by.width, by.branch, by.residual, by.sum, by.out)) forward<true, ADD, NORM, false>(by, squares, found);
  else forward<false, ADD, NORM, false>(by, squares, found);
}
KERNEL(rms_norm_f32, 256, LIMIT(64, 16656, 3, 8),
       (const f32* x, const f32* weight, f32* out, f32* factors, u32 rows, u32 width, f32 eps)) {
  SUMMANDS(squares, 4);
  SHARED(f32, found, 4);
  const Forward<f32> by = {nullptr, x, {}, nullptr, weight, out, factors, rows, width, eps};
  forward_by<false, true>(by, squares, found);
}
KERNEL(rms_norm_bf16, 256, LIMIT(64, 16656, 3, 8),
       (const f32* x, const f32* weight, bf16* out, f32* factors, u32 rows, u32 width, f32 eps)) {
  SUMMANDS(squares, 4);
  SHARED(f32, found, 4);
  const Forward<bf16> by = {nullptr, x, {}, nullptr, weight, out, factors, rows, width, eps};
  forward_by<false, true>(by, squares, found);
}
KERNEL(residual_sum_f32, 256, LIMIT(64, 0, 8, 8),
       (const f32* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, f32* sum, u32 rows, u32 width)) {
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Forward<f32> by = {branch, residual, scaling, sum, nullptr, nullptr, nullptr, rows, width, 0.0f};
  forward_by<true, false>(by, nullptr, nullptr);
}
KERNEL(residual_sum_bf16, 256, LIMIT(64, 0, 8, 4),
       (const bf16* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, f32* sum, u32 rows, u32 width)) {
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Forward<bf16> by = {branch, residual, scaling, sum, nullptr, nullptr, nullptr, rows, width, 0.0f};
  forward_by<true, false>(by, nullptr, nullptr);
}
KERNEL(residual_norm_f32, 256, LIMIT(80, 16656, 3, 12),
       (const f32* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, const f32* weight, f32* sum, f32* out, f32* factors, u32 rows, u32 width, f32 eps)) {
  SUMMANDS(squares, 4);
  SHARED(f32, found, 4);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Forward<f32> by = {branch, residual, scaling, sum, weight, out, factors, rows, width, eps};
  forward_by<true, true>(by, squares, found);
}
KERNEL(residual_norm_bf16, 256, LIMIT(80, 16656, 3, 8),
       (const bf16* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, const f32* weight, f32* sum, bf16* out, f32* factors, u32 rows, u32 width, f32 eps)) {
  SUMMANDS(squares, 4);
  SHARED(f32, found, 4);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Forward<bf16> by = {branch, residual, scaling, sum, weight, out, factors, rows, width, eps};
  forward_by<true, true>(by, squares, found);
}

// What has rows of experts, in their order: nothing, the branch, or the gradient, which comes from a layer of
// experts.
enum Routed { NOTHING, BRANCH, GRADIENT };

// Back. Without an addition the rows that were normed stand in `residual`. To a gradient that has rows of experts,
// `more` is added, and the sum is rounded, as by `unpermute`.
template <typename G, typename T>
struct Back {
  const G* grad;  // of the norm's outcome, or without a norm of the sum
  const f32 *factors, *weight, *beside;
  const T* branch;
  const f32* residual;
  Scaling scaling;
  T* to_branch;
  f32 *to_residual, *of_norm, *partial;
  u32 rows, width;
  Routes<T> routes = {};
  const G* more = nullptr;
};

// Shared memory of a band: what is added along rows; sums; unfinished ones of each lane, for the next SPAN; and the
// places of tokens.
struct Band {
  Four* products;
  f32 *along, *parts = nullptr;
  Places places = {};
};

// What AHEAD rows need of four columns.
template <u32 AHEAD, typename G, typename T>
struct Operands {
  Packed<G> grad[AHEAD];
  Packed<T> branch[AHEAD], row[AHEAD];  // the branch is the row of an expert times its gate
  Packed<f32> residual[AHEAD];
  f32 factor[AHEAD];
};
template <bool WHOLE, bool NORM, bool ADD, Routed ROUTED, u32 AHEAD, typename G, typename T>
DEVICE void load_operands(const Back<G, T>& by, const Band& band, u32 row, u32 end, u32 column, Operands<AHEAD, G, T>& operands) {
  UNROLL
  for (u32 next = 0; next < AHEAD; ++next) {
    const u64 at = static_cast<u64>(row + next) * by.width;
    const u32 limit = row + next < end ? by.width : 0;
    const u32 token = limit > 0 ? (row + next) % BAND : 0;
    if constexpr (ROUTED == GRADIENT) {
      const RowView<G> from = row_found(band.places.at[token], by.grad, by.routes.passed, by.width);
      const Packed<G> own = load<WHOLE>(from.row, column, limit > 0 ? from.width : 0);
      operands.grad[next] = plus(own, load<WHOLE>(by.more + at, column, limit));
    } else {
      operands.grad[next] = load<WHOLE>(by.grad + at, column, limit);
    }
    operands.residual[next] = load<WHOLE>(by.residual + at, column, limit);
    if constexpr (ROUTED == BRANCH) {
      const RowView<T> from = row_found(band.places.at[token], by.branch, by.routes.passed, by.width);
      operands.row[next] = load<WHOLE>(from.row, column, limit > 0 ? from.width : 0);
      operands.branch[next] = times(operands.row[next], band.places.gates[token]);
    } else if constexpr (ADD) {
      operands.branch[next] = load<WHOLE>(by.branch + at, column, limit);
    }
    if constexpr (NORM) operands.factor[next] = row + next < end ? by.factors[row + next] : 0.0f;
  }
}

// What came to the norm, times the factor.
template <bool ADD, u32 AHEAD, typename G, typename T>
DEVICE Four normed_of(const Operands<AHEAD, G, T>& operands, u32 row, const Scales& scales) {
  Four x;
  if constexpr (ADD) x = added_up(operands.branch[row], operands.residual[row], scales);
  else x = operands.residual[row].all;
  UNROLL
  for (u32 next = 0; next < 4; ++next) x.at[next] = x.at[next] * operands.factor[row];
  return x;
}

// Whether a column of four is there. WHOLE: all are, or none.
template <bool WHOLE>
DEVICE bool inside(u32 column, u32 place, u32 width) {
  return column + (WHOLE ? 0 : place) < width;
}

// Puts what the sum of a row is made of into shared memory: gradient, times x times the factor, times the weight.
template <bool WHOLE, u32 AHEAD, typename G, typename T>
DEVICE void put_products(const Operands<AHEAD, G, T>& operands, const Four (&normed)[AHEAD], const Four& weight, u32 column,
                         u32 width, Four* products) {
  UNROLL
  for (u32 next = 0; next < AHEAD; ++next) {
    Four own;
    UNROLL
    for (u32 place = 0; place < 4; ++place) {
      const f32 product = wide(operands.grad[next], place) * normed[next].at[place] * weight.at[place];
      own.at[place] = inside<WHOLE>(column, place, width) ? product : 0.0f;
    }
    put_summands(products, next, own);
  }
}

// Zeros in the places without a token. A thread has a place; those of a block are far apart, since most places
// without a token stand at the end.
template <bool WHOLE, typename T>
DEVICE void zero_padding(const Routes<T>& by, T* rows, u32 blocks, u32 width) {
  for (u32 place = block_index() + blocks * thread_index(); place < by.all; place += blocks * BLOCK) {
    if (by.order[place] >= 0) continue;
    for (u32 column = 0; column < width; column += 4)
      store<WHOLE>(rows + static_cast<u64>(place) * width, column, width, Packed<T>{});
  }
}

// NORM: back through the norm; `beside` is added to the gradient of what came to it, unless that is null. ADD: back through the
// addition that made it: gradients of both sides; without it the gradient goes to the residual. A block has a band. In bands are
// written the gradient of the norm's weight, and, [3, bands, width], the sums of the gradient of the sum, of that times the branch,
// and of that times the residual: of its four columns a thread has them in registers. The sum is not read but made again from
// branch and residual, which must be read anyhow. So of an element with branch and gradient in bf16 are read 2 + 4 + 2 + 4 bytes
// and written 2 + 4, each once. Of rows wider than SPAN gradient, branch and residual are read twice. The gradient may stand where
// that of the residual goes if there is no norm. The gradient of a routed BRANCH is written in the order of experts, as by
// `gather_backward`, with zeros in places without a token.
template <bool WHOLE, bool NORM, bool ADD, Routed ROUTED, typename G, typename T>
DEVICE void band_back(const Back<G, T>& by, const Band& band) {
  constexpr u32 AHEAD = WHOLE ? 2 : 1;
  const u32 first = block_index() * BAND, end = first + BAND < by.rows ? first + BAND : by.rows;
  const u32 own = 4 * thread_index(), width = by.width;
  Four* const products = band.products;
  f32* const along = band.along;
  const bool once = WHOLE && width <= SPAN;
  if constexpr (ROUTED == BRANCH) zero_padding<WHOLE>(by.routes, by.to_branch, (by.rows + BAND - 1) / BAND, width);
  if constexpr (ROUTED != NOTHING) find_places(band.places, by.routes, first, end);
  const auto sum_rows = [=](u32 row, f32 part) {
    summed<AHEAD>(part, [=](u32 next, f32 sum) { along[row - first + next] = sum / -static_cast<f32>(width); });
  };
  if constexpr (NORM)
    for (u32 row = first; row < end && !once; row += AHEAD) {
      f32 part = 0.0f;
      for (u32 base = 0; base < width; base += SPAN) {
        const u32 column = base + own;
        Operands<AHEAD, G, T> operands;
        load_operands<WHOLE, NORM, ADD, ROUTED>(by, band, row, end, column, operands);
        const Scales scales = ADD ? scales_of<WHOLE>(by.scaling, column, width) : Scales{};
        Four normed[AHEAD];
        UNROLL
        for (u32 next = 0; next < AHEAD; ++next) normed[next] = normed_of<ADD>(operands, next, scales);
        put_products<WHOLE>(operands, normed, of_vector<WHOLE>(by.weight, column, width), column, width, products);
        barrier();
        part = added<AHEAD>(products, part, width - base);
        barrier();
      }
      sum_rows(row, part);
    }
  if (NORM && !once) barrier();
  const u64 bands = (by.rows + BAND - 1) / BAND;
  for (u32 base = 0; base < width; base += SPAN) {
    const u32 column = base + own;
    const Scales scales = ADD ? scales_of<WHOLE>(by.scaling, column, width) : Scales{};
    const Four weight = NORM ? of_vector<WHOLE>(by.weight, column, width) : Four{};
    Packed<f32> of_norm = {}, all = {}, branches = {}, residuals = {};
    for (u32 row = first; row < end; row += AHEAD) {
      Operands<AHEAD, G, T> operands;
      load_operands<WHOLE, NORM, ADD, ROUTED>(by, band, row, end, column, operands);
      Packed<f32> beside[AHEAD];
      Four normed[AHEAD];
      if constexpr (NORM) {
        UNROLL
        for (u32 next = 0; next < AHEAD; ++next) {
          const u32 limit = by.beside != nullptr && row + next < end ? width : 0;
          beside[next] = load<WHOLE>(by.beside + static_cast<u64>(row + next) * width, column, limit);
        }
        UNROLL
        for (u32 next = 0; next < AHEAD; ++next) normed[next] = normed_of<ADD>(operands, next, scales);
        if (once) {
          put_products<WHOLE>(operands, normed, weight, column, width, products);
          barrier();
          sum_rows(row, added<AHEAD>(products, 0.0f, width));
          barrier();
        }
      }
      UNROLL
      for (u32 next = 0; next < AHEAD; ++next) {
        if (row + next >= end) continue;
        Packed<T> to_branch = {};
        Packed<f32> to_residual;
        UNROLL
        for (u32 place = 0; place < 4; ++place) {
          f32 value = wide(operands.grad[next], place);
          if constexpr (NORM) {
            of_norm.all.at[place] += value * normed[next].at[place];
            value = (value * weight.at[place] + normed[next].at[place] * along[row - first + next]) * operands.factor[next];
            if (by.beside != nullptr) value = beside[next].all.at[place] + value;
          }
          if constexpr (ADD) {
            all.all.at[place] += value;
            branches.all.at[place] += value * wide(operands.branch[next], place);
            residuals.all.at[place] += value * operands.residual[next].all.at[place];
            put(to_branch, place, value * scales.scale.at[place]);
            value = value * scales.residual_scale.at[place];
          }
          to_residual.all.at[place] = value;
        }
        const u64 at = static_cast<u64>(row + next) * width;
        store<WHOLE>(by.to_residual + at, column, width, to_residual);
        if constexpr (ROUTED == BRANCH) {
          Four product;
          UNROLL
          for (u32 place = 0; place < 4; ++place) {
            const f32 own = wide(to_branch, place) * wide(operands.row[next], place);
            product.at[place] = inside<WHOLE>(column, place, width) ? own : 0.0f;
          }
          put_summands(products, next, product);
          const u64 to = static_cast<u64>(band.places.at[row - first + next] % SKIPPED) * width;
          store<WHOLE>(by.to_branch + to, column, width, times(to_branch, band.places.gates[row - first + next]));
        } else if constexpr (ADD) {
          store<WHOLE>(by.to_branch + at, column, width, to_branch);
        }
      }
      if constexpr (ROUTED == BRANCH) {
        barrier();
        f32* const own = band.parts + (row - first) * PARTS + thread_index();  // of a lane of a row
        const bool last = base + SPAN >= width, there = thread_index() < AHEAD * PARTS;
        const f32 part = added<AHEAD>(products, there && base > 0 ? *own : 0.0f, width - base);
        if (there && !last) *own = part;
        if (last)
          summed<AHEAD>(part, [=](u32 next, f32 sum) {
            if (row + next < end) by.routes.to_gates[row + next] = sum;
          });
        barrier();
      }
    }
    const u64 to = static_cast<u64>(block_index()) * width;
    if constexpr (NORM) store<WHOLE>(by.of_norm + to, column, width, of_norm);
    if constexpr (ADD) {
      store<WHOLE>(by.partial + to, column, width, all);
      store<WHOLE>(by.partial + bands * width + to, column, width, branches);
      store<WHOLE>(by.partial + 2 * bands * width + to, column, width, residuals);
    }
  }
}
template <bool NORM, bool ADD, typename G, typename T>
DEVICE void band_back_by(const Back<G, T>& by, const Band& band) {
  const bool whole = by_fours(by.width, by.grad, by.beside, by.branch, by.residual, by.to_branch, by.to_residual, by.of_norm,
                              by.partial);
  if (whole) band_back<true, NORM, ADD, NOTHING>(by, band);
  else band_back<false, NORM, ADD, NOTHING>(by, band);
}
KERNEL(rms_norm_backward_f32, 256, LIMIT(80, 8448, 6, 10),
       (const f32* x, const f32* factors, const f32* weight, const f32* grad, const f32* beside, f32* input, f32* partial,
        u32 rows, u32 width)) {
  SUMMANDS(products, 2);
  SHARED(f32, along, BAND);
  const Back<f32, f32> by = {grad, factors, weight, beside, nullptr, x, {}, nullptr, input, partial, nullptr, rows, width};
  band_back_by<true, false>(by, {products, along});
}
KERNEL(rms_norm_backward_bf16, 256, LIMIT(80, 8448, 6, 6),
       (const f32* x, const f32* factors, const f32* weight, const bf16* grad, const f32* beside, f32* input, f32* partial,
        u32 rows, u32 width)) {
  SUMMANDS(products, 2);
  SHARED(f32, along, BAND);
  const Back<bf16, bf16> by = {grad, factors, weight, beside, nullptr, x, {}, nullptr, input, partial, nullptr, rows, width};
  band_back_by<true, false>(by, {products, along});
}
KERNEL(residual_backward_f32, 256, LIMIT(80, 0, 6, 6),
       (const f32* branch, const f32* residual, const f32* grad, const f32* scale, const f32* residual_scale, f32* to_branch,
        f32* to_residual, f32* partial, u32 rows, u32 width)) {
  const Scaling scaling = {scale, scale, residual_scale, residual_scale};  // nothing is made again, so that no bias is read
  const Back<f32, f32> by = {grad, nullptr, nullptr, nullptr, branch, residual, scaling, to_branch, to_residual, nullptr, partial,
                           rows, width};
  band_back_by<false, true>(by, {nullptr, nullptr});
}
KERNEL(residual_backward_bf16, 256, LIMIT(80, 0, 6, 4),
       (const bf16* branch, const f32* residual, const f32* grad, const f32* scale, const f32* residual_scale, bf16* to_branch,
        f32* to_residual, f32* partial, u32 rows, u32 width)) {
  const Scaling scaling = {scale, scale, residual_scale, residual_scale};  // nothing is made again, so that no bias is read
  const Back<f32, bf16> by = {grad, nullptr, nullptr, nullptr, branch, residual, scaling, to_branch, to_residual, nullptr, partial,
                           rows, width};
  band_back_by<false, true>(by, {nullptr, nullptr});
}
KERNEL(residual_norm_backward_f32, 256, LIMIT(128, 8448, 4, 14),
       (const f32* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, const f32* factors, const f32* weight, const f32* grad, const f32* beside, f32* to_branch,
        f32* to_residual, f32* of_norm, f32* partial, u32 rows, u32 width)) {
  SUMMANDS(products, 2);
  SHARED(f32, along, BAND);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Back<f32, f32> by = {grad, factors, weight, beside, branch, residual, scaling, to_branch, to_residual, of_norm, partial,
                            rows, width};
  band_back_by<true, true>(by, {products, along});
}
KERNEL(residual_norm_backward_bf16, 256, LIMIT(128, 8448, 4, 6),
       (const bf16* branch, const f32* residual, const f32* scale, const f32* bias, const f32* residual_scale,
        const f32* residual_bias, const f32* factors, const f32* weight, const bf16* grad, const f32* beside, bf16* to_branch,
        f32* to_residual, f32* of_norm, f32* partial, u32 rows, u32 width)) {
  SUMMANDS(products, 2);
  SHARED(f32, along, BAND);
  const Scaling scaling = {scale, bias, residual_scale, residual_bias};
  const Back<bf16, bf16> by = {grad, factors, weight, beside, branch, residual, scaling, to_branch, to_residual, of_norm, partial,
                            rows, width};
  band_back_by<true, true>(by, {products, along});
}

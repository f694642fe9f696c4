// What libtorch has for devices alone, written down for plain memory: products of bf16 with an outcome in f32, and attention over
// documents. As formulas, in f32, rounded once at the end.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

namespace standin {
inline at::Tensor mm_wide(const at::Tensor& left, const at::Tensor& right, at::ScalarType kind) {
  TORCH_CHECK(left.scalar_type() == at::kBFloat16 && right.scalar_type() == at::kBFloat16 && kind == at::kFloat,
              "stand-in: a product that a device does not widen");
  return at::mm(left.to(kind), right.to(kind));
}
inline at::Tensor bmm_wide(const at::Tensor& left, const at::Tensor& right, at::ScalarType kind) {
  TORCH_CHECK(left.scalar_type() == at::kBFloat16 && right.scalar_type() == at::kBFloat16 && kind == at::kFloat,
              "stand-in: a product that a device does not widen");
  return at::bmm(left.to(kind), right.to(kind));
}

// A document: its first query and key, and how many it has of either.
struct Document {
  int64_t query, queries, key, keys;
};

inline std::vector<Document> documents(const at::Tensor& query_ends, const at::Tensor& key_ends, int64_t most, int64_t most_keys) {
  TORCH_CHECK(query_ends.scalar_type() == at::kInt && key_ends.scalar_type() == at::kInt, "stand-in: ends are not i32");
  TORCH_CHECK(query_ends.is_contiguous() && key_ends.is_contiguous() && query_ends.numel() == key_ends.numel(), "stand-in: ends");
  const int32_t *q = query_ends.const_data_ptr<int32_t>(), *k = key_ends.const_data_ptr<int32_t>();
  std::vector<Document> all;
  for (int64_t i = 0; i + 1 < query_ends.numel(); ++i) {
    all.push_back({q[i], q[i + 1] - q[i], k[i], k[i + 1] - k[i]});
    TORCH_CHECK(all[i].queries <= most && all[i].keys <= most_keys, "stand-in: a longer document than was said");
  }
  return all;
}

// Of one document, [K, G, ...]: queries, keys, values, and scores with what comes later than a query masked, and what comes more
// than `before` keys earlier. The last query sees the last key.
struct Scored {
  at::Tensor query, key, value, logits;
};

inline Scored scored(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Document& of, double scale,
                     std::optional<c10::SymInt> before) {
  const int64_t heads = key.size(1), group = query.size(1) / heads;
  const auto part = [&](const at::Tensor& tensor, int64_t first, int64_t count) {
    return tensor.narrow(0, first, count).to(at::kFloat).unflatten(1, {heads, -1}).permute({1, 2, 0, 3});
  };
  TORCH_CHECK(query.size(1) == heads * group, "stand-in: heads");
  Scored made{part(query, of.query, of.queries), part(key, of.key, of.keys), part(value, of.key, of.keys), {}};
  const at::Tensor all = at::ones({of.queries, of.keys}, at::kBool);
  at::Tensor hidden = all.triu(of.keys - of.queries + 1);
  if (before) hidden = hidden.logical_or(all.tril(of.keys - of.queries - before->expect_int() - 1));
  made.logits = at::matmul(made.query, made.key.transpose(-1, -2)).mul(scale);
  made.logits = made.logits.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  return made;
}

using Five = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

inline Five attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& query_ends,
                   const std::optional<at::Tensor>& key_ends, c10::SymInt most, c10::SymInt most_keys, double dropout, bool causal,
                   bool, std::optional<double> scale, std::optional<c10::SymInt> before, std::optional<c10::SymInt>,
                   const std::optional<at::Tensor>&, const std::optional<at::Tensor>&) {
  TORCH_CHECK(query.scalar_type() == at::kBFloat16 && dropout == 0 && causal && scale, "stand-in: attention of another kind");
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1, "stand-in: numbers of a head in pieces");
  at::Tensor out = at::empty_like(query);
  at::Tensor logs = at::empty({query.size(1), query.size(0)}, at::kFloat);
  for (const Document& of : documents(*query_ends, *key_ends, most.expect_int(), most_keys.expect_int())) {
    const Scored made = scored(query, key, value, of, *scale, before);
    const at::Tensor heads = at::matmul(made.logits.softmax(-1), made.value);
    out.narrow(0, of.query, of.queries).copy_(heads.permute({2, 0, 1, 3}).flatten(1, 2));
    logs.narrow(1, of.query, of.queries).copy_(made.logits.logsumexp(-1).flatten(0, 1));
  }
  return {out, logs, at::empty({2}, at::kLong), at::empty({}, at::kLong), at::empty({0}, query.options())};
}

inline Three attend_back(const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const at::Tensor& out, const at::Tensor& logs, const at::Tensor& query_ends, const at::Tensor& key_ends,
                         c10::SymInt most, c10::SymInt most_keys, double dropout, bool causal, const at::Tensor&, const at::Tensor&,
                         std::optional<double> scale, std::optional<c10::SymInt> before, std::optional<c10::SymInt>) {
  TORCH_CHECK(dropout == 0 && causal && scale, "stand-in: attention of another kind");
  const at::Tensor to_query = at::empty_like(query), to_key = at::empty_like(key), to_value = at::empty_like(value);
  const int64_t heads = key.size(1);
  for (const Document& of : documents(query_ends, key_ends, most.expect_int(), most_keys.expect_int())) {
    const Scored made = scored(query, key, value, of, *scale, before);
    const auto part = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, of.query, of.queries).to(at::kFloat).unflatten(1, {heads, -1}).permute({1, 2, 0, 3});
    };
    const at::Tensor log = logs.narrow(1, of.query, of.queries).unflatten(0, {heads, -1}).unsqueeze(-1);
    const at::Tensor scores = made.logits.sub(log).exp(), down = part(grad);
    const at::Tensor along = down.mul(part(out)).sum(-1, true);
    const at::Tensor logits = at::matmul(down, made.value.transpose(-1, -2)).sub(along).mul(scores).mul(*scale);
    to_query.narrow(0, of.query, of.queries).copy_(at::matmul(logits, made.key).permute({2, 0, 1, 3}).flatten(1, 2));
    const auto grouped = [&](const at::Tensor& all) { return all.sum(1).permute({1, 0, 2}); };
    to_key.narrow(0, of.key, of.keys).copy_(grouped(at::matmul(logits.transpose(-1, -2), made.query)));
    to_value.narrow(0, of.key, of.keys).copy_(grouped(at::matmul(scores.transpose(-1, -2), down)));
  }
  return {to_query, to_key, to_value};
}
}  // namespace standin

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("mm.dtype", TORCH_FN(standin::mm_wide));
  m.impl("bmm.dtype", TORCH_FN(standin::bmm_wide));
  m.impl("_flash_attention_forward", TORCH_FN(standin::attend));
  m.impl("_flash_attention_backward", TORCH_FN(standin::attend_back));
}

// The forward pass of libtorch's attention over documents, which tch does not wrap.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_flash_attention_forward.h>

#include "shim.h"

extern "C" {

// Takes queries, keys and values [tokens, heads, d], the ends of documents among queries and keys (i32), and the
// longest of each; and how many keys before its own a query sees, -1 for all. Returns the output, its log-sums, and two
// tensors for the backward pass.
int shim_flash_attention(const at::Tensor* const* operands, const int64_t* longest, double scale, int64_t before,
                         at::Tensor** out) {
  return shim_guard([=] {
    const auto at = [=](int i) -> const at::Tensor& { return *operands[i]; };
    const auto window = before < 0 ? std::optional<int64_t>() : before;
    const auto [heads, logs, seed, offset, mask] = at::_flash_attention_forward(
        at(0), at(1), at(2), at(3), at(4), longest[0], longest[1], /*dropout_p=*/0.0, /*is_causal=*/true,
        /*return_debug_mask=*/false, scale, window);
    const at::Tensor* results[] = {&heads, &logs, &seed, &offset};
    for (int i = 0; i < 4; ++i) out[i] = new at::Tensor(*results[i]);
  });
}

} // extern "C"

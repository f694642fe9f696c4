// Products of f32 matrices through oneDNN, whose kernels use AVX-512 on every processor that has it; MKL's, to which
// libtorch gives such products, do so on some.

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "shim.h"

namespace at::native {
// Exported by libtorch, declared in a header that it does not ship. Weak: a libtorch without it still links.
__attribute__((weak)) void mkldnn_matmul(
    const Tensor& left, const Tensor& right, const Tensor& out, float beta, float alpha);
} // namespace at::native

extern "C" {

// 1 where products of f32 matrices go through oneDNN: it is there, and libtorch itself computes with AVX-512.
int shim_onednn_products(int* out) {
  return shim_guard([=] {
    *out = at::native::mkldnn_matmul != nullptr && at::hasMKLDNN() && at::globalContext().userEnabledMkldnn() &&
        at::get_cpu_capability().rfind("AVX512", 0) == 0;
  });
}

// out = left right + (add ? out : 0): f32 matrices on the CPU.
int shim_product(const void* out, const void* left, const void* right, int add) {
  return shim_guard([=] {
    const auto at = [](const void* tensor) -> const at::Tensor& { return *static_cast<const at::Tensor*>(tensor); };
    at::native::mkldnn_matmul(at(left), at(right), at(out), add ? 1.0f : 0.0f, 1.0f);
  });
}

} // extern "C"

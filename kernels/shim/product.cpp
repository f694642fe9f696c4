// Matmuls. Those of f32 use oneDNN, whose kernels use AVX-512 on every processor that has it; the kernels of MKL,
// libtorch's choice for f32, do so only on some.

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#if __has_include(<oneapi/dnnl/dnnl_common.hpp>)
#include <oneapi/dnnl/dnnl_common.hpp>
#endif

#include "shim.h"

namespace at::native {
// Exported by libtorch, declared in a header that it does not ship. Weak: a libtorch without it still links.
__attribute__((weak)) void mkldnn_matmul(
    const Tensor& left, const Tensor& right, const Tensor& out, float beta, float alpha);
} // namespace at::native

namespace {

// oneDNN only gets calls that it supports, so if a matmul fails, it had no memory for its code.
template <typename Body>
void with_memory_errors(Body&& body) {
#if __has_include(<oneapi/dnnl/dnnl_common.hpp>)
  try {
    body();
  } catch (const dnnl::error& error) {
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, error.what());
  }
#else
  body();
#endif
}

// Whether oneDNN supports such a matmul. Users can limit its instruction set (ONEDNN_MAX_CPU_ISA), and libtorch's
// function refuses below AVX-512, even without bf16. Lack of memory is not an answer.
bool supports_matmul() {
  const auto square = at::ones({2, 2}, at::kFloat);
  auto out = at::empty({2, 2}, at::kFloat);
  try {
    with_memory_errors([&] { at::native::mkldnn_matmul(square, square, out, 0.0f, 1.0f); });
    return true;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    return false;
  }
}

} // namespace

extern "C" {

// 1 if f32 matmuls use oneDNN: it is available and supports them, and libtorch itself computes with AVX-512.
int shim_onednn_products(int* out) {
  return shim_guard([=] {
    *out = at::native::mkldnn_matmul != nullptr && at::hasMKLDNN() && at::globalContext().userEnabledMkldnn() &&
        at::get_cpu_capability().rfind("AVX512", 0) == 0 && supports_matmul();
  });
}

// out = left right + (add ? out : 0): matrices or batches of them, by oneDNN (f32 on the CPU) or as libtorch would.
int shim_product(const void* to, const void* left, const void* right, int add, int onednn) {
  return shim_guard([=] {
    const auto at = [](const void* tensor) -> const at::Tensor& { return *static_cast<const at::Tensor*>(tensor); };
    auto out = at(to);
    with_memory_errors([&] {
      if (onednn) {
        at::native::mkldnn_matmul(at(left), at(right), out, add ? 1.0f : 0.0f, 1.0f);
      } else if (add) {
        out.addmm_(at(left), at(right));
      } else if (at(left).dim() == 3) {
        at::bmm_out(out, at(left), at(right));
      } else {
        at::mm_out(out, at(left), at(right));
      }
    });
  });
}

} // extern "C"

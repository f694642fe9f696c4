// The switches of libtorch that decide bits, and a reader for each: setting is not believed, it is read back.
// Every function returns nullptr when it worked, else the reason (valid until the next call on this thread).

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

#include "shim.h"

namespace {

thread_local std::string answer;

#if defined(__x86_64__)
constexpr unsigned kFlushToZero = 0x8000;
constexpr unsigned kDenormalsAreZero = 0x0040;
#endif

} // namespace

const char* shim_fail(const std::string& reason) {
  answer = reason;
  return answer.c_str();
}

extern "C" {

// Process-wide switches. `interop` can only be set before the first parallel work: libtorch itself throws later.
const char* shim_set_switches() {
  return shim_guard([] {
    auto& context = at::globalContext();
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    // Filling fresh memory costs a pass over every output and hides nothing here: no operator we call reads it.
    context.setDeterministicFillUninitializedMemory(false);
    context.setDeterministicCuDNN(true);
    context.setDeterministicMkldnn(true);
    context.setBenchmarkCuDNN(false);
    context.setFloat32MatmulPrecision("highest");
    context.setAllowTF32CuDNN(false);
    context.setAllowTF32CuBLAS(false);
    context.setAllowFP16ReductionCPU(false);
    context.setAllowFP16ReductionCuBLAS(false);
    context.setAllowBF16ReductionCuBLAS(false);
    context.setAllowFP16AccumulationCuBLAS(false);
    at::set_num_threads(1);
  });
}

const char* shim_set_interop_threads(int threads) {
  return shim_guard([=] { at::set_num_interop_threads(threads); });
}

int shim_interop_threads() { return static_cast<int>(at::get_num_interop_threads()); }

// What belongs to a thread: the number of math threads it may start and how it treats denormal numbers.
const char* shim_enter_thread(int threads) {
  return shim_guard([=] {
    at::set_num_threads(threads);
    at::globalContext().setFlushDenormal(false);
  });
}

int shim_threads() { return at::get_num_threads(); }

// 1 where denormal numbers are flushed to zero, 0 where they are kept, -1 where this cannot be read.
int shim_flushes_denormals() {
#if defined(__x86_64__)
  return (_mm_getcsr() & (kFlushToZero | kDenormalsAreZero)) != 0;
#else
  return -1;
#endif
}

// 1 or 0 for a known switch, -1 for an unknown name.
int shim_switch(const char* name) {
  const auto& context = at::globalContext();
  const std::string wanted(name);
  if (wanted == "deterministic_algorithms") {
    return context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
  }
  if (wanted == "fill_uninitialized") return context.deterministicFillUninitializedMemory();
  if (wanted == "deterministic_cudnn") return context.deterministicCuDNN();
  if (wanted == "deterministic_onednn") return context.deterministicMkldnn();
  if (wanted == "benchmark_cudnn") return context.benchmarkCuDNN();
  if (wanted == "tf32_cudnn") return context.allowTF32CuDNN();
  if (wanted == "tf32_cublas") return context.allowTF32CuBLAS();
  if (wanted == "tf32_onednn") return context.allowTF32OneDNN();
  if (wanted == "float32_matmul_highest") {
    return context.float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST;
  }
  if (wanted == "fp16_reduction_cpu") return context.allowFP16ReductionCPU();
  if (wanted == "fp16_reduction_cublas") {
    return context.allowFP16ReductionCuBLAS() != at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK &&
        context.allowFP16ReductionCuBLAS() != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK;
  }
  if (wanted == "bf16_reduction_cublas") {
    return context.allowBF16ReductionCuBLAS() != at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK &&
        context.allowBF16ReductionCuBLAS() != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK;
  }
  if (wanted == "fp16_accumulation_cublas") return context.allowFP16AccumulationCuBLAS();
  return -1;
}

int shim_in_parallel_region() { return at::in_parallel_region(); }

const char* shim_describe(const char* what) {
  const std::string wanted(what);
  if (wanted == "compiled_against") return TORCH_VERSION;
  if (wanted == "config") return shim_fail(at::show_config());
  if (wanted == "cpu_capability") return shim_fail(at::get_cpu_capability());
  if (wanted == "mkl") return shim_fail(at::get_mkl_version());
  if (wanted == "onednn") return shim_fail(at::get_mkldnn_version());
  if (wanted == "cpu") {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    __cpuid(0, a, b, c, d);
    std::string vendor;
    for (unsigned word : {b, d, c}) {
      for (int byte = 0; byte < 4; ++byte) vendor.push_back(static_cast<char>(word >> (8 * byte)));
    }
    __cpuid(1, a, b, c, d);
    const unsigned family = ((a >> 8) & 15) + ((a >> 20) & 255);
    const unsigned model = ((a >> 4) & 15) + ((a >> 12) & 240);
    return shim_fail(vendor + " family " + std::to_string(family) + " model " + std::to_string(model));
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "unknown";
#endif
  }
  return "";
}

} // extern "C"

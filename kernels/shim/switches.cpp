// The switches of libtorch that affect bits, and a reader for each: every setting is read back. Every function returns
// a code of `shim.h`; results are returned through an out-pointer or `shim_text`.

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

thread_local std::string last_text;

#if defined(__x86_64__)
constexpr unsigned kFlushToZero = 0x8000;
constexpr unsigned kDenormalsAreZero = 0x0040;
#endif

// 1 or 0 for a known switch, -1 for an unknown name.
int read_switch(const std::string& wanted) {
  const auto& context = at::globalContext();
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

#if defined(__x86_64__)
// What oneDNN and MKL consider besides the model of a processor: a hypervisor may hide instructions from its guest, and
// the operating system the registers for them.
std::string extensions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  std::string found;
  const auto add = [&](bool present, const char* name) {
    if (present) found += (found.empty() ? "" : " ") + std::string(name);
  };
  const auto bit = [](unsigned word, int at) { return (word >> at & 1) != 0; };
  __cpuid(1, a, b, c, d);
  add(bit(c, 12), "fma");
  unsigned low = 0, high = 0;
  if (bit(c, 27)) __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const bool tiles = (low >> 17 & 3) == 3;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  add(bit(b, 5), "avx2");
  add(bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31), "avx512");
  add(bit(c, 11), "avx512_vnni");
  add(bit(d, 23), "avx512_fp16");
  add(tiles && bit(d, 22), "amx_bf16");
  add(tiles && bit(d, 25), "amx_int8");
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return found;
  add(bit(a, 4), "avx_vnni");
  add(bit(a, 5), "avx512_bf16");
  add(tiles && bit(a, 21), "amx_fp16");
  add(bit(d, 5), "avx_ne_convert");
  return found;
}
#else
std::string extensions() { return ""; }
#endif

std::string described(const std::string& wanted) {
  if (wanted == "compiled_against") return TORCH_VERSION;
  if (wanted == "config") return at::show_config();
  if (wanted == "cpu_capability") return at::get_cpu_capability();
  if (wanted == "mkl") return at::get_mkl_version();
  if (wanted == "extensions") return extensions();
  if (wanted == "onednn") return at::get_mkldnn_version();
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
    return vendor + " family " + std::to_string(family) + " model " + std::to_string(model);
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "unknown";
#endif
  }
  return "";
}

} // namespace

void shim_say(const std::string& text) { last_text = text; }

int shim_fail(int code, const char* reason) noexcept {
  try {
    last_text = reason;
    return code;
  } catch (...) {
    last_text.clear();
    return kNoMemory;
  }
}

extern "C" {

// The text of the last call on this thread.
const char* shim_text() { return last_text.c_str(); }

// Process-wide switches. `interop` can only be set before the first parallel work: libtorch itself throws later.
int shim_set_switches() {
  return shim_guard([] {
    auto& context = at::globalContext();
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    // Filling new memory would cost a pass over every output and is not needed here: no operator we call reads it.
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

int shim_set_interop_threads(int threads) {
  return shim_guard([=] { at::set_num_interop_threads(threads); });
}

int shim_interop_threads(int* out) {
  return shim_guard([=] { *out = static_cast<int>(at::get_num_interop_threads()); });
}

// Settings of a thread: its number of math threads, and the treatment of denormal numbers.
int shim_enter_thread(int threads) {
  return shim_guard([=] {
    at::set_num_threads(threads);
    at::globalContext().setFlushDenormal(false);
  });
}

int shim_threads(int* out) {
  return shim_guard([=] { *out = at::get_num_threads(); });
}

// 1 if denormal numbers are flushed to zero, 0 if they are kept, -1 if this cannot be read.
int shim_flushes_denormals() {
#if defined(__x86_64__)
  return (_mm_getcsr() & (kFlushToZero | kDenormalsAreZero)) != 0;
#else
  return -1;
#endif
}

int shim_switch(const char* name, int* out) {
  return shim_guard([=] { *out = read_switch(name); });
}

int shim_in_parallel_region(int* out) {
  return shim_guard([=] { *out = at::in_parallel_region(); });
}

int shim_describe(const char* what) {
  return shim_guard([=] { shim_say(described(what)); });
}

} // extern "C"

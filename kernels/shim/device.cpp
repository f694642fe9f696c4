// Devices: the GPU half of libtorch is opened at run time, and streams and events use its device-generic interface, so
// nothing here needs CUDA or HIP headers. HIP builds of libtorch use the name `cuda`, too.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "shim.h"

namespace {

constexpr auto kGpu = c10::DeviceType::CUDA;

c10::Device gpu(int index) { return c10::Device(kGpu, static_cast<c10::DeviceIndex>(index)); }

// A stream next to the computing one.
struct Side {
  c10::Stream stream;
};

// Runs `body` with `stream` as the current one. The restore must not create a context on another device: `setDevice`
// would create one on the thread's first device, even if this process computes on another.
template <typename Body>
void on_stream(const c10::Stream& stream, Body&& body) {
  const c10::impl::VirtualGuardImpl guard(kGpu);
  const c10::Device device_before = guard.exchangeDevice(stream.device());
  const c10::Stream before = guard.exchangeStream(stream);
  try {
    body();
  } catch (...) {
    guard.exchangeStream(before);
    guard.uncheckedSetDevice(device_before);
    throw;
  }
  guard.exchangeStream(before);
  guard.uncheckedSetDevice(device_before);
}

// The GPU half of libtorch, once it has been opened.
std::atomic<void*> gpu_half{nullptr};

// A function of the GPU half or of a library that it uses; of any library in the process if the half was there from the
// start. Null if it does not exist.
template <typename Function>
Function loaded(const char* name) {
  void* const opened = gpu_half;
  return reinterpret_cast<Function>(dlsym(opened == nullptr ? RTLD_DEFAULT : opened, name));
}

// Whether the GPU half is AMD's: checks for its runtime library first, because libtorch's CPU half may load NVIDIA's
// for its profiler, while NVIDIA's half loads nothing of AMD's.
bool of_amd() {
  static const bool is_amd = loaded<int (*)(int)>("hipSetDevice") != nullptr;
  return is_amd;
}

// The function with the name that the present vendor uses.
template <typename Function>
Function of_vendor(const char* nvidia, const char* amd) {
  return loaded<Function>(of_amd() ? amd : nvidia);
}

// A driver loads and launches only for a thread that has a device's context. libtorch's own selection creates none if
// the device is selected already, as the first one is on every thread, so the runtime library is called each time.
// Since CUDA 12 its selection creates the context; before, allocating or freeing memory does, even freeing a null
// pointer.
void enter_context(int index) {
  static const auto choose = of_vendor<int (*)(int)>("cudaSetDevice", "hipSetDevice");
  static const auto free_none = of_vendor<int (*)(void*)>("cudaFree", "hipFree");
  thread_local int entered = -1;
  if (choose == nullptr || free_none == nullptr) throw std::runtime_error("the runtime library has no choice of a device");
  int answer = choose(index);
  if (answer == 0 && entered != index) answer = free_none(nullptr);
  if (answer != 0) throw std::runtime_error("the runtime library answers with error " + std::to_string(answer));
  entered = index;
}

// Properties of a GPU, one line `name=value` each.
class PropertyLines {
 public:
  void add(const char* name, const std::string& value) { text_ += std::string(name) + "=" + value + "\n"; }
  void add(const char* name, int value) { add(name, std::to_string(value)); }
  const std::string& text() const { return text_; }

  // A numeric attribute of a device; the vendors have different numbers for attributes.
  void attribute(const char* name, int index, int nvidia, int amd) {
    const auto ask = of_vendor<int (*)(int*, int, int)>("cudaDeviceGetAttribute", "hipDeviceGetAttribute");
    int value = 0;
    if (ask != nullptr && ask(&value, of_amd() ? amd : nvidia, index) == 0) add(name, value);
  }
  // A release as a single number, from the present vendor's function.
  void release(const char* name, const char* nvidia, const char* amd) {
    const auto ask = of_vendor<int (*)(int*)>(nvidia, amd);
    int value = 0;
    if (ask != nullptr && ask(&value) == 0) add(name, value);
  }
  // A release in three parts, queried one by one as in NVIDIA's libraries.
  void property(const char* name, const char* function) {
    const auto ask = loaded<int (*)(int, int*)>(function);
    int parts[3] = {};
    for (int part = 0; part < 3; ++part) {
      if (ask == nullptr || ask(part, &parts[part]) != 0) return;
    }
    add(name, std::to_string(parts[0]) + "." + std::to_string(parts[1]) + "." + std::to_string(parts[2]));
  }

 private:
  std::string text_;
};

} // namespace

extern "C" {

// The folder of the loaded libtorch_cpu.so.
int shim_libtorch_folder() {
  return shim_guard([] {
    shim_say("");
    Dl_info info;
    // Any function of the library works; a data symbol could be a copy in the program.
    if (dladdr(reinterpret_cast<void*>(&at::globalContext), &info) == 0 || info.dli_fname == nullptr) return;
    const std::string path(info.dli_fname);
    const auto slash = path.rfind('/');
    if (slash != std::string::npos) shim_say(path.substr(0, slash));
  });
}

// Opens the GPU half of libtorch permanently, with its symbols visible to libraries opened later.
int shim_open_library(const char* path) {
  return shim_guard([=] {
    // Its initializers may throw.
    if (void* const opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL)) {
      gpu_half = opened;
      return;
    }
    const char* reason = dlerror();
    throw std::runtime_error(reason == nullptr ? "unknown reason" : reason);
  });
}

// Whether a library has registered the GPU. Unlike at::hasCUDA() this may be called before one is opened.
int shim_gpu_registered(int* out) {
  return shim_guard([=] { *out = c10::impl::hasDeviceGuardImpl(kGpu); });
}

int shim_gpu_count(int* out) {
  return shim_guard([=] {
    const bool here = c10::impl::hasDeviceGuardImpl(kGpu);
    *out = here ? c10::impl::getDeviceGuardImpl(kGpu)->deviceCount() : 0;
  });
}

// Whether a GPU context exists already: its libraries have then read their environment.
int shim_gpu_context_exists(int* out) {
  return shim_guard(
      [=] { *out = c10::impl::hasDeviceGuardImpl(kGpu) && at::detail::getCUDAHooks().hasPrimaryContext(0); });
}

// Architecture or name of a GPU, from the loaded runtime library; empty if it does not report one.
int shim_gpu_architecture(int index) {
  return shim_guard([=] {
    shim_say("");
    if (of_amd()) {
      // The property structure changed its layout between HIP releases, the name function did not.
      const auto ask = loaded<int (*)(char*, int, int)>("hipDeviceGetName");
      char name[256] = {};
      if (ask != nullptr && ask(name, sizeof(name) - 1, index) == 0) shim_say(name);
      return;
    }
    // Attributes 75 and 76 are the compute capability since CUDA 5.
    const auto ask = loaded<int (*)(int*, int, int)>("cudaDeviceGetAttribute");
    int major = 0, minor = 0;
    if (ask != nullptr && ask(&major, 75, index) == 0 && ask(&minor, 76, index) == 0) {
      shim_say("sm_" + std::to_string(major) + std::to_string(minor));
    }
  });
}

// Properties of GPU `index`, besides its architecture, that affect bits, as far as driver, runtime and libraries report
// them: libraries choose their kernels by the number of compute units and by the memory, and kernels differ between
// releases.
int shim_gpu_table(int index) {
  return shim_guard([=] {
    PropertyLines lines;
    lines.attribute("compute units", index, 16, 63);
    lines.attribute("memory bus bits", index, 37, 59);
    lines.attribute("memory clock kHz", index, 36, 60);
    lines.release("driver", "cudaDriverGetVersion", "hipDriverGetVersion");
    lines.release("runtime", "cudaRuntimeGetVersion", "hipRuntimeGetVersion");
    if (!of_amd()) {
      lines.property("cuBLAS", "cublasGetProperty");
      lines.property("cuBLASLt", "cublasLtGetProperty");
      lines.property("cuDNN", "cudnnGetProperty");
      return shim_say(lines.text());
    }
    char text[256] = {};
    const auto rocblas = loaded<int (*)(char*, size_t)>("rocblas_get_version_string");
    if (rocblas != nullptr && rocblas(text, sizeof(text) - 1) == 0) lines.add("rocBLAS", text);
    // Querying its release requires a handle.
    void* handle = nullptr;
    const auto create = loaded<int (*)(void**)>("hipblasLtCreate");
    const auto version = loaded<int (*)(void*, int*)>("hipblasLtGetVersion");
    const auto destroy = loaded<int (*)(void*)>("hipblasLtDestroy");
    if (create != nullptr && version != nullptr && destroy != nullptr && create(&handle) == 0) {
      int release = 0;
      if (version(handle, &release) == 0) lines.add("hipBLASLt", std::to_string(release));
      destroy(handle);
    }
    size_t parts[3] = {};
    const auto miopen = loaded<int (*)(size_t*, size_t*, size_t*)>("miopenGetVersion");
    if (miopen != nullptr && miopen(&parts[0], &parts[1], &parts[2]) == 0) {
      lines.add("MIOpen", std::to_string(parts[0]) + "." + std::to_string(parts[1]) + "." + std::to_string(parts[2]));
    }
    shim_say(lines.text());
  });
}

// A new stream on GPU `index`.
int shim_side_stream(int index, void** out) {
  return shim_guard([&] {
    const c10::impl::VirtualGuardImpl guard(kGpu);
    *out = new Side{guard.getNewStream(gpu(index))};
  });
}

void shim_side_stream_free(void* side) { delete static_cast<Side*>(side); }

// The stream's handle for the vendor's own libraries.
int shim_side_handle(void* side, void** out) {
  return shim_guard([&] { *out = static_cast<Side*>(side)->stream.native_handle(); });
}

// Callers that record, wait for or free an event have entered its GPU: libtorch restores the thread's device by
// `setDevice`, which would create a context on any other device that the thread was at.

// Records an event after what is queued on the current stream of GPU `index`.
int shim_mark(int index, void** event) {
  return shim_guard([&] {
    const c10::impl::VirtualGuardImpl guard(kGpu);
    auto mark = std::make_unique<c10::Event>(kGpu);
    mark->record(guard.getStream(gpu(index)));
    *event = mark.release();
  });
}

// Makes the side stream wait for an event.
int shim_side_after(void* side, void* event) {
  return shim_guard([&] { static_cast<c10::Event*>(event)->block(static_cast<Side*>(side)->stream); });
}

// Selects GPU `index`, and creates its context, for the calling thread's calls of the vendor's own libraries.
int shim_enter_gpu(int index) {
  return shim_guard([&] {
    c10::impl::VirtualGuardImpl(kGpu).setDevice(gpu(index));
    enter_context(index);
  });
}

// Pinned host memory of so many bytes, initially zero, which GPU `index` can read directly.
int shim_pinned(int index, int64_t bytes, at::Tensor** out) {
  return shim_guard([=] {
    const c10::OptionalDeviceGuard guard(gpu(index));
    *out = new at::Tensor(at::zeros({bytes}, at::TensorOptions(at::kByte).pinned_memory(true)));
  });
}

// Copies a tensor of a GPU into pinned memory on the side stream; the tensor's memory is not reused before the copy is
// done.
int shim_fetch(void* side, const at::Tensor* from, at::Tensor** out) {
  return shim_guard([=] {
    const c10::Stream stream = static_cast<Side*>(side)->stream;
    const at::Tensor source = from->detach();
    auto copy = std::make_unique<at::Tensor>();
    on_stream(stream, [&] {
      const auto options = source.options().device(at::kCPU).pinned_memory(true);
      *copy = at::empty(source.sizes(), options).copy_(source, /*non_blocking=*/true);
    });
    source.record_stream(stream);
    *out = copy.release();
  });
}

// Records an event after what is queued on the side stream.
int shim_mark_side(void* side, void** event) {
  return shim_guard([&] {
    auto mark = std::make_unique<c10::Event>(kGpu);
    mark->record(static_cast<Side*>(side)->stream);
    *event = mark.release();
  });
}

// Makes the current stream of GPU `index` wait for an event.
int shim_hold(int index, void* event) {
  return shim_guard([=] {
    static_cast<c10::Event*>(event)->block(c10::impl::VirtualGuardImpl(kGpu).getStream(gpu(index)));
  });
}

// Copies 8-bit flags, and the 32-bit words after them, from host memory: in one copy on the side stream, if there is
// one. Converts them to f32 and 64-bit words in one allocation; `event` marks the end of the conversion.
int shim_stage(void* side, const at::Tensor* memory, const int64_t* counts, at::Tensor** out, void** event) {
  return shim_guard([&] {
    const int64_t flags = counts[0], words = counts[1];
    const auto padded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t first = padded(flags), place = padded(4 * flags);
    std::unique_ptr<at::Tensor> wide_flags, wide_words;
    const auto widen = [&](const at::Tensor& narrow) {
      const at::Tensor wide = at::empty({place + 8 * words}, narrow.options().pinned_memory(false));
      const auto part = [&](int64_t begin, int64_t bytes, at::ScalarType kind) {
        return std::make_unique<at::Tensor>(wide.narrow(0, begin, bytes).view(kind));
      };
      wide_flags = part(0, 4 * flags, at::kFloat), wide_words = part(place, 8 * words, at::kLong);
      wide_flags->copy_(narrow.narrow(0, 0, flags), /*non_blocking=*/true);
      wide_words->copy_(narrow.narrow(0, first, 4 * words).view(at::kInt), /*non_blocking=*/true);
    };
    std::unique_ptr<c10::Event> done;
    if (side == nullptr) {
      widen(*memory);
    } else {
      const c10::Stream stream = static_cast<Side*>(side)->stream;
      done = std::make_unique<c10::Event>(kGpu);
      on_stream(stream, [&] {
        const at::Tensor part = memory->narrow(0, 0, first + 4 * words);
        const auto on_device = part.options().device(stream.device()).pinned_memory(false);
        widen(part.to(on_device, /*non_blocking=*/true, /*copy=*/true));
        done->record(stream);
      });
    }
    *event = done.release();
    out[0] = wide_flags.release(), out[1] = wide_words.release();
  });
}

// Copies words to the memory of GPU `index` through a pinned buffer on the current stream; the host does not wait.
int shim_upload(int index, const int64_t* words, int64_t count, at::Tensor** out) {
  return shim_guard([&] {
    const auto options = at::TensorOptions(at::kLong);
    const at::Tensor pinned = at::empty({count}, options.pinned_memory(true));
    std::memcpy(pinned.mutable_data_ptr(), words, static_cast<size_t>(count) * sizeof(int64_t));
    *out = new at::Tensor(pinned.to(options.device(gpu(index)), /*non_blocking=*/true, /*copy=*/true));
  });
}

// Size of the workspace that a matmul may use, as libtorch's GPU half reads it from the environment; 0 if unknown.
int shim_workspace(size_t* out) {
  return shim_guard([=] {
    using Ask = size_t (*)();
    const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "_ZN2at4cuda22getChosenWorkspaceSizeEv"));
    *out = ask == nullptr ? 0 : ask();
  });
}

// Makes the current stream wait for the copy, and tells the allocator that this stream uses the tensor, too.
int shim_await(void* event, const at::Tensor* tensor) {
  return shim_guard([&] {
    const c10::impl::VirtualGuardImpl guard(kGpu);
    const c10::Stream current = guard.getStream(tensor->device());
    static_cast<c10::Event*>(event)->block(current);
    tensor->record_stream(current);
  });
}

// 1 if the device has reached the event, otherwise 0.
int shim_event_over(void* event, int* out) {
  return shim_guard([&] { *out = static_cast<c10::Event*>(event)->query(); });
}

// Blocks the host until the device has reached the event.
int shim_event_wait(void* event) {
  return shim_guard([&] { static_cast<c10::Event*>(event)->synchronize(); });
}

void shim_event_free(void* event) { delete static_cast<c10::Event*>(event); }

} // extern "C"

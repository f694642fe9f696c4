// Memory of foreign code: notes failed allocations by thread, and on request counts the bytes of live tensors in main
// memory, and their maximum.

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <utility>

#include "shim.h"

namespace {

std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};

void count_allocation(int64_t bytes) {
  const int64_t now = live_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t seen = peak_bytes.load(std::memory_order_relaxed);
  while (seen < now && !peak_bytes.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

c10::Allocator* counted_allocator = nullptr;

// Whether an allocation has failed on this thread since the flag was last read.
thread_local bool was_refused = false;

// libtorch's allocator throws its general error, and its wrapper passes on only the text.
struct FailureRecorder final : c10::Allocator {
  explicit FailureRecorder(c10::Allocator* wrapped) : wrapped(wrapped) {}

  c10::DataPtr allocate(size_t bytes) override {
    try {
      return wrapped->allocate(bytes);
    } catch (const c10::Error& error) {
      was_refused = true;
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, error.what_without_backtrace());
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return wrapped->raw_deleter(); }

  void copy_data(void* to, const void* from, size_t count) const override { wrapped->copy_data(to, from, count); }

  c10::Allocator* wrapped;
};

// How often libtorch's GPU allocator ran out of memory; 0 without a GPU. A process computes on one GPU, but not every
// thread has selected it, so all are queried.
int64_t gpu_refusals() noexcept {
  constexpr auto kGpu = c10::DeviceType::CUDA;
  try {
    if (!c10::impl::hasDeviceGuardImpl(kGpu)) return 0;
    auto* const allocator = c10::getDeviceAllocator(kGpu);
    const c10::DeviceIndex count = c10::impl::VirtualGuardImpl(kGpu).deviceCount();
    int64_t refusals = 0;
    for (c10::DeviceIndex index = 0; index < count; ++index) refusals += allocator->getDeviceStats(index).num_ooms;
    return refusals;
  } catch (...) {
    // An allocator that is not initialized has no failures.
    return 0;
  }
}

// How many of the failures on GPUs this thread has reported.
thread_local int64_t reported_refusals = 0;

// The default action of `new` without memory, and a flag.
void refuse() {
  was_refused = true;
  throw std::bad_alloc();
}

// Runs before any tensor can exist.
[[maybe_unused]] const bool is_installed = [] {
  c10::SetCPUAllocator(new FailureRecorder(c10::GetCPUAllocator()));
  std::set_new_handler(refuse);
  return true;
}();

// Each tensor's memory is preceded by its size, in a header of libtorch's alignment.
constexpr size_t kHeaderBytes = 64;

void release(void* data) {
  if (data == nullptr) return;
  void* allocation = static_cast<char*>(data) - kHeaderBytes;
  live_bytes.fetch_sub(*static_cast<int64_t*>(allocation), std::memory_order_relaxed);
  counted_allocator->raw_deallocate(allocation);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    void* allocation = counted_allocator->raw_allocate(bytes + kHeaderBytes);
    *static_cast<int64_t*>(allocation) = static_cast<int64_t>(bytes);
    count_allocation(static_cast<int64_t>(bytes));
    void* data = static_cast<char*>(allocation) + kHeaderBytes;
    return {data, data, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

}  // namespace

// mimalloc looks the handler up by this name. Its own weak definition returns none, after which it ends the process;
// this strong definition overrides it.
std::new_handler shim_new_handler() noexcept __asm__("_ZSt15get_new_handlerv");
std::new_handler shim_new_handler() noexcept { return refuse; }

// 1 if an allocation has failed on this thread since the last call.
extern "C" int shim_was_refused() {
  const int64_t refusals = gpu_refusals();
  const bool by_gpu = std::exchange(reported_refusals, refusals) < refusals;
  return std::exchange(was_refused, false) || by_gpu;
}

// The same without resetting the flag.
extern "C" int shim_is_refused() { return was_refused || reported_refusals < gpu_refusals(); }

// 1 if the system has practically no memory left. oneDNN allocates its code and scratch space in its own ways, and on
// failure does not report lack of memory as the reason.
extern "C" int shim_nothing_left() {
  constexpr size_t kProbeBytes = size_t{64} << 20;
  void* const place = mmap(nullptr, kProbeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return 1;
  munmap(place, kProbeBytes);
  return 0;
}

// Counts allocations from here on. Never undone: a tensor may outlive its counter.
extern "C" int shim_count_memory() {
  return shim_guard([] {
    static std::once_flag once;
    std::call_once(once, [] {
      counted_allocator = c10::GetCPUAllocator();
      c10::SetCPUAllocator(new CountingAllocator);
    });
  });
}

extern "C" int64_t shim_live_bytes() { return live_bytes.load(std::memory_order_relaxed); }

extern "C" int64_t shim_most_bytes() { return peak_bytes.load(std::memory_order_relaxed); }

// The maximum of live tensor bytes on GPU `index`, from the statistics of libtorch's allocator.
extern "C" int shim_most_bytes_on(int index, int64_t* out) {
  return shim_guard([=] {
    auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    *out = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index)).allocated_bytes[0].peak;
  });
}

// Resets that maximum.
extern "C" int shim_most_anew_on(int index) {
  return shim_guard([=] {
    c10::getDeviceAllocator(c10::DeviceType::CUDA)->resetPeakStats(static_cast<c10::DeviceIndex>(index));
  });
}

// Resets the maximum.
extern "C" void shim_most_anew() { peak_bytes.store(live_bytes.load(std::memory_order_relaxed)); }

// Memory that foreign code asks for: what was refused is known by thread, and on request the bytes of tensors are counted that are
// alive in main memory, and the most that were.

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

std::atomic<int64_t> live{0};
std::atomic<int64_t> most{0};

void alive(int64_t bytes) {
  const int64_t now = live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t seen = most.load(std::memory_order_relaxed);
  while (seen < now && !most.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

c10::Allocator* inner = nullptr;

// Whether this thread was refused memory and nobody has asked yet.
thread_local bool was_refused = false;

// libtorch's allocator throws what libtorch throws for everything, and its wrapper hands on nothing but words.
struct Listening final : c10::Allocator {
  explicit Listening(c10::Allocator* own) : own(own) {}

  c10::DataPtr allocate(size_t bytes) override {
    try {
      return own->allocate(bytes);
    } catch (const c10::Error& error) {
      was_refused = true;
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, error.what_without_backtrace());
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return own->raw_deleter(); }

  void copy_data(void* to, const void* from, size_t count) const override { own->copy_data(to, from, count); }

  c10::Allocator* own;
};

// How often libtorch's allocator had no memory of a GPU to give; 0 without one. A process computes on one of them, but not every
// thread of it has chosen that one, so all are asked.
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
    // An allocator that has not begun has refused nothing.
    return 0;
  }
}

// Of those, what this thread has been told of.
thread_local int64_t told = 0;

// What `new` does where there is no memory, and a mark.
void refuse() {
  was_refused = true;
  throw std::bad_alloc();
}

// Before there can be a tensor.
[[maybe_unused]] const bool listening = [] {
  c10::SetCPUAllocator(new Listening(c10::GetCPUAllocator()));
  std::set_new_handler(refuse);
  return true;
}();

// Before each tensor's memory stands how much it is. As many bytes as libtorch aligns memory to.
constexpr size_t kHead = 64;

void release(void* data) {
  if (data == nullptr) return;
  void* whole = static_cast<char*>(data) - kHead;
  live.fetch_sub(*static_cast<int64_t*>(whole), std::memory_order_relaxed);
  inner->raw_deallocate(whole);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    void* whole = inner->raw_allocate(bytes + kHead);
    *static_cast<int64_t*>(whole) = static_cast<int64_t>(bytes);
    alive(static_cast<int64_t>(bytes));
    void* data = static_cast<char*>(whole) + kHead;
    return {data, data, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

}  // namespace

// mimalloc asks for the handler by this name, and has an answer of its own that says there is none, upon which it ends the process.
// This one is stronger.
std::new_handler shim_new_handler() noexcept __asm__("_ZSt15get_new_handlerv");
std::new_handler shim_new_handler() noexcept { return refuse; }

// 1 where this thread was refused memory since it asked last.
extern "C" int shim_was_refused() {
  const int64_t refusals = gpu_refusals();
  const bool by_gpu = std::exchange(told, refusals) < refusals;
  return std::exchange(was_refused, false) || by_gpu;
}

// The same, of which nothing is forgotten.
extern "C" int shim_is_refused() { return was_refused || told < gpu_refusals(); }

// 1 where the system has nothing left that is worth the name. oneDNN gets memory for its code and its scratch by ways of its own, and
// where it gets none it says no more than that it could not.
extern "C" int shim_nothing_left() {
  constexpr size_t kWorth = size_t{64} << 20;
  void* const place = mmap(nullptr, kWorth, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) return 1;
  munmap(place, kWorth);
  return 0;
}

// Counts what is allocated from here on. Never taken back: a tensor outlives whoever counts.
extern "C" int shim_count_memory() {
  return shim_guard([] {
    static std::once_flag once;
    std::call_once(once, [] {
      inner = c10::GetCPUAllocator();
      c10::SetCPUAllocator(new Counting);
    });
  });
}

extern "C" int64_t shim_live_bytes() { return live.load(std::memory_order_relaxed); }

extern "C" int64_t shim_most_bytes() { return most.load(std::memory_order_relaxed); }

// The most bytes of tensors that were alive on GPU `index` at a time, by the statistics of libtorch's allocator.
extern "C" int shim_most_bytes_on(int index, int64_t* out) {
  return shim_guard([=] {
    auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    *out = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(index)).allocated_bytes[0].peak;
  });
}

// Forgets the most that was alive there before.
extern "C" int shim_most_anew_on(int index) {
  return shim_guard([=] {
    c10::getDeviceAllocator(c10::DeviceType::CUDA)->resetPeakStats(static_cast<c10::DeviceIndex>(index));
  });
}

// Forgets the most that was alive before.
extern "C" void shim_most_anew() { most.store(live.load(std::memory_order_relaxed)); }

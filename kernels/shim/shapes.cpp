// Tensors that have shapes and no numbers: libtorch's meta device, and the bytes that they would take.
//
// torch-sys has no name for that device: it reports a meta tensor's device as MPS, which no Linux build of libtorch
// has. What is requested there is therefore made on the meta device.

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "shim.h"

namespace {

// By thread: one computation is counted on one thread.
thread_local int64_t live_bytes = 0;
thread_local int64_t peak_bytes = 0;

// The allocation is its size.
void release(void* allocation) { live_bytes -= reinterpret_cast<intptr_t>(allocation); }

struct ShapeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    live_bytes += static_cast<int64_t>(bytes);
    peak_bytes = std::max(peak_bytes, live_bytes);
    return {nullptr, reinterpret_cast<void*>(bytes), &release, c10::Device(c10::kMeta)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void*, const void*, size_t) const override {}
};

using Flag = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;
using Kind = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Place = std::optional<at::Device>;

constexpr auto kMeta = at::DeviceType::Meta;

at::Tensor empty(at::IntArrayRef size, Kind kind, Layout layout, Place, Flag pinned, Format format) {
  return at::empty(size, kind, layout, at::Device(kMeta), pinned, format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef strides, Kind kind, Layout layout, Place, Flag pinned) {
  return at::empty_strided(size, strides, kind, layout, at::Device(kMeta), pinned);
}

// libtorch defines the shapes of these in Python.
at::Tensor index_select(const at::Tensor& self, int64_t dimension, const at::Tensor& index) {
  std::vector<int64_t> size = self.sizes().vec();
  size.at(at::maybe_wrap_dim(dimension, self.dim())) = index.numel();
  return at::empty(size, self.options());
}

at::Tensor where(const at::Tensor& condition, const at::Tensor& self, const at::Tensor& other) {
  const auto size = at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()));
  return at::empty(size, self.options());
}

at::Tensor flip(const at::Tensor& self, at::IntArrayRef) { return at::empty(self.sizes(), self.options()); }

void install() {
  c10::SetAllocator(kMeta, new ShapeAllocator, 1);
  // None of these is ever destroyed: at the end of a process libtorch's own tables may be destroyed first.
  new c10::impl::DeviceGuardImplRegistrar(at::DeviceType::MPS, new c10::impl::NoOpDeviceGuardImpl<at::DeviceType::MPS>);
  auto& requests = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
  requests.impl("empty.memory_format", &empty);
  requests.impl("empty_strided", &empty_strided);
  auto& shapes = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
  shapes.impl("index_select", &index_select);
  shapes.impl("where.self", &where);
  shapes.impl("flip", &flip);
}

}  // namespace

// Makes the device known to this process; counts from here on.
extern "C" int shim_shapes() {
  return shim_guard([] {
    static std::once_flag once;
    std::call_once(once, install);
  });
}

extern "C" int64_t shim_shapes_live() { return live_bytes; }

extern "C" int64_t shim_shapes_peak() { return peak_bytes; }

// Sets the maximum to what is live.
extern "C" void shim_shapes_anew() { peak_bytes = live_bytes; }

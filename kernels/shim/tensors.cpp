// What every operation asks of its tensors, without an allocation: tch allocates the sizes that it returns, and asks
// for an error message after each call.

#include <ATen/core/DimVector.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/narrow.h>
#include <ATen/ops/transpose.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

#include "shim.h"

namespace {

// A device's number in tch, which has no name for libtorch's meta device: see shapes.cpp.
int number(const at::Tensor& tensor) {
  const auto device = tensor.device();
  if (device.is_cuda()) return device.index();
  return device.is_cpu() ? -1 : -2;
}

at::Device device(int number) {
  if (number >= 0) return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(number));
  return at::Device(number == -1 ? at::kCPU : at::kMeta);
}

// Neither records gradients nor what they would need: operators are called without libtorch's layers for them.
struct Plain {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
};

// An alias for which no operator is called: nothing that is recorded for gradients.
at::Tensor view(const at::Tensor& of, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(of.storage()), of.key_set(), of.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return made;
}

// Runs an operator whose failure is reported as tch reports it.
template <typename Body>
int operate(Body&& body) noexcept {
  try {
    body();
    return kDone;
  } catch (const std::exception& error) {
    return shim_fail(kFailed, error.what());
  }
}

} // namespace

extern "C" {

// The dtype of a contiguous tensor of this shape, -1 for any other tensor.
int shim_contiguous_kind(const at::Tensor* tensor, const int64_t* shape, int64_t dimensions) {
  if (!tensor->defined()) return -1;
  const auto size = tensor->sizes();
  const bool fits = std::equal(size.begin(), size.end(), shape, shape + dimensions) && tensor->is_contiguous();
  return fits ? static_cast<int>(tensor->scalar_type()) : -1;
}

// Copies the sizes of a tensor of so many dimensions; 0 if it has another number of them.
int shim_sizes(const at::Tensor* tensor, int64_t* out, int64_t dimensions) {
  if (!tensor->defined()) return 0;
  const auto size = tensor->sizes();
  if (static_cast<int64_t>(size.size()) != dimensions) return 0;
  std::copy(size.begin(), size.end(), out);
  return 1;
}

// The size of a dimension; -1 if there is none.
int64_t shim_extent(const at::Tensor* tensor, int64_t dimension) {
  if (!tensor->defined() || dimension < 0 || dimension >= tensor->dim()) return -1;
  return tensor->sizes()[dimension];
}

// The address of a contiguous tensor of this dtype on this device; 0 for any other tensor.
int shim_address(const at::Tensor* tensor, int kind, int device, void** out) {
  if (!tensor->defined() || static_cast<int>(tensor->scalar_type()) != kind) return 0;
  if (number(*tensor) != device || !tensor->is_contiguous()) return 0;
  *out = tensor->unsafeGetTensorImpl()->mutable_data();
  return 1;
}

// An uninitialized tensor.
int shim_room(const int64_t* shape, int64_t dimensions, int kind, int number, at::Tensor** out) {
  return operate([=] {
    const at::AutoDispatchBelowADInplaceOrView plain;
    const auto options = at::TensorOptions(static_cast<at::ScalarType>(kind)).device(device(number));
    *out = new at::Tensor(at::empty({shape, static_cast<size_t>(dimensions)}, options));
  });
}

// A view of a range of one dimension, as libtorch's `narrow` makes it by way of two other operators.
int shim_part(const at::Tensor* tensor, int64_t dimension, int64_t first, int64_t length, at::Tensor** out) {
  return operate([=] {
    const auto sizes = tensor->sizes(), strides = tensor->strides();
    const bool there = dimension >= 0 && dimension < tensor->dim();
    if (!there || first < 0 || length < 0 || first > sizes[dimension] - length || tensor->requires_grad()) {
      // It says what is wrong, or records a gradient.
      *out = new at::Tensor(tensor->narrow(dimension, first, length));
      return;
    }
    at::DimVector size(sizes.begin(), sizes.end());
    size[dimension] = length;
    *out = new at::Tensor(view(*tensor, size, strides, tensor->storage_offset() + first * strides[dimension]));
  });
}

// The same for `transpose`.
int shim_swapped(const at::Tensor* tensor, int64_t a, int64_t b, at::Tensor** out) {
  return operate([=] {
    const int64_t dimensions = tensor->dim();
    if (std::min(a, b) < 0 || std::max(a, b) >= dimensions || tensor->requires_grad()) {
      *out = new at::Tensor(tensor->transpose(a, b));
      return;
    }
    const auto sizes = tensor->sizes(), strides = tensor->strides();
    at::DimVector size(sizes.begin(), sizes.end()), stride(strides.begin(), strides.end());
    std::swap(size[a], size[b]);
    std::swap(stride[a], stride[b]);
    *out = new at::Tensor(view(*tensor, size, stride, tensor->storage_offset()));
  });
}

// left right: matrices or stacks of as many as libtorch's `matmul` takes, which finds the same operator by some others.
int shim_matmul(const at::Tensor* left, const at::Tensor* right, at::Tensor** out) {
  return operate([=] {
    const bool stacks = left->dim() == 3 && right->dim() == 3 && left->size(0) == right->size(0);
    const bool matrices = left->dim() == 2 && right->dim() == 2;
    const auto& [a, b] = std::tie(*left, *right);
    *out = new at::Tensor(matrices ? at::mm(a, b) : stacks ? at::bmm(a, b) : at::matmul(a, b));
  });
}

// Calls operators without libtorch's layers for gradients on this thread until `shim_plain_end`.
int shim_plain(void** out) {
  return shim_guard([=] { *out = new Plain; });
}

void shim_plain_end(void* plain) { delete static_cast<Plain*>(plain); }

} // extern "C"

// A GPU that is not there, as a `libtorch_cuda.so` or, with STANDIN_HIP, as a `libtorch_hip.so`: libtorch's dispatch key CUDA
// served by its CPU kernels over plain memory. HIP answers to that name too; what differs is what a program looks up of the
// vendor's own libraries, and libtorch's grouped product. What libtorch has for devices alone is in `half.h`.
//
// It computes at once, so that its bits are those of libtorch on a CPU, and keeps count of what a device would be asked for:
// operations, copies, reads by the host. `clocks.h` says what a real one would be free to do in another order. It refuses what a
// real one refuses and a CPU would not: operands on two devices. It makes contexts where libtorch 2.11 does over CUDA 12, and
// says at the end on which devices. For the tests alone; variables that they set:
// - STANDIN_REPORT: a file to which a process adds its totals when it ends, a line of JSON.
// - STANDIN_FAULT: a fault to plant (clocks.h).
// - STANDIN_UNITS: how many compute units it says it has.
//
// What it cannot show: numbers of a real device, errors that come later than the call, speed.
#include "clocks.h"
#include "half.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <unordered_map>

namespace {
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;
using standin::Machine, standin::Totals;
constexpr auto kGpu = DeviceType::CUDA;

// Never freed: other threads may still ask when the process ends.
Machine& machine() {
  static auto* const one = new Machine;
  return *one;
}

// The device of the calling thread as the runtime library has it, and the one that libtorch only remembers, where there is no
// context on it.
thread_local DeviceIndex chosen = 0, remembered = -1;
// The device whose context is this thread's own, as the driver sees it: none before the runtime library has made it so. A real
// one does that with the first memory or kernel, too; whoever counts on that counts on an order.
thread_local DeviceIndex context = -1;
thread_local std::array<int, standin::kDevices> current_stream = {};

// What libtorch's `CUDAFunctions` do: GetDevice, SetDevice, MaybeSetDevice, ExchangeDevice. To choose another device makes its
// context in this process, for good; only the third makes none.
DeviceIndex device_now() { return remembered >= 0 ? remembered : chosen; }
void choose_device(DeviceIndex device) {
  machine().enters(device);
  chosen = device;
}
void set_device(DeviceIndex device) {
  remembered = -1;
  if (device != chosen) choose_device(device);
}
void set_device_back(DeviceIndex device) {
  if (machine().has_context(device)) set_device(device);
  else remembered = device;
}
DeviceIndex exchange_device(DeviceIndex device) {
  const DeviceIndex before = device_now();
  if (remembered >= 0 || device != chosen) choose_device(device);
  remembered = -1;
  return before;
}

int place(DeviceIndex device, int64_t stream) { return device * standin::kPerDevice + static_cast<int>(stream); }
int place(const Stream& stream) { return place(stream.device_index(), stream.id()); }
int place_now(DeviceIndex device) { return place(device, current_stream[static_cast<size_t>(device)]); }

// A stream as the vendor's libraries know it: none for the default one, else its place, which is not 0.
void* handle(const Stream& stream) {
  return stream.id() == 0 ? nullptr : reinterpret_cast<void*>(static_cast<intptr_t>(place(stream)));
}
int place_of(void* handle) {
  return handle == nullptr ? place(device_now(), 0) : static_cast<int>(reinterpret_cast<intptr_t>(handle));
}

// As libtorch's guards: a kernel or memory makes the context of a thread's first device as well. None for a device below 0.
struct OnDevice {
  DeviceIndex before = -1;
  explicit OnDevice(DeviceIndex device) {
    if (device < 0) return;
    before = exchange_device(device);
    machine().enters(device);
  }
  ~OnDevice() {
    if (before >= 0) set_device_back(before);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
};

// As libtorch does with events: it sets the device back without a look at whether that has a context.
struct SetBack {
  DeviceIndex before = device_now();
  explicit SetBack(DeviceIndex device) { set_device(device); }
  ~SetBack() { set_device(before); }
  SetBack(const SetBack&) = delete;
  SetBack& operator=(const SetBack&) = delete;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kGpu;
  Guard() = default;
  explicit Guard(DeviceType) {}
  static DeviceIndex index(Device device) { return device.has_index() ? device.index() : device_now(); }
  DeviceType type() const override { return kGpu; }
  Device getDevice() const override { return Device(kGpu, device_now()); }
  void setDevice(Device device) const override { set_device(index(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { set_device_back(index(device)); }
  Device exchangeDevice(Device device) const override { return Device(kGpu, exchange_device(index(device))); }
  static Stream numbered(Device device, int64_t id) { return Stream(Stream::UNSAFE, Device(kGpu, index(device)), id); }
  Stream getStream(Device device) const override { return numbered(device, current_stream[static_cast<size_t>(index(device))]); }
  Stream getDefaultStream(Device device) const override { return numbered(device, 0); }
  Stream getNewStream(Device device, int) const override {
    const OnDevice on(index(device));
    return numbered(device, machine().next_stream(index(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream[static_cast<size_t>(stream.device_index())] = static_cast<int>(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return handle(stream); }
  bool queryStream(const Stream& stream) const override {
    const OnDevice on(stream.device_index());
    return machine().is_idle(place(stream));
  }
  void synchronizeStream(const Stream& stream) const override {
    const OnDevice on(stream.device_index());
    machine().count(&Totals::host_waits);
    machine().synchronize(place(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    const SetBack on(device);
    machine().count(&Totals::host_waits);
    for (int stream = 0; stream < standin::kPerDevice; ++stream) machine().synchronize(place(device, stream));
  }
  static standin::Event& event(void* raw) { return *static_cast<standin::Event*>(raw); }
  void record(void** raw, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    const SetBack on(stream.device_index());
    if (*raw == nullptr) *raw = new standin::Event;
    machine().record(event(*raw), place(stream));
  }
  void destroyEvent(void* raw, DeviceIndex device) const noexcept override {
    if (raw == nullptr) return;
    const SetBack on(device);
    delete static_cast<standin::Event*>(raw);
  }
  void block(void* raw, const Stream& stream) const override {
    if (raw == nullptr) return;
    const SetBack on(stream.device_index());
    machine().wait(event(raw), place(stream));
  }
  // libtorch asks on whatever device the thread has. A runtime library may begin a thread's context with any call of it.
  bool queryEvent(void* raw) const override {
    if (raw == nullptr) return true;
    machine().enters(chosen);
    return machine().is_over(event(raw));
  }
  void synchronizeEvent(void* raw) const override {
    if (raw == nullptr) return;
    machine().enters(chosen);
    machine().wait_on_host(event(raw));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    machine().record_stream(data.get(), place(stream));
  }
  DeviceIndex deviceCount() const noexcept override { return standin::kDevices; }
};

// Memory comes filled with NaNs of every kind, so that nobody counts on zeros.
struct DeviceMemory final : c10::DeviceAllocator {
  static void release(void* data) {
    machine().freed(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    // As libtorch's own half does. Whoever asked for a GPU before this half was here got hooks that know none, for good.
    at::detail::getCUDAHooks().init();
    const DeviceIndex device = device_now();
    machine().enters(device);
    // STANDIN_MEMORY: so many bytes, and no more.
    static const char* most = std::getenv("STANDIN_MEMORY");
    if (most != nullptr && machine().bytes()[0] + static_cast<int64_t>(bytes) > std::atoll(most)) {
      ++refusals[static_cast<size_t>(device)];
      throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "CUDA out of memory.");
    }
    void* data = std::aligned_alloc(512, (bytes + 1023) / 512 * 512);
    if (data == nullptr) throw std::bad_alloc();
    std::memset(data, 0xff, bytes);
    machine().allocated(data, bytes, place_now(device));
    return {data, data, &release, Device(kGpu, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override { Guard().recordDataPtrOnStream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const auto [now, peak] = machine().bytes();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = now;
    stats.allocated_bytes[0].peak = stats.reserved_bytes[0].peak = peak;
    stats.num_ooms = refusals[static_cast<size_t>(device)];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { machine().forget_peak(); }
  std::array<std::atomic<int64_t>, standin::kDevices> refusals{};
};
DeviceMemory device_memory;

struct PinnedMemory final : c10::Allocator {
  static void release(void* data) {
    machine().unpinned(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    // It is pinned for all devices, by any context that there is.
    if (!machine().has_any_context()) machine().enters(chosen);
    void* data = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (data == nullptr) throw std::bad_alloc();
    machine().pinned(data, bytes);
    return {data, data, &release, DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;
}  // namespace

struct StandinHooks final : at::CUDAHooksInterface {
  explicit StandinHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* data) const override { return machine().is_pinned(data); }
  DeviceIndex current_device() const override { return device_now(); }
  DeviceIndex getCurrentDevice() const override { return device_now(); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex deviceCount() const override { return standin::kDevices; }
  int getNumGPUs() const override { return standin::kDevices; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  std::string showConfig() const override { return "  - a stand-in for a GPU\n"; }
  long versionCuDNN() const override { return 0; }
  void deviceSynchronize(DeviceIndex device) const override {
    const OnDevice on(device);
    Guard().synchronizeDevice(device);
  }
};
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::StandinHooks)
}

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// The operands of one operation as tensors of a CPU over the same memory, and back.
class Operands {
 public:
  DeviceIndex device = -1;

  at::Tensor there(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    const DeviceIndex own = tensor.device().index();
    TORCH_CHECK(device < 0 || device == own, "stand-in: operands on devices ", int(device), " and ", int(own));
    device = own;
    c10::Storage& storage = there_[tensor.storage().unsafeGetStorageImpl()];
    if (!storage) {
      const c10::Storage real = tensor.storage();
      const auto let_go = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
      c10::DataPtr data(real.mutable_data(), new c10::Storage(real), let_go, DeviceType::CPU);
      storage = c10::Storage(c10::Storage::use_byte_size_t(), real.nbytes(), std::move(data),
                             c10::GetAllocator(DeviceType::CPU), true);
      back_[storage.unsafeGetStorageImpl()] = real;
    }
    at::Tensor alias = over(c10::Storage(storage), c10::DispatchKey::CPU, tensor);
    alias._set_conj(tensor.is_conj());
    pairs_[alias.unsafeGetTensorImpl()] = {alias, tensor};
    return alias;
  }

  at::Tensor back(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    const auto known = pairs_.find(tensor.unsafeGetTensorImpl());
    if (known != pairs_.end()) return known->second.second;
    const auto old = back_.find(tensor.storage().unsafeGetStorageImpl());
    return over(old != back_.end() ? old->second : moved(tensor.storage()), c10::DispatchKey::CUDA, tensor);
  }

  // What an operation has made larger is so on the device too.
  void resize() {
    for (auto& [impl, pair] : pairs_) {
      const at::Tensor& tensor = pair.second;
      if (impl->sizes() == tensor.sizes() || impl->numel() == 0) continue;
      if (impl->storage().nbytes() > tensor.storage().nbytes()) {
        c10::Storage larger = moved(impl->storage());
        tensor.storage().set_data_ptr(std::move(larger.mutable_data_ptr()));
        tensor.storage().set_nbytes(larger.nbytes());
      }
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides());
    }
  }

 private:
  static at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
  }
  c10::Storage moved(const c10::Storage& storage) const {
    const OnDevice on(device);
    c10::DataPtr data = device_memory.allocate(storage.nbytes());
    std::memcpy(data.get(), storage.data(), storage.nbytes());
    return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), &device_memory, true);
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> there_, back_;
  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> pairs_;
};

// Every tensor in a value, replaced by what `change` makes of it.
template <typename Change>
void each_tensor(c10::IValue& value, Change&& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    value = list;
  }
}

bool writes(const c10::AliasInfo* info) { return info != nullptr && info->isWrite(); }

// The host waits here for numbers of the device: a value, or how large the outcome is.
bool read_by_host(const std::string& name) {
  static const std::set<std::string> names = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
                                              "aten::_unique2", "aten::unique_dim", "aten::bincount", "aten::is_nonzero"};
  return names.count(name) != 0;
}

// Any operation of libtorch.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t given = schema.arguments().size(), first = stack->size() - given;
  const auto& returns = schema.returns();
  const bool view = !returns.empty() && returns[0].alias_info() != nullptr && !returns[0].alias_info()->isWrite();
  Operands operands;
  std::vector<Machine::Touch> touched;
  for (size_t i = 0; i < given; ++i) {
    c10::IValue& value = (*stack)[first + i];
    const bool write = writes(schema.arguments()[i].alias_info());
    // An index may lie in plain memory, and so may a number.
    const bool anywhere = value.isOptionalTensorList();
    each_tensor(value, [&](const at::Tensor& tensor) {
      const bool plain = tensor.defined() && !tensor.is_cuda();
      TORCH_CHECK(!plain || anywhere || tensor.dim() == 0, "stand-in: ", name, " has an operand in plain memory");
      if (tensor.defined() && !plain && !view && tensor.numel() > 0) touched.push_back({tensor.storage().data(), write});
      return operands.there(tensor);
    });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      operands.device = Guard::index(value.toDevice());
      value = Device(DeviceType::CPU);
    }
  }
  // As a kernel does: it runs on the device of its operands, whatever the thread's own is.
  const OnDevice on(operands.device);
  const int stream = place_now(device_now());
  if (!view) machine().operate(name, stream, touched);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = 0; i < returns.size(); ++i) {
    each_tensor((*stack)[stack->size() - returns.size() + i], [&](const at::Tensor& tensor) {
      at::Tensor made = operands.back(tensor);
      if (made.defined() && !view && made.numel() > 0) machine().wrote(name, stream, made.storage().data());
      return made;
    });
  }
  operands.resize();
  if (!read_by_host(name)) return;
  machine().count(&Totals::host_reads);
  machine().synchronize(stream);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> kind, std::optional<at::Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice on(device ? Guard::index(*device) : -1);
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), kind.value_or(at::kFloat),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> kind,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const OnDevice on(device ? Guard::index(*device) : -1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           kind.value_or(at::kFloat));
}

// To, from and on devices. The host waits for all but those to and from pinned memory that are asked not to block.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const at::Tensor &device_side = self.is_cuda() ? self : source, &other = self.is_cuda() ? source : self;
  const bool to_host = !self.is_cuda(), from_host = !source.is_cuda();
  if (self.numel() == 0) return self;
  TORCH_CHECK(to_host || from_host || self.device() == source.device(), "stand-in: a copy between devices");
  const OnDevice on(device_side.device().index());
  const int stream = place_now(device_now());
  std::vector<Machine::Touch> touched;
  if (!to_host) touched.push_back({self.storage().data(), true});
  if (!from_host) touched.push_back({source.storage().data(), false});
  machine().operate("copy_", stream, touched);
  machine().count(&Totals::copies);
  if (to_host) machine().count(&Totals::to_host);
  if (from_host) machine().count(&Totals::from_host);
  {
    Operands there, too;
    there.there(self).copy_(too.there(source));
  }
  if (!to_host && !from_host) return self;
  if (non_blocking && machine().is_pinned(other.storage().data())) {
    TORCH_CHECK(other.is_contiguous(), "stand-in: a copy that does not block of memory in pieces");
    machine().under_way(stream, other.mutable_data_ptr(), other.nbytes(), to_host);
    return self;
  }
  machine().count(to_host ? &Totals::host_reads : &Totals::host_waits);
  machine().synchronize(stream);
  return self;
}

void record_stream(at::Tensor& self, Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

at::Tensor& set_source(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_source));
#ifndef STANDIN_HIP
  // NVIDIA's half of the library has a kernel for it. AMD's makes a product for each expert, whose rows the host asks for, and so
  // does libtorch where no kernel is named.
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
#endif
}

struct Process {
  Process() { c10::SetAllocator(kGpu, &device_memory, 100); }
  ~Process() { machine().tell(); }
} process;
}  // namespace

// What a program looks up by name in the real library and in those that come with it, and what other stand-ins ask this one.
#ifdef STANDIN_HIP
#define VENDORS(nvidia, amd) amd
#else
#define VENDORS(nvidia, amd) nvidia
#endif
extern "C" {
// libtorch's own call does nothing where the device is chosen already, as the first one is on every thread; this one makes a
// context.
int VENDORS(cudaSetDevice, hipSetDevice)(int device) {
  if (device < 0 || device >= standin::kDevices) return 101;
  if (context != device) machine().count(&Totals::contexts);
  context = static_cast<DeviceIndex>(device);
  choose_device(context);
  return 0;
}
int VENDORS(cudaFree, hipFree)(void* data) {
  if (data != nullptr) return 1;
  machine().enters(chosen);
  return 0;
}
// What a driver answers to the calling thread: no context, a stream of another device's, or all is well.
int standin_answer(void* stream) {
  if (context < 0) return 201;
  return stream == nullptr || place_of(stream) / standin::kPerDevice == context ? 0 : 400;
}
// It says no architecture (attributes 75 and 76 of NVIDIA's, the name of AMD's): what ran here never passes for what ran on a GPU.
// Its compute units (16, or 63 of AMD's) are as many as STANDIN_UNITS says.
int VENDORS(cudaDeviceGetAttribute, hipDeviceGetAttribute)(int* value, int attribute, int) {
  if (VENDORS(attribute == 75 || attribute == 76, false)) return 1;
  const char* units = std::getenv("STANDIN_UNITS");
  *value = attribute != VENDORS(16, 63) ? 0 : units == nullptr ? 2 : std::atoi(units);
  return 0;
}
int VENDORS(cudaDriverGetVersion, hipDriverGetVersion)(int* version) {
  *version = VENDORS(13000, 70000000);
  return 0;
}
int VENDORS(cudaRuntimeGetVersion, hipRuntimeGetVersion)(int* version) {
  *version = VENDORS(13000, 70000000);
  return 0;
}
#ifdef STANDIN_HIP
int hipDeviceGetName(char*, int, int) { return 1; }
int rocblas_get_version_string(char* text, size_t room) { return std::snprintf(text, room, "0.1.2") < 0; }
int hipblasLtCreate(void** handle) {
  static int one;
  *handle = &one;
  return 0;
}
int hipblasLtGetVersion(void* handle, int* version) {
  *version = 12;
  return handle == nullptr;
}
int hipblasLtDestroy(void* handle) { return handle == nullptr; }
int miopenGetVersion(size_t* major, size_t* minor, size_t* patch) {
  *major = 0, *minor = 1, *patch = 2;
  return 0;
}
#else
int cublasGetProperty(int part, int* value) {
  *value = part;
  return 0;
}
#endif
int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = handle(Guard().getStream(Device(kGpu, static_cast<DeviceIndex>(device))));
  return 0;
}

// A kernel that is launched past libtorch, with the memory that it reads and writes.
void standin_launch(void* stream, const char* name, size_t count, const void* const* data, const int* write) {
  std::vector<Machine::Touch> touched;
  for (size_t i = 0; i < count; ++i) touched.push_back({data[i], write[i] != 0});
  int place = place_of(stream);
  if (machine().goes_astray(name)) place += standin::kPool - place % standin::kPerDevice;
  machine().operate(name, place, touched);
  machine().count(&Totals::launches);
}
// Work that goes on by itself begins on a stream, and is done.
void standin_begin(void* stream) { machine().foreign_begins(place_of(stream)); }
void standin_end(void* stream) { machine().foreign_ends(place_of(stream)); }
}

// libtorch's profiler: what ran between two calls, on every thread of the process and on its GPU. Every function
// returns a code of `shim.h`; the events are returned through `shim_text`.

#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>
#include <string>

#include "shim.h"

namespace {

using torch::profiler::impl::ActivityType;

// The activity of any GPU is called CUDA in libtorch, also for ROCm.
std::set<ActivityType> activities(int on_device) {
  if (on_device == 0) return {ActivityType::CPU};
  return {ActivityType::CPU, ActivityType::CUDA};
}

}  // namespace

// Starts profiling.
extern "C" int shim_profile(int on_device) {
  return shim_guard([=] {
    torch::profiler::impl::ExperimentalConfig more;
    // Micro-batches run on threads that are started later.
    more.profile_all_threads = true;
    const torch::profiler::impl::ProfilerConfig config(
        torch::profiler::impl::ProfilerState::KINETO, false, false, false, false, false, more);
    torch::autograd::profiler::prepareProfiler(config, activities(on_device));
    torch::autograd::profiler::enableProfiler(config, activities(on_device), {at::RecordScope::FUNCTION});
  });
}

// Stops profiling and writes everything to `path`, in a format for browsers and Perfetto. The text has a line for each
// event: whether it ran on a device, its thread or stream, start, nanoseconds, name.
extern "C" int shim_profiled(const char* path) {
  return shim_guard([=] {
    auto found = torch::autograd::profiler::disableProfiler();
    std::string text;
    for (const auto& event : found->events()) {
      const bool on_device = event.deviceType() != c10::DeviceType::CPU;
      const auto place = on_device ? static_cast<uint64_t>(event.deviceResourceId()) : event.startThreadId();
      text += on_device ? '1' : '0';
      for (const uint64_t number : {place, event.startNs(), event.durationNs()}) text += ' ' + std::to_string(number);
      text += ' ';
      for (const char letter : event.name()) text += letter == '\n' ? ' ' : letter;
      text += '\n';
    }
    found->save(path);
    shim_say(text);
  });
}

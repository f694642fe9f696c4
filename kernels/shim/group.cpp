// Ranks: libtorch's own Gloo process group. Only bytes move here; nothing is added, except in the benchmark's
// collectives. Every call that waits takes a deadline in milliseconds. Every function that can throw returns a code of
// `shim.h`; texts are returned through `shim_text`.

#define USE_DISTRIBUTED
#define USE_C10D_GLOO

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shim.h"

// The caller's store, as in `bridge.rs`. Each call returns a code of `shim.h`.
struct StoreCalls {
  void* owner;
  int (*set)(void* owner, const char* key, std::size_t key_length, const std::uint8_t* value, std::size_t length);
  // Waits until there is a value, and passes it to `shim_bytes` with the sink.
  int (*wait)(void* owner, const char* key, std::size_t key_length, void* sink);
  void (*free)(void* owner);
};

namespace {

using std::chrono::milliseconds;
using Bytes = std::vector<std::uint8_t>;

// Gloo's interface to the caller's store, with what it needs to connect the ranks. The caller decides how long to wait
// for a value.
class CallersStore final : public c10d::Store {
 public:
  explicit CallersStore(const StoreCalls& calls) : calls_(calls) {}
  CallersStore(const CallersStore&) = delete;
  CallersStore& operator=(const CallersStore&) = delete;
  ~CallersStore() override { calls_.free(calls_.owner); }

  void set(const std::string& key, const Bytes& value) override {
    check_code(calls_.set(calls_.owner, key.data(), key.size(), value.data(), value.size()));
  }
  Bytes get(const std::string& key) override {
    Bytes value;
    check_code(calls_.wait(calls_.owner, key.data(), key.size(), &value));
    return value;
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const auto& key : keys) get(key);
  }
  void wait(const std::vector<std::string>& keys, const milliseconds&) override { wait(keys); }

  c10::intrusive_ptr<c10d::Store> clone() override { return refuse("clone"), nullptr; }
  int64_t add(const std::string&, int64_t) override { return refuse("add"), 0; }
  bool deleteKey(const std::string&) override { return refuse("deleteKey"), false; }
  bool check(const std::vector<std::string>&) override { return refuse("check"), false; }
  int64_t getNumKeys() override { return refuse("getNumKeys"), 0; }

 private:
  static void check_code(int code) {
    if (code != kDone) throw std::runtime_error("the store failed");
  }
  static void refuse(const char* call) {
    throw std::runtime_error(std::string("the store of the ranks has no ") + call);
  }

  StoreCalls calls_;
};

struct Peers {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
};

struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
};

// The time in which this process was running. A process that was stopped and continues (a suspended job, a machine that
// slept or had no CPU time for it) was not waiting meanwhile: the other processes of its machine were stopped, too, and
// their answers arrive now. So time counts while this thread is scheduled, and a pause counts as one late wakeup.
class RunningClock {
 public:
  // Never freed: its thread runs until the process ends.
  static RunningClock& clock() {
    static RunningClock* instance = new RunningClock;
    return *instance;
  }

  milliseconds now() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::chrono::duration_cast<milliseconds>(advance());
  }

  // Waits until the work is done; throws ShimLate if that takes longer than `timeout`.
  void wait(c10d::Work& work, milliseconds timeout) {
    const auto entry = enter(work, timeout);
    // Whether this clock aborted the work.
    const auto leave = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      const bool late = entry->late;
      waits_.erase(entry);
      return late;
    };
    bool done = false;
    std::exception_ptr failure;
    try {
      // Gloo's own deadline uses the wall clock and cannot be polled, so it is practically infinite here.
      done = work.wait(std::chrono::hours(24 * 365));
    } catch (...) {
      failure = std::current_exception();
    }
    const bool late = leave();
    if (done) return;
    if (late) throw ShimLate("timed out");
    if (failure) std::rethrow_exception(failure);
    throw std::runtime_error("the transfer was given up");
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Wait {
    c10d::Work* work;
    Clock::duration until;
    bool late;
  };

  static constexpr auto kPollInterval = milliseconds(20);
  static constexpr auto kLongestPause = milliseconds(100);

  RunningClock() : last_(Clock::now()) {
    std::thread([this] {
      for (;;) {
        std::this_thread::sleep_for(kPollInterval);
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto now = advance();
        for (auto& wait : waits_) {
          if (wait.until > now) continue;
          wait.late = true;
          // The waiting thread reports it above; another abort does nothing. If a work cannot be aborted, the wait
          // continues.
          try {
            wait.work->abort();
          } catch (...) {
          }
        }
      }
    }).detach();
  }

  std::list<Wait>::iterator enter(c10d::Work& work, milliseconds timeout) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waits_.insert(waits_.end(), Wait{&work, advance() + timeout, false});
  }

  Clock::duration advance() {
    const auto now = Clock::now();
    running_ += std::min<Clock::duration>(now - last_, kLongestPause);
    last_ = now;
    return running_;
  }

  std::mutex mutex_;
  std::list<Wait> waits_;
  Clock::time_point last_;
  Clock::duration running_{0};
};

c10d::ProcessGroupGloo& gloo_of(void* group) { return *static_cast<Peers*>(group)->gloo; }

} // namespace

extern "C" {

// Stores a value in the sink of `StoreCalls::wait`.
int shim_bytes(void* sink, const std::uint8_t* bytes, std::size_t length) {
  return shim_guard([&] { static_cast<Bytes*>(sink)->assign(bytes, bytes + length); });
}

// Connects every rank with every other. An interface takes precedence over a host; without either, libtorch chooses.
int shim_group_open(StoreCalls calls, int rank, int world, const char* interface, const char* host, int64_t timeout,
                    void** out) {
  return shim_guard([&] {
    const auto store = c10::make_intrusive<CallersStore>(calls);
    // Failures are returned as errors that name a rank; c10d's log would only add stack traces.
    if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = c10::GLOG_FATAL;
    auto options = c10d::ProcessGroupGloo::Options::create(milliseconds(timeout));
    // These threads serve only libtorch's own collectives; our transfers run on the device's thread.
    options->threads = 1;
    if (*interface != 0) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    } else if (*host != 0) {
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(host));
    } else {
      options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    }
    auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, world, std::move(options));
    *out = new Peers{std::move(gloo)};
  });
}

void shim_group_free(void* group) { delete static_cast<Peers*>(group); }

// Starts to send a contiguous CPU tensor, which is kept until the work is freed.
int shim_send(void* group, const at::Tensor* tensor, int to, int tag, void** out) {
  return shim_guard([&] {
    std::vector<at::Tensor> tensors{*tensor};
    *out = new Transfer{gloo_of(group).send(tensors, to, tag)};
  });
}

// Starts to receive into a contiguous CPU tensor.
int shim_recv(void* group, const at::Tensor* tensor, int from, int tag, void** out) {
  return shim_guard([&] {
    std::vector<at::Tensor> tensors{*tensor};
    *out = new Transfer{gloo_of(group).recv(tensors, from, tag)};
  });
}

// `timeout` counts the time in which this process runs.
int shim_work_wait(void* work, int64_t timeout) {
  return shim_guard([&] {
    auto& transfer = *static_cast<Transfer*>(work)->work;
    RunningClock::clock().wait(transfer, milliseconds(timeout));
  });
}

// Milliseconds for which this process was running since the first call.
int shim_lived(int64_t* out) {
  return shim_guard([=] { *out = RunningClock::clock().now().count(); });
}

void shim_work_free(void* work) { delete static_cast<Transfer*>(work); }

// libtorch's own collectives on f32 tensors, for the benchmark: 0 all-reduce, 1 reduce-scatter, 2 all-gather,
// 3 broadcast from rank 0, 4 all-to-all.
int shim_collective(void* group, int which, const at::Tensor* input, const at::Tensor* output, int64_t timeout) {
  return shim_guard([&] {
    auto& gloo = gloo_of(group);
    at::Tensor in = *input, out = *output;
    std::vector<at::Tensor> tensors{in};
    std::vector<int64_t> equal;
    c10::intrusive_ptr<c10d::Work> work;
    switch (which) {
      case 0: work = gloo.allreduce(tensors); break;
      case 1: work = gloo._reduce_scatter_base(out, in); break;
      case 2: work = gloo._allgather_base(out, in); break;
      case 3: work = gloo.broadcast(tensors); break;
      default: work = gloo.alltoall_base(out, in, equal, equal); break;
    }
    work->wait(milliseconds(timeout));
  });
}

// Ends the process at once, without exit handlers: other threads still compute.
void shim_vanish(int code) { _exit(code); }

} // extern "C"

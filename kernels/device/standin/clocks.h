// What order a device promises: streams and events carry vector clocks, memory remembers who wrote and who reads it.
//
// An operation is after another where its stream's clock has reached the other's time there: by the same stream, by a wait for
// an event recorded later, or because a thread of the host had waited for it before it queued the operation. Whatever is not
// ordered so a device may do in either order: it is a race, whatever the bits are here. All threads of the host count as one:
// what they tell each other cannot be seen from here.
//
// A copy that the host does not wait for is checked on both sides. What it reads of pinned memory must have the same bytes when
// the host has heard of its end; what it writes there holds NaNs until then.
#pragma once
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace standin {
constexpr int kDevices = 2;
constexpr int kPool = 31;                    // streams beside the default one, handed out in turn as libtorch does
constexpr int kPerDevice = kPool + 1;
constexpr int kHost = kDevices * kPerDevice; // the host's place in a clock
constexpr int kPlaces = kHost + 1;
using Clock = std::array<uint64_t, kPlaces>;

inline void join(Clock& into, const Clock& from) {
  for (int i = 0; i < kPlaces; ++i) into[i] = std::max(into[i], from[i]);
}

struct Moment {
  int place = -1;
  uint64_t time = 0;
};
inline bool reached(const Clock& clock, Moment moment) { return moment.place < 0 || clock[moment.place] >= moment.time; }

// What a stream's memory is used for, by whom.
struct Memory {
  size_t bytes = 0;
  int home = 0;                        // the stream that it was allocated on
  Moment writer;
  std::string by;                      // the operation that wrote it
  std::map<int, uint64_t> readers;     // the last time of each stream since then
  std::set<int> recorded;              // streams that the allocator waits for before it hands the memory out again
};

struct Copy {
  Moment end;
  char* host;
  size_t bytes;
  bool to_host;
  std::vector<char> data;              // what it read, or will have written
};

// Work of another library that goes on by itself on a stream.
struct Foreign {
  uint64_t begun = 0, done = 0;
};

struct Event {
  Clock clock{};
  int place = -1;
  uint64_t foreign = 0;                // what of another library's work it comes after
};

struct Totals {
  uint64_t operations = 0, launches = 0, copies = 0, to_host = 0, from_host = 0, host_reads = 0, host_waits = 0,
           stream_waits = 0, foreign_waits = 0, foreign_host_waits = 0, races = 0, contexts = 0;
  std::map<std::string, uint64_t> by_name;
};

// A fault that a test has planted: STANDIN_FAULT=wait:N loses the N-th wait of a default stream for an event, side:N that of
// another stream, record:N the N-th record_stream, host:N the N-th wait of the host for an event, or look at one that is over;
// 0 means all of them. Of events behind another library's work arrival:N loses the N-th wait of a default stream, look:N the N-th
// look of the host at one that is over: it may free memory then, but what it queues is not after it. KERNEL:N puts the N-th launch
// of that kernel of ours on a stream that waits for nobody. Several faults are parted by commas.
class Fault {
 public:
  explicit Fault(const char* what) {
    const char* variable = std::getenv("STANDIN_FAULT");
    const std::string asked = std::string(",") + (variable == nullptr ? "" : variable), prefix = std::string(",") + what + ":";
    const size_t found = asked.find(prefix);
    if (found != std::string::npos) number_ = std::atoll(asked.c_str() + found + prefix.size());
  }
  bool strikes() {
    ++count_;
    return number_ == 0 || number_ == count_;
  }

 private:
  int64_t number_ = -1, count_ = 0;
};

class Machine {
 public:
  Machine() {
    for (int i = 0; i < kPlaces; ++i) clocks_[i][i] = 1;
  }

  int next_stream(int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    return 1 + static_cast<int>(handed_out_[device]++ % kPool);
  }

  // An operation on a stream, queued now; `touched` says what it reads and writes.
  struct Touch {
    const void* data;
    bool write;
  };
  void operate(const std::string& name, int place, const std::vector<Touch>& touched) {
    std::lock_guard<std::mutex> guard(mutex_);
    ++totals_.operations;
    ++totals_.by_name[name];
    join(clocks_[place], clocks_[kHost]);
    for (const Touch& touch : touched) this->touch(touch, place, name);
  }
  bool goes_astray(const std::string& kernel) {
    std::lock_guard<std::mutex> guard(mutex_);
    return astray_.try_emplace(kernel, kernel.c_str()).first->second.strikes();
  }
  void wrote(const std::string& name, int place, const void* data) {
    std::lock_guard<std::mutex> guard(mutex_);
    touch({data, true}, place, name);
  }
  void count(uint64_t Totals::* what) {
    std::lock_guard<std::mutex> guard(mutex_);
    ++(totals_.*what);
  }

  // This process has a context on a device from here on: hundreds of megabytes of a real one.
  void enters(int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    contexts_on_ |= uint64_t{1} << device;
  }
  bool has_context(int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    return ((contexts_on_ >> device) & 1) != 0;
  }
  bool has_any_context() {
    std::lock_guard<std::mutex> guard(mutex_);
    return contexts_on_ != 0;
  }

  void allocated(void* data, size_t bytes, int place) {
    std::lock_guard<std::mutex> guard(mutex_);
    Memory memory;
    memory.bytes = bytes;
    memory.home = place;
    memory_.emplace(static_cast<char*>(data), std::move(memory));
    bytes_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, bytes_);
  }
  // The allocator hands memory out again at once to whoever asks on the stream that it was allocated on.
  void freed(void* data) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = memory_.find(static_cast<char*>(data));
    if (found == memory_.end()) return;
    Memory& memory = found->second;
    Clock home = clocks_[memory.home];
    join(home, clocks_[kHost]);
    join(home, seen_);
    const auto check = [&](Moment moment) {
      if (reached(home, moment) || memory.recorded.count(moment.place) != 0) return;
      report("freed while it may be in use", "the allocator", memory.home, memory, moment.place);
    };
    check(memory.writer);
    for (const auto& [place, time] : memory.readers) check({place, time});
    bytes_ -= static_cast<int64_t>(memory.bytes);
    memory_.erase(found);
  }
  void record_stream(const void* data, int place) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (lost_record_.strikes()) return;
    if (Memory* memory = find(data)) memory->recorded.insert(place);
  }
  std::array<int64_t, 2> bytes() {
    std::lock_guard<std::mutex> guard(mutex_);
    return {bytes_, peak_};
  }
  void forget_peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    peak_ = bytes_;
  }

  void pinned(void* data, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    pinned_[static_cast<char*>(data)] = bytes;
  }
  bool is_pinned(const void* data) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto after = pinned_.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (after == pinned_.begin()) return false;
    const auto& [begin, bytes] = *std::prev(after);
    return static_cast<const char*>(data) < begin + bytes;
  }
  // The allocator of pinned memory keeps what a copy still needs from being handed out again.
  void unpinned(void* data) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = pinned_.find(static_cast<char*>(data));
    if (found == pinned_.end()) return;
    char *begin = found->first, *end = begin + found->second;
    settle([=](const Copy& copy) { return copy.host >= begin && copy.host < end; });
    pinned_.erase(found);
  }
  // A copy between pinned memory and a device that the host does not wait for.
  void under_way(int place, void* host, size_t bytes, bool to_host) {
    std::lock_guard<std::mutex> guard(mutex_);
    char* begin = static_cast<char*>(host);
    copies_.push_back({{place, clocks_[place][place]}, begin, bytes, to_host, std::vector<char>(begin, begin + bytes)});
    if (to_host) std::memset(begin, 0xff, bytes);
  }

  void record(Event& event, int place) {
    std::lock_guard<std::mutex> guard(mutex_);
    event = {clocks_[place], place, foreign_[place].begun};
    ++clocks_[place][place];
  }
  void wait(const Event& event, int place) {
    passed(event);
    std::lock_guard<std::mutex> guard(mutex_);
    ++totals_.stream_waits;
    const bool by_default = place % kPerDevice == 0;
    if (by_default && event.foreign > 0) {
      ++totals_.foreign_waits;
      if (lost_arrival_.strikes()) return;
    }
    Fault& lost = by_default ? lost_wait_ : lost_side_wait_;
    if (!lost.strikes()) join(clocks_[place], event.clock);
  }
  bool is_over(const Event& event) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (event.place >= 0 && foreign_[event.place].done < event.foreign) return false;
    join(seen_, event.clock);
    if (event.foreign > 0 && lost_look_.strikes()) return true;
    if (!lost_host_wait_.strikes()) heard(event.clock);
    return true;
  }
  void wait_on_host(const Event& event) {
    passed(event);
    std::lock_guard<std::mutex> guard(mutex_);
    ++totals_.host_waits;
    if (event.foreign > 0) ++totals_.foreign_host_waits;
    if (!lost_host_wait_.strikes()) heard(event.clock);
  }
  bool is_idle(int place) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (foreign_[place].done < foreign_[place].begun) return false;
    heard(clocks_[place]);
    ++clocks_[place][place];
    return true;
  }
  // The host waits for all that a stream has to do.
  void synchronize(int place) {
    Event now;
    record(now, place);
    passed(now);
    std::lock_guard<std::mutex> guard(mutex_);
    if (now.foreign > 0) ++totals_.foreign_host_waits;
    heard(now.clock);
  }

  void foreign_begins(int place) {
    std::lock_guard<std::mutex> guard(mutex_);
    ++foreign_[place].begun;
  }
  void foreign_ends(int place) {
    std::lock_guard<std::mutex> guard(mutex_);
    ++foreign_[place].done;
  }

  // One line of JSON, added to the file that STANDIN_REPORT names.
  void tell() {
    std::lock_guard<std::mutex> guard(mutex_);
    settle([](const Copy& copy) { return !copy.to_host; });
    const char* path = std::getenv("STANDIN_REPORT");
    std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "a");
    if (file == nullptr) return;
    const Totals& t = totals_;
    std::string line = "{";
    const auto number = [&](const char* name, uint64_t value) {
      line += "\"" + std::string(name) + "\":" + std::to_string(value) + ",";
    };
    number("operations", t.operations), number("launches", t.launches), number("copies", t.copies);
    number("to_host", t.to_host), number("from_host", t.from_host), number("host_reads", t.host_reads);
    number("host_waits", t.host_waits), number("stream_waits", t.stream_waits);
    number("foreign_waits", t.foreign_waits), number("foreign_host_waits", t.foreign_host_waits);
    number("races", t.races), number("contexts", t.contexts);
    number("contexts_on", contexts_on_), number("peak_bytes", static_cast<uint64_t>(peak_));
    line += "\"by_name\":{";
    for (const auto& [name, times] : t.by_name) number(name.c_str(), times);
    if (line.back() == ',') line.pop_back();
    line += "}}\n";
    std::fwrite(line.data(), 1, line.size(), file);
    std::fclose(file);
  }

 private:
  Memory* find(const void* data) {
    const auto after = memory_.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (after == memory_.begin()) return nullptr;
    auto& [begin, memory] = *std::prev(after);
    return static_cast<const char*>(data) < begin + std::max<size_t>(memory.bytes, 1) ? &memory : nullptr;
  }

  void touch(const Touch& touch, int place, const std::string& name) {
    Memory* memory = find(touch.data);
    if (memory == nullptr) return;
    const Clock& now = clocks_[place];
    if (!reached(now, memory->writer)) report(touch.write ? "written" : "read", name, place, *memory, memory->writer.place);
    if (!touch.write) {
      memory->readers[place] = now[place];
      return;
    }
    for (const auto& [reader, time] : memory->readers) {
      if (!reached(now, {reader, time})) report("written while it may be read", name, place, *memory, reader);
    }
    memory->readers.clear();
    memory->writer = {place, now[place]};
    memory->by = name;
  }

  static std::string named(int place) {
    if (place == kHost) return "the host";
    return "stream " + std::to_string(place % kPerDevice) + " of device " + std::to_string(place / kPerDevice);
  }
  void report(const char* what, const std::string& name, int place, const Memory& memory, int other) {
    ++totals_.races;
    const std::string by = memory.by.empty() ? "nobody" : memory.by;
    const std::string text = "stand-in: memory that " + by + " wrote is " + what + " by " + name + " on " + named(place) +
                             ", which does not wait for " + named(other) + "\n";
    // A lost wait shows by all that is behind it: each kind of race is told once.
    if (told_.size() < 40 && told_.insert(text).second) std::fputs(text.c_str(), stderr);
  }

  // The host has waited for what this clock says.
  void heard(const Clock& clock) {
    join(clocks_[kHost], clock);
    settle([&](const Copy& copy) { return reached(clocks_[kHost], copy.end); });
  }
  template <typename Ended>
  void settle(Ended&& ended) {
    const auto finish = [&](Copy& copy) {
      if (!ended(copy)) return false;
      if (copy.to_host) std::memcpy(copy.host, copy.data.data(), copy.bytes);
      else if (std::memcmp(copy.host, copy.data.data(), copy.bytes) != 0 && ++totals_.races > 0 && ++overwritten_ <= 20) {
        std::fprintf(stderr, "stand-in: the host wrote pinned memory that a copy on %s may still read\n",
                     named(copy.end.place).c_str());
      }
      return true;
    };
    copies_.erase(std::remove_if(copies_.begin(), copies_.end(), finish), copies_.end());
  }

  // Until what another library does before the event is done.
  void passed(const Event& event) {
    const auto done = [&] {
      std::lock_guard<std::mutex> guard(mutex_);
      return event.place < 0 || foreign_[event.place].done >= event.foreign;
    };
    while (!done()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  std::mutex mutex_;
  std::array<Clock, kPlaces> clocks_{};
  std::array<uint64_t, kDevices> handed_out_{};
  std::array<Foreign, kPlaces> foreign_{};
  std::map<char*, Memory> memory_;
  std::map<char*, size_t> pinned_;
  std::vector<Copy> copies_;
  Totals totals_;
  uint64_t contexts_on_ = 0;           // devices on which this process has one, a bit each
  Clock seen_{};                       // what the host has ever looked at
  int64_t bytes_ = 0, peak_ = 0;
  std::set<std::string> told_;         // of races
  int overwritten_ = 0;                // copies whose memory the host has written under them: told apart from the other races
  Fault lost_wait_{"wait"}, lost_side_wait_{"side"}, lost_record_{"record"}, lost_host_wait_{"host"},
      lost_arrival_{"arrival"}, lost_look_{"look"};
  std::map<std::string, Fault> astray_;  // by kernel
};
}  // namespace standin

// Compiled without a sanitizer, and linked instead of one.
#include "counter.h"

#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "emulator.h"

namespace {
constexpr uint64_t SECTOR = 32, WAVE = 32;

struct Range {
  uint64_t begin, end;
};
std::vector<Range> ranges;
counter::Bytes bytes;
bool counts = false;

// Of a block: how often each thread came by an instruction, and the sectors that its wave asked for there, each time.
struct Asked {
  std::unordered_map<uint64_t, std::vector<uint32_t>> times;
  std::map<std::tuple<uint64_t, uint32_t, uint32_t>, std::set<uint64_t>> sectors;
};
uint32_t block = 0;
Asked loads, stores;

uint64_t settle(Asked& asked) {
  uint64_t sum = 0;
  for (const auto& one : asked.sectors) sum += one.second.size() * SECTOR;
  asked = {};
  return sum;
}
void settle() {
  bytes.loaded += settle(loads);
  bytes.stored += settle(stores);
}

// What a thread keeps to itself, or has in shared memory, is in no buffer.
bool is_named(uint64_t at) {
  for (const Range& range : ranges)
    if (at >= range.begin && at < range.end) return true;
  return false;
}

void ask(Asked& asked, const void* address, uint64_t size, const void* instruction) {
  const auto at = reinterpret_cast<uint64_t>(address), place = reinterpret_cast<uint64_t>(instruction);
  if (!counts || !is_named(at)) return;
  if (emulator::block() != block) settle();
  block = emulator::block();
  const uint32_t thread = emulator::thread();
  std::vector<uint32_t>& times = asked.times[place];
  if (times.size() <= thread) times.resize(thread + 1);
  std::set<uint64_t>& sectors = asked.sectors[{place, times[thread]++, thread / WAVE}];
  for (uint64_t sector = at / SECTOR; sector <= (at + size - 1) / SECTOR; ++sector) sectors.insert(sector);
}
}  // namespace

namespace counter {
void name(const void* buffer, uint64_t size) {
  const auto begin = reinterpret_cast<uint64_t>(buffer);
  ranges.push_back({begin, begin + size});
}
void start() {
  bytes = {0, 0};
  counts = true;
}
Bytes stop() {
  counts = false;
  settle();
  return bytes;
}
}  // namespace counter

#define ASK(name, asked, size) \
  void __tsan_##name(void* at) { ask(asked, at, size, __builtin_return_address(0)); }
#define ACCESS(size)                                                                      \
  ASK(read##size, loads, size)                                                            \
  ASK(write##size, stores, size)                                                          \
  ASK(unaligned_read##size, loads, size)                                                  \
  ASK(unaligned_write##size, stores, size)
extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* at, uint64_t size) { ask(loads, at, size, __builtin_return_address(0)); }
void __tsan_write_range(void* at, uint64_t size) { ask(stores, at, size, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
}

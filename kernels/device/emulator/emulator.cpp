// Compiled without a sanitizer, also where the kernels are compiled with one: what is done here no thread of a block does.
#include "emulator.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

extern "C" {
void* __tsan_get_current_fiber() __attribute__((weak));
void* __tsan_create_fiber(unsigned) __attribute__((weak));
void __tsan_destroy_fiber(void*) __attribute__((weak));
void __tsan_switch_to_fiber(void*, unsigned) __attribute__((weak));
void __tsan_acquire(void*) __attribute__((weak));
void __tsan_release(void*) __attribute__((weak));
void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));
}

#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
// A system call at each switch, as ucontext makes it, would take most of the time.
extern "C" void emulator_swap(void** from, void* to);
asm(R"(
.text
.globl emulator_swap
.type emulator_swap,@function
emulator_swap:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emulator_swap,.-emulator_swap
)");
struct Context {
  void* stack = nullptr;
  void prepare(char* low, size_t bytes, void (*start)()) {
    auto* top = reinterpret_cast<void**>(low + bytes - 64);
    top[0] = reinterpret_cast<void*>(start);
    stack = top - 6;
  }
  void go(Context& to) { emulator_swap(&stack, to.stack); }
};
#else
struct Context {
  ucontext_t context;
  void prepare(char* low, size_t bytes, void (*start)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = low;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
  }
  void go(Context& to) { swapcontext(&context, &to.context); }
};
#endif

namespace emulator {
namespace {
enum class State { ready, barrier, together, done };
struct Fiber {
  Context context;
  void* tsan;
  State state;
  Site site;
  void* own;
  Unit unit;
};
struct Array {
  const void* identity;
  char* at;
};
constexpr size_t kStack = 64 << 10, kShared = 64 << 10, kGap = 64, kArrays = 16;

struct Block {
  uint32_t id;
  std::vector<Fiber> fibers;
  Array arrays[kArrays] = {};  // not a vector: a fiber fills it, and a sanitizer would see the allocation
  char* arena;
  size_t used = 0, taken = 0;
  uint64_t epoch = 0;
  char meeting[2];
};

const Kernel* kernels = nullptr;
const Kernel* running = nullptr;
void** arguments_now = nullptr;
Block* now = nullptr;
uint32_t current = 0, now_wave = 0;
Context home;
void* home_tsan = nullptr;
char launch_end;

[[noreturn]] void refuse(const char* what, uint32_t one, uint32_t other) {
  const Site a = now->fibers[one].site, b = now->fibers[other].site;
  fprintf(stderr, "emulator: %s, block %u: %s: thread %u (%s:%u), thread %u (%s:%u)\n", running->name, now->id, what, one,
          a.file ? a.file : "start", a.line, other, b.file ? b.file : "start", b.line);
  _Exit(3);
}

bool same(Site a, Site b) { return a.line == b.line && a.file && b.file && strcmp(a.file, b.file) == 0; }

void leave(State state) {
  Fiber& fiber = now->fibers[current];
  fiber.state = state;
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(home_tsan, 1);
  fiber.context.go(home);
}

void enter(uint32_t index) {
  current = index;
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(now->fibers[index].tsan, 1);
  home.go(now->fibers[index].context);
}

void start() {
  running->call(arguments_now);
  if (__tsan_release) __tsan_release(&launch_end);
  now->fibers[current].site = {"end", 0};
  leave(State::done);
  abort();
}

uint64_t draw(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

std::vector<uint32_t> permutation(uint32_t count, Order order, uint64_t& seed) {
  std::vector<uint32_t> numbers(count);
  for (uint32_t i = 0; i < count; ++i) numbers[i] = order == Order::reverse ? count - 1 - i : i;
  if (order == Order::shuffled)
    for (uint32_t i = count; i > 1; --i) std::swap(numbers[i - 1], numbers[draw(seed) % i]);
  return numbers;
}

// Does what the lanes of each wave that meets are here for. False where no wave meets.
bool met() {
  const uint32_t wave = now_wave;
  bool moved = false;
  std::vector<void*> of_lanes;
  const auto threads = static_cast<uint32_t>(now->fibers.size());
  for (uint32_t base = 0; base < threads; base += wave) {
    const uint32_t end = std::min(base + wave, threads);
    uint32_t first = base;
    while (first < end && now->fibers[first].state != State::together) ++first;
    if (first == end) continue;
    of_lanes.clear();
    const Unit unit = now->fibers[first].unit;
    for (uint32_t i = base; i < end; ++i) {
      Fiber& fiber = now->fibers[i];
      if (fiber.state != State::together || fiber.unit != unit || !same(fiber.site, now->fibers[first].site))
        refuse("a shuffle without all lanes of the wave", first, i);
      of_lanes.push_back(fiber.own);
      fiber.state = State::ready;
    }
    unit(of_lanes.data(), end - base);
    moved = true;
  }
  return moved;
}

struct Exchange {
  uint32_t value, mask, found;
};
void exchange_unit(void* const* of_lanes, uint32_t wave) {
  for (uint32_t lane = 0; lane < wave; ++lane) {
    auto* own = static_cast<Exchange*>(of_lanes[lane]);
    own->found = static_cast<const Exchange*>(of_lanes[lane ^ own->mask])->value;
  }
}

void run_block(Way way, uint64_t& seed) {
  const auto threads = static_cast<uint32_t>(now->fibers.size());
  for (;;) {
    for (const uint32_t i : permutation(threads, way.order, seed))
      if (now->fibers[i].state == State::ready) enter(i);
    if (met()) continue;
    uint32_t done = 0;
    for (const Fiber& fiber : now->fibers) done += fiber.state == State::done;
    if (done == threads) return;
    for (uint32_t i = 0; i < threads; ++i) {
      const Fiber& fiber = now->fibers[i];
      if (fiber.state != State::barrier || !same(fiber.site, now->fibers[0].site)) refuse("threads part at a barrier", 0, i);
    }
    ++now->epoch;
    for (Fiber& fiber : now->fibers) fiber.state = State::ready;
  }
}

char* take(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    perror("emulator: memory for stacks");
    _Exit(4);
  }
  return static_cast<char*>(at);
}
}  // namespace

uint32_t thread() { return current; }
uint32_t block() { return now->id; }
uint32_t wave() { return now_wave; }

void barrier(Site site) {
  now->fibers[current].site = site;
  char* meeting = &now->meeting[now->epoch & 1];  // two in turn: nobody passes the next before all have passed this one
  if (__tsan_release) __tsan_release(meeting);
  leave(State::barrier);
  if (__tsan_acquire) __tsan_acquire(meeting);
}

// Registers travel; memory is not ordered by it.
void together(Site site, void* own, Unit unit) {
  Fiber& fiber = now->fibers[current];
  fiber.site = site;
  fiber.own = own;
  fiber.unit = unit;
  leave(State::together);
}

uint32_t exchange(Site site, uint32_t value, uint32_t mask) {
  if (mask >= 32) refuse("a shuffle from beyond 32 lanes", current, current);
  Exchange own{value, mask, 0};
  together(site, &own, &exchange_unit);
  return own.found;
}

void* shared(const void* identity, size_t bytes) {
  for (Array& array : now->arrays) {
    if (array.identity == identity) return array.at;
    if (array.identity != nullptr) continue;
    now->taken += bytes;
    if (now->taken > kShared) refuse("more shared memory than the 64 KiB of gfx942", current, current);
    array = {identity, now->arena + now->used};
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(array.at, bytes);
    now->used += (bytes + kGap - 1) / kGap * kGap + kGap;
    return array.at;
  }
  refuse("more than 16 shared arrays", current, current);
}

Kernel::Kernel(const char* name, uint32_t threads, Call call, Parameters parameters)
    : name(name), threads(threads), call(call), parameters(parameters), next(kernels) {
  kernels = this;
}

const Kernel* find(const char* name) {
  const Kernel* kernel = kernels;
  while (kernel != nullptr && strcmp(kernel->name, name) != 0) kernel = kernel->next;
  return kernel;
}

void launch(const Kernel& kernel, uint32_t blocks, void** arguments, Way way) {
  running = &kernel;
  arguments_now = arguments;
  now_wave = way.wave;
  uint64_t seed = (way.seed + 1) * 0x9e3779b97f4a7c15ull;
  if (__tsan_get_current_fiber) home_tsan = __tsan_get_current_fiber();
  const size_t arena = kShared + kArrays * 2 * kGap, bytes = kStack * kernel.threads + arena;
  const std::vector<uint32_t> unwritten(arena / 4, 0x7fc00000u + static_cast<uint32_t>(way.seed * 64 + way.wave));
  // Fresh stacks cost a page fault for each thread of a block, so they are kept for the next launch.
  static char* kept = nullptr;
  static size_t kept_bytes = 0;
  if (kept_bytes != bytes && kept != nullptr) munmap(std::exchange(kept, nullptr), kept_bytes);
  kept_bytes = bytes;
  char* memory = std::exchange(kept, nullptr);
  for (const uint32_t id : permutation(blocks, way.order, seed)) {
    // A thread sanitizer forgets a mapping that goes: with it no address serves two blocks.
    if (memory == nullptr) memory = take(bytes);
    Block here{id, std::vector<Fiber>(kernel.threads), {}, memory + kStack * kernel.threads, 0, 0, 0, {}};
    now = &here;
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(here.arena, arena);
    memcpy(here.arena, unwritten.data(), arena);
    if (__asan_poison_memory_region) __asan_poison_memory_region(here.arena, arena);
    for (uint32_t i = 0; i < kernel.threads; ++i) {
      Fiber& fiber = here.fibers[i];
      fiber.context.prepare(memory + kStack * i, kStack, &start);
      fiber.tsan = __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr;
    }
    run_block(way, seed);
    for (const Fiber& fiber : here.fibers)
      if (__tsan_destroy_fiber) __tsan_destroy_fiber(fiber.tsan);
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(here.arena, arena);
    if (__tsan_create_fiber) {
      munmap(memory, bytes);
      memory = nullptr;
    }
  }
  kept = memory;
  if (__tsan_acquire) __tsan_acquire(&launch_end);
  now = nullptr;
}
}  // namespace emulator

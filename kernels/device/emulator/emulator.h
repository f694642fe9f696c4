// A GPU's blocks on a CPU: each thread of a block is a fiber, and switches at barriers and shuffles only.
//
// What it refuses, with a sentence and exit code 3: threads of a block at different barriers, a shuffle or a matrix product
// without all lanes of the wave, more shared memory than a device has. Shared memory is filled anew for each block, with other
// NaNs in each way of running it, so that a read of what was not written gets other bits. Under -fsanitize=thread each fiber is a
// thread of its own and nothing but a barrier orders memory, and that within a block: a read that races with a write is reported.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace emulator {
struct Site {
  const char* file;
  uint32_t line;
};
uint32_t thread();
uint32_t block();
void barrier(Site site);
uint32_t wave();
// What all lanes of a wave do at once, in registers: `unit` is called when all of them are here, with what each brought.
using Unit = void (*)(void* const* of_lanes, uint32_t wave);
void together(Site site, void* own, Unit unit);
uint32_t exchange(Site site, uint32_t value, uint32_t mask);
void* shared(const void* identity, size_t bytes);

// A kernel, called with the addresses of its arguments, as the drivers do.
using Call = void (*)(void** arguments);
template <auto F>
struct Caller;
template <typename... A, void (*F)(A...)>
struct Caller<F> {
  template <size_t... I>
  static void with(void** arguments, std::index_sequence<I...>) {
    F(*static_cast<A*>(arguments[I])...);
  }
};
template <auto F>
struct Count;
template <typename... A, void (*F)(A...)>
struct Count<F> {
  using Indices = std::index_sequence_for<A...>;
};
template <auto F>
void call(void** arguments) {
  Caller<F>::with(arguments, typename Count<F>::Indices());
}

// What a kernel does with a parameter: whatever it may write is mutable. It reads a table, whose rows may hold addresses; a bf16
// is no row.
enum class Use : uint8_t { value, reads, writes, table };
template <typename T>
constexpr Use use_of = Use::value;
template <typename T>
constexpr Use use_of<T*> = Use::writes;
template <typename T>
constexpr Use use_of<const T*> = std::is_class_v<T> && sizeof(T) >= 8 ? Use::table : Use::reads;
struct Parameters {
  const Use* uses;
  size_t count;
};
template <auto F>
struct Signature;
template <typename... A, void (*F)(A...)>
struct Signature<F> {
  static constexpr Use uses[] = {use_of<A>...};
  static constexpr Parameters whole = {uses, sizeof...(A)};
};

// Enters a kernel into the list as the program starts.
struct Kernel {
  Kernel(const char* name, uint32_t threads, Call call, Parameters parameters);
  const char* name;
  uint32_t threads;
  Call call;
  Parameters parameters;
  const Kernel* next;
};
// nullptr where there is none of that name.
const Kernel* find(const char* name);

enum class Order { forward, reverse, shuffled };
struct Way {
  uint32_t wave;
  Order order;
  uint64_t seed;
};
void launch(const Kernel& kernel, uint32_t blocks, void** arguments, Way way);
}  // namespace emulator

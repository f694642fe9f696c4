// How many bytes a kernel asks memory for. Its source is compiled for a thread sanitizer, whose calls, one before each access that
// is left after optimisation, are answered by counter.cpp.
//
// What 32 threads of a wave ask for by one instruction is counted in sectors of 32 bytes, as a GPU fetches it: one for all where
// they ask for the same, and 32 where each asks for a row of its own.
#pragma once
#include <cstdint>

namespace counter {
struct Bytes {
  uint64_t loaded, stored;
};
// From now on accesses count that are within a buffer that was named.
void name(const void* buffer, uint64_t size);
void start();
Bytes stop();
}  // namespace counter

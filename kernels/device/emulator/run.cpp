// run OUT WAYS TAPE...: launches what stands on tapes, and prints a digest of what each leaves in memory.
//
// A tape holds the contents of buffers, addresses to be put into them, and launches with their arguments
// (src/device/emulated/tape.rs writes it). WAYS is `all`: waves of 32 and of 64 threads, each with the threads and blocks in
// order, in reverse and shuffled, and memory that no access of 16 bytes may touch, which must all leave the same bits; or `one` of
// these. OUT gets what the last tape leaves in its buffers, one behind the other. COUNTED: each launch is said before, with the
// bytes that it loads from the buffers and those that it stores there.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../kernels.h"
#include "plants.h"
#ifdef COUNTED
#include "counter.h"
#endif

namespace {
[[noreturn]] void refuse(const std::string& what) {
  fprintf(stderr, "run: %s\n", what.c_str());
  exit(4);
}

struct Reader {
  std::vector<char> bytes;
  size_t at = 0;
  std::string text(size_t count) {
    if (count > bytes.size() - at) refuse("a tape ends early");
    at += count;
    return std::string(bytes.data() + at - count, count);
  }
  uint64_t number() {
    uint64_t value;
    memcpy(&value, text(8).data(), 8);
    return value;
  }
};

struct Address {
  uint64_t buffer, at, target, offset;
};
struct Argument {
  uint64_t kind, value;  // a buffer, four bytes, or eight bytes
};
struct Launch {
  const emulator::Kernel* kernel;
  uint32_t blocks;
  std::vector<Argument> arguments;
};
struct Tape {
  std::string name;
  std::vector<std::string> buffers;
  std::vector<Address> addresses;
  std::vector<Launch> launches;
};

Tape read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(std::string("cannot read ") + path);
  Reader in{{std::istreambuf_iterator<char>(file), {}}};
  Tape tape;
  tape.name = in.text(in.number());
  for (uint64_t left = in.number(); left > 0; --left) tape.buffers.push_back(in.text(in.number()));
  for (uint64_t left = in.number(); left > 0; --left) {
    const uint64_t buffer = in.number(), at = in.number(), target = in.number();
    tape.addresses.push_back({buffer, at, target, in.number()});
  }
  for (uint64_t left = in.number(); left > 0; --left) {
    const std::string name = in.text(in.number());
    Launch launch{emulator::find(name.c_str()), static_cast<uint32_t>(in.number()), {}};
    if (launch.kernel == nullptr) refuse("no kernel " + name);
    for (uint64_t arguments = in.number(); arguments > 0; --arguments) {
      const uint64_t kind = in.number();
      launch.arguments.push_back({kind, in.number()});
    }
    tape.launches.push_back(launch);
  }
  return tape;
}

// What stands in the buffers afterwards; those that hold addresses as they were on the tape.
// Each begins `off` bytes behind an address that suits everything.
std::vector<std::string> played(const Tape& tape, emulator::Way way, size_t off = 0) {
  std::vector<char*> memory;  // of exactly the right size each, so that a sanitizer sees who goes beyond
  for (const std::string& buffer : tape.buffers) {
#ifdef COUNTED
    // As a device's allocator gives it: no row of a matrix begins within a sector.
    memory.push_back(static_cast<char*>(aligned_alloc(64, (buffer.size() + 64) / 64 * 64)));
#else
    memory.push_back(static_cast<char*>(malloc(off + buffer.size())) + off);
#endif
    if (!buffer.empty()) memcpy(memory.back(), buffer.data(), buffer.size());
  }
  for (const Address& address : tape.addresses) {
    const auto value = reinterpret_cast<uint64_t>(memory.at(address.target)) + address.offset;
    memcpy(memory.at(address.buffer) + address.at, &value, 8);
  }
  for (const Launch& launch : tape.launches) {
    std::vector<Argument> arguments = launch.arguments;
    std::vector<void*> places;
    for (Argument& argument : arguments) {
      if (argument.kind == 0) argument.value = reinterpret_cast<uint64_t>(memory.at(argument.value));
      places.push_back(&argument.value);
    }
#ifdef COUNTED
    for (size_t i = 0; i < memory.size(); ++i) counter::name(memory[i], tape.buffers[i].size());
    counter::start();
    emulator::launch(*launch.kernel, launch.blocks, places.data(), way);
    const counter::Bytes bytes = counter::stop();
    printf("%s %" PRIu64 " %" PRIu64 "\n", launch.kernel->name, bytes.loaded, bytes.stored);
#else
    emulator::launch(*launch.kernel, launch.blocks, places.data(), way);
#endif
  }
  std::vector<std::string> left;
  for (size_t i = 0; i < memory.size(); ++i) left.emplace_back(memory[i], tape.buffers[i].size());
  for (const Address& address : tape.addresses) left[address.buffer] = tape.buffers[address.buffer];
  for (char* buffer : memory) free(buffer - off);
  return left;
}

uint64_t digest(const std::vector<std::string>& buffers) {
  uint64_t hash = 1469598103934665603ull;
  for (const std::string& buffer : buffers)
    for (const char byte : buffer) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
  return hash;
}
}  // namespace

int main(int count, char** words) {
  if (count < 4) refuse("run OUT all|one TAPE...");
  const bool all = strcmp(words[2], "all") == 0;
  std::vector<std::string> left;
  for (int i = 3; i < count; ++i) {
    const Tape tape = read(words[i]);
    left = played(tape, {32, emulator::Order::forward, 0});
    uint64_t seed = 0;
    for (const uint32_t wave : {32u, 64u})
      for (const emulator::Order order : {emulator::Order::forward, emulator::Order::reverse, emulator::Order::shuffled}) {
        if (!all || ++seed == 1) continue;
        if (played(tape, {wave, order, seed}) != left)
          refuse(tape.name + ": other bits with waves of " + std::to_string(wave) + " in order " +
                 std::to_string(static_cast<int>(order)));
      }
    // Some kernels rely on the host for addresses that suit four elements.
    const bool anywhere = tape.name.rfind("aligned", 0) != 0;
    if (all && anywhere && played(tape, {32, emulator::Order::forward, 0}, 8) != left)
      refuse(tape.name + ": other bits at other addresses");
    printf("%s %016" PRIx64 "\n", tape.name.c_str(), digest(left));
  }
  std::ofstream out(words[1], std::ios::binary);
  for (const std::string& buffer : left) out << buffer;
  out.close();
  return out ? 0 : 4;
}

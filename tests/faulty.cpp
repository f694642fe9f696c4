// Simulates faulty hardware: preloaded before all other libraries, it corrupts a rank's results or kills it at a place
// that a test chooses. The program takes no part; it shows each rank's progress to any library that is preloaded.
//
// FAULTY has a line for each rank or list of ranks ("0+2"):
//
// bits R N FILE    the next N matmuls of rank R each get one wrong bit, at a random element and mantissa position, so
//                  that computing the same thing twice gives different errors
// clock R 1 FILE   the clock of rank R fails once, in the thread that leads it: no program expects that
// kill R N TEXT    rank R is killed before it sends or writes data containing TEXT for the N-th time; opening, renaming
//                  to and removing a file count as writing its name and " opened", " put" and " removed"; a TEXT of
//                  "|EXCHANGE|PLACE" is reached when the rank gets there, and not when it sends word of that
//
// The first two start once FILE exists, and remove it, so that the test knows they have happened.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace {

enum class Kind { kNone, kBits, kClock, kKill };

struct Fault {
  Kind kind = Kind::kNone;
  long count = 0;
  // FILE for the first two kinds, TEXT for the third.
  std::string what;
};

// Whether a list of ranks ("0+2") has this one.
bool has(const std::string& ranks, const char* rank) {
  std::istringstream list(ranks);
  for (std::string one; std::getline(list, one, '+');)
    if (one == rank)
      return true;
  return false;
}

// The fault of this process, if any.
const Fault& fault() {
  static const Fault found = [] {
    const char* text = getenv("FAULTY");
    const char* rank = getenv("RANK");
    std::istringstream lines(text && rank ? text : "");
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string kind, ranks;
      Fault fault;
      words >> kind >> ranks >> fault.count >> std::ws;
      std::getline(words, fault.what);
      fault.kind = kind == "bits" ? Kind::kBits : kind == "clock" ? Kind::kClock : Kind::kKill;
      if (has(ranks, rank))
        return fault;
    }
    return Fault();
  }();
  return found;
}

std::atomic<long> left{0};
std::atomic<uint64_t> drawn{1};
std::atomic<bool> refuses{false};

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// Whether to corrupt the current matmul.
bool begins() {
  if (fault().kind != Kind::kBits && fault().kind != Kind::kClock)
    return false;
  if (real<int (*)(const char*)>("unlink")(fault().what.c_str()) == 0) {
    if (fault().kind == Kind::kClock)
      refuses = true;
    else
      left = fault().count;
  }
  return left > 0 && left.fetch_sub(1) > 0;
}

uint64_t draw() {
  uint64_t word = drawn.fetch_add(1) * 0x9e3779b97f4a7c15u;
  word = (word ^ (word >> 29)) * 0xbf58476d1ce4e5b9u;
  return word ^ (word >> 32);
}

// Flips one bit of an f32 tensor, by libtorch's C interface.
void spoil(const void* tensor) {
  using Ask = int32_t (*)(const void*, void*);
  static const Ask data_of = real<Ask>("aoti_torch_get_data_ptr");
  static const Ask numel_of = real<Ask>("aoti_torch_get_numel");
  uint32_t* data = nullptr;
  int64_t elements = 0;
  if (!begins() || data_of(tensor, &data) != 0 || numel_of(tensor, &elements) != 0 || elements == 0)
    return;
  const uint64_t word = draw();
  data[(word >> 8) % static_cast<uint64_t>(elements)] ^= 1u << (16 + word % 7);
}

// Kills this process if its fault matches what it does now, or the place that it gets to.
void passes(const void* said, size_t bytes, bool is_place = false) {
  static std::atomic<long> seen{0};
  const Fault& here = fault();
  if (here.kind == Kind::kKill && is_place == (here.what[0] == '|') && memmem(said, bytes, here.what.data(), here.what.size()) && ++seen == here.count)
    kill(getpid(), SIGKILL);
}

void passes(const std::string& said) {
  passes(said.data(), said.size());
}

// Whether the program itself calls: libraries treat a failing clock as no answer.
bool is_ours(const void* caller) {
  Dl_info from;
  return dladdr(caller, &from) != 0 && from.dli_fname && strstr(from.dli_fname, "ztrain");
}

} // namespace

extern "C" {

void ztrain_progress(const char* said, size_t bytes) {
  passes(said, bytes, true);
}

ssize_t send(int to, const void* said, size_t bytes, int flags) {
  passes(said, bytes);
  static const auto ask = real<ssize_t (*)(int, const void*, size_t, int)>("send");
  return ask(to, said, bytes, flags);
}

ssize_t write(int to, const void* said, size_t bytes) {
  passes(said, bytes);
  static const auto ask = real<ssize_t (*)(int, const void*, size_t)>("write");
  return ask(to, said, bytes);
}

int open64(const char* name, int flags, ...) {
  passes(std::string(name) + " opened");
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  static const auto ask = real<int (*)(const char*, int, ...)>("open64");
  return ask(name, flags, mode);
}

int rename(const char* from, const char* to) noexcept {
  passes(std::string(to) + " put");
  static const auto ask = real<int (*)(const char*, const char*)>("rename");
  return ask(from, to);
}

int unlink(const char* name) noexcept {
  passes(std::string(name) + " removed");
  static const auto ask = real<int (*)(const char*)>("unlink");
  return ask(name);
}

// at::native::mkldnn_matmul(Tensor const&, Tensor const&, Tensor const&, float, float)
void _ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff(const void* left, const void* right, const void* out, float beta, float alpha) {
  using Product = void (*)(const void*, const void*, const void*, float, float);
  static const Product product = real<Product>("_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff");
  product(left, right, out, beta, alpha);
  spoil(out);
}

// at::_ops::mm_out::call(Tensor const&, Tensor const&, Tensor&): used without AVX-512.
void* _ZN2at4_ops6mm_out4callERKNS_6TensorES4_RS2_(const void* left, const void* right, void* out) {
  using Product = void* (*)(const void*, const void*, void*);
  static const Product product = real<Product>("_ZN2at4_ops6mm_out4callERKNS_6TensorES4_RS2_");
  product(left, right, out);
  spoil(out);
  return out;
}

int clock_gettime(clockid_t clock, struct timespec* time) noexcept {
  using Clock = int (*)(clockid_t, struct timespec*);
  static const Clock ask = real<Clock>("clock_gettime");
  if (refuses && gettid() == getpid() && is_ours(__builtin_return_address(0)) && refuses.exchange(false)) {
    errno = EINVAL;
    return -1;
  }
  return ask(clock, time);
}

} // extern "C"

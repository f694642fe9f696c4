// What a program opens where it wants a GPU's driver and its run-time compiler, over the emulator: the few functions that ours
// calls, under the names of both vendors. It "compiles" to the sum of what it was given, and loads nothing else. The stand-in
// for a GPU hears of each launch, where one is in the process (standin/gpu.cpp).
#include "touched.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {
constexpr int kInvalid = 1, kNotInitialized = 3, kNotFound = 500, kCompilation = 6;

// What the stand-in for a GPU has to say, where one is in the process: a driver refuses a thread that has no context of a device,
// and a stream of another device than the context's.
int answer(void* stream) {
  using Ask = int (*)(void*);
  static const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "standin_answer"));
  return ask == nullptr ? 0 : ask(stream);
}

struct Program {
  std::string all, log, code;
};

std::string compiled(const std::string& all) {
  u64 sum = 1469598103934665603ull;
  for (const char byte : all) sum = (sum ^ static_cast<u8>(byte)) * 1099511628211ull;
  return "\177ELF" + std::to_string(sum);
}

int version(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
int create(void** out, const char* source, const char* name, int count, const char* const* headers, const char* const* names) {
  auto* program = new Program{std::string(name) + source, "", ""};
  for (int i = 0; i < count; ++i) program->all += std::string(names[i]) + headers[i];
  *out = program;
  return 0;
}
int destroy(void** program) {
  delete static_cast<Program*>(*program);
  *program = nullptr;
  return 0;
}
// Refuses what it is told to, as a compiler does: with a log.
int compile(void* raw, int count, const char* const* options) {
  auto* program = static_cast<Program*>(raw);
  for (int i = 0; i < count; ++i) {
    if (strstr(options[i], "no_such_device") != nullptr) {
      program->log = std::string("invalid value of ") + options[i];
      return kCompilation;
    }
    program->all += options[i];
  }
  if (program->all.find("KERNEL(checksum_blocks") == std::string::npos) return kCompilation;
  program->code = compiled(program->all);
  return 0;
}
int log_size(void* program, size_t* out) {
  *out = static_cast<Program*>(program)->log.size() + 1;
  return 0;
}
int log(void* program, char* out) {
  strcpy(out, static_cast<Program*>(program)->log.c_str());
  return 0;
}
int code_size(void* program, size_t* out) {
  *out = static_cast<Program*>(program)->code.size();
  return 0;
}
int code(void* program, char* out) {
  const std::string& text = static_cast<Program*>(program)->code;
  memcpy(out, text.data(), text.size());
  return 0;
}

int load(void** module, const void* image) {
  if (const int refused = answer(nullptr)) return refused;
  *module = const_cast<void*>(image);
  return memcmp(image, "\177ELF", 4) == 0 ? 0 : kInvalid;
}
int function(void** out, void*, const char* name) {
  const emulator::Kernel* const found = emulator::find(name);
  if (found == nullptr) return kNotFound;
  if (!is_told(*found)) {
    fprintf(stderr, "emulator: nobody tells what the table of %s names (touched.h)\n", name);
    return kNotFound;
  }
  *out = const_cast<emulator::Kernel*>(found);
  return 0;
}

void tell(const emulator::Kernel& kernel, void** arguments, void* stream) {
  using Tell = void (*)(void*, const char*, size_t, const void* const*, const int*);
  static const auto standin = reinterpret_cast<Tell>(dlsym(RTLD_DEFAULT, "standin_launch"));
  if (standin == nullptr) return;
  const Touched touched(kernel, arguments);
  standin(stream, kernel.name, touched.data.size(), touched.data.data(), touched.writes.data());
}

int launch(void* raw, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz, unsigned shared, void* stream,
           void** arguments, void** extra) {
  if (const int refused = answer(stream)) return refused;
  const auto* kernel = static_cast<const emulator::Kernel*>(raw);
  if (y * z * ty * tz != 1 || shared != 0 || extra != nullptr || threads != kernel->threads || blocks == 0) return kInvalid;
  // Threads may launch at once, and the emulator runs one kernel at a time.
  static std::mutex mutex;
  const std::lock_guard<std::mutex> one(mutex);
  tell(*kernel, arguments, stream);
  emulator::launch(*kernel, blocks, arguments, {64, emulator::Order::forward, 7});
  return 0;
}
}  // namespace

namespace {
bool initialized = false;
int init() {
  initialized = true;
  return 0;
}
int device(int* out, int index) {
  *out = index;
  return initialized ? 0 : kNotInitialized;
}
int device_name(char* out, int room, int) {
  snprintf(out, static_cast<size_t>(room), "a pretended GPU");
  return 0;
}
int total_memory(size_t* out, int) {
  *out = size_t{1} << 30;
  return 0;
}
int unique(unsigned char* out, int index) {
  memset(out, index + 1, 16);
  return 0;
}
}  // namespace

#define BOTH(nvidia, amd, parameters, body)         \
  extern "C" int nvidia parameters { return body; } \
  extern "C" int amd parameters { return body; }
BOTH(cuInit, hipInit, (unsigned), init())
BOTH(cuDeviceGet, hipDeviceGet, (int* out, int index), device(out, index))
BOTH(cuDeviceGetName, hipDeviceGetName, (char* out, int room, int index), device_name(out, room, index))
BOTH(cuDeviceTotalMem_v2, hipDeviceTotalMem, (size_t* out, int index), total_memory(out, index))
BOTH(cuDeviceGetUuid_v2, hipDeviceGetUuid, (unsigned char* out, int index), unique(out, index))
BOTH(nvrtcVersion, hiprtcVersion, (int* major, int* minor), version(major, minor))
BOTH(nvrtcCreateProgram, hiprtcCreateProgram,
     (void** out, const char* source, const char* name, int count, const char* const* headers, const char* const* names),
     create(out, source, name, count, headers, names))
BOTH(nvrtcDestroyProgram, hiprtcDestroyProgram, (void** program), destroy(program))
BOTH(nvrtcCompileProgram, hiprtcCompileProgram, (void* program, int count, const char* const* options),
     compile(program, count, options))
BOTH(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize, (void* program, size_t* out), log_size(program, out))
BOTH(nvrtcGetProgramLog, hiprtcGetProgramLog, (void* program, char* out), log(program, out))
BOTH(nvrtcGetCUBINSize, hiprtcGetCodeSize, (void* program, size_t* out), code_size(program, out))
BOTH(nvrtcGetCUBIN, hiprtcGetCode, (void* program, char* out), code(program, out))
BOTH(cuModuleLoadData, hipModuleLoadData, (void** module, const void* image), load(module, image))
BOTH(cuModuleGetFunction, hipModuleGetFunction, (void** out, void* module, const char* name), function(out, module, name))
BOTH(cuLaunchKernel, hipModuleLaunchKernel,
     (void* kernel, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared, void* stream,
      void** arguments, void** extra),
     launch(kernel, x, y, z, tx, ty, tz, shared, stream, arguments, extra))

// Simulates another C library: preloaded before all other libraries, its `expf` returns one unit in the last place
// above the right result. This affects the ranks in MATHEMATICS ("1", "0+2"), or every process if it is "all". The
// program takes no part.

#include <dlfcn.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

extern "C" float expf(float x) {
  static const auto right = reinterpret_cast<float (*)(float)>(dlsym(RTLD_NEXT, "expf"));
  static const bool off = [] {
    const char* where = getenv("MATHEMATICS");
    const char* rank = getenv("RANK");
    if (where == nullptr) return false;
    const auto among = [&] { return ("+" + std::string(where) + "+").find("+" + std::string(rank) + "+") != std::string::npos; };
    return strcmp(where, "all") == 0 || (rank != nullptr && among());
  }();
  const float found = right(x);
  return off ? std::nextafterf(found, HUGE_VALF) : found;
}

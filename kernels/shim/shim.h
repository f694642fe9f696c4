// Shared by the files of the shim. C++ exceptions stop here: none may cross into Rust.

#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

// Return codes, as in `shim.rs`. Every function that can throw returns one of them, and leaves its message for
// `shim_text`.
constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kNoMemory = 2;
constexpr int kLate = 3;

// Thrown when a deadline has passed.
struct ShimLate : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// 1 if an allocation has failed on this thread since the last call.
extern "C" int shim_was_refused();

// 1 if the system has practically no memory left.
extern "C" int shim_nothing_left();

// Stores a text for this thread until the next one.
void shim_say(const std::string& text);

// Ends a failed call.
int shim_fail(int code, const char* reason) noexcept;

template <typename Body>
int shim_guard(Body&& body) noexcept {
  try {
    body();
    return kDone;
  } catch (const ShimLate& late) {
    return shim_fail(kLate, late.what());
  } catch (const c10::OutOfMemoryError& error) {
    shim_was_refused();
    return shim_fail(kNoMemory, error.what());
  } catch (const std::bad_alloc& error) {
    shim_was_refused();
    return shim_fail(kNoMemory, error.what());
  } catch (const std::exception& error) {
    return shim_fail(shim_was_refused() || shim_nothing_left() ? kNoMemory : kFailed, error.what());
  } catch (...) {
    return shim_fail(kFailed, "unknown C++ exception");
  }
}

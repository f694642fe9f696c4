// What the files of the shim share. C++ exceptions stop here: none may cross into Rust.

#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

// How a call ended; `shim.rs` has the same numbers. Every function that can throw returns one of them, and leaves what
// was said for `shim_text`.
constexpr int kDone = 0;
constexpr int kFailed = 1;
constexpr int kNoMemory = 2;
constexpr int kLate = 3;

// Thrown where a deadline has passed.
struct ShimLate : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// 1 where this thread was refused memory since it asked last.
extern "C" int shim_was_refused();

// 1 where the system has nothing left that is worth the name.
extern "C" int shim_nothing_left();

// Keeps a text for this thread until the next one.
void shim_say(const std::string& text);

// Ends a call that failed.
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

// What the files of the shim share. C++ exceptions stop here: none may cross into Rust.

#pragma once

#include <exception>
#include <string>

// Keeps `reason` for this thread and returns it.
const char* shim_fail(const std::string& reason);

template <typename Body>
const char* shim_guard(Body&& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return shim_fail(error.what());
  } catch (...) {
    return shim_fail("unknown C++ exception");
  }
}

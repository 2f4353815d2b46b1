// The one place where a Status becomes a Python exception.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "py_gil.h"
#include "status.h"

namespace tsr {

// A message as a Python str. It may hold what a peer wrote: bytes that are no UTF-8 become escapes.
pybind11::object TextOf(const std::string& message);

// Throws what pybind11 turns into the exception of `status`, with its message; nothing where it is
// ok. Called with the GIL held, on the thread of the Python call that failed.
void ThrowIfError(const Status& status);

// Runs `call`, which returns a Status, without the GIL, and throws where it failed.
template <typename Call>
void WithoutGil(Call call) {
  Status status;
  {
    GilReleased released;
    status = call();
  }
  ThrowIfError(status);
}

}  // namespace tsr

// The one place where a Status becomes a Python exception.
#pragma once

#include "status.h"

namespace tsr {

// Throws what pybind11 turns into the exception of `status`, with its message; nothing where it is
// ok. Called with the GIL held, on the thread of the Python call that failed.
void ThrowIfError(const Status& status);

}  // namespace tsr

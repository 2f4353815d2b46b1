// The GIL, given away while native code works or waits.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

namespace tsr {

// Without the GIL from its start to its end. On one thread.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  // Pythons below 3.14 end a daemon thread that asks for the GIL when the interpreter exits, by
  // unwinding its stack; no C++ frame above this one is made for that, and std::terminate would
  // abort the process. So the thread stays here until the process ends, as it does from 3.14 on.
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) ::pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace tsr

// The Python module, compiled as one: reading pybind11's headers takes longer than all else here,
// and each file would read them anew. setup.py compiles no other py_*.cc.
#include "py_module.h"

#include "py_errors.cc"
#include "py_memory.cc"
#include "py_plan.cc"
#include "py_transport.cc"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native core of tpu_sync_rl: boxes, bytes and checksums, never names.";
  tsr::BindPlan(module);
  tsr::BindMemory(module);
  tsr::BindTransport(module);
}

#include "py_module.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The native core of tpu_sync_rl: boxes, bytes and checksums, never names.";
  tsr::BindPlan(module);
  tsr::BindMemory(module);
  tsr::BindTransport(module);
}

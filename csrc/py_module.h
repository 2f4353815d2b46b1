// What each csrc/py_*.cc adds to the Python module `tpu_sync_rl._native`.
#pragma once

#include <pybind11/pybind11.h>

namespace tsr {

// BoxLayout, Plan, make_plan, ShardDirectory.
void BindPlan(pybind11::module_& module);
// HostMemory, LocalCopy, digests, crc32c, crc32c_implementation, cpu_level, cpu_levels.
void BindMemory(pybind11::module_& module);

// Exporter, Fetcher, DigestRequest.
void BindTransport(pybind11::module_& module);

}  // namespace tsr

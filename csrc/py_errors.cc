#include "py_errors.h"

namespace tsr {
namespace {

namespace py = pybind11;

// Name in tpu_sync_rl.errors of the exception for `code`, which is neither kOk nor kInvalid.
const char* ErrorName(Code code) {
  switch (code) {
    case Code::kPlan:
      return "PlanError";
    case Code::kCorruption:
      return "CorruptionError";
    case Code::kPeerLost:
      return "PeerLostError";
    case Code::kGone:
      return "VersionError";
    case Code::kTimeout:
      return "SyncTimeoutError";
    default:
      return "SyncError";
  }
}

}  // namespace

py::object TextOf(const std::string& message) {
  const auto nbytes = static_cast<py::ssize_t>(message.size());
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(message.data(), nbytes, "backslashreplace"));
}

void ThrowIfError(const Status& status) {
  if (status.ok()) return;
  if (status.code() == Code::kInvalid) throw py::value_error(status.message());
  // Imported when it is needed, so that the extension itself imports in any order.
  const py::object type = py::module_::import("tpu_sync_rl.errors").attr(ErrorName(status.code()));
  py::set_error(type, TextOf(status.message()));
  throw py::error_already_set();
}

}  // namespace tsr

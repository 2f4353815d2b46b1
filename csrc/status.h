// Result of an operation that can fail: a code and, when it failed, a message for people.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace tsr {

enum class Code : uint8_t {
  kOk = 0,
  kInvalid,     // the caller's mistake
  kPlan,        // boxes that don't cover, or a layout that is not supported
  kCorruption,  // bytes that don't match their checksum
  kPeerLost,    // a connection that broke or fell silent
  kGone,        // a version that the source no longer holds
  kTimeout,     // a deadline that passed
  kCancelled,   // ended by our own side
  kSystem,      // a system call that failed
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace tsr

// Returns from the enclosing function when `expr`, a Status, is not ok.
#define TSR_RETURN_IF_ERROR(expr)                        \
  do {                                                   \
    if (::tsr::Status status_ = (expr); !status_.ok()) { \
      return status_;                                    \
    }                                                    \
  } while (false)

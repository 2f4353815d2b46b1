// A point on the monotonic clock by which something has to be over.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>

namespace tsr {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  static Deadline After(double seconds) {
    return Deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(seconds)));
  }

  // What is left, in milliseconds rounded up and at least 0: the timeout that poll(2) takes.
  int remaining_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    if (left <= 0) return 0;
    constexpr int64_t kMost = std::numeric_limits<int>::max();
    return static_cast<int>(left < kMost ? left : kMost);
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}

  Clock::time_point at_;
};

}  // namespace tsr

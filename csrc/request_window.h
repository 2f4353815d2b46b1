// How far ahead of what has come a stream asks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "deadline.h"

namespace tsr {

// A stream asks for as much as comes within two round trips: once to keep the way full, and once
// more so that the window doubles, round trip by round trip, until something else is the limit. A
// few requests are always under way, which is all it takes where the way is short: what is asked
// for ahead is lost to the other streams. Not thread-safe.
class RequestWindow {
 public:
  // Bytes asked for ahead of a peer, at most: 2.7 GB/s at 100 ms. Each MiB takes one request, so
  // they bound no memory at either end but a few kB of requests.
  static constexpr uint64_t kMaxNbytes = 256 << 20;

  // At least `num_requests` are under way, and as many as come to `least_nbytes`.
  RequestWindow(size_t num_requests, uint64_t least_nbytes)
      : num_requests_(num_requests), least_nbytes_(least_nbytes) {}

  bool HasRoom(size_t num_requests, uint64_t nbytes) const {
    return num_requests < num_requests_ || nbytes < nbytes_ahead();
  }
  uint64_t nbytes_ahead() const {
    return std::clamp(2 * flight_nbytes_, least_nbytes_, kMaxNbytes);
  }
  // What came within a round trip, lately.
  uint64_t flight_nbytes() const { return flight_nbytes_; }

  // The stream begins to ask after a pause, which says nothing of its rate.
  void Resume(Clock::time_point now) {
    began_ = now;
    came_nbytes_ = 0;
  }
  // Counts what has come. `rtt` says how long the way there and back takes, 0 where that is not
  // known; it is called once a round at most. Returns whether the flight was measured anew.
  template <typename Rtt>
  bool Received(uint64_t nbytes, Clock::time_point now, Rtt rtt) {
    came_nbytes_ += nbytes;
    const Clock::duration round = now - began_;
    if (round < std::max(kMinRound, rtt_)) return false;
    rtt_ = rtt();
    if (round < rtt_ || rtt_ == Clock::duration(0)) return false;
    const double rtts = std::chrono::duration<double>(round) / std::chrono::duration<double>(rtt_);
    const auto flight = static_cast<uint64_t>(static_cast<double>(came_nbytes_) / rtts);
    // A round trip in which a packet was lost, or a leaf was still to come, is soon made up for.
    flight_nbytes_ = std::max(flight, flight_nbytes_ - flight_nbytes_ / 8);
    Resume(now);
    return true;
  }
  Clock::duration rtt() const { return rtt_; }

 private:
  // The kernel is asked for the round trip no more often than this.
  static constexpr Clock::duration kMinRound = std::chrono::milliseconds(1);

  const size_t num_requests_;
  const uint64_t least_nbytes_;
  uint64_t flight_nbytes_ = 0;
  uint64_t came_nbytes_ = 0;  // since began_
  Clock::time_point began_;
  Clock::duration rtt_{0};
};

}  // namespace tsr

// What went over each rail, counted where it happens and read from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "deadline.h"

namespace tsr {

// How long at least one stream of a rail was at work on chunks. Thread-safe.
class BusyTime {
 public:
  void Begin() {
    std::lock_guard lock(mutex_);
    if (num_busy_++ == 0) since_ = Clock::now();
  }
  void End() {
    std::lock_guard lock(mutex_);
    if (--num_busy_ == 0) before_ += Clock::now() - since_;
  }
  // Until now.
  Clock::duration total() const {
    std::lock_guard lock(mutex_);
    return num_busy_ == 0 ? before_ : before_ + (Clock::now() - since_);
  }

 private:
  mutable std::mutex mutex_;
  int num_busy_ = 0;  // guarded by mutex_, as the rest
  Clock::time_point since_;
  Clock::duration before_{0};
};

// One stream's part in the busy time of its rail, which outlives it.
class BusyStream {
 public:
  explicit BusyStream(BusyTime* time) : time_(time) {}
  ~BusyStream() { Set(false); }
  BusyStream(const BusyStream&) = delete;
  BusyStream& operator=(const BusyStream&) = delete;

  void Set(bool busy) {
    if (busy == busy_) return;
    busy_ = busy;
    busy ? time_->Begin() : time_->End();
  }

 private:
  BusyTime* const time_;
  bool busy_ = false;
};

// Counters of one rail at one end. Thread-safe; each is exact, together they are no snapshot.
struct RailStats {
  std::atomic<uint64_t> nbytes = 0;  // of chunks that were sent whole, or verified
  std::atomic<uint64_t> num_chunks = 0;
  std::atomic<uint64_t> num_retries = 0;  // chunks that another stream had to fetch again
  std::atomic<uint64_t> num_lost = 0;     // streams that did not end by our own doing
  std::atomic<uint64_t> copy_ns = 0;      // gather at the source, scatter at the sink
  std::atomic<uint64_t> wire_ns = 0;      // in sendmsg, recvmsg
  std::atomic<uint64_t> checksum_ns = 0;
  BusyTime busy;
  // At a sink, now.
  std::atomic<uint64_t> num_streams = 0;
  std::atomic<uint64_t> window_nbytes = 0;  // that all of them together ask for ahead
  std::atomic<uint64_t> rtt_ns = 0;         // of the stream that measured it last
};

// Adds the time since the last lap, or since it was made, to a counter.
class Stopwatch {
 public:
  void Lap(std::atomic<uint64_t>* ns) {
    const Clock::time_point now = Clock::now();
    ns->fetch_add(static_cast<uint64_t>((now - last_) / std::chrono::nanoseconds(1)),
                  std::memory_order_relaxed);
    last_ = now;
  }

 private:
  Clock::time_point last_ = Clock::now();
};

// Rails by name. Thread-safe; the stats of a rail live as long as the table.
class RailStatsTable {
 public:
  RailStats* Get(const std::string& rail) {
    std::lock_guard lock(mutex_);
    return &rails_[rail];
  }
  template <typename Visit>
  void ForEach(Visit visit) const {
    std::lock_guard lock(mutex_);
    for (const auto& [rail, stats] : rails_) visit(rail, stats);
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, RailStats> rails_;  // guarded by mutex_; nodes never move
};

}  // namespace tsr

// What a sink knows of one source and of its streams to it, on whichever worker they are.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "deadline.h"
#include "rail_stats.h"
#include "request_window.h"

namespace tsr {

// A stream that has asked and gets nothing.
struct Stall {
  Clock::time_point since;
  uint64_t nbytes;  // of chunks that it has asked for
};

// The streams to one source on one rail.
struct RailStreams {
  int num_streams = 0;
  int num_full = 0;  // of them: as much as kernels let a connection have is under way
  std::map<const void*, Stall> stalls;
  int num_lost = 0;         // since the version began
  std::string lost_reason;  // of the last of these
};

// Thread-safe.
struct SourceLink {
  enum class Table : uint8_t { kAbsent, kUploading, kHeld };

  uint32_t process = 0;
  size_t index = 0;  // in Plan::sources
  std::atomic<Table> table = Table::kAbsent;
  std::atomic<uint32_t> table_id = 0;                                    // valid once it is held
  std::atomic<Clock::time_point> last_heard = Clock::time_point::min();  // on any stream

  std::mutex mutex;
  std::map<std::string, RailStreams> rails;  // guarded by mutex, as the rest; nodes never move
  std::string lost_reason;                   // of the stream that was lost last
};

// One stream's part in what is known of its source and its rail, which outlive it. Used on the
// stream's thread.
class StreamOnRail {
 public:
  // A stream with `full_nbytes` under way is full; it never asks for less than `least_nbytes`.
  StreamOnRail(SourceLink* source, const std::string& rail, RailStats* stats, uint64_t full_nbytes,
               uint64_t least_nbytes);
  ~StreamOnRail() { Leave(); }
  StreamOnRail(const StreamOnRail&) = delete;
  StreamOnRail& operator=(const StreamOnRail&) = delete;

  // Takes in what `window` has measured.
  void Measured(const RequestWindow& window);
  // Nothing has come since then.
  void SetStalled(Stall stall);
  void SetMoving() {
    if (stalled_) EndStall();
  }
  // It is of no use any more; Leave() follows.
  void Lost(const std::string& reason);
  // Idempotent.
  void Leave();

 private:
  void EndStall();
  void CountWindow(uint64_t nbytes);

  SourceLink* const source_;
  RailStreams* streams_;
  RailStats* const stats_;
  const uint64_t full_nbytes_;
  const uint64_t least_nbytes_;
  uint64_t window_nbytes_ = 0;  // as counted in stats_
  bool full_ = false;
  bool stalled_ = false;
  bool left_ = false;
};

// What is wrong on one rail to a source.
struct Trouble {
  uint32_t process;
  std::string rail;
  uint64_t num_stalled;
  uint64_t stalled_nbytes;
  double stalled_s;  // of the stream that got nothing for longest
  int num_lost;
  std::string lost_reason;
};

// Adds the rails to `source` whose streams get nothing, or were lost since the version began.
void AddTroubles(SourceLink* source, std::vector<Trouble>* troubles);
// Forgets the streams that were lost.
void ForgetLosses(SourceLink* source);

}  // namespace tsr

// What each stream did, chunk by chunk, kept for a trace of it.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "deadline.h"

namespace tsr {

// A chunk's way over a stream, as one end of it saw it.
struct ChunkEvent {
  uint64_t peer = 0;  // at a sink the source's process, at a source the sink's id
  uint64_t version = 0;
  uint64_t chunk = 0;       // in the source's table
  uint64_t nbytes = 0;      // 0: the stream was lost before the chunk had come
  int num_retries = 0;      // how often it had been asked for in vain before
  Clock::time_point asked;  // when its request was made; at a source, was received
  Clock::time_point ended;  // when it was verified; at a source, was with the kernel
};

// Holds a bounded number of events until they are taken; later ones are counted alone. Thread-safe.
class ChunkLog {
 public:
  // The streams that one after another have a place on a rail.
  struct Track {
    std::string rail;
    int number;  // from 1 on each rail
    bool taken;
  };
  using Events = std::vector<std::pair<const Track*, ChunkEvent>>;

  Track* OpenTrack(const std::string& rail) {
    std::lock_guard lock(mutex_);
    int number = 1;
    for (Track& track : tracks_) {
      if (track.rail != rail) continue;
      if (!std::exchange(track.taken, true)) return &track;
      ++number;
    }
    return &tracks_.emplace_back(Track{rail, number, true});
  }
  void CloseTrack(Track* track) {
    std::lock_guard lock(mutex_);
    track->taken = false;
  }

  void Add(const Track* track, const ChunkEvent& event) {
    std::lock_guard lock(mutex_);
    if (events_.size() == kMaxEvents) {
      ++num_dropped_;
    } else {
      events_.emplace_back(track, event);
    }
  }
  // Takes all events, in their order on each track, and how many there were no room for.
  Events Take(uint64_t* num_dropped) {
    std::lock_guard lock(mutex_);
    *num_dropped = std::exchange(num_dropped_, 0);
    return std::exchange(events_, {});
  }

 private:
  static constexpr size_t kMaxEvents = 1 << 16;  // 64 GB in chunks of 1 MiB; 5 MB of memory

  std::mutex mutex_;
  std::deque<Track> tracks_;  // guarded by mutex_, as the rest; never move nor go
  Events events_;
  uint64_t num_dropped_ = 0;
};

// A stream's place in a log, which outlives it. Where there is none, nothing is kept.
class ChunkTrack {
 public:
  ChunkTrack(ChunkLog* log, const std::string& rail)
      : log_(log), track_(log == nullptr ? nullptr : log->OpenTrack(rail)) {}
  ~ChunkTrack() {
    if (on()) log_->CloseTrack(track_);
  }
  ChunkTrack(const ChunkTrack&) = delete;
  ChunkTrack& operator=(const ChunkTrack&) = delete;

  bool on() const { return log_ != nullptr; }
  void Add(const ChunkEvent& event) { log_->Add(track_, event); }

 private:
  ChunkLog* const log_;
  ChunkLog::Track* const track_;
};

}  // namespace tsr

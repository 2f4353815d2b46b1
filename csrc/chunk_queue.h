// The chunks of one source that no stream has asked for yet.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

#include "deadline.h"

namespace tsr {

// Every stream of a source draws from its queue, so a slow one takes fewer. Thread-safe.
class ChunkQueue {
 public:
  explicit ChunkQueue(uint64_t num_chunks) : num_chunks_(num_chunks) {}

  // Gives a chunk to `stream`, which has `num_in_flight` already. False where there is none now, as
  // one may still be given back, and where the others will be done with what is left before this
  // stream would be: it asks again when a chunk of its own has come.
  bool Take(const void* stream, size_t num_in_flight, uint64_t* chunk) {
    std::lock_guard lock(mutex_);
    if (num_in_flight > 0 && num_in_flight + 1 > FairShare(stream)) return false;
    if (!returned_.empty()) {
      *chunk = returned_.back();
      returned_.pop_back();
    } else if (next_ < num_chunks_) {
      *chunk = next_++;
    } else {
      return false;
    }
    paces_.try_emplace(stream, Pace{Clock::now(), 0});
    ++num_in_flight_;
    return true;
  }

  // A chunk that `stream` took has come and is verified.
  void Finish(const void* stream) {
    std::lock_guard lock(mutex_);
    const auto pace = paces_.find(stream);
    if (pace != paces_.end()) ++pace->second.num_finished;
    --num_in_flight_;
  }

  // A chunk whose stream was lost.
  void GiveBack(const void* stream, uint64_t chunk) {
    std::lock_guard lock(mutex_);
    Return(stream, chunk);
  }

  // A chunk that arrived and did not match its checksum. Returns how often it did not so far.
  int GiveBackCorrupt(const void* stream, uint64_t chunk) {
    std::lock_guard lock(mutex_);
    Return(stream, chunk);
    return ++num_corrupt_[chunk];
  }

  // How often a chunk was given back.
  int num_retries(uint64_t chunk) {
    std::lock_guard lock(mutex_);
    const auto found = num_retries_.find(chunk);
    return found == num_retries_.end() ? 0 : found->second;
  }

 private:
  // What a stream has done since it took its first chunk.
  struct Pace {
    Clock::time_point began;
    uint64_t num_finished;

    double PerSecond(Clock::time_point now) const {
      return static_cast<double>(num_finished) / std::chrono::duration<double>(now - began).count();
    }
  };

  void Return(const void* stream, uint64_t chunk) {
    paces_.erase(stream);
    returned_.push_back(chunk);
    --num_in_flight_;
    ++num_retries_[chunk];
  }

  // How many of the chunks that have not come yet, in flight or left, come on this stream if all go
  // on at their pace. No limit while its pace is not known.
  double FairShare(const void* stream) const {
    const auto own = paces_.find(stream);
    if (own == paces_.end() || own->second.num_finished == 0) {
      return std::numeric_limits<double>::infinity();
    }
    const Clock::time_point now = Clock::now();
    double of_all = 0;
    for (const auto& [_, pace] : paces_) of_all += pace.PerSecond(now);
    const uint64_t num_left = num_chunks_ - next_ + returned_.size() + num_in_flight_;
    return static_cast<double>(num_left) * own->second.PerSecond(now) / of_all;
  }

  const uint64_t num_chunks_;
  std::mutex mutex_;
  uint64_t next_ = 0;  // guarded by mutex_, as the rest
  uint64_t num_in_flight_ = 0;
  std::vector<uint64_t> returned_;
  std::map<uint64_t, int> num_corrupt_;
  std::map<uint64_t, int> num_retries_;
  std::map<const void*, Pace> paces_;
};

}  // namespace tsr

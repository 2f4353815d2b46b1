// The chunks of one source that no stream has asked for yet.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace tsr {

// Every stream of a source draws from its queue, so a slow one takes fewer. Thread-safe.
class ChunkQueue {
 public:
  explicit ChunkQueue(uint64_t num_chunks) : num_chunks_(num_chunks) {}

  // False where there is none now; one may still be given back.
  bool Take(uint64_t* chunk) {
    std::lock_guard lock(mutex_);
    if (!returned_.empty()) {
      *chunk = returned_.back();
      returned_.pop_back();
      return true;
    }
    if (next_ == num_chunks_) return false;
    *chunk = next_++;
    return true;
  }

  // A chunk whose stream was lost.
  void GiveBack(uint64_t chunk) {
    std::lock_guard lock(mutex_);
    returned_.push_back(chunk);
  }

  // A chunk that arrived and did not match its checksum. Returns how often it did not so far.
  int GiveBackCorrupt(uint64_t chunk) {
    std::lock_guard lock(mutex_);
    returned_.push_back(chunk);
    return ++num_corrupt_[chunk];
  }

 private:
  const uint64_t num_chunks_;
  std::mutex mutex_;
  uint64_t next_ = 0;  // guarded by mutex_, as the rest
  std::vector<uint64_t> returned_;
  std::map<uint64_t, int> num_corrupt_;
};

}  // namespace tsr

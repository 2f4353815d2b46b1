// The chunk tables that sinks uploaded to this source, and what each sink has verified.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "chunk_table.h"

namespace tsr {

// A sink is named by the id that it proved in its handshake. Thread-safe.
class SinkTables {
 public:
  // Every stream of a sink begins and ends with these. With the last one goes what is known of the
  // sink; one that connects again shows its table again.
  void AddStream(uint64_t sink);
  void RemoveStream(uint64_t sink);

  // Another table of a sink replaces its former one, and what it has verified starts anew.
  void Set(uint64_t sink, uint32_t id, std::shared_ptr<const ChunkTable> table);
  // Null where the sink's table is another one.
  std::shared_ptr<const ChunkTable> Find(uint64_t sink, uint32_t id) const;

  // Counts a chunk that the sink has verified; more than once is as good as once.
  void MarkDone(uint64_t sink, uint32_t id, uint64_t version, uint64_t chunk);
  void ForgetVersion(uint64_t version);
  // Those of `leaves` of which every one of `sinks` has verified every chunk. A sink without a
  // table has verified nothing.
  std::vector<uint32_t> FinishedLeaves(uint64_t version, std::span<const uint64_t> sinks,
                                       std::vector<uint32_t> leaves) const;

 private:
  struct Progress {
    std::vector<bool> done;          // shape=[num_chunks]
    std::vector<uint32_t> num_left;  // shape=[num_leaves]: chunks that are not done
  };
  struct Sink {
    size_t num_streams = 0;
    uint32_t id = 0;
    std::shared_ptr<const ChunkTable> table;
    std::map<uint64_t, Progress> versions;
  };

  mutable std::mutex mutex_;
  std::map<uint64_t, Sink> sinks_;  // guarded by mutex_
};

}  // namespace tsr

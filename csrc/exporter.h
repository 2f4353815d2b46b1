// Serves the shards of published versions to every sink that asks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chunk_log.h"
#include "chunk_table.h"
#include "pipe.h"
#include "published.h"
#include "rail_stats.h"
#include "sink_tables.h"
#include "source_stream.h"
#include "status.h"

namespace tsr {

struct ExporterOptions {
  int num_workers = 2;
  uint64_t max_chunk_nbytes = 0;
  double peer_timeout_s = 0;
  bool traced = false;  // keeps a log of chunks
};

// One per source process. Thread-safe. The directory outlives it. Memory of a version is read from
// Publish() until Withdraw(), DropLeaves() or Close() has returned, and never after.
class Exporter {
 public:
  static Status Make(const ShardDirectory* directory, const ExporterOptions& options,
                     std::unique_ptr<Exporter>* out);
  ~Exporter() { Close(); }

  Status Publish(uint64_t version, std::span<const uint64_t> addresses,
                 std::span<const int64_t> strides, bool coming = false,
                 const ShardLayouts& layouts = {}) {
    return versions_.Publish(version, addresses, strides, coming, layouts);
  }
  // Leaves of a version that was published as coming are there now; who asked for them gets them.
  Status AddLeaves(uint64_t version, std::span<const uint32_t> leaves,
                   std::span<const uint64_t> addresses, std::span<const int64_t> strides,
                   const ShardLayouts& layouts = {});
  // Both wait for the workers, which takes no longer than what one of them does at a stretch, and
  // close the connections that are in the middle of sending what is taken away.
  Status DropLeaves(uint64_t version, std::span<const uint32_t> leaves);
  void Withdraw(uint64_t version);
  // Ascending leaves that the version holds and of which every one of `sinks` has verified all.
  std::vector<uint32_t> FinishedLeaves(uint64_t version, std::span<const uint64_t> sinks) const {
    return tables_.FinishedLeaves(version, sinks, versions_.HeldLeaves(version));
  }

  // Takes over an authenticated connection.
  Status AddConnection(Connection connection, uint64_t sink, const std::string& rail);

  const RailStatsTable& stats() const { return stats_; }
  ChunkLog* log() { return log_.get(); }  // null where it is not traced
  // Ends every connection and the threads; no more are taken.
  void Close();

 private:
  explicit Exporter(const ShardDirectory* directory) : versions_(directory) {}

  // Closes the streams for which `condition` holds, and returns when that is done.
  template <typename Condition>
  void CloseStreams(Condition condition);
  // Has streams look again whose chunk was still to come.
  void WakeStreams();

  PublishedVersions versions_;
  SinkTables tables_;
  RailStatsTable stats_;
  std::unique_ptr<ChunkLog> log_;
  std::atomic<size_t> next_worker_ = 0;
  std::vector<std::unique_ptr<SourceWorker>> workers_;
};

}  // namespace tsr

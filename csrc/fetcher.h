// Pulls versions into the memory of a sink process, as its plan says.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chunk_log.h"
#include "deadline.h"
#include "fetch.h"
#include "pipe.h"
#include "plan.h"
#include "rail_stats.h"
#include "sink_stream.h"
#include "status.h"

namespace tsr {

struct FetcherOptions {
  int num_workers = 2;
  int window = 3;
  double peer_timeout_s = 0;
  // A stream that has so much under way gains nothing by asking for more: more streams may.
  uint64_t full_nbytes = 2 << 20;
  bool traced = false;  // keeps a log of chunks
  bool checksums = true;
  // Tells sources which chunks are verified, so that they let go of leaves. Not where digests are
  // asked for afterwards.
  bool tells_done = true;
};

// One per sink process and incarnation. Thread-safe. The plan outlives it. The memory of a version
// is written from Begin() until End() or Close() has returned, and never after.
class Fetcher {
 public:
  static Status Make(const Plan* plan, const FetcherOptions& options,
                     std::unique_ptr<Fetcher>* out);
  ~Fetcher() { Close(); }

  // Takes over an authenticated connection to a source; kInvalid where the plan reads none such.
  Status AddStream(uint32_t process, Connection connection, const std::string& rail);
  // Streams to a source that are alive, on one rail or on all.
  int NumStreams(uint32_t process, const std::optional<std::string>& rail = std::nullopt);
  // Whether every stream to a source on a rail is full.
  bool IsFull(uint32_t process, const std::string& rail);

  // Starts a version. Chunks of a source without a stream wait for one.
  Status Begin(uint64_t version, std::span<const uint64_t> sink_addresses,
               const ShardLayouts& sink_layouts = {});
  // Starts to ask for digests of a version, whose memory is not written to; see Fetch.
  Status BeginDigests(uint64_t version, std::vector<std::vector<DigestRequest>> requests);
  // Of the digests that began last; none of a version that began after them.
  std::vector<std::vector<uint64_t>> Digests() const;
  // See Fetch::Wait().
  Status Wait(Deadline deadline, bool* done) const;
  // See Fetch::TakeFinished(); none where no version has begun.
  std::vector<uint32_t> TakeFinished(Deadline deadline);
  uint64_t ProgressNbytes() const;
  // Stops what is in flight; streams that have nothing in flight stay for the next version.
  void End();

  const RailStatsTable& stats() const { return stats_; }
  ChunkLog* log() { return log_.get(); }  // null where it is not traced
  // From the begin to the last verified chunk of the version that began last; 0 at first.
  double fetch_seconds() const;
  // The rails whose streams get nothing, or were lost since the version that began last did.
  std::vector<Trouble> Troubles();
  template <typename Visit>
  void ForEachSource(Visit visit) {
    for (SourceLink& source : sources_) visit(source);
  }
  // Ends every stream and the threads; a version that is in flight fails.
  void Close();

 private:
  explicit Fetcher(const Plan* plan) : plan_(plan) {}

  SourceLink* Find(uint32_t process);
  void WakeAll();
  std::shared_ptr<Fetch> current() const;
  Status Begin(std::shared_ptr<Fetch> fetch);

  const Plan* const plan_;
  RailStatsTable stats_;
  std::unique_ptr<ChunkLog> log_;
  std::deque<SourceLink> sources_;  // as Plan::sources
  std::atomic<size_t> next_worker_ = 0;

  mutable std::mutex mutex_;
  std::shared_ptr<Fetch> fetch_;  // guarded by mutex_
  bool active_ = false;           // guarded by mutex_: between Begin() and End()
  bool closed_ = false;           // guarded by mutex_

  std::vector<std::unique_ptr<SinkWorker>> workers_;
};

}  // namespace tsr

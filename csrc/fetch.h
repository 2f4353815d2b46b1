// One version on its way into a sink's memory; or the digests of it that a sink asks for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "chunk_queue.h"
#include "deadline.h"
#include "digest_request.h"
#include "plan.h"
#include "shard_layout.h"
#include "status.h"

namespace tsr {

// Thread-safe. Doesn't own the memory that the addresses name; the plan outlives it.
class Fetch {
 public:
  // `sink_addresses`: one per (pair, sink box), pair-major; kInvalid for another number of them.
  // `sink_layouts`: of the pairs whose sink boxes lie in tiles; kInvalid where one does not fit.
  static Status Make(const Plan& plan, uint64_t version, std::span<const uint64_t> sink_addresses,
                     const ShardLayouts& sink_layouts, std::shared_ptr<Fetch>* out);

  // For digests instead of chunks: `requests` has those to each source of the plan. They are drawn
  // from the queues, given back and counted as chunks are.
  static Status MakeDigests(const Plan& plan, uint64_t version,
                            std::vector<std::vector<DigestRequest>> requests,
                            std::shared_ptr<Fetch>* out);

  const Plan& plan() const { return *plan_; }
  uint64_t version() const { return version_; }
  uint8_t* sink_base(uint32_t pair, uint32_t box) const {
    return reinterpret_cast<uint8_t*>(sink_addresses_[first_address_[pair] + box]);
  }
  // Null where the boxes of the pair are dense rows.
  const ShardLayout* sink_layout(uint32_t pair) const {
    const auto it = sink_layouts_.find(pair);
    return it == sink_layouts_.end() ? nullptr : it->second.get();
  }
  ChunkQueue& queue(size_t source) { return queues_[source]; }

  bool asks_for_digests() const { return !digests_.empty(); }
  const DigestRequest& digest_request(size_t source, uint64_t index) const {
    return digest_requests_[source][index];
  }
  // Counts the answer to a request. By the one stream that asked.
  void SetDigest(size_t source, uint64_t index, uint64_t digest);
  // Per source; complete when Wait() says so.
  const std::vector<std::vector<uint64_t>>& digests() const { return digests_; }

  // Counts a chunk of the plan whose bytes are all in place and match their checksum.
  void Verified(uint64_t chunk);
  // Ends it for good; the first reason counts.
  void Fail(Status status);
  bool over() const { return over_.load(std::memory_order_relaxed); }

  // Blocks until every chunk is verified, it has failed, or the deadline has passed; `done` tells
  // the first from the last, the status of a failure is returned.
  Status Wait(Deadline deadline, bool* done) const;
  // Blocks until there are pairs all of whose bytes are verified and that were not told of before,
  // it is over, or the deadline has passed; tells of them.
  std::vector<uint32_t> TakeFinished(Deadline deadline);
  uint64_t verified_nbytes() const { return nbytes_.load(std::memory_order_relaxed); }
  // From the begin to the last chunk that was verified.
  double seconds() const;

 private:
  Fetch(const Plan& plan, uint64_t version) : plan_(&plan), version_(version) {}

  void AddQueue(uint64_t num_chunks);
  // One chunk or answer less is to come. With mutex_ held.
  void Count();

  const Plan* const plan_;
  const uint64_t version_;
  const Clock::time_point begin_ = Clock::now();
  std::vector<uint64_t> sink_addresses_;
  ShardLayouts sink_layouts_;
  std::vector<size_t> first_address_;  // shape=[num_pairs]
  std::deque<ChunkQueue> queues_;      // shape=[num_sources]
  std::vector<std::vector<DigestRequest>> digest_requests_;
  std::vector<std::vector<uint64_t>> digests_;
  std::atomic<uint64_t> nbytes_ = 0;
  std::atomic<bool> over_ = false;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t num_left_ = 0;               // guarded by mutex_, as the rest
  std::vector<uint64_t> regions_left_;  // shape=[num_pairs]
  std::vector<uint32_t> finished_;      // pairs, not told of yet
  Status status_;
  Clock::time_point last_verified_ = begin_;
};

}  // namespace tsr

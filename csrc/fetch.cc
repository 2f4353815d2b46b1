#include "fetch.h"

#include <string>
#include <utility>

namespace tsr {

Status Fetch::Make(const Plan& plan, uint64_t version, std::span<const uint64_t> sink_addresses,
                   const ShardLayouts& sink_layouts, std::shared_ptr<Fetch>* out) {
  std::shared_ptr<Fetch> fetch(new Fetch(plan, version));
  size_t num_addresses = 0;
  for (const LeafPair& pair : plan.input.pairs) {
    fetch->first_address_.push_back(num_addresses);
    num_addresses += static_cast<size_t>(plan.input.layouts[pair.sink_layout].num_boxes());
  }
  if (sink_addresses.size() != num_addresses) {
    return Status(Code::kInvalid, "fetch: expected " + std::to_string(num_addresses) +
                                      " sink addresses, got " +
                                      std::to_string(sink_addresses.size()));
  }
  fetch->sink_addresses_.assign(sink_addresses.begin(), sink_addresses.end());
  TSR_RETURN_IF_ERROR(CheckSinkLayouts(plan, sink_layouts));
  fetch->sink_layouts_ = sink_layouts;
  for (const SourceChunks& source : plan.sources) fetch->AddQueue(source.num_chunks);
  fetch->regions_left_ = plan.regions_per_pair;
  for (uint32_t pair = 0; pair < plan.input.pairs.size(); ++pair) {
    if (plan.regions_per_pair[pair] == 0) fetch->finished_.push_back(pair);
  }
  *out = std::move(fetch);
  return Status();
}

Status Fetch::MakeDigests(const Plan& plan, uint64_t version,
                          std::vector<std::vector<DigestRequest>> requests,
                          std::shared_ptr<Fetch>* out) {
  if (requests.size() != plan.sources.size()) {
    return Status(Code::kInvalid, "digests: expected requests to " +
                                      std::to_string(plan.sources.size()) + " sources, got " +
                                      std::to_string(requests.size()));
  }
  std::shared_ptr<Fetch> fetch(new Fetch(plan, version));
  for (const auto& of_source : requests) {
    fetch->AddQueue(of_source.size());
    fetch->digests_.emplace_back(of_source.size());
  }
  fetch->digest_requests_ = std::move(requests);
  *out = std::move(fetch);
  return Status();
}

void Fetch::AddQueue(uint64_t num_chunks) {
  queues_.emplace_back(num_chunks);
  num_left_ += num_chunks;
  over_ = num_left_ == 0;
}

void Fetch::Verified(uint64_t chunk) {
  const Chunk& verified = plan_->chunks[chunk];
  nbytes_.fetch_add(verified.nbytes, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  const size_t num_finished = finished_.size();
  for (uint64_t i = 0; i < verified.num_regions; ++i) {
    const uint32_t pair = plan_->regions[verified.first_region + i].pair;
    if (--regions_left_[pair] == 0) finished_.push_back(pair);
  }
  if (finished_.size() > num_finished) changed_.notify_all();
  Count();
}

void Fetch::SetDigest(size_t source, uint64_t index, uint64_t digest) {
  digests_[source][index] = digest;
  std::lock_guard lock(mutex_);
  Count();
}

void Fetch::Count() {
  last_verified_ = Clock::now();
  if (--num_left_ > 0) return;
  over_ = true;
  changed_.notify_all();
}

void Fetch::Fail(Status status) {
  std::lock_guard lock(mutex_);
  if (over_) return;
  status_ = std::move(status);
  over_ = true;
  changed_.notify_all();
}

Status Fetch::Wait(Deadline deadline, bool* done) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::milliseconds(deadline.remaining_ms()),
                    [&] { return over(); });
  *done = num_left_ == 0;
  return status_;
}

std::vector<uint32_t> Fetch::TakeFinished(Deadline deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::milliseconds(deadline.remaining_ms()),
                    [&] { return over() || !finished_.empty(); });
  return std::exchange(finished_, {});
}

double Fetch::seconds() const {
  std::lock_guard lock(mutex_);
  return std::chrono::duration<double>(last_verified_ - begin_).count();
}

}  // namespace tsr

#include "source_link.h"

#include <algorithm>

namespace tsr {

StreamOnRail::StreamOnRail(SourceLink* source, const std::string& rail, RailStats* stats,
                           uint64_t full_nbytes, uint64_t least_nbytes)
    : source_(source), stats_(stats), full_nbytes_(full_nbytes), least_nbytes_(least_nbytes) {
  std::lock_guard lock(source_->mutex);
  streams_ = &source_->rails[rail];
  ++streams_->num_streams;
  stats_->num_streams.fetch_add(1, std::memory_order_relaxed);
  CountWindow(least_nbytes_);
}

void StreamOnRail::Measured(const RequestWindow& window) {
  CountWindow(std::max(window.nbytes_ahead(), least_nbytes_));
  stats_->rtt_ns.store(static_cast<uint64_t>(window.rtt() / std::chrono::nanoseconds(1)),
                       std::memory_order_relaxed);
  const bool full = window.flight_nbytes() >= full_nbytes_;
  if (full == full_) return;
  full_ = full;
  std::lock_guard lock(source_->mutex);
  streams_->num_full += full ? 1 : -1;
}

void StreamOnRail::CountWindow(uint64_t nbytes) {
  stats_->window_nbytes.fetch_add(nbytes - window_nbytes_, std::memory_order_relaxed);
  window_nbytes_ = nbytes;
}

void StreamOnRail::SetStalled(Stall stall) {
  stalled_ = true;
  std::lock_guard lock(source_->mutex);
  streams_->stalls.insert_or_assign(this, stall);
}

void StreamOnRail::EndStall() {
  stalled_ = false;
  std::lock_guard lock(source_->mutex);
  streams_->stalls.erase(this);
}

void StreamOnRail::Lost(const std::string& reason) {
  stats_->num_lost.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(source_->mutex);
  ++streams_->num_lost;
  streams_->lost_reason = source_->lost_reason = reason;
}

void StreamOnRail::Leave() {
  if (left_) return;
  left_ = true;
  SetMoving();
  CountWindow(0);
  stats_->num_streams.fetch_sub(1, std::memory_order_relaxed);
  std::lock_guard lock(source_->mutex);
  --streams_->num_streams;
  streams_->num_full -= full_ ? 1 : 0;
}

void AddTroubles(SourceLink* source, std::vector<Trouble>* troubles) {
  const Clock::time_point now = Clock::now();
  std::lock_guard lock(source->mutex);
  for (const auto& [rail, streams] : source->rails) {
    if (streams.stalls.empty() && streams.num_lost == 0) continue;
    Clock::duration longest{0};
    uint64_t nbytes = 0;
    for (const auto& [_, stall] : streams.stalls) {
      longest = std::max(longest, now - stall.since);
      nbytes += stall.nbytes;
    }
    troubles->push_back({source->process, rail, streams.stalls.size(), nbytes,
                         std::chrono::duration<double>(longest).count(), streams.num_lost,
                         streams.lost_reason});
  }
}

void ForgetLosses(SourceLink* source) {
  std::lock_guard lock(source->mutex);
  for (auto& [_, streams] : source->rails) {
    streams.num_lost = 0;
    streams.lost_reason.clear();
  }
}

}  // namespace tsr

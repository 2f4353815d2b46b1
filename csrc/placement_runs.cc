#include "placement_runs.h"

#include <algorithm>
#include <limits>

namespace tsr {

PlacementCursor::PlacementCursor(BoxView region, BoxView part, int64_t itemsize,
                                 const DenseBox& sink)
    : run_nbytes_(itemsize), data_(sink.base) {
  int64_t wire_stride = itemsize;
  int64_t sink_stride = itemsize;
  bool dense = true;
  int outer[kMaxRank];
  for (int dim = RankOf(part) - 1; dim >= 0; --dim) {
    const int64_t extent = ExtentOf(part, dim);
    wire_offset_ += (StartOf(part, dim) - StartOf(region, dim)) * wire_stride;
    data_ += (StartOf(part, dim) - StartOf(sink.box, dim)) * sink_stride;
    if (extent > 1) {
      dense = dense && wire_stride == run_nbytes_ && sink_stride == run_nbytes_;
      if (dense) {
        run_nbytes_ *= extent;
      } else {
        // From the back: the innermost comes first here, and last where they are walked.
        outer[rank_] = dim;
        wire_strides_[rank_] = wire_stride;
        sink_strides_[rank_] = sink_stride;
        ++rank_;
      }
    }
    wire_stride *= ExtentOf(region, dim);
    sink_stride *= ExtentOf(sink.box, dim);
  }
  for (int i = 0; i < rank_; ++i) {
    extents_[i] = ExtentOf(part, outer[i]);
    index_[i] = 0;
  }
}

void PlacementCursor::Next() {
  for (int i = 0; i < rank_; ++i) {
    wire_offset_ += wire_strides_[i];
    data_ += sink_strides_[i];
    if (++index_[i] < extents_[i]) return;
    wire_offset_ -= wire_strides_[i] * extents_[i];
    data_ -= sink_strides_[i] * extents_[i];
    index_[i] = 0;
  }
  done_ = true;
}

void PlacementRuns::Start(BoxView region, int64_t itemsize) {
  region_ = region;
  itemsize_ = itemsize;
  nbytes_ = VolumeOf(region) * itemsize;
  wire_offset_ = 0;
  placements_.clear();
  current_ = 0;
}

void PlacementRuns::Add(const DenseBox& sink) {
  int64_t part[2 * kMaxRank];
  const std::span<int64_t> part_view(part, region_.size());
  if (!Intersect(region_, sink.box, part_view)) return;
  placements_.emplace_back(region_, part_view, itemsize_, sink);
}

int64_t PlacementRuns::min_run_nbytes() const {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const PlacementCursor& placement : placements_) {
    least = std::min(least, placement.run_nbytes());
  }
  return least;
}

PlacementRuns::Run PlacementRuns::Take(int64_t room_nbytes) {
  // At every offset exactly one placement goes on, most often that behind the last.
  for (;; current_ = (current_ + 1) % placements_.size()) {
    PlacementCursor& placement = placements_[current_];
    const int64_t taken = wire_offset_ - placement.wire_offset();
    if (placement.done() || taken < 0 || taken >= placement.run_nbytes()) continue;
    const Run run{wire_offset_, placement.data() + taken,
                  std::min(placement.run_nbytes() - taken, room_nbytes)};
    wire_offset_ += run.nbytes;
    if (taken + run.nbytes == placement.run_nbytes()) placement.Next();
    return run;
  }
}

}  // namespace tsr

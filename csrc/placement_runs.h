// Which sink box takes which bytes of a region.
#pragma once

#include <cstdint>
#include <vector>

#include "box.h"
#include "box_copy.h"

namespace tsr {

// The part of a region that one sink box takes, as runs that are dense both on the wire and in the
// sink's memory. In row-major order of the region. Copies are independent.
class PlacementCursor {
 public:
  // `part` lies in both `region` and the sink's box.
  PlacementCursor(BoxView region, BoxView part, int64_t itemsize, const DenseBox& sink);

  int64_t run_nbytes() const { return run_nbytes_; }
  bool done() const { return done_; }
  int64_t wire_offset() const { return wire_offset_; }
  uint8_t* data() const { return data_; }
  void Next();

 private:
  int64_t run_nbytes_;
  bool done_ = false;
  int64_t wire_offset_ = 0;
  uint8_t* data_;
  int rank_ = 0;  // dimensions outside a run, outermost first
  int64_t extents_[kMaxRank];
  int64_t index_[kMaxRank];
  int64_t wire_strides_[kMaxRank];
  int64_t sink_strides_[kMaxRank];
};

// Walks a region in row-major order, as it is on the wire, over all the sink boxes that take a part
// of it. Together they take every element once. Not thread-safe.
class PlacementRuns {
 public:
  struct Run {
    int64_t wire_offset;
    uint8_t* data;
    int64_t nbytes;
  };

  // Begins with a region that nobody takes yet; its elements have `itemsize` bytes on the wire.
  void Start(BoxView region, int64_t itemsize);
  // Adds a sink box; nothing where it has no element of the region.
  void Add(const DenseBox& sink);
  // Bytes of the shortest run. Those of one sink box are equally long.
  int64_t min_run_nbytes() const;
  // Where the region goes if it is one run of one sink box, else null.
  const uint8_t* one_run() const {
    return min_run_nbytes() == nbytes_ ? placements_.front().data() : nullptr;
  }

  bool done() const { return wire_offset_ == nbytes_; }
  // The next bytes that are one run, at most `room_nbytes`.
  Run Take(int64_t room_nbytes);

 private:
  BoxView region_;
  int64_t itemsize_ = 0;
  int64_t nbytes_ = 0;
  int64_t wire_offset_ = 0;
  std::vector<PlacementCursor> placements_;
  size_t current_ = 0;  // in placements_
};

}  // namespace tsr

// Cuts a box into parts that fit a buffer.
#pragma once

#include <cstdint>
#include <span>

#include "region_copy.h"

namespace tsr {

// Walks a box in row-major order by sub-boxes that are each one piece of that order, as large as
// fits. Coordinates are relative to the box. Owns everything it needs; copies are independent.
class SlabCursor {
 public:
  SlabCursor() = default;
  // `extents` has no 0. No slab will need more than `limit_nbytes`, which holds one element.
  SlabCursor(std::span<const int64_t> extents, int64_t itemsize, int64_t limit_nbytes);

  bool done() const { return done_; }
  // Moves to the next slab of at most `room_nbytes`. Returns its bytes, 0 where none fits.
  int64_t Take(int64_t room_nbytes);
  // The slab that was taken last: where it starts in the box, and its extents.
  std::span<const int64_t> start() const { return {start_, rank_}; }
  std::span<const int64_t> extents() const { return {slab_, rank_}; }

 private:
  size_t rank_ = 0;
  size_t dim_ = 0;            // slabs are ranges of this dimension, whole in those after it
  int64_t index_nbytes_ = 0;  // bytes of one index of dim_
  bool done_ = true;
  int64_t extents_[RunIterator::kMaxRank];
  int64_t next_[RunIterator::kMaxRank];  // where the slab after this one starts
  int64_t start_[RunIterator::kMaxRank];
  int64_t slab_[RunIterator::kMaxRank];
};

}  // namespace tsr

// Cuts a box into parts that fit a buffer.
#pragma once

#include <cstdint>

#include "box.h"

namespace tsr {

// Walks a box in row-major order by sub-boxes that are each one piece of that order, as large as
// fits. Owns everything it needs; copies are independent.
class SlabCursor {
 public:
  SlabCursor() = default;
  // `box` is not empty. No slab will need more than `limit_nbytes`, which holds one element.
  SlabCursor(BoxView box, int64_t itemsize, int64_t limit_nbytes);

  bool done() const { return done_; }
  // Moves to the next slab of at most `room_nbytes`. Returns its bytes, 0 where none fits.
  int64_t Take(int64_t room_nbytes);
  // The slab that was taken last, in the coordinates of the box.
  BoxView slab() const { return {slab_, static_cast<size_t>(2 * rank_)}; }

 private:
  int rank_ = 0;
  int dim_ = 0;               // slabs are ranges of this dimension, whole in those after it
  int64_t index_nbytes_ = 0;  // bytes of one index of dim_
  bool done_ = true;
  int64_t box_[2 * kMaxRank];
  int64_t slab_[2 * kMaxRank];
  int64_t next_[kMaxRank];  // where the slab after this one starts
};

}  // namespace tsr

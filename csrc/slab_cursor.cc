#include "slab_cursor.h"

#include <algorithm>

namespace tsr {

SlabCursor::SlabCursor(BoxView box, int64_t itemsize, int64_t limit_nbytes)
    : rank_(RankOf(box)), index_nbytes_(itemsize), done_(false) {
  std::copy(box.begin(), box.end(), box_);
  std::copy(box.begin(), box.end(), slab_);
  for (int dim = 0; dim < rank_; ++dim) next_[dim] = StartOf(box, dim);
  if (rank_ == 0) return;
  dim_ = rank_ - 1;
  while (dim_ > 0 && index_nbytes_ * ExtentOf(box, dim_) <= limit_nbytes) {
    index_nbytes_ *= ExtentOf(box, dim_);
    --dim_;
  }
}

int64_t SlabCursor::Take(int64_t room_nbytes) {
  const int64_t room = room_nbytes / index_nbytes_;
  if (room == 0) return 0;
  if (rank_ == 0) {
    done_ = true;
    return index_nbytes_;
  }
  const BoxView box(box_, static_cast<size_t>(2 * rank_));
  const int64_t count = std::min(room, StopOf(box, dim_) - next_[dim_]);
  for (int dim = 0; dim <= dim_; ++dim) {
    slab_[2 * dim] = next_[dim];
    slab_[2 * dim + 1] = next_[dim] + (dim == dim_ ? count : 1);
  }

  next_[dim_] += count;
  for (int dim = dim_; next_[dim] == StopOf(box, dim); --dim) {
    if (dim == 0) {
      done_ = true;
      break;
    }
    next_[dim] = StartOf(box, dim);
    ++next_[dim - 1];
  }
  return count * index_nbytes_;
}

}  // namespace tsr

#include "slab_cursor.h"

#include <algorithm>

namespace tsr {

SlabCursor::SlabCursor(std::span<const int64_t> extents, int64_t itemsize, int64_t limit_nbytes)
    : rank_(extents.size()), index_nbytes_(itemsize), done_(false) {
  std::copy(extents.begin(), extents.end(), extents_);
  std::fill_n(next_, rank_, 0);
  if (rank_ == 0) return;
  dim_ = rank_ - 1;
  while (dim_ > 0 && index_nbytes_ * extents_[dim_] <= limit_nbytes) {
    index_nbytes_ *= extents_[dim_];
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
  std::copy_n(next_, rank_, start_);
  std::fill_n(slab_, dim_, 1);
  std::copy(extents_ + dim_, extents_ + rank_, slab_ + dim_);
  const int64_t count = std::min(room, extents_[dim_] - next_[dim_]);
  slab_[dim_] = count;

  next_[dim_] += count;
  size_t dim = dim_;
  while (next_[dim] == extents_[dim]) {
    if (dim == 0) {
      done_ = true;
      break;
    }
    next_[dim] = 0;
    ++next_[--dim];
  }
  return count * index_nbytes_;
}

}  // namespace tsr

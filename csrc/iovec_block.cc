#include "iovec_block.h"

namespace tsr {

void IovecBlock::Clear() {
  num_iov_ = 0;
  nbytes_ = 0;
  packed_nbytes_ = 0;
}

bool IovecBlock::Continues(const uint8_t* data) const {
  if (num_iov_ == 0) return true;
  const iovec& last = iov_[num_iov_ - 1];
  return static_cast<const uint8_t*>(last.iov_base) + last.iov_len == data;
}

void IovecBlock::Append(const uint8_t* data, int64_t nbytes) {
  nbytes_ += nbytes;
  if (num_iov_ > 0 && Continues(data)) {
    iov_[num_iov_ - 1].iov_len += static_cast<size_t>(nbytes);
  } else {
    // sendmsg only reads; iovec has no const.
    iov_[num_iov_++] = iovec{const_cast<uint8_t*>(data), static_cast<size_t>(nbytes)};
  }
}

uint8_t* IovecBlock::AppendPacked(int64_t nbytes) {
  uint8_t* const data = packed_.get() + packed_nbytes_;
  packed_nbytes_ += nbytes;
  Append(data, nbytes);
  return data;
}

std::unique_ptr<IovecBlock> IovecBlockPool::Take() {
  ++num_taken_;
  if (spare_.empty()) return std::make_unique<IovecBlock>();
  std::unique_ptr<IovecBlock> block = std::move(spare_.back());
  spare_.pop_back();
  return block;
}

void IovecBlockPool::GiveBack(std::unique_ptr<IovecBlock> block) {
  if (block == nullptr) return;
  --num_taken_;
  if (spare_.size() < kMaxSpare) spare_.push_back(std::move(block));
}

}  // namespace tsr

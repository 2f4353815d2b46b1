#include "chunk_gather.h"

#include <algorithm>

namespace tsr {
namespace {

constexpr size_t kMaxSpare = 4;

}  // namespace

void GatherBlock::Clear() {
  num_iov_ = 0;
  nbytes_ = 0;
  packed_nbytes_ = 0;
}

void GatherBlock::AppendPacked(int64_t nbytes) {
  Append(packed(), nbytes);
  packed_nbytes_ += nbytes;
}

void GatherBlock::Append(const uint8_t* data, int64_t nbytes) {
  nbytes_ += nbytes;
  if (num_iov_ > 0) {
    iovec& last = iov_[num_iov_ - 1];
    if (static_cast<const uint8_t*>(last.iov_base) + last.iov_len == data) {
      last.iov_len += static_cast<size_t>(nbytes);
      return;
    }
  }
  // sendmsg only reads; iovec has no const.
  iov_[num_iov_++] = iovec{const_cast<uint8_t*>(data), static_cast<size_t>(nbytes)};
}

std::unique_ptr<GatherBlock> GatherBlockPool::Take() {
  ++num_taken_;
  if (spare_.empty()) return std::make_unique<GatherBlock>();
  std::unique_ptr<GatherBlock> block = std::move(spare_.back());
  spare_.pop_back();
  return block;
}

void GatherBlockPool::GiveBack(std::unique_ptr<GatherBlock> block) {
  if (block == nullptr) return;
  --num_taken_;
  if (spare_.size() < kMaxSpare) spare_.push_back(std::move(block));
}

ChunkGather::ChunkGather(const ShardDirectory& directory, std::shared_ptr<const ChunkTable> table,
                         std::shared_ptr<const PublishedVersion> published, uint64_t chunk)
    : directory_(&directory),
      table_(std::move(table)),
      published_(std::move(published)),
      chunk_(&table_->chunks[chunk]),
      next_region_(chunk_->first_region),
      end_region_(chunk_->first_region + chunk_->num_regions) {}

void ChunkGather::Fill(GatherBlock* block) {
  while (!done() && !block->full()) {
    if (!region_open_) OpenRegion();
    if (packed_) {
      if (!AppendSlab(block)) return;
    } else {
      AppendRuns(block);
    }
  }
}

bool ChunkGather::ReadsLeaf(uint32_t leaf) const {
  const auto regions =
      std::span(table_->regions).subspan(chunk_->first_region, chunk_->num_regions);
  return std::ranges::any_of(regions, [&](const TableRegion& region) {
    return directory_->shard(region.shard).leaf == leaf;
  });
}

void ChunkGather::OpenRegion() {
  const TableRegion& region = table_->regions[next_region_++];
  const ShardDirectory::Shard& shard = directory_->shard(region.shard);
  const BoxView box = BoxView(table_->boxes).subspan(region.box_offset, 2 * shard.rank);
  op_ = region.op;
  itemsize_ = shard.itemsize;
  wire_itemsize_ = op_.is_copy() ? itemsize_ : ItemsizeOf(op_.to());
  strides_ = published_->strides(region.shard);
  base_ = published_->base(region.shard);
  int64_t extents[RunIterator::kMaxRank];
  for (uint32_t dim = 0; dim < shard.rank; ++dim) {
    base_ += StartOf(box, static_cast<int>(dim)) * strides_[dim];
    extents[dim] = ExtentOf(box, static_cast<int>(dim));
  }
  const std::span<const int64_t> extents_view(extents, shard.rank);
  runs_ = RunIterator(itemsize_, extents_view, strides_);
  run_taken_nbytes_ = 0;
  packed_ = !op_.is_copy() || runs_.run_nbytes() < kMinRunNbytes;
  if (packed_) slabs_ = SlabCursor(extents_view, wire_itemsize_, kPackedNbytes);
  region_open_ = true;
}

void ChunkGather::AppendRuns(GatherBlock* block) {
  while (!block->full()) {
    const int64_t nbytes = std::min(runs_.run_nbytes() - run_taken_nbytes_, block->room_nbytes());
    block->Append(base_ + runs_.offset() + run_taken_nbytes_, nbytes);
    run_taken_nbytes_ += nbytes;
    if (run_taken_nbytes_ < runs_.run_nbytes()) return;
    run_taken_nbytes_ = 0;
    runs_.Next();
    if (runs_.done()) {
      region_open_ = false;
      return;
    }
  }
}

bool ChunkGather::AppendSlab(GatherBlock* block) {
  const int64_t nbytes = slabs_.Take(std::min(block->packed_room_nbytes(), block->room_nbytes()));
  if (nbytes == 0) return false;
  const std::span<const int64_t> start = slabs_.start();
  const std::span<const int64_t> extents = slabs_.extents();
  const uint8_t* from = base_;
  int64_t packed_strides[RunIterator::kMaxRank];
  int64_t stride = wire_itemsize_;
  for (size_t dim = start.size(); dim-- > 0;) {
    from += start[dim] * strides_[dim];
    packed_strides[dim] = stride;
    stride *= extents[dim];
  }
  CopyRegion(op_, itemsize_, extents, {from, strides_},
             {block->packed(), {packed_strides, start.size()}});
  block->AppendPacked(nbytes);
  region_open_ = !slabs_.done();
  return true;
}

}  // namespace tsr

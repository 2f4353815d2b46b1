#include "chunk_gather.h"

#include <algorithm>

namespace tsr {

ChunkGather::ChunkGather(const ShardDirectory& directory, std::shared_ptr<const ChunkTable> table,
                         std::shared_ptr<const PublishedVersion> published, uint64_t chunk)
    : directory_(&directory),
      table_(std::move(table)),
      published_(std::move(published)),
      chunk_(&table_->chunks[chunk]),
      next_region_(chunk_->first_region),
      end_region_(chunk_->first_region + chunk_->num_regions) {}

void ChunkGather::Fill(IovecBlock* block) {
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
  tiled_ = {{}, published_->base(region.shard), published_->layout(region.shard)};
  if (tiled_.layout != nullptr) {
    tiled_.box = tiled_.layout->box();
    packed_ = region_open_ = true;
    slabs_ = SlabCursor(box, SinkItemsize(op_, itemsize_), kPackedNbytes);
    return;
  }
  from_ = {box, published_->base(region.shard), published_->strides(region.shard)};
  int64_t extents[kMaxRank];
  for (size_t dim = 0; dim < shard.rank; ++dim) {
    // A table's boxes are relative to their shard.
    from_.base += StartOf(box, static_cast<int>(dim)) * from_.strides[dim];
    extents[dim] = ExtentOf(box, static_cast<int>(dim));
  }
  runs_ = RunIterator(itemsize_, {extents, shard.rank}, from_.strides);
  run_taken_nbytes_ = 0;
  packed_ = !op_.is_copy() || runs_.run_nbytes() < kMinRunNbytes;
  if (packed_) slabs_ = SlabCursor(box, SinkItemsize(op_, itemsize_), kPackedNbytes);
  region_open_ = true;
}

void ChunkGather::AppendRuns(IovecBlock* block) {
  while (!block->full()) {
    const int64_t nbytes = std::min(runs_.run_nbytes() - run_taken_nbytes_, block->room_nbytes());
    block->Append(from_.base + runs_.offset() + run_taken_nbytes_, nbytes);
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

bool ChunkGather::AppendSlab(IovecBlock* block) {
  const int64_t nbytes = slabs_.Take(std::min(block->packed_room_nbytes(), block->room_nbytes()));
  if (nbytes == 0) return false;
  uint8_t* const packed = block->AppendPacked(nbytes);
  if (tiled_.layout != nullptr) {
    const ShardLayout dense = ShardLayout::RowMajor(slabs_.slab(), SinkItemsize(op_, itemsize_));
    CopyTiled(op_, itemsize_, slabs_.slab(), tiled_, {slabs_.slab(), packed, &dense},
              Stores::kCached);
  } else {
    CopyCommon(op_, itemsize_, from_, {slabs_.slab(), packed}, Stores::kCached);
  }
  region_open_ = !slabs_.done();
  return true;
}

}  // namespace tsr

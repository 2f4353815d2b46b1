#include "chunk_scatter.h"

#include <algorithm>

namespace tsr {

PlacementCursor::PlacementCursor(BoxView region, BoxView sink_box, BoxView part, int64_t itemsize,
                                 uint8_t* base)
    : run_nbytes_(itemsize), data_(base) {
  int64_t wire_stride = itemsize;
  int64_t sink_stride = itemsize;
  bool dense = true;
  int outer[RunIterator::kMaxRank];
  for (int dim = RankOf(part) - 1; dim >= 0; --dim) {
    const int64_t extent = ExtentOf(part, dim);
    wire_offset_ += (StartOf(part, dim) - StartOf(region, dim)) * wire_stride;
    data_ += (StartOf(part, dim) - StartOf(sink_box, dim)) * sink_stride;
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
    sink_stride *= ExtentOf(sink_box, dim);
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

void ScatterBlock::Clear() {
  num_iov_ = 0;
  nbytes_ = 0;
  staged_nbytes_ = 0;
  pieces_.clear();
  boxes_.clear();
}

bool ScatterBlock::Continues(const uint8_t* data) const {
  if (num_iov_ == 0) return true;
  const iovec& last = iov_[num_iov_ - 1];
  return static_cast<const uint8_t*>(last.iov_base) + last.iov_len == data;
}

void ScatterBlock::Append(uint8_t* data, int64_t nbytes) {
  nbytes_ += nbytes;
  if (num_iov_ > 0 && Continues(data)) {
    iov_[num_iov_ - 1].iov_len += static_cast<size_t>(nbytes);
  } else {
    iov_[num_iov_++] = iovec{data, static_cast<size_t>(nbytes)};
  }
}

void ScatterBlock::Stage(const Region& region, BoxView box, int64_t nbytes) {
  pieces_.push_back(Piece{&region, boxes_.size(), staged_nbytes_});
  boxes_.insert(boxes_.end(), box.begin(), box.end());
  Append(staging_.get() + staged_nbytes_, nbytes);
  staged_nbytes_ += nbytes;
}

void ChunkScatter::Start(const Fetch& fetch, uint64_t chunk) {
  fetch_ = &fetch;
  const Chunk& taken = fetch.plan().chunks[chunk];
  next_region_ = taken.first_region;
  end_region_ = taken.first_region + taken.num_regions;
  region_open_ = false;
}

void ChunkScatter::Fill(ScatterBlock* block) {
  while (!done() && !block->full()) {
    if (!region_open_) OpenRegion(*block);
    if (staged_) {
      if (!AppendSlab(block)) return;
    } else {
      AppendRuns(block);
    }
  }
}

BoxView ChunkScatter::SinkBox(const Region& region, uint32_t placement) const {
  const Plan& plan = fetch_->plan();
  const LeafPair& pair = plan.input.pairs[region.pair];
  return plan.input.layouts[pair.sink_layout].box(
      plan.placements[region.first_placement + placement]);
}

void ChunkScatter::OpenRegion(const ScatterBlock& block) {
  const Plan& plan = fetch_->plan();
  const Region& region = plan.regions[next_region_++];
  const BoxView box = plan.region_box(region);
  const int64_t itemsize = plan.input.pairs[region.pair].wire_itemsize;
  int64_t part[2 * RunIterator::kMaxRank];
  const std::span<int64_t> part_view(part, box.size());
  placements_.clear();
  staged_ = false;
  for (uint32_t i = 0; i < region.num_placements && !staged_; ++i) {
    const BoxView sink_box = SinkBox(region, i);
    if (!Intersect(box, sink_box, part_view)) continue;
    placements_.emplace_back(
        box, sink_box, part_view, itemsize,
        fetch_->sink_base(region.pair, plan.placements[region.first_placement + i]));
    const PlacementCursor& last = placements_.back();
    // Small leaves lie one behind the other: most of them only prolong an iovec.
    const bool prolongs =
        region.num_placements == 1 && last.is_one_run() && block.Continues(last.data());
    staged_ = last.run_nbytes() < kMinRunNbytes && !prolongs;
  }
  if (staged_) {
    int64_t extents[RunIterator::kMaxRank];
    for (int dim = 0; dim < RankOf(box); ++dim) extents[dim] = ExtentOf(box, dim);
    slabs_ = SlabCursor({extents, static_cast<size_t>(RankOf(box))}, itemsize, kPackedNbytes);
  }
  current_ = 0;
  wire_offset_ = 0;
  region_open_ = true;
}

// The placements cover the region, each element once: at every offset exactly one of them goes on.
void ChunkScatter::AppendRuns(ScatterBlock* block) {
  for (size_t tried = 0; tried < placements_.size() && !block->full();) {
    PlacementCursor& placement = placements_[current_];
    const int64_t taken = wire_offset_ - placement.wire_offset();
    if (placement.done() || taken < 0 || taken >= placement.run_nbytes()) {
      current_ = (current_ + 1) % placements_.size();
      ++tried;
      continue;
    }
    tried = 0;
    const int64_t nbytes = std::min(placement.run_nbytes() - taken, block->room_nbytes());
    block->Append(placement.data() + taken, nbytes);
    wire_offset_ += nbytes;
    if (taken + nbytes == placement.run_nbytes()) placement.Next();
  }
  region_open_ =
      !std::ranges::all_of(placements_, [](const PlacementCursor& p) { return p.done(); });
}

bool ChunkScatter::AppendSlab(ScatterBlock* block) {
  const int64_t nbytes = slabs_.Take(std::min(block->staging_room_nbytes(), block->room_nbytes()));
  if (nbytes == 0) return false;
  const Region& region = fetch_->plan().regions[next_region_ - 1];
  const BoxView box = fetch_->plan().region_box(region);
  int64_t slab[2 * RunIterator::kMaxRank];
  for (int dim = 0; dim < RankOf(box); ++dim) {
    slab[2 * dim] = StartOf(box, dim) + slabs_.start()[dim];
    slab[2 * dim + 1] = slab[2 * dim] + slabs_.extents()[dim];
  }
  block->Stage(region, BoxView(slab, box.size()), nbytes);
  region_open_ = !slabs_.done();
  return true;
}

void ChunkScatter::Finish(const ScatterBlock& block) const {
  const Plan& plan = fetch_->plan();
  for (const ScatterBlock::Piece& piece : block.pieces()) {
    const Region& region = *piece.region;
    const size_t rank = plan.region_box(region).size() / 2;
    const BoxView from_box = block.box(piece, rank);
    const int64_t itemsize = plan.input.pairs[region.pair].wire_itemsize;
    int64_t part[2 * RunIterator::kMaxRank];
    int64_t extents[RunIterator::kMaxRank];
    int64_t from_strides[RunIterator::kMaxRank];
    int64_t to_strides[RunIterator::kMaxRank];
    RowMajorStrides(from_box, itemsize, {from_strides, rank});
    for (uint32_t i = 0; i < region.num_placements; ++i) {
      const BoxView sink_box = SinkBox(region, i);
      if (!Intersect(from_box, sink_box, {part, 2 * rank})) continue;
      RowMajorStrides(sink_box, itemsize, {to_strides, rank});
      const uint8_t* from = block.staged(piece);
      uint8_t* to = fetch_->sink_base(region.pair, plan.placements[region.first_placement + i]);
      for (size_t dim = 0; dim < rank; ++dim) {
        from += (part[2 * dim] - from_box[2 * dim]) * from_strides[dim];
        to += (part[2 * dim] - sink_box[2 * dim]) * to_strides[dim];
        extents[dim] = part[2 * dim + 1] - part[2 * dim];
      }
      CopyRegion(Op(), itemsize, {extents, rank}, {from, {from_strides, rank}},
                 {to, {to_strides, rank}});
    }
  }
}

}  // namespace tsr

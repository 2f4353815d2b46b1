#include "chunk_scatter.h"

#include <algorithm>
#include <array>

namespace tsr {

void ScatterBlock::Clear() {
  iovecs_.Clear();
  pieces_.clear();
  boxes_.clear();
}

void ScatterBlock::Stage(const Region& region, BoxView box, int64_t nbytes) {
  pieces_.push_back(Piece{&region, boxes_.size(), iovecs_.AppendPacked(nbytes)});
  boxes_.insert(boxes_.end(), box.begin(), box.end());
}

void ChunkScatter::Start(const Fetch& fetch, uint64_t chunk, int64_t min_placed_nbytes) {
  fetch_ = &fetch;
  min_placed_nbytes_ = min_placed_nbytes;
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

DenseBox ChunkScatter::SinkBox(const Region& region, uint32_t placement) const {
  const Plan& plan = fetch_->plan();
  const uint32_t box = plan.placements[region.first_placement + placement];
  return {plan.input.layouts[plan.pair(region).sink_layout].box(box),
          fetch_->sink_base(region.pair, box)};
}

void ChunkScatter::OpenRegion(const ScatterBlock& block) {
  const Plan& plan = fetch_->plan();
  const Region& region = plan.regions[next_region_++];
  const BoxView box = plan.region_box(region);
  const int64_t itemsize = plan.pair(region).wire_itemsize;
  const bool tiled = fetch_->sink_layout(region.pair) != nullptr;
  runs_.Start(box, itemsize);
  for (uint32_t i = 0; i < region.num_placements; ++i) runs_.Add(SinkBox(region, i));
  // Small leaves lie one behind the other: most of them only prolong an iovec.
  const uint8_t* const one_run = runs_.one_run();
  const bool prolongs = one_run != nullptr && block.Continues(one_run);
  staged_ = tiled || (runs_.min_run_nbytes() < min_placed_nbytes_ && !prolongs);
  if (staged_) slabs_ = SlabCursor(box, itemsize, kPackedNbytes);
  region_open_ = true;
}

void ChunkScatter::AppendRuns(ScatterBlock* block) {
  while (!runs_.done() && !block->full()) {
    const PlacementRuns::Run run = runs_.Take(block->room_nbytes());
    block->Append(run.data, run.nbytes);
  }
  region_open_ = !runs_.done();
}

bool ChunkScatter::AppendSlab(ScatterBlock* block) {
  const int64_t nbytes = slabs_.Take(std::min(block->staging_room_nbytes(), block->room_nbytes()));
  if (nbytes == 0) return false;
  block->Stage(fetch_->plan().regions[next_region_ - 1], slabs_.slab(), nbytes);
  region_open_ = !slabs_.done();
  return true;
}

void ChunkScatter::FinishTiled(const Region& region, const StridedBox& from, int64_t itemsize,
                               const ShardLayout& layout) const {
  const ShardLayout dense = ShardLayout::Strided(from.box, itemsize, from.strides);
  std::array<int64_t, 2 * kMaxRank> ranges;
  const std::span<int64_t> common = std::span(ranges).first(from.box.size());
  for (uint32_t i = 0; i < region.num_placements; ++i) {
    const DenseBox sink = SinkBox(region, i);
    if (!Intersect(from.box, sink.box, common)) continue;
    CopyTiled(Op(), itemsize, common, {from.box, from.base, &dense}, {sink.box, sink.base, &layout},
              Stores::kPastCache);
  }
}

void ChunkScatter::Finish(const ScatterBlock& block) const {
  const Plan& plan = fetch_->plan();
  for (const ScatterBlock::Piece& piece : block.pieces()) {
    const Region& region = *piece.region;
    const size_t rank = plan.region_box(region).size() / 2;
    const int64_t itemsize = plan.input.pairs[region.pair].wire_itemsize;
    int64_t strides[kMaxRank];
    const StridedBox from{block.box(piece, rank), piece.staged, {strides, rank}};
    RowMajorStrides(from.box, itemsize, {strides, rank});
    if (const ShardLayout* layout = fetch_->sink_layout(region.pair)) {
      FinishTiled(region, from, itemsize, *layout);
      continue;
    }
    for (uint32_t i = 0; i < region.num_placements; ++i) {
      CopyCommon(Op(), itemsize, from, SinkBox(region, i), Stores::kPastCache);
    }
  }
}

}  // namespace tsr

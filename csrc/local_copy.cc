#include "local_copy.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "region_copy.h"

namespace tsr {
namespace {

Status Invalid(const std::string& message) { return Status(Code::kInvalid, message); }

// A plan whose every region has been found in the directory.
class LocalCopy {
 public:
  LocalCopy(const Plan& plan, const ShardDirectory& directory, const LocalMemory& memory)
      : plan_(plan), directory_(directory), memory_(memory) {}

  Status Prepare() {
    TSR_RETURN_IF_ERROR(CheckSource());
    TSR_RETURN_IF_ERROR(CheckSink());
    shards_.reserve(plan_.regions.size());
    for (const Region& region : plan_.regions) TSR_RETURN_IF_ERROR(FindShard(region));
    return Status();
  }

  void Run(int num_threads) {
    const auto copy_chunks = [this] {
      while (true) {
        const size_t c = next_chunk_.fetch_add(1, std::memory_order_relaxed);
        if (c >= plan_.chunks.size()) return;
        const Chunk& chunk = plan_.chunks[c];
        for (uint32_t r = 0; r < chunk.num_regions; ++r) CopyOne(chunk.first_region + r);
      }
    };
    const size_t num_useful = std::min(static_cast<size_t>(num_threads), plan_.chunks.size());
    std::vector<std::jthread> threads;
    for (size_t i = 1; i < num_useful; ++i) threads.emplace_back(copy_chunks);
    copy_chunks();
  }

 private:
  Status CheckSource() {
    if (memory_.addresses.size() != directory_.num_shards()) {
      return Invalid(std::to_string(memory_.addresses.size()) + " addresses for " +
                     std::to_string(directory_.num_shards()) + " shards");
    }
    if (memory_.strides.size() != directory_.num_strides()) {
      return Invalid(std::to_string(memory_.strides.size()) + " strides where the shards have " +
                     std::to_string(directory_.num_strides()) + " dimensions");
    }
    const auto negative = [](int64_t stride) { return stride < 0; };
    if (std::ranges::any_of(memory_.strides, negative)) return Invalid("a stride is negative");
    return Status();
  }

  Status CheckSink() {
    size_t num_boxes = 0;
    for (size_t i = 0; i < plan_.input.pairs.size(); ++i) {
      first_sink_.push_back(num_boxes);
      num_boxes += SinkOf(plan_.input.pairs[i]).num_boxes();
    }
    if (memory_.sink_addresses.size() != num_boxes) {
      return Invalid(std::to_string(memory_.sink_addresses.size()) + " sink addresses for " +
                     std::to_string(num_boxes) + " sink boxes");
    }
    return Status();
  }

  Status FindShard(const Region& region) {
    const LeafPair& pair = plan_.pair(region);
    const std::string name =
        "box " + std::to_string(region.source_box) + " of leaf " + std::to_string(pair.source_leaf);
    const int64_t found = directory_.Find(pair.source_leaf, region.source_box);
    if (found < 0) return Invalid(name + " is not in the directory");
    const auto index = static_cast<size_t>(found);
    const ShardDirectory::Shard& shard = directory_.shard(index);
    const BoxView box = plan_.region_box(region);
    const bool fits = RankOf(box) == static_cast<int>(shard.rank) &&
                      Contains(directory_.range(shard), box) && shard.itemsize == pair.itemsize &&
                      (pair.op.is_copy() || pair.op.from() == shard.kind);
    if (!fits) return Invalid(name + " is another one in the directory");
    if (memory_.addresses[index] == 0) return Invalid(name + " has a null address");
    for (uint32_t sink_box : PlacementsOf(region)) {
      if (memory_.sink_addresses[first_sink_[region.pair] + sink_box] == 0) {
        return Invalid("sink box " + std::to_string(sink_box) + " of leaf " +
                       std::to_string(pair.sink_leaf) + " has a null address");
      }
    }
    shards_.push_back(static_cast<uint32_t>(index));
    return Status();
  }

  // Copies to every sink box its part of a region, straight to where it stays.
  void CopyOne(uint64_t index) const {
    const Region& region = plan_.regions[index];
    const LeafPair& pair = plan_.pair(region);
    const ShardDirectory::Shard& shard = directory_.shard(shards_[index]);
    const size_t rank = shard.rank;
    const BoxView source = directory_.range(shard);
    const auto strides = memory_.strides.subspan(directory_.first_stride(shards_[index]), rank);
    for (uint32_t placement : PlacementsOf(region)) {
      const BoxView sink = SinkOf(pair).box(placement);
      std::array<int64_t, 2 * kMaxRank> part_ranges;
      std::array<int64_t, kMaxRank> sink_stride_array;
      std::array<int64_t, kMaxRank> extents;
      const std::span<int64_t> part(part_ranges.data(), 2 * rank);
      const std::span<int64_t> sink_strides(sink_stride_array.data(), rank);
      if (!Intersect(plan_.region_box(region), sink, part)) continue;
      RowMajorStrides(sink, pair.wire_itemsize, sink_strides);
      const auto* from = reinterpret_cast<const uint8_t*>(memory_.addresses[shards_[index]]);
      auto* to =
          reinterpret_cast<uint8_t*>(memory_.sink_addresses[first_sink_[region.pair] + placement]);
      for (size_t d = 0; d < rank; ++d) {
        const int dim = static_cast<int>(d);
        from += (StartOf(part, dim) - StartOf(source, dim)) * strides[d];
        to += (StartOf(part, dim) - StartOf(sink, dim)) * sink_strides[d];
        extents[d] = ExtentOf(part, dim);
      }
      CopyRegion(pair.op, pair.itemsize, std::span(extents).first(rank), {from, strides},
                 {to, sink_strides});
    }
  }

  const BoxLayout& SinkOf(const LeafPair& pair) const {
    return plan_.input.layouts[pair.sink_layout];
  }
  std::span<const uint32_t> PlacementsOf(const Region& region) const {
    return std::span(plan_.placements).subspan(region.first_placement, region.num_placements);
  }

  const Plan& plan_;
  const ShardDirectory& directory_;
  const LocalMemory memory_;
  std::vector<size_t> first_sink_;  // per pair
  std::vector<uint32_t> shards_;    // per region, its index in the directory
  std::atomic<size_t> next_chunk_{0};
};

}  // namespace

Status CopyPlan(const Plan& plan, const ShardDirectory& directory, const LocalMemory& memory,
                int num_threads) {
  if (num_threads < 1) return Invalid("num_threads is " + std::to_string(num_threads));
  LocalCopy copy(plan, directory, memory);
  TSR_RETURN_IF_ERROR(copy.Prepare());
  copy.Run(num_threads);
  return Status();
}

}  // namespace tsr

#include "local_copy.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include "cpu.h"
#include "placement_runs.h"
#include "region_copy.h"
#include "share_out.h"

namespace tsr {
namespace {

constexpr int64_t kMinRunInOrderNbytes = 256;

Status Invalid(const std::string& message) { return Status(Code::kInvalid, message); }

std::string NameOf(uint32_t box, uint32_t leaf) {
  return "box " + std::to_string(box) + " of leaf " + std::to_string(leaf);
}

}  // namespace

Status LocalCopy::Start(const Plan& plan, const ShardDirectory& directory,
                        const LocalMemory& memory, int num_threads,
                        std::unique_ptr<LocalCopy>* out) {
  if (num_threads < 1) return Invalid("num_threads is " + std::to_string(num_threads));
  TSR_RETURN_IF_ERROR(CheckCpuLevel());
  std::unique_ptr<LocalCopy> copy(new LocalCopy(plan, directory, memory));
  TSR_RETURN_IF_ERROR(copy->CheckSource());
  TSR_RETURN_IF_ERROR(copy->CheckSink());
  copy->is_read_.resize(directory.num_shards());
  copy->layouts_.resize(directory.num_shards());
  copy->shards_.reserve(plan.regions.size());
  for (const Region& region : plan.regions) TSR_RETURN_IF_ERROR(copy->FindShard(region));
  const size_t num_useful = std::min(static_cast<size_t>(num_threads), plan.chunks.size());
  copy->threads_ = StartThreads(std::max(num_useful, size_t{1}) - 1,
                                [self = copy.get()] { self->CopyChunks(); });
  *out = std::move(copy);
  return Status();
}

Status LocalCopy::SetPinned(size_t num_shards, std::shared_ptr<const ShardLayout> layout) {
  const size_t before = num_pinned_.load(std::memory_order_relaxed);
  if (num_shards < before || num_shards > directory_.num_shards()) {
    return Invalid(std::to_string(num_shards) + " shards are pinned, behind " +
                   std::to_string(before) + " of " + std::to_string(directory_.num_shards()));
  }
  for (size_t i = before; i < num_shards; ++i) {
    layouts_[i] = layout;
    TSR_RETURN_IF_ERROR(CheckShard(i));
  }
  num_pinned_.store(num_shards, std::memory_order_release);
  num_pinned_.notify_all();
  return Status();
}

Status LocalCopy::Finish() {
  if (stopped_) return Invalid("the copy is closed");
  const size_t num_pinned = num_pinned_.load(std::memory_order_relaxed);
  if (num_pinned < directory_.num_shards()) {
    return Invalid(std::to_string(num_pinned) + " of " + std::to_string(directory_.num_shards()) +
                   " shards are pinned");
  }
  CopyChunks();
  threads_.clear();
  return Status();
}

void LocalCopy::Close() {
  stopped_ = true;
  num_pinned_ = directory_.num_shards();
  num_pinned_.notify_all();
  threads_.clear();
}

Status LocalCopy::CheckSource() const {
  if (memory_.addresses.size() != directory_.num_shards()) {
    return Invalid(std::to_string(memory_.addresses.size()) + " addresses for " +
                   std::to_string(directory_.num_shards()) + " shards");
  }
  if (memory_.strides.size() != directory_.num_strides()) {
    return Invalid(std::to_string(memory_.strides.size()) + " strides where the shards have " +
                   std::to_string(directory_.num_strides()) + " dimensions");
  }
  return Status();
}

Status LocalCopy::CheckSink() {
  size_t num_boxes = 0;
  for (size_t i = 0; i < plan_.input.pairs.size(); ++i) {
    first_sink_.push_back(num_boxes);
    num_boxes += SinkOf(plan_.input.pairs[i]).num_boxes();
  }
  if (memory_.sink_addresses.size() != num_boxes) {
    return Invalid(std::to_string(memory_.sink_addresses.size()) + " sink addresses for " +
                   std::to_string(num_boxes) + " sink boxes");
  }
  return CheckSinkLayouts(plan_, memory_.sink_layouts);
}

Status LocalCopy::FindShard(const Region& region) {
  const LeafPair& pair = plan_.pair(region);
  const auto name = [&] { return NameOf(region.source_box, pair.source_leaf); };
  const int64_t found = directory_.Find(pair.source_leaf, region.source_box);
  if (found < 0) return Invalid(name() + " is not in the directory");
  const auto index = static_cast<size_t>(found);
  const ShardDirectory::Shard& shard = directory_.shard(index);
  const BoxView box = plan_.region_box(region);
  const bool fits = RankOf(box) == static_cast<int>(shard.rank) &&
                    Contains(directory_.range(shard), box) && shard.itemsize == pair.itemsize &&
                    (pair.op.is_copy() || pair.op.from() == shard.kind);
  if (!fits) return Invalid(name() + " is another one in the directory");
  for (uint32_t sink_box : PlacementsOf(region)) {
    if (memory_.sink_addresses[first_sink_[region.pair] + sink_box] == 0) {
      return Invalid("sink box " + std::to_string(sink_box) + " of leaf " +
                     std::to_string(pair.sink_leaf) + " has a null address");
    }
  }
  shards_.push_back(static_cast<uint32_t>(index));
  is_read_[index] = true;
  return Status();
}

Status LocalCopy::CheckShard(size_t index) const {
  if (!is_read_[index]) return Status();
  const ShardDirectory::Shard& shard = directory_.shard(index);
  if (memory_.addresses[index] == 0) {
    return Invalid(NameOf(shard.box, shard.leaf) + " has a null address");
  }
  if (layouts_[index] != nullptr) {
    if (layouts_[index]->Fits(directory_.range(shard), shard.itemsize)) return Status();
    return Invalid(NameOf(shard.box, shard.leaf) + " has a layout of other shards than its own");
  }
  const auto strides = memory_.strides.subspan(directory_.first_stride(index), shard.rank);
  if (std::ranges::any_of(strides, [](int64_t stride) { return stride < 0; })) {
    return Invalid(NameOf(shard.box, shard.leaf) + " has a negative stride");
  }
  return Status();
}

void LocalCopy::CopyChunks() {
  while (!stopped_.load(std::memory_order_relaxed)) {
    const size_t c = next_chunk_.fetch_add(1, std::memory_order_relaxed);
    if (c >= plan_.chunks.size()) return;
    const Chunk& chunk = plan_.chunks[c];
    for (uint64_t r = chunk.first_region; r < chunk.first_region + chunk.num_regions; ++r) {
      if (!WaitForShard(shards_[r])) return;
      CopyOne(r);
    }
  }
}

// False where the copy was stopped meanwhile.
bool LocalCopy::WaitForShard(size_t index) const {
  size_t num_pinned = num_pinned_.load(std::memory_order_acquire);
  while (num_pinned <= index) {
    num_pinned_.wait(num_pinned, std::memory_order_acquire);
    num_pinned = num_pinned_.load(std::memory_order_acquire);
  }
  return !stopped_.load(std::memory_order_relaxed);
}

void LocalCopy::CopyOne(uint64_t index) const {
  const Region& region = plan_.regions[index];
  const LeafPair& pair = plan_.pair(region);
  const BoxView held = directory_.range(directory_.shard(shards_[index]));
  const auto* base = reinterpret_cast<const uint8_t*>(memory_.addresses[shards_[index]]);
  const auto strides =
      memory_.strides.subspan(directory_.first_stride(shards_[index]), held.size() / 2);
  if (const ShardLayout* layout = layouts_[shards_[index]].get()) {
    return CopyTiledOnes(region, {held, base, layout});
  }
  if (SinkLayoutOf(region.pair) != nullptr) {
    const ShardLayout layout = ShardLayout::Strided(held, pair.itemsize, strides);
    return CopyTiledOnes(region, {held, base, &layout});
  }
  const BoxView box = plan_.region_box(region);
  const StridedBox from{box, base + OffsetOf(box, held, strides), strides};
  if (CopyInOrder(region, from)) return;
  for (uint32_t sink_box : PlacementsOf(region)) {
    CopyCommon(pair.op, pair.itemsize, from, SinkBoxOf(region, sink_box), Stores::kPastCache);
  }
}

bool LocalCopy::CopyInOrder(const Region& region, const StridedBox& from) const {
  const LeafPair& pair = plan_.pair(region);
  if (region.num_placements == 1 || !IsRowMajor(from, pair.itemsize)) return false;
  PlacementRuns runs;
  runs.Start(from.box, pair.wire_itemsize);
  for (uint32_t sink_box : PlacementsOf(region)) runs.Add(SinkBoxOf(region, sink_box));
  if (runs.min_run_nbytes() < kMinRunInOrderNbytes) return false;
  while (!runs.done()) {
    const PlacementRuns::Run run = runs.Take(std::numeric_limits<int64_t>::max());
    CopyRun(pair.op, pair.itemsize,
            from.base + run.wire_offset / pair.wire_itemsize * pair.itemsize, run.data,
            run.nbytes / pair.wire_itemsize, Stores::kPastCache);
  }
  FenceStores();
  return true;
}

void LocalCopy::CopyTiledOnes(const Region& region, const TiledSource& from) const {
  const LeafPair& pair = plan_.pair(region);
  std::array<int64_t, 2 * kMaxRank> ranges;
  const std::span<int64_t> common = std::span(ranges).first(from.box.size());
  for (uint32_t sink_box : PlacementsOf(region)) {
    const DenseBox sink = SinkBoxOf(region, sink_box);
    if (!Intersect(plan_.region_box(region), sink.box, common)) continue;
    const ShardLayout dense = ShardLayout::RowMajor(sink.box, pair.wire_itemsize);
    const ShardLayout* const layout = SinkLayoutOf(region.pair);
    CopyTiled(pair.op, pair.itemsize, common, from,
              {sink.box, sink.base, layout == nullptr ? &dense : layout}, Stores::kPastCache);
  }
}

DenseBox LocalCopy::SinkBoxOf(const Region& region, uint32_t box) const {
  const uint64_t address = memory_.sink_addresses[first_sink_[region.pair] + box];
  return {SinkOf(plan_.pair(region)).box(box), reinterpret_cast<uint8_t*>(address)};
}

}  // namespace tsr

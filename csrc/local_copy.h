// Carries out a whole plan from memory to memory, for one program that reaches both sides.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "box_copy.h"
#include "chunk_table.h"
#include "plan.h"
#include "shard_layout.h"
#include "status.h"
#include "tiled_copy.h"

namespace tsr {

// Where the bytes of both sides lie. Does not own its arrays, nor the memory that they point to.
struct LocalMemory {
  std::span<const uint64_t> addresses;  // of the first element of each shard of the directory
  std::span<const int64_t> strides;     // in bytes, those of a shard after those of the former
  // Of each (pair, sink box), boxes in the order of the pair's sink layout: dense row-major memory
  // with the extents of the box, elements of the pair's wire_itemsize.
  std::span<const uint64_t> sink_addresses;
  // Of the pairs whose sink boxes lie in tiles instead.
  ShardLayouts sink_layouts = {};
};

// Copies every region of a plan, whatever process it is planned from, with threads that take chunks
// in the order of the sources' memory, while its owner still finds out where the later ones lie.
//
// Belongs to one thread; plan, directory and arrays outlive it. Sides don't overlap.
class LocalCopy {
 public:
  // Starts up to `num_threads` - 1 threads; the caller's is one more, in Finish. kInvalid, before
  // the first byte moves, where arrays don't have the lengths that plan and directory ask for,
  // where the directory lacks what the plan reads, or where a sink address is null or a layout no
  // fit.
  static Status Start(const Plan& plan, const ShardDirectory& directory, const LocalMemory& memory,
                      int num_threads, std::unique_ptr<LocalCopy>* out);
  ~LocalCopy() { Close(); }
  LocalCopy(const LocalCopy&) = delete;
  LocalCopy& operator=(const LocalCopy&) = delete;

  // Addresses and strides of the first `num_shards` shards, at least as many as before, are in the
  // arrays and stay: they are copied from now on. Those that are new lie in tiles where there is a
  // `layout`; their strides mean nothing then. kInvalid where one that is read is null, a stride
  // negative, or the layout that of other shards.
  Status SetPinned(size_t num_shards, std::shared_ptr<const ShardLayout> layout = nullptr);

  // Takes part, and returns when all is copied. kInvalid where shards are missing, or closed.
  Status Finish();

  // Where it has not finished: leaves the sinks half written. Returns when nobody reads or writes.
  void Close();

 private:
  LocalCopy(const Plan& plan, const ShardDirectory& directory, const LocalMemory& memory)
      : plan_(plan), directory_(directory), memory_(memory) {}

  Status CheckSource() const;
  Status CheckSink();
  Status FindShard(const Region& region);
  Status CheckShard(size_t index) const;
  void CopyChunks();
  bool WaitForShard(size_t index) const;
  // Copies to every sink box its part of a region, straight to where it stays.
  void CopyOne(uint64_t index) const;
  // Reads a region once, in the order of its memory, though several sink boxes take parts of it.
  // False, and nothing copied, where only one does, where a side has it in another order, or
  // where runs are so short that it is faster to take sink boxes one after another.
  bool CopyInOrder(const Region& region, const StridedBox& from) const;
  void CopyTiledOnes(const Region& region, const TiledSource& from) const;
  DenseBox SinkBoxOf(const Region& region, uint32_t box) const;

  // Null where the boxes of the pair are dense rows.
  const ShardLayout* SinkLayoutOf(uint32_t pair) const {
    const auto it = memory_.sink_layouts.find(pair);
    return it == memory_.sink_layouts.end() ? nullptr : it->second.get();
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
  std::vector<bool> is_read_;       // per shard
  // Per shard that lies in tiles; written before its number is in num_pinned_.
  std::vector<std::shared_ptr<const ShardLayout>> layouts_;
  std::atomic<size_t> num_pinned_{0};
  std::atomic<size_t> next_chunk_{0};
  std::atomic<bool> stopped_{false};
  std::vector<std::jthread> threads_;
};

}  // namespace tsr

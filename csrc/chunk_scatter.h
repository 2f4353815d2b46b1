// Where the bytes of a chunk go at its sink, block by block, as recvmsg takes them.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <vector>

#include "box_copy.h"
#include "fetch.h"
#include "iovec_block.h"
#include "placement_runs.h"
#include "slab_cursor.h"
#include "tiled_copy.h"

namespace tsr {

// Scratch of one stream for one block. Not thread-safe.
class ScatterBlock {
 public:
  // A box, in global coordinates, whose bytes lie apart until they are scattered.
  struct Piece {
    const Region* region;
    size_t box_offset;  // in boxes
    const uint8_t* staged;
  };

  void Clear();
  bool full() const { return iovecs_.full(); }
  int64_t room_nbytes() const { return iovecs_.room_nbytes(); }
  int64_t staging_room_nbytes() const { return iovecs_.packed_room_nbytes(); }
  bool Continues(const uint8_t* data) const { return iovecs_.Continues(data); }
  void Append(uint8_t* data, int64_t nbytes) { iovecs_.Append(data, nbytes); }
  void Stage(const Region& region, BoxView box, int64_t nbytes);

  std::span<iovec> iov() { return iovecs_.iov(); }
  int64_t nbytes() const { return iovecs_.nbytes(); }
  std::span<const Piece> pieces() const { return pieces_; }
  BoxView box(const Piece& piece, size_t rank) const {
    return BoxView(boxes_).subspan(piece.box_offset, 2 * rank);
  }

 private:
  IovecBlock iovecs_;  // what is staged is packed
  std::vector<Piece> pieces_;
  std::vector<int64_t> boxes_;
};

// Takes one chunk in wire order. Not thread-safe. The fetch outlives it.
class ChunkScatter {
 public:
  // `chunk` is an index in the plan's chunks. Runs of at least `min_placed_nbytes` are received
  // where they stay; that is kMinRunNbytes or more.
  void Start(const Fetch& fetch, uint64_t chunk, int64_t min_placed_nbytes);

  bool done() const { return next_region_ == end_region_ && !region_open_; }
  // Puts where the next bytes go into a cleared block, for at least one byte.
  void Fill(ScatterBlock* block);
  // Moves what was staged to where it belongs, once all bytes of the block are there.
  void Finish(const ScatterBlock& block) const;

 private:
  void OpenRegion(const ScatterBlock& block);
  void AppendRuns(ScatterBlock* block);
  // False where the block has no room for more.
  bool AppendSlab(ScatterBlock* block);
  void FinishTiled(const Region& region, const StridedBox& from, int64_t itemsize,
                   const ShardLayout& layout) const;
  DenseBox SinkBox(const Region& region, uint32_t placement) const;

  const Fetch* fetch_ = nullptr;
  int64_t min_placed_nbytes_ = kMinRunNbytes;
  uint64_t next_region_ = 0;
  uint64_t end_region_ = 0;

  // The region that is being taken.
  bool region_open_ = false;
  bool staged_ = false;
  PlacementRuns runs_;
  SlabCursor slabs_;
};

}  // namespace tsr

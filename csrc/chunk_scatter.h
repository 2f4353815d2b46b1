// Where the bytes of a chunk go at its sink, block by block, as recvmsg takes them.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "chunk_gather.h"
#include "fetch.h"
#include "slab_cursor.h"

namespace tsr {

// The part of a region that one sink box takes, as runs that are dense both on the wire and in the
// sink's memory. In row-major order of the region. Copies are independent.
class PlacementCursor {
 public:
  // `part` lies in both `region` and `sink_box`. Elements of the sink box lie row-major at `base`.
  PlacementCursor(BoxView region, BoxView sink_box, BoxView part, int64_t itemsize, uint8_t* base);

  int64_t run_nbytes() const { return run_nbytes_; }
  bool is_one_run() const { return rank_ == 0; }
  bool done() const { return done_; }
  int64_t wire_offset() const { return wire_offset_; }
  uint8_t* data() const { return data_; }
  void Next();

 private:
  int64_t run_nbytes_;
  bool done_ = false;
  int64_t wire_offset_ = 0;
  uint8_t* data_;
  int rank_ = 0;  // dimensions outside a run, outermost first
  int64_t extents_[RunIterator::kMaxRank];
  int64_t index_[RunIterator::kMaxRank];
  int64_t wire_strides_[RunIterator::kMaxRank];
  int64_t sink_strides_[RunIterator::kMaxRank];
};

// Scratch of one stream for one block. Not thread-safe.
class ScatterBlock {
 public:
  // A box, in global coordinates, whose bytes lie in staging() until they are scattered.
  struct Piece {
    const Region* region;
    size_t box_offset;  // in boxes
    int64_t staging_offset;
  };

  void Clear();
  bool full() const { return num_iov_ == kMaxRuns || nbytes_ >= kBlockNbytes; }
  int64_t room_nbytes() const { return kBlockNbytes - nbytes_; }
  int64_t staging_room_nbytes() const { return kPackedNbytes - staged_nbytes_; }
  // Whether bytes at `data` need no iovec of their own, or the first one.
  bool Continues(const uint8_t* data) const;
  void Append(uint8_t* data, int64_t nbytes);
  void Stage(const Region& region, BoxView box, int64_t nbytes);

  std::span<iovec> iov() { return {iov_.data(), num_iov_}; }
  int64_t nbytes() const { return nbytes_; }
  std::span<const Piece> pieces() const { return pieces_; }
  BoxView box(const Piece& piece, size_t rank) const {
    return BoxView(boxes_).subspan(piece.box_offset, 2 * rank);
  }
  const uint8_t* staged(const Piece& piece) const { return staging_.get() + piece.staging_offset; }

 private:
  static constexpr size_t kMaxRuns = kBlockNbytes / kMinRunNbytes;

  std::unique_ptr<uint8_t[]> staging_ = std::make_unique_for_overwrite<uint8_t[]>(kPackedNbytes);
  std::array<iovec, kMaxRuns + 1> iov_;  // one more for what follows the chunk
  size_t num_iov_ = 0;
  int64_t nbytes_ = 0;
  int64_t staged_nbytes_ = 0;
  std::vector<Piece> pieces_;
  std::vector<int64_t> boxes_;
};

// Takes one chunk in wire order. Not thread-safe. The fetch outlives it.
class ChunkScatter {
 public:
  // `chunk` is an index in the plan's chunks.
  void Start(const Fetch& fetch, uint64_t chunk);

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
  BoxView SinkBox(const Region& region, uint32_t placement) const;

  const Fetch* fetch_ = nullptr;
  uint64_t next_region_ = 0;
  uint64_t end_region_ = 0;

  // The region that is being taken.
  bool region_open_ = false;
  bool staged_ = false;
  std::vector<PlacementCursor> placements_;
  size_t current_ = 0;  // in placements_
  int64_t wire_offset_ = 0;
  SlabCursor slabs_;
};

}  // namespace tsr

// Moves a box of elements between strided memory and dense memory, or between two strided sides.
#pragma once

#include <cstdint>
#include <span>

#include "box.h"
#include "cast.h"
#include "stores.h"

namespace tsr {

// Memory of one side of a region: where its first element lies and how far apart, in bytes, its
// neighbours along each dimension are. Strides may be in any order (column-major shards) but not
// negative. Does not own its memory.
struct StridedSource {
  const uint8_t* base;
  std::span<const int64_t> strides;  // shape=[rank]
};
struct StridedSink {
  uint8_t* base;
  std::span<const int64_t> strides;  // shape=[rank]
};

// Copies the box `extents` (shape=[rank]; no extent is 0) of elements of `itemsize` bytes.
// With a cast `op`, `itemsize` is that of the source, and the sink's strides are in the bytes of
// op.to(). Dimensions that are dense on both sides move as one run; where the sides run in
// different orders the box is walked in blocks that stay in cache. `stores` says where all but
// short runs are written. Sides don't overlap.
void CopyRegion(Op op, int64_t itemsize, std::span<const int64_t> extents, StridedSource from,
                StridedSink to, Stores stores);

// Copies or casts `count` elements that are dense on both sides. Who has it write past the cache
// calls FenceStores() behind the last of his runs.
void CopyRun(Op op, int64_t itemsize, const uint8_t* from, uint8_t* to, int64_t count,
             Stores stores);

// Walks the contiguous byte runs of one strided side of a box, in row-major order of the box.
// Holds no memory of its own beyond its counters; ranks up to kMaxRank.
class RunIterator {
 public:
  static constexpr int kMaxRank = tsr::kMaxRank;

  // `extents` and `strides` are copied. Adjacent dimensions that are dense are merged.
  RunIterator(int64_t itemsize, std::span<const int64_t> extents, std::span<const int64_t> strides);

  // Bytes of every run (all runs of a box are equally long) and how many there are.
  int64_t run_nbytes() const { return run_nbytes_; }
  int64_t num_runs() const { return num_runs_; }

  bool done() const { return left_ == 0; }
  // Byte offset of the current run from the base.
  int64_t offset() const { return offset_; }
  void Next();

 private:
  int rank_ = 0;
  int64_t run_nbytes_ = 0;
  int64_t num_runs_ = 0;
  int64_t left_ = 0;
  int64_t offset_ = 0;
  int64_t extents_[kMaxRank];
  int64_t strides_[kMaxRank];
  int64_t index_[kMaxRank];
};

}  // namespace tsr

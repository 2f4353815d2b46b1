// The bytes of a chunk at its source, block by block, as they go into sendmsg.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "chunk_table.h"
#include "published.h"
#include "region_copy.h"
#include "slab_cursor.h"

namespace tsr {

// Runs of at least this many bytes go by an iovec of their own, shorter ones are packed: below it
// the kernel's work per iovec costs more than the copy.
inline constexpr int64_t kMinRunNbytes = 2048;
// Bytes of a block: small enough to be in cache from its checksum to its send.
inline constexpr int64_t kBlockNbytes = 512 << 10;
inline constexpr int64_t kPackedNbytes = 256 << 10;

// Scratch for one block. Not thread-safe.
class GatherBlock {
 public:
  void Clear();
  // Whether no more of the chunk goes in; a frame before it and a trailer after it always do.
  bool full() const { return num_iov_ > kMaxRuns || nbytes_ >= kBlockNbytes; }
  int64_t room_nbytes() const { return kBlockNbytes - nbytes_; }
  int64_t packed_room_nbytes() const { return kPackedNbytes - packed_nbytes_; }
  // Where bytes that have no place of their own go before AppendPacked().
  uint8_t* packed() { return packed_.get() + packed_nbytes_; }
  void AppendPacked(int64_t nbytes);
  void Append(const uint8_t* data, int64_t nbytes);

  std::span<iovec> iov() { return {iov_.data(), num_iov_}; }
  int64_t nbytes() const { return nbytes_; }

 private:
  static constexpr size_t kMaxRuns = kBlockNbytes / kMinRunNbytes;

  std::unique_ptr<uint8_t[]> packed_ = std::make_unique_for_overwrite<uint8_t[]>(kPackedNbytes);
  std::array<iovec, kMaxRuns + 3> iov_;
  size_t num_iov_ = 0;
  int64_t nbytes_ = 0;
  int64_t packed_nbytes_ = 0;
};

// Blocks of one worker, at most kMaxSpare of them unused. Not thread-safe.
class GatherBlockPool {
 public:
  std::unique_ptr<GatherBlock> Take();
  void GiveBack(std::unique_ptr<GatherBlock> block);
  // How many are with connections now.
  size_t num_taken() const { return num_taken_; }

 private:
  std::vector<std::unique_ptr<GatherBlock>> spare_;
  size_t num_taken_ = 0;
};

// Reads one chunk of one version in wire order. Copies are independent: one made before Fill() can
// fill the same block again. The directory outlives it; memory of the version is read in Fill(),
// and by whoever reads the block afterwards.
class ChunkGather {
 public:
  ChunkGather(const ShardDirectory& directory, std::shared_ptr<const ChunkTable> table,
              std::shared_ptr<const PublishedVersion> published, uint64_t chunk);

  bool done() const { return next_region_ == end_region_ && !region_open_; }
  // Puts the next bytes in, at least one, while the block is not full().
  void Fill(GatherBlock* block);

  const TableChunk& chunk() const { return *chunk_; }
  uint64_t version() const { return published_->version(); }
  bool ReadsLeaf(uint32_t leaf) const;

 private:
  void OpenRegion();
  void AppendRuns(GatherBlock* block);
  // False where the block has no room for more.
  bool AppendSlab(GatherBlock* block);

  const ShardDirectory* directory_;
  std::shared_ptr<const ChunkTable> table_;
  std::shared_ptr<const PublishedVersion> published_;
  const TableChunk* chunk_;
  uint64_t next_region_;
  uint64_t end_region_;

  // The region that is being read.
  bool region_open_ = false;
  bool packed_ = false;
  Op op_;
  int64_t itemsize_ = 0;
  int64_t wire_itemsize_ = 0;
  const uint8_t* base_ = nullptr;
  std::span<const int64_t> strides_;
  RunIterator runs_{1, {}, {}};
  int64_t run_taken_nbytes_ = 0;
  SlabCursor slabs_;
};

}  // namespace tsr

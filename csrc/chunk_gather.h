// The bytes of a chunk at its source, block by block, as they go into sendmsg.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "box_copy.h"
#include "chunk_table.h"
#include "iovec_block.h"
#include "published.h"
#include "region_copy.h"
#include "slab_cursor.h"
#include "tiled_copy.h"

namespace tsr {

// Reads one chunk of one version in wire order. Copies are independent: one made before Fill() can
// fill the same block again. The directory outlives it; memory of the version is read in Fill(),
// and by whoever reads the block afterwards.
class ChunkGather {
 public:
  ChunkGather(const ShardDirectory& directory, std::shared_ptr<const ChunkTable> table,
              std::shared_ptr<const PublishedVersion> published, uint64_t chunk);

  bool done() const { return next_region_ == end_region_ && !region_open_; }
  // Puts the next bytes in, at least one, while the block is not full().
  void Fill(IovecBlock* block);

  const TableChunk& chunk() const { return *chunk_; }
  uint64_t version() const { return published_->version(); }
  bool ReadsLeaf(uint32_t leaf) const;

 private:
  void OpenRegion();
  void AppendRuns(IovecBlock* block);
  // False where the block has no room for more.
  bool AppendSlab(IovecBlock* block);

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
  StridedBox from_;
  TiledSource tiled_;  // its layout is null where the shard is not in tiles
  RunIterator runs_{1, {}, {}};
  int64_t run_taken_nbytes_ = 0;
  SlabCursor slabs_;
};

}  // namespace tsr

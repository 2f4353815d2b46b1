// The chunks that one sink reads from one source, as bytes and as the source looks them up.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "box.h"
#include "cast.h"
#include "plan.h"
#include "status.h"

namespace tsr {

// What a source process holds: its distinct shards, fixed for an incarnation. A (leaf, box) pair
// names a shard on the wire; boxes are in global coordinates.
// Immutable once made; shared by threads freely.
class ShardDirectory {
 public:
  struct Shard {
    uint32_t leaf;
    uint32_t box;
    uint32_t itemsize;
    FloatKind kind;
    uint32_t rank;
    uint64_t range_offset;  // in ranges(): [rank, 2]
  };

  // `shards` in any order; kInvalid for a repeated (leaf, box), a bad range or a rank above
  // kMaxRank.
  static Status Make(std::vector<Shard> shards, std::vector<int64_t> ranges, uint32_t num_leaves,
                     ShardDirectory* out);

  size_t num_shards() const { return shards_.size(); }
  uint32_t num_leaves() const { return num_leaves_; }
  const Shard& shard(size_t index) const { return shards_[index]; }
  BoxView range(const Shard& shard) const {
    return BoxView(ranges_).subspan(shard.range_offset, 2 * shard.rank);
  }
  // Where the strides of a shard begin in a list of those of all shards, and how many that has.
  size_t first_stride(size_t index) const { return first_stride_[index]; }
  size_t num_strides() const { return first_stride_.back(); }
  // Index into shard(), or -1.
  int64_t Find(uint32_t leaf, uint32_t box) const;
  // Indices of the shards of a leaf, ascending by box.
  std::span<const uint32_t> ShardsOf(uint32_t leaf) const;

 private:
  std::vector<Shard> shards_;  // as they were given
  std::vector<int64_t> ranges_;
  std::vector<size_t> first_stride_ = {0};  // shape=[num_shards + 1]
  std::vector<uint32_t> order_;             // shards_ sorted by (leaf, box)
  uint32_t num_leaves_ = 0;
};

struct TableRegion {
  uint32_t shard;  // index in the directory
  Op op;
  uint64_t box_offset;  // in ChunkTable::boxes: [rank, 2], relative to the shard's own start

  friend bool operator==(const TableRegion&, const TableRegion&) = default;
};

struct TableChunk {
  uint64_t first_region;
  uint32_t num_regions;
  uint32_t nbytes;  // on the wire
  uint64_t first_leaf = 0;
  uint32_t num_leaves = 0;

  friend bool operator==(const TableChunk&, const TableChunk&) = default;
};

// Immutable once decoded; shared by threads freely.
struct ChunkTable {
  std::vector<int64_t> boxes;
  std::vector<TableRegion> regions;
  std::vector<TableChunk> chunks;
  std::vector<uint32_t> leaves;           // that a chunk touches, each once; chunk after chunk
  std::vector<uint32_t> chunks_per_leaf;  // shape=[num_leaves]: chunks that touch the leaf

  std::span<const uint32_t> leaves_of(const TableChunk& chunk) const {
    return std::span(leaves).subspan(chunk.first_leaf, chunk.num_leaves);
  }

  friend bool operator==(const ChunkTable&, const ChunkTable&) = default;
};

// Bytes of the table that `plan` uploads to plan.sources[source], as WIRE_FORMAT.md has them.
std::string EncodeChunkTable(const Plan& plan, size_t source);

// Reads a table from a peer. Every number is checked, overflow-safe, against the directory before
// it is used or allocated for: kInvalid says what was wrong and where. A chunk has at most
// `max_chunk_nbytes` bytes.
Status DecodeChunkTable(std::span<const uint8_t> bytes, const ShardDirectory& directory,
                        uint64_t max_chunk_nbytes, ChunkTable* out);

}  // namespace tsr

#include "chunk_table.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <tuple>

#include "little_endian.h"

namespace tsr {
namespace {

// Offsets and widths are those of WIRE_FORMAT.md.
constexpr uint32_t kMagic = 0x43525354;  // "TSRC"
constexpr uint32_t kFormat = 1;
constexpr size_t kHeaderNbytes = 24;
constexpr size_t kChunkNbytes = 8;
constexpr size_t kRegionNbytes = 12;
constexpr size_t kRangeNbytes = 16;

Status Invalid(const std::string& message) { return Status(Code::kInvalid, message); }

Status Invalid(const std::string& what, uint64_t index, const std::string& message) {
  return Invalid("chunk table: " + what + " " + std::to_string(index) + " " + message);
}

struct Counts {
  size_t num_chunks;
  size_t num_regions;
  size_t num_ranges;  // of all regions together
};

// Counts are bounded by the bytes that are there, before anything is allocated for them.
Status ReadHeader(std::span<const uint8_t> bytes, Counts* counts) {
  if (bytes.size() < kHeaderNbytes) return Invalid("chunk table: shorter than its header");
  Reader reader(bytes.data());
  if (reader.Read<uint32_t>() != kMagic) return Invalid("chunk table: wrong magic");
  if (const uint32_t format = reader.Read<uint32_t>(); format != kFormat) {
    return Invalid("chunk table: format " + std::to_string(format) + " is not known here");
  }
  const uint64_t num_chunks = reader.Read<uint64_t>();
  const uint64_t num_regions = reader.Read<uint64_t>();
  size_t left = bytes.size() - kHeaderNbytes;
  if (num_chunks > left / kChunkNbytes) return Invalid("chunk table: more chunks than bytes");
  left -= num_chunks * kChunkNbytes;
  if (num_regions > left / kRegionNbytes) return Invalid("chunk table: more regions than bytes");
  left -= num_regions * kRegionNbytes;
  if (left % kRangeNbytes != 0) return Invalid("chunk table: ends within a range");
  if (num_chunks > std::numeric_limits<uint32_t>::max()) {
    return Invalid("chunk table: too many chunks");
  }
  *counts = {num_chunks, num_regions, left / kRangeNbytes};
  return Status();
}

// Decodes the regions of a table one after another, after its chunks.
class RegionDecoder {
 public:
  RegionDecoder(Reader reader, size_t num_ranges, const ShardDirectory& directory,
                ChunkTable* table)
      : reader_(reader), ranges_left_(num_ranges), directory_(directory), table_(table) {}

  size_t ranges_left() const { return ranges_left_; }

  // Appends the next region to the table and sets its bytes on the wire.
  Status Decode(uint64_t* nbytes) {
    const uint64_t index = table_->regions.size();
    const auto leaf = reader_.Read<uint32_t>();
    const auto box = reader_.Read<uint32_t>();
    const Op op(reader_.Read<uint8_t>());
    const auto rank = reader_.Read<uint8_t>();
    const auto reserved = reader_.Read<uint16_t>();
    const int64_t found = directory_.Find(leaf, box);
    if (found < 0) {
      return Invalid("region", index,
                     "names box " + std::to_string(box) + " of leaf " + std::to_string(leaf) +
                         ", which this process does not hold");
    }
    const ShardDirectory::Shard& shard = directory_.shard(found);
    if (rank != shard.rank) return Invalid("region", index, "has another rank than its shard");
    if (reserved != 0) return Invalid("region", index, "has a reserved field that is not 0");
    if (!op.valid() || (!op.is_copy() && op.from() != shard.kind)) {
      return Invalid("region", index, "has an op that its shard does not take");
    }
    if (rank > ranges_left_) return Invalid("region", index, "lacks a range");
    ranges_left_ -= rank;
    table_->regions.push_back({static_cast<uint32_t>(found), op, table_->boxes.size()});
    uint64_t volume = 1;  // at most the shard's, which fits, unless that has none
    for (int dim = 0; dim < rank; ++dim) {
      const auto start = reader_.Read<uint64_t>();
      const auto extent = reader_.Read<uint64_t>();
      const uint64_t whole = ExtentOf(directory_.range(shard), dim);
      if (extent == 0 || extent > whole || start > whole - extent) {
        return Invalid("region", index, "is not within its shard");
      }
      table_->boxes.push_back(static_cast<int64_t>(start));
      table_->boxes.push_back(static_cast<int64_t>(start + extent));
      volume *= extent;
    }
    *nbytes = volume * static_cast<uint64_t>(SinkItemsize(op, shard.itemsize));
    return Status();
  }

 private:
  Reader reader_;
  size_t ranges_left_;
  const ShardDirectory& directory_;
  ChunkTable* table_;
};

void ListLeaves(const ShardDirectory& directory, ChunkTable* table) {
  table->chunks_per_leaf.assign(directory.num_leaves(), 0);
  std::vector<size_t> last_chunk(directory.num_leaves(), std::numeric_limits<size_t>::max());
  for (size_t c = 0; c < table->chunks.size(); ++c) {
    TableChunk& chunk = table->chunks[c];
    chunk.first_leaf = table->leaves.size();
    for (uint64_t r = chunk.first_region; r < chunk.first_region + chunk.num_regions; ++r) {
      const uint32_t leaf = directory.shard(table->regions[r].shard).leaf;
      if (last_chunk[leaf] == c) continue;
      last_chunk[leaf] = c;
      table->leaves.push_back(leaf);
      table->chunks_per_leaf[leaf] += 1;
    }
    chunk.num_leaves = static_cast<uint32_t>(table->leaves.size() - chunk.first_leaf);
  }
}

}  // namespace

Status ShardDirectory::Make(std::vector<Shard> shards, std::vector<int64_t> ranges,
                            uint32_t num_leaves, ShardDirectory* out) {
  ShardDirectory directory;
  directory.shards_ = std::move(shards);
  directory.ranges_ = std::move(ranges);
  directory.num_leaves_ = num_leaves;
  const std::vector<Shard>& all = directory.shards_;
  if (all.size() > std::numeric_limits<uint32_t>::max()) return Invalid("too many shards");
  for (size_t i = 0; i < all.size(); ++i) {
    const Shard& shard = all[i];
    const std::string name = "shard " + std::to_string(i);
    if (shard.leaf >= num_leaves) return Invalid(name + ": no such leaf");
    if (shard.rank > kMaxRank) return Invalid(name + ": rank is above 32");
    if (shard.range_offset > directory.ranges_.size() ||
        2 * shard.rank > directory.ranges_.size() - shard.range_offset) {
      return Invalid(name + ": ranges are too few");
    }
    const int64_t volume = VolumeOf(directory.range(shard));
    // A cast of one byte takes at most the eight of a float64.
    const int64_t itemsize = std::max<int64_t>(shard.itemsize, ItemsizeOf(FloatKind::kF64));
    if (volume < 0 || volume > std::numeric_limits<int64_t>::max() / itemsize) {
      return Invalid(name + ": bad range " + FormatBox(directory.range(shard)));
    }
    if (shard.itemsize == 0 ||
        (shard.kind != FloatKind::kNone && shard.itemsize != ItemsizeOf(shard.kind))) {
      return Invalid(name + ": itemsize " + std::to_string(shard.itemsize) + " is wrong");
    }
    directory.first_stride_.push_back(directory.num_strides() + shard.rank);
  }
  const auto name = [&](uint32_t i) { return std::tuple(all[i].leaf, all[i].box); };
  directory.order_.resize(all.size());
  std::iota(directory.order_.begin(), directory.order_.end(), 0);
  std::sort(directory.order_.begin(), directory.order_.end(),
            [&](uint32_t a, uint32_t b) { return name(a) < name(b); });
  const auto repeated =
      std::adjacent_find(directory.order_.begin(), directory.order_.end(),
                         [&](uint32_t a, uint32_t b) { return name(a) == name(b); });
  if (repeated != directory.order_.end()) {
    return Invalid("shard " + std::to_string(*repeated) + " is there twice");
  }
  *out = std::move(directory);
  return Status();
}

int64_t ShardDirectory::Find(uint32_t leaf, uint32_t box) const {
  const auto found = std::lower_bound(order_.begin(), order_.end(), std::tuple(leaf, box),
                                      [this](uint32_t i, const auto& name) {
                                        return std::tuple(shards_[i].leaf, shards_[i].box) < name;
                                      });
  if (found == order_.end() || shards_[*found].leaf != leaf || shards_[*found].box != box)
    return -1;
  return *found;
}

std::span<const uint32_t> ShardDirectory::ShardsOf(uint32_t leaf) const {
  const auto leaf_of = [this](uint32_t i) { return shards_[i].leaf; };
  const auto first = std::ranges::lower_bound(order_, leaf, {}, leaf_of);
  return {first, std::ranges::upper_bound(first, order_.end(), leaf, {}, leaf_of)};
}

std::string EncodeChunkTable(const Plan& plan, size_t source) {
  const SourceChunks& own = plan.sources[source];
  const std::span<const Chunk> chunks(&plan.chunks[own.first_chunk], own.num_chunks);
  const uint64_t first_region = chunks.front().first_region;
  const uint64_t num_regions =
      chunks.back().first_region + chunks.back().num_regions - first_region;
  const std::span<const Region> regions(&plan.regions[first_region], num_regions);
  size_t nbytes = kHeaderNbytes + chunks.size() * kChunkNbytes;
  for (const Region& region : regions) {
    nbytes += kRegionNbytes + RankOf(plan.region_box(region)) * kRangeNbytes;
  }
  std::string bytes;
  bytes.reserve(nbytes);
  Append(kMagic, &bytes);
  Append(kFormat, &bytes);
  Append(uint64_t{chunks.size()}, &bytes);
  Append(num_regions, &bytes);
  for (const Chunk& chunk : chunks) {
    Append(chunk.num_regions, &bytes);
    Append(chunk.nbytes, &bytes);
  }
  for (const Region& region : regions) {
    const LeafPair& pair = plan.pair(region);
    const BoxView box = plan.region_box(region);
    const BoxView shard = plan.input.layouts[pair.source_layout].box(region.source_box);
    Append(pair.source_leaf, &bytes);
    Append(region.source_box, &bytes);
    Append(pair.op.code(), &bytes);
    Append(static_cast<uint8_t>(RankOf(box)), &bytes);
    Append(uint16_t{0}, &bytes);
    for (int dim = 0; dim < RankOf(box); ++dim) {
      Append(static_cast<uint64_t>(StartOf(box, dim) - StartOf(shard, dim)), &bytes);
      Append(static_cast<uint64_t>(ExtentOf(box, dim)), &bytes);
    }
  }
  return bytes;
}

Status DecodeChunkTable(std::span<const uint8_t> bytes, const ShardDirectory& directory,
                        uint64_t max_chunk_nbytes, ChunkTable* out) {
  Counts counts;
  TSR_RETURN_IF_ERROR(ReadHeader(bytes, &counts));
  ChunkTable table;
  table.chunks.reserve(counts.num_chunks);
  Reader reader(bytes.data() + kHeaderNbytes);
  uint64_t num_regions = 0;
  for (size_t c = 0; c < counts.num_chunks; ++c) {
    const auto own_regions = reader.Read<uint32_t>();
    const auto nbytes = reader.Read<uint32_t>();
    if (own_regions == 0 || own_regions > kMaxRegionsPerChunk) {
      return Invalid("chunk", c, "has " + std::to_string(own_regions) + " regions");
    }
    if (nbytes > max_chunk_nbytes) {
      return Invalid("chunk", c, "has " + std::to_string(nbytes) + " bytes");
    }
    table.chunks.push_back({num_regions, own_regions, nbytes});
    num_regions += own_regions;
  }
  if (num_regions != counts.num_regions) {
    return Invalid("chunk table: chunks and header differ in their number of regions");
  }
  table.regions.reserve(counts.num_regions);
  table.boxes.reserve(2 * counts.num_ranges);
  RegionDecoder decoder(reader, counts.num_ranges, directory, &table);
  for (size_t c = 0; c < counts.num_chunks; ++c) {
    uint64_t left = table.chunks[c].nbytes;
    for (uint32_t r = 0; r < table.chunks[c].num_regions; ++r) {
      uint64_t nbytes = 0;
      TSR_RETURN_IF_ERROR(decoder.Decode(&nbytes));
      if (nbytes > left) return Invalid("chunk", c, "has fewer bytes than its regions");
      left -= nbytes;
    }
    if (left != 0) return Invalid("chunk", c, "has more bytes than its regions");
  }
  if (decoder.ranges_left() != 0) return Invalid("chunk table: bytes are left over");
  ListLeaves(directory, &table);
  *out = std::move(table);
  return Status();
}

}  // namespace tsr

// The versions that a source process holds readable, as addresses of its shards.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "chunk_table.h"
#include "shard_layout.h"
#include "status.h"

namespace tsr {

// One version's memory, not owned. What Find() has checked of it may be read without a lock for as
// long as the reader can be stopped by whoever withdraws it.
class PublishedVersion {
 public:
  PublishedVersion(const ShardDirectory* directory, uint64_t version,
                   std::span<const uint64_t> addresses, std::span<const int64_t> strides,
                   bool coming, const ShardLayouts& layouts);

  uint64_t version() const { return version_; }
  const uint8_t* base(size_t shard) const {
    return reinterpret_cast<const uint8_t*>(addresses_[shard]);
  }
  // Bytes between neighbours along each dimension; shape=[rank].
  std::span<const int64_t> strides(size_t shard) const {
    return std::span(strides_).subspan(directory_->first_stride(shard),
                                       directory_->shard(shard).rank);
  }
  // Null where the shard is not in tiles; else its strides mean nothing.
  const ShardLayout* layout(size_t shard) const {
    return layouts_[directory_->shard(shard).leaf].get();
  }

 private:
  friend class PublishedVersions;

  enum class Leaf : uint8_t { kHeld, kComing, kDropped };

  // Takes the memory of a leaf that it does not hold, from that of all.
  void Add(uint32_t leaf, std::span<const uint64_t> addresses, std::span<const int64_t> strides,
           const ShardLayouts& layouts);

  const ShardDirectory* const directory_;
  const uint64_t version_;
  std::vector<uint64_t> addresses_;  // shape=[num_shards]
  std::vector<int64_t> strides_;
  std::vector<std::shared_ptr<const ShardLayout>> layouts_;  // shape=[num_leaves]
  std::vector<Leaf> leaves_;                                 // shape=[num_leaves]
};

// Thread-safe. `directory` outlives it. Taking memory away here stops no reader that has begun:
// that is the exporter's to do.
class PublishedVersions {
 public:
  explicit PublishedVersions(const ShardDirectory* directory) : directory_(directory) {}

  // `addresses`: one per shard of the directory; `strides`: those of all shards, in this order;
  // `layouts`: of the leaves whose shards lie in tiles. A version that is published already gets
  // the leaves back that it had dropped, and no others. With `coming` all leaves of a new version
  // are still to be added: what is given for them is void.
  Status Publish(uint64_t version, std::span<const uint64_t> addresses,
                 std::span<const int64_t> strides, bool coming = false,
                 const ShardLayouts& layouts = {});
  // Adds leaves that are there now, with memory named as above, which counts for these.
  Status AddLeaves(uint64_t version, std::span<const uint32_t> leaves,
                   std::span<const uint64_t> addresses, std::span<const int64_t> strides,
                   const ShardLayouts& layouts = {});
  Status DropLeaves(uint64_t version, std::span<const uint32_t> leaves);
  // Nothing where it is not published.
  void Withdraw(uint64_t version);

  bool Holds(uint64_t version) const;
  // Ascending; none where it is not published.
  std::vector<uint32_t> HeldLeaves(uint64_t version) const;
  // The version, if it holds all of `leaves`; null where they are still coming; else kGone names
  // what is missing.
  Status Find(uint64_t version, std::span<const uint32_t> leaves,
              std::shared_ptr<const PublishedVersion>* out) const;

 private:
  Status CheckNumbers(size_t num_addresses, size_t num_strides) const;
  Status CheckLeaves(std::span<const uint32_t> leaves) const;
  Status CheckLayouts(const ShardLayouts& layouts) const;

  const ShardDirectory* const directory_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<PublishedVersion>> versions_;  // guarded by mutex_
};

}  // namespace tsr

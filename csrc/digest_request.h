// What a sink asks a source for the digest of, as bytes; and the answer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "box.h"
#include "cast.h"
#include "chunk_table.h"
#include "published.h"
#include "status.h"

namespace tsr {

// A box of one shard, in coordinates of the leaf: what the source has of it, and what it is in the
// leaf, whatever was planned.
struct DigestRequest {
  uint32_t leaf;
  uint32_t box;  // in the leaf's layout at the source: names the shard
  Op op;
  std::vector<int64_t> shape;   // of the leaf
  std::vector<int64_t> ranges;  // shape=[rank, 2]

  friend bool operator==(const DigestRequest&, const DigestRequest&) = default;
};

// The request's bytes, as WIRE_FORMAT.md has them.
std::string EncodeDigestRequest(const DigestRequest& request);

// Reads a request from a peer, and finds its shard in the directory. Every number is checked
// before it is used: kInvalid says what was wrong. A request is for at most `max_nbytes` bytes.
Status DecodeDigestRequest(std::span<const uint8_t> bytes, const ShardDirectory& directory,
                           uint64_t max_nbytes, DigestRequest* out, size_t* shard_index);

// The digest of what a decoded request is for, in the memory that a version has for its shard.
uint64_t DigestOf(const DigestRequest& request, const ShardDirectory& directory,
                  const PublishedVersion& published, size_t shard_index);

// The digest of each of `requests`, to this process itself and of any number of bytes, in memory
// named as PublishedVersions::Publish() has it; they are shared out among threads. kInvalid where
// a shard is not in the directory, or the numbers don't fit it.
Status DigestsOfShards(std::span<const DigestRequest> requests, const ShardDirectory& directory,
                       std::span<const uint64_t> addresses, std::span<const int64_t> strides,
                       const ShardLayouts& layouts, int num_threads, std::vector<uint64_t>* out);

}  // namespace tsr

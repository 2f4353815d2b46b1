#include "digest_request.h"

#include <algorithm>

#include "digest.h"
#include "little_endian.h"
#include "share_out.h"

namespace tsr {
namespace {

// Offsets and widths are those of WIRE_FORMAT.md.
constexpr size_t kHeadNbytes = 12;
constexpr size_t kDimNbytes = 24;

Status Invalid(const std::string& message) {
  return Status(Code::kInvalid, "digest request: " + message);
}

Status NotHeld(const DigestRequest& request) {
  return Invalid("this process does not hold box " + std::to_string(request.box) + " of leaf " +
                 std::to_string(request.leaf));
}

}  // namespace

std::string EncodeDigestRequest(const DigestRequest& request) {
  std::string bytes;
  Append(request.leaf, &bytes);
  Append(request.box, &bytes);
  Append(request.op.code(), &bytes);
  Append(static_cast<uint8_t>(request.shape.size()), &bytes);
  Append(uint16_t{0}, &bytes);
  for (size_t dim = 0; dim < request.shape.size(); ++dim) {
    Append(request.shape[dim], &bytes);
    Append(request.ranges[2 * dim], &bytes);
    Append(request.ranges[2 * dim + 1], &bytes);
  }
  return bytes;
}

Status DecodeDigestRequest(std::span<const uint8_t> bytes, const ShardDirectory& directory,
                           uint64_t max_nbytes, DigestRequest* out, size_t* shard_index) {
  if (bytes.size() < kHeadNbytes) return Invalid("it is shorter than its head");
  Reader reader(bytes.data());
  DigestRequest request;
  request.leaf = reader.Read<uint32_t>();
  request.box = reader.Read<uint32_t>();
  request.op = Op(reader.Read<uint8_t>());
  const auto rank = reader.Read<uint8_t>();
  const auto reserved = reader.Read<uint16_t>();
  const int64_t found = directory.Find(request.leaf, request.box);
  if (found < 0) return NotHeld(request);
  const ShardDirectory::Shard& shard = directory.shard(static_cast<size_t>(found));
  if (rank != shard.rank) return Invalid("its rank is not that of the shard");
  if (reserved != 0) return Invalid("a reserved field is not 0");
  if (bytes.size() != kHeadNbytes + rank * kDimNbytes) return Invalid("its length is wrong");
  if (!request.op.valid() || (!request.op.is_copy() && request.op.from() != shard.kind)) {
    return Invalid("its shard does not take its op");
  }
  const BoxView held = directory.range(shard);
  for (int dim = 0; dim < rank; ++dim) {
    const auto extent = reader.Read<int64_t>();
    const auto start = reader.Read<int64_t>();
    const auto stop = reader.Read<int64_t>();
    if (start < StartOf(held, dim) || start >= stop || stop > StopOf(held, dim)) {
      return Invalid("its box is not within the shard");
    }
    if (extent < StopOf(held, dim)) return Invalid("its shape is too small for the shard");
    request.shape.push_back(extent);
    request.ranges.insert(request.ranges.end(), {start, stop});
  }
  // A box within the shard has a volume that fits, also in bytes.
  const int64_t itemsize =
      std::max<int64_t>(shard.itemsize, SinkItemsize(request.op, shard.itemsize));
  if (static_cast<uint64_t>(VolumeOf(request.ranges) * itemsize) > max_nbytes) {
    return Invalid("its box is too large");
  }
  *out = std::move(request);
  *shard_index = static_cast<size_t>(found);
  return Status();
}

uint64_t DigestOf(const DigestRequest& request, const ShardDirectory& directory,
                  const PublishedVersion& published, size_t shard_index) {
  const ShardDirectory::Shard& shard = directory.shard(shard_index);
  const BoxView held = directory.range(shard);
  if (const ShardLayout* layout = published.layout(shard_index)) {
    return DigestOfTiledBox(request.op, shard.itemsize, request.shape, request.ranges,
                            {held, published.base(shard_index), layout});
  }
  const std::span<const int64_t> strides = published.strides(shard_index);
  const int64_t offset = OffsetOf(request.ranges, held, strides);
  return DigestOfBox(request.op, shard.itemsize, request.shape,
                     {request.ranges, published.base(shard_index) + offset, strides});
}

Status DigestsOfShards(std::span<const DigestRequest> requests, const ShardDirectory& directory,
                       std::span<const uint64_t> addresses, std::span<const int64_t> strides,
                       const ShardLayouts& layouts, int num_threads, std::vector<uint64_t>* out) {
  PublishedVersions versions(&directory);
  std::shared_ptr<const PublishedVersion> memory;
  TSR_RETURN_IF_ERROR(versions.Publish(0, addresses, strides, /*coming=*/false, layouts));
  TSR_RETURN_IF_ERROR(versions.Find(0, {}, &memory));
  std::vector<size_t> shards;
  for (const DigestRequest& request : requests) {
    const int64_t found = directory.Find(request.leaf, request.box);
    if (found < 0) return NotHeld(request);
    shards.push_back(static_cast<size_t>(found));
  }
  out->assign(requests.size(), 0);
  ShareOut(requests.size(), num_threads,
           [&](size_t i) { (*out)[i] = DigestOf(requests[i], directory, *memory, shards[i]); });
  return Status();
}

}  // namespace tsr

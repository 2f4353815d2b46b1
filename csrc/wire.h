// The frames of a data connection. WIRE_FORMAT.md describes them byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "status.h"

namespace tsr {

inline constexpr size_t kFrameNbytes = 32;
inline constexpr size_t kTrailerNbytes = 4;            // CRC32C after the bytes of a chunk
inline constexpr uint64_t kMaxTextNbytes = 512;        // of an error's text
inline constexpr uint64_t kMaxTableNbytes = 1u << 30;  // of a chunk table
inline constexpr uint64_t kMaxDigestRequestNbytes = 1024;
inline constexpr uint64_t kMaxEchoNbytes = 1 << 16;

// Values are on the wire: never renumber.
enum class FrameKind : uint8_t {
  // Sink to source.
  kTable = 1,  // the bytes of a chunk table follow
  kFetch = 2,
  kDone = 3,  // the sink has verified the chunk; no answer
  kPing = 4,
  kFetchUnsummed = 5,  // as kFetch, but no checksum is computed: the trailer is 0
  kDigest = 6,         // the bytes of a DigestRequest follow
  kEcho = 7,           // any bytes follow
  // Source to sink, in the order of the requests.
  kTableOk = 17,
  kChunk = 18,  // the bytes of the chunk and a trailer follow
  kPong = 19,
  kGone = 20,     // the version, or a leaf of the chunk, is not held here any more; text follows
  kInvalid = 21,  // a request that makes no sense; text follows
  kNoTable = 22,  // this source doesn't have the table; text follows
  kDigestIs = 23,
  kLater = 24,   // the leaf is not here yet: the answer follows when it is
  kEchoIs = 25,  // the same bytes follow
};

inline bool IsRequest(FrameKind kind) { return kind <= FrameKind::kEcho; }
inline bool HasText(FrameKind kind) {
  return kind >= FrameKind::kGone && kind <= FrameKind::kNoTable;
}

struct Frame {
  FrameKind kind;
  uint32_t table = 0;  // CRC32C of the table's bytes; of those of a DigestRequest
  uint64_t version = 0;
  uint64_t chunk = 0;   // index in the table; the digest
  uint64_t nbytes = 0;  // of what follows the frame, the trailer not counted; below 2^32
};

using FrameBytes = std::span<uint8_t, kFrameNbytes>;

void EncodeFrame(const Frame& frame, FrameBytes out);

// kInvalid for bytes that no frame has, and for those of one that were changed on their way; also
// for an `nbytes` that its kind can't have. That of a kChunk is for the caller to check.
Status DecodeFrame(std::span<const uint8_t, kFrameNbytes> bytes, Frame* out);

}  // namespace tsr

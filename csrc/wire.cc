#include "wire.h"

#include <bit>
#include <cstddef>
#include <cstring>
#include <string>

#include "crc32c.h"

namespace tsr {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little endian");

// What lies on the wire. Every field is at its natural alignment: no padding.
struct Layout {
  uint8_t magic[3];
  FrameKind kind;
  uint32_t table;
  uint64_t version;
  uint64_t chunk;
  uint32_t nbytes;
  uint32_t crc;  // of all before it
};
static_assert(sizeof(Layout) == kFrameNbytes);

uint32_t CrcOf(const Layout& layout) { return Crc32c(0, &layout, offsetof(Layout, crc)); }

constexpr uint8_t kMagic[3] = {'T', 'S', 'R'};

bool IsKnown(FrameKind kind) {
  return (kind >= FrameKind::kTable && kind <= FrameKind::kEcho) ||
         (kind >= FrameKind::kTableOk && kind <= FrameKind::kEchoIs);
}

bool NbytesFits(const Layout& layout) {
  if (layout.kind == FrameKind::kChunk) return true;
  if (layout.kind == FrameKind::kTable) return layout.nbytes <= kMaxTableNbytes;
  if (layout.kind == FrameKind::kDigest) return layout.nbytes <= kMaxDigestRequestNbytes;
  if (layout.kind == FrameKind::kEcho || layout.kind == FrameKind::kEchoIs) {
    return layout.nbytes <= kMaxEchoNbytes;
  }
  return layout.nbytes <= (HasText(layout.kind) ? kMaxTextNbytes : 0);
}

}  // namespace

void EncodeFrame(const Frame& frame, FrameBytes out) {
  Layout layout{.magic = {kMagic[0], kMagic[1], kMagic[2]},
                .kind = frame.kind,
                .table = frame.table,
                .version = frame.version,
                .chunk = frame.chunk,
                .nbytes = static_cast<uint32_t>(frame.nbytes),
                .crc = 0};
  layout.crc = CrcOf(layout);
  std::memcpy(out.data(), &layout, sizeof layout);
}

Status DecodeFrame(std::span<const uint8_t, kFrameNbytes> bytes, Frame* out) {
  Layout layout;
  std::memcpy(&layout, bytes.data(), sizeof layout);
  if (layout.crc != CrcOf(layout)) return Status(Code::kInvalid, "bytes that are no frame");
  const auto kind = [&] { return std::to_string(static_cast<int>(layout.kind)); };
  if (std::memcmp(layout.magic, kMagic, sizeof kMagic) != 0 || !IsKnown(layout.kind)) {
    return Status(Code::kInvalid, "bytes that are no frame, of kind " + kind());
  }
  if (!NbytesFits(layout)) {
    return Status(Code::kInvalid, "frame of kind " + kind() + " that announces " +
                                      std::to_string(layout.nbytes) + " bytes");
  }
  *out = Frame{layout.kind, layout.table, layout.version, layout.chunk, layout.nbytes};
  return Status();
}

}  // namespace tsr

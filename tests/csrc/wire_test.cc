#include "wire.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "crc32c.h"

namespace tsr {
namespace {

using Bytes = std::array<uint8_t, kFrameNbytes>;

Bytes Encoded(const Frame& frame) {
  Bytes bytes;
  EncodeFrame(frame, bytes);
  return bytes;
}

TEST(WireTest, FrameHasTheBytesOfTheFormatsExample) {
  const Bytes expected = {'T', 'S', 'R', 2, 0xDD, 0xCC, 0xBB, 0xAA, 42,   0,   0,
                          0,   0,   0,   0, 0,    3,    0,    0,    0,    0,   0,
                          0,   0,   0,   0, 0,    0,    0x65, 0xC9, 0xE3, 0x92};
  EXPECT_EQ(Encoded({FrameKind::kFetch, 0xAABBCCDD, 42, 3}), expected);
}

TEST(WireTest, EveryKindComesBack) {
  for (const FrameKind kind :
       {FrameKind::kTable, FrameKind::kFetch, FrameKind::kDone, FrameKind::kPing,
        FrameKind::kTableOk, FrameKind::kChunk, FrameKind::kPong, FrameKind::kGone,
        FrameKind::kInvalid, FrameKind::kNoTable, FrameKind::kFetchUnsummed, FrameKind::kDigest,
        FrameKind::kDigestIs, FrameKind::kLater, FrameKind::kEcho, FrameKind::kEchoIs}) {
    Frame frame{FrameKind::kPing};
    ASSERT_TRUE(DecodeFrame(Encoded({kind, 1, ~uint64_t{0}, 1ull << 63}), &frame).ok());
    EXPECT_EQ(frame.kind, kind);
    EXPECT_EQ(frame.table, 1u);
    EXPECT_EQ(frame.version, ~uint64_t{0});
    EXPECT_EQ(frame.chunk, 1ull << 63);
    EXPECT_EQ(frame.nbytes, 0u);
  }
}

TEST(WireTest, WhatIsNoFrameIsRefused) {
  Frame frame{};
  for (const int kind : {0, 8, 16, 26, 255}) {
    const Status status = DecodeFrame(Encoded({static_cast<FrameKind>(kind)}), &frame);
    EXPECT_EQ(status.message(), "bytes that are no frame, of kind " + std::to_string(kind));
  }
  Bytes bytes = Encoded({FrameKind::kPing});
  bytes[2] = 'Q';
  const uint32_t crc = Crc32c(0, bytes.data(), kFrameNbytes - sizeof(crc));
  std::memcpy(&bytes[kFrameNbytes - sizeof(crc)], &crc, sizeof(crc));
  EXPECT_EQ(DecodeFrame(bytes, &frame).message(), "bytes that are no frame, of kind 4");
}

TEST(WireTest, FrameOfWhichABitFlippedIsRefused) {
  Frame frame{};
  for (size_t bit = 0; bit < 8 * kFrameNbytes; ++bit) {
    Bytes bytes = Encoded({FrameKind::kChunk, 0xAABBCCDD, 42, 3, 1 << 20});
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    EXPECT_EQ(DecodeFrame(bytes, &frame).message(), "bytes that are no frame");
  }
}

TEST(WireTest, MoreBytesThanAKindCanHaveAreRefused) {
  const auto fits = [](FrameKind kind, uint64_t nbytes) {
    Frame frame{};
    return DecodeFrame(Encoded({.kind = kind, .nbytes = nbytes}), &frame).ok();
  };
  EXPECT_TRUE(fits(FrameKind::kTable, kMaxTableNbytes));
  EXPECT_FALSE(fits(FrameKind::kTable, kMaxTableNbytes + 1));
  EXPECT_FALSE(fits(FrameKind::kTable, ~uint32_t{0}));
  EXPECT_TRUE(fits(FrameKind::kGone, kMaxTextNbytes));
  EXPECT_FALSE(fits(FrameKind::kGone, kMaxTextNbytes + 1));
  EXPECT_TRUE(fits(FrameKind::kDigest, kMaxDigestRequestNbytes));
  EXPECT_FALSE(fits(FrameKind::kDigest, kMaxDigestRequestNbytes + 1));
  EXPECT_FALSE(fits(FrameKind::kDigestIs, 1));
  EXPECT_TRUE(fits(FrameKind::kEcho, kMaxEchoNbytes));
  EXPECT_FALSE(fits(FrameKind::kEcho, kMaxEchoNbytes + 1));
  EXPECT_FALSE(fits(FrameKind::kFetch, 1));
  EXPECT_FALSE(fits(FrameKind::kPong, 1));
}

}  // namespace
}  // namespace tsr

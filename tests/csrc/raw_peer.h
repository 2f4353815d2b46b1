// One end of a data connection that a test drives by hand, so that it can break the rules.
#pragma once

#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "crc32c.h"
#include "fd_io.h"
#include "wire.h"

namespace tsr {

class RawPeer {
 public:
  explicit RawPeer(UniqueFd fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }

  // Whether anything, the end of the stream too, comes within the test's time.
  bool Readable() const {
    pollfd polled{fd_.get(), POLLIN, 0};
    return ::poll(&polled, 1, 20'000) == 1;
  }
  // Empty at the end of the stream.
  std::vector<uint8_t> Read(size_t nbytes) const {
    std::vector<uint8_t> bytes(nbytes);
    size_t got = 0;
    while (got < nbytes) {
      if (!Readable()) {
        ADD_FAILURE() << "the peer is silent";
        return {};
      }
      const ssize_t n = ::recv(fd_.get(), bytes.data() + got, nbytes - got, 0);
      if (n <= 0) return {};
      got += static_cast<size_t>(n);
    }
    return bytes;
  }
  Frame ReadFrame() const {
    const std::vector<uint8_t> bytes = Read(kFrameNbytes);
    Frame frame{};
    if (bytes.empty()) {
      ADD_FAILURE() << "the stream ended before a frame";
    } else {
      EXPECT_TRUE(
          DecodeFrame(std::span<const uint8_t, kFrameNbytes>(bytes.data(), kFrameNbytes), &frame)
              .ok());
    }
    return frame;
  }
  std::string ReadText(const Frame& frame) const {
    const std::vector<uint8_t> bytes = Read(frame.nbytes);
    return std::string(bytes.begin(), bytes.end());
  }
  bool Ended() const { return Readable() && Read(1).empty(); }

  void Write(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      ASSERT_GT(n, 0) << "the peer has closed";
      bytes.remove_prefix(static_cast<size_t>(n));
    }
  }
  void Write(const Frame& frame) const {
    uint8_t bytes[kFrameNbytes];
    EncodeFrame(frame, FrameBytes(bytes, kFrameNbytes));
    Write(std::string_view(reinterpret_cast<char*>(bytes), kFrameNbytes));
  }
  // The answer to `fetch`, with `trailer` for the checksum.
  void WriteChunk(Frame fetch, std::string_view payload, uint32_t trailer) const {
    fetch.kind = FrameKind::kChunk;
    fetch.nbytes = payload.size();
    Write(fetch);
    Write(payload);
    Write(std::string_view(reinterpret_cast<const char*>(&trailer), kTrailerNbytes));
  }
  void WriteChunk(const Frame& fetch, std::string_view payload) const {
    WriteChunk(fetch, payload, Crc32c(0, payload.data(), payload.size()));
  }
  // Receives the table that a sink uploads first, and takes it.
  void TakeTable() const {
    Frame frame = ReadFrame();
    EXPECT_EQ(frame.kind, FrameKind::kTable);
    const std::vector<uint8_t> table = Read(frame.nbytes);
    EXPECT_EQ(frame.table, Crc32c(0, table.data(), table.size()));
    frame.kind = FrameKind::kTableOk;
    frame.nbytes = 0;
    Write(frame);
  }
  // Whether the peer has received everything that was written.
  bool AllTaken() const {
    int num_left = 0;
    EXPECT_EQ(::ioctl(fd_.get(), SIOCOUTQ, &num_left), 0);
    return num_left == 0;
  }
  void Close() { fd_.Close(); }

 private:
  UniqueFd fd_;
};

}  // namespace tsr

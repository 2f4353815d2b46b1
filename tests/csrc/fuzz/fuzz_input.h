// What fuzz targets share: bytes of an input taken piece by piece, and checks that end the process.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "wire.h"

namespace tsr {

// A promise that must hold for every input; the fuzzer keeps one that breaks it.
inline void Check(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise);
  std::abort();
}

// Hands out an input from its front; zeros once it is used up.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t nbytes) : rest_(data, nbytes) {}

  bool empty() const { return rest_.empty(); }
  uint8_t Byte() {
    const std::string byte = Bytes(1);
    return byte.empty() ? 0 : static_cast<uint8_t>(byte[0]);
  }
  uint64_t Number(size_t nbytes) {
    uint64_t number = 0;
    for (size_t i = 0; i < nbytes; ++i) number = number << 8 | Byte();
    return number;
  }
  std::string Bytes(size_t nbytes) {
    nbytes = std::min(nbytes, rest_.size());
    const std::string bytes(rest_.begin(), rest_.begin() + static_cast<ptrdiff_t>(nbytes));
    rest_ = rest_.subspan(nbytes);
    return bytes;
  }
  Frame AnyFrame() {
    const auto kind = static_cast<FrameKind>(Byte());
    return Frame{kind, static_cast<uint32_t>(Number(4)), Number(8), Number(8), Number(8)};
  }

 private:
  std::span<const uint8_t> rest_;
};

inline std::string Encoded(const Frame& frame) {
  uint8_t bytes[kFrameNbytes];
  EncodeFrame(frame, bytes);
  return std::string(bytes, bytes + kFrameNbytes);
}

// Writes what there is room for; the rest is lost, as for a peer that breaks off.
inline void SendAll(int fd, const std::string& bytes) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n =
        ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n <= 0) return;
    sent += static_cast<size_t>(n);
  }
}

// Appends what has come.
inline void ReceiveAll(int fd, std::string* into) {
  char buffer[1 << 14];
  for (;;) {
    const ssize_t n = ::recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (n <= 0) return;
    into->append(buffer, static_cast<size_t>(n));
  }
}

// Takes a frame from the front; false where there is none yet. Our own side sends no other bytes.
inline bool TakeFrame(std::string* from, Frame* frame) {
  if (from->size() < kFrameNbytes) return false;
  const auto* bytes = reinterpret_cast<const uint8_t*>(from->data());
  const Status status =
      DecodeFrame(std::span<const uint8_t, kFrameNbytes>(bytes, kFrameNbytes), frame);
  Check(status.ok(), "an end sends frames");
  return true;
}

}  // namespace tsr

// How the bytes of one connection move: by its socket, or by memory that both ends share.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <memory>

#include "crc32c.h"
#include "deadline.h"
#include "fd_io.h"
#include "rail_stats.h"

namespace tsr {

// Bytes at the front of what is moved that a checksum covers: it is extended by those that move.
struct Summed {
  size_t nbytes = 0;
  uint32_t* crc = nullptr;
  Stores stores = Stores::kCached;  // for those that are copied
};

// Both ways of one connection, as a non-blocking socket has them. Used on one thread. Doesn't own
// the connection's descriptor, which epoll watches and which outlives it.
class Pipe {
 public:
  virtual ~Pipe() = default;

  // Whether Send() sums what it moves, as its copy reads the bytes anyway; `summed` is void where
  // it doesn't.
  virtual bool sums_sent() const = 0;
  // Moves as many bytes as there is room for; `iov` holds at least one. Where the entry behind the
  // summed bytes is the checksum itself, it moves as they make it.
  virtual IoResult Send(iovec* iov, size_t num_iov, Summed summed) = 0;
  // Runs of at least this many bytes are best received where they stay, shorter ones into cache and
  // scattered from there.
  virtual int64_t min_placed_nbytes() const = 0;
  // Moves as many bytes as have come. The checksum is of those that lie where `iov` says now,
  // whatever the other end does.
  virtual IoResult Receive(iovec* iov, size_t num_iov, Summed summed) = 0;
  // How long a byte takes to the other end and back, where nothing else is under way; 0 where it
  // takes no time worth counting, or that is not known.
  virtual Clock::duration Rtt() const { return Clock::duration(0); }
  // Ends a turn of moving bytes: what was sent in it is on its way. Returns the events of epoll
  // that tell when there is something to receive, or room to send.
  virtual uint32_t EndTurn(bool receives, bool sends) = 0;
};

// Bytes go through the socket itself.
class SocketPipe final : public Pipe {
 public:
  SocketPipe(int fd, RailStats* stats) : fd_(fd), stats_(stats) {}

  bool sums_sent() const override { return false; }
  // Scattering writes whole lines past the cache, which costs less than an iovec for each run and
  // the lines that the kernel's copy reads before it writes them. Resharding over the unsharded
  // rate, from 2 KiB and from 64 KiB: 0.84 to 0.89 and 0.90 to 0.95 (loopback TCP, 2-core Zen 5 VM,
  // 2026-11-29).
  int64_t min_placed_nbytes() const override { return 64 << 10; }
  IoResult Send(iovec* iov, size_t num_iov, Summed summed) override;
  IoResult Receive(iovec* iov, size_t num_iov, Summed summed) override;
  Clock::duration Rtt() const override;
  uint32_t EndTurn(bool receives, bool sends) override {
    return (receives ? EPOLLIN : 0u) | (sends ? EPOLLOUT : 0u);
  }

 private:
  const int fd_;
  RailStats* const stats_;
};

// An authenticated connection. `ring` is empty, or the memory that it shares; see shared_pipe.h.
struct Connection {
  UniqueFd socket;
  UniqueFd ring{};
};

enum class End : uint8_t { kSource, kSink };

// The pipe of one end of a connection, which outlives it as the stats do. kPeerLost for a ring that
// is not what it has to be.
Status MakePipe(const Connection& connection, End end, RailStats* stats,
                std::unique_ptr<Pipe>* out);

}  // namespace tsr

// A connection between processes of one host, whose bytes go through memory that both have mapped.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "fd_io.h"
#include "iovec_block.h"
#include "pipe.h"
#include "status.h"

namespace tsr {

// The memory of one connection: a ring for the sink's bytes, then one for the source's.
inline constexpr size_t kSinkRingNbytes = 64 << 10;
inline constexpr size_t kMaxRingNbytes = 64 << 20;  // of the source

// Owns the mapping. The other process may write to every byte at any time, but can neither take
// memory away nor stop us: what it could misuse is refused.
class SharedRing {
 public:
  // Maps a memfd that is sealed against shrinking and growing. kPeerLost where it isn't one.
  static Status Map(int memfd, SharedRing* out);
  SharedRing() = default;
  SharedRing(SharedRing&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}
  SharedRing& operator=(SharedRing&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
    return *this;
  }
  ~SharedRing();

  uint8_t* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t nbytes_ = 0;
};

// The socket carries only notes: how many bytes its sender has written to its own ring, and read
// from the other's, since the start. Positions come from this end's own counts and from notes that
// were held against them; nothing in shared memory is more than a byte of the stream.
class SharedPipe final : public Pipe {
 public:
  SharedPipe(int socket, SharedRing ring, End end, RailStats* stats);

  bool sums_sent() const override { return true; }
  // This end copies by itself, past the cache: scattering would be a second copy. Resharding from
  // 2 KiB and from 64 KiB: 13 to 17 and 10 to 17 GB/s
  // (2-core Zen 5 VM, 2026-11-29).
  int64_t min_placed_nbytes() const override { return kMinRunNbytes; }
  IoResult Send(iovec* iov, size_t num_iov, Summed summed) override;
  IoResult Receive(iovec* iov, size_t num_iov, Summed summed) override;
  uint32_t EndTurn(bool receives, bool sends) override;

 private:
  // Bytes of one direction, counted since the start: at most as many as fit are under way.
  struct Direction {
    uint8_t* data;
    size_t nbytes;
    uint64_t written = 0;
    uint64_t read = 0;

    size_t unread_nbytes() const { return static_cast<size_t>(written - read); }
    size_t room_nbytes() const { return nbytes - unread_nbytes(); }
    // Where the byte `at` lies, and how many lie behind it in one piece.
    uint8_t* place(uint64_t at) const { return data + at % nbytes; }
    size_t piece_nbytes(uint64_t at) const { return nbytes - at % nbytes; }
  };
  struct Note {
    uint64_t written;
    uint64_t read;
  };

  // Whether half of a ring has been written or read and the other end doesn't know. It is woken no
  // more often within a turn, so that each end goes on for a while once it runs; and less room than
  // that is never what it waits for.
  bool has_news() const {
    return out_.written - told_.written >= out_.nbytes / 2 ||
           in_.read - told_.read >= in_.nbytes / 2;
  }
  // Takes in the notes that have come.
  void Listen();
  // Sends a note. Where the socket is full the next turn does.
  void Tell();
  IoResult nothing_moved() const;

  const int socket_;
  const SharedRing ring_;
  RailStats* const stats_;
  Direction out_;
  Direction in_;
  Note told_{0, 0};  // what the other end has been told
  std::array<uint8_t, 64 * sizeof(Note)> notes_;
  size_t notes_nbytes_ = 0;  // received; less than a note between calls
  bool closed_ = false;      // by the other end
  int error_ = 0;
};

}  // namespace tsr

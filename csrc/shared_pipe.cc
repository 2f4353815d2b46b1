#include "shared_pipe.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "crc32c.h"

namespace tsr {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kPageNbytes = 4096;

Status Refused(const std::string& reason) {
  return Status(Code::kPeerLost, "the ring of the peer is refused: " + reason);
}

// Copies bytes of which the first, or all, are summed.
void Move(uint8_t* to, const uint8_t* from, size_t nbytes, Summed* summed) {
  const size_t own = std::min(nbytes, summed->nbytes);
  if (own > 0) {
    *summed->crc = CopyCrc32c(*summed->crc, to, from, own, summed->stores);
    summed->nbytes -= own;
  }
  std::memcpy(to + own, from + own, nbytes - own);
}

}  // namespace

// Files of tmpfs mounts start with F_SEAL_SEAL, so what has the other seals is a memfd, and its
// pages are bounded by nothing but memory. Huge pages are: a hole in them might not be filled
// again.
Status SharedRing::Map(int memfd, SharedRing* out) {
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (seals < 0) return Refused("it is no memfd");
  if ((seals & kSeals) != kSeals) return Refused("it is not sealed");
  struct statfs filesystem;
  if (::fstatfs(memfd, &filesystem) < 0 || filesystem.f_type != TMPFS_MAGIC) {
    return Refused("it is not of ordinary pages");
  }
  struct stat file;
  if (::fstat(memfd, &file) < 0) return Refused(::strerrordesc_np(errno));
  const auto nbytes = static_cast<uint64_t>(file.st_size);
  if (nbytes < kSinkRingNbytes + kPageNbytes || nbytes > kSinkRingNbytes + kMaxRingNbytes ||
      nbytes % kPageNbytes != 0) {
    return Refused("it has " + std::to_string(file.st_size) + " bytes");
  }
  void* data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memfd, 0);
  if (data == MAP_FAILED) return Refused(::strerrordesc_np(errno));
  SharedRing ring;
  ring.data_ = static_cast<uint8_t*>(data);
  ring.nbytes_ = nbytes;
  *out = std::move(ring);
  return Status();
}

SharedRing::~SharedRing() {
  if (data_ != nullptr) ::munmap(data_, nbytes_);
}

SharedPipe::SharedPipe(int socket, SharedRing ring, End end, RailStats* stats)
    : socket_(socket), ring_(std::move(ring)), stats_(stats) {
  out_ = {ring_.data(), kSinkRingNbytes};
  in_ = {ring_.data() + kSinkRingNbytes, ring_.nbytes() - kSinkRingNbytes};
  if (end == End::kSource) std::swap(out_, in_);
}

IoResult SharedPipe::Send(iovec* iov, size_t num_iov, Summed summed) {
  Stopwatch stopwatch;
  if (out_.room_nbytes() == 0) Listen();
  size_t moved = 0;
  for (; num_iov > 0 && out_.room_nbytes() > 0; ++iov, --num_iov) {
    const auto* from = static_cast<const uint8_t*>(iov->iov_base);
    for (size_t left = iov->iov_len; left > 0 && out_.room_nbytes() > 0;) {
      const size_t part = std::min({left, out_.room_nbytes(), out_.piece_nbytes(out_.written)});
      Move(out_.place(out_.written), from, part, &summed);
      out_.written += part;
      from += part;
      left -= part;
      moved += part;
    }
  }
  if (has_news()) Tell();
  stopwatch.Lap(&stats_->wire_ns);
  return moved > 0 && error_ == 0 ? IoResult::Bytes(moved) : nothing_moved();
}

// The copy reads each shared byte once, and sums what it has stored; frames are looked at after
// they were copied. So the other end can't change a byte between its check and its use.
IoResult SharedPipe::Receive(iovec* iov, size_t num_iov, Summed summed) {
  Stopwatch stopwatch;
  if (in_.unread_nbytes() == 0) Listen();
  size_t moved = 0;
  for (; num_iov > 0 && in_.unread_nbytes() > 0; ++iov, --num_iov) {
    auto* to = static_cast<uint8_t*>(iov->iov_base);
    for (size_t left = iov->iov_len; left > 0 && in_.unread_nbytes() > 0;) {
      const size_t part = std::min({left, in_.unread_nbytes(), in_.piece_nbytes(in_.read)});
      Move(to, in_.place(in_.read), part, &summed);
      in_.read += part;
      to += part;
      left -= part;
      moved += part;
    }
  }
  if (has_news()) Tell();
  stopwatch.Lap(&stats_->wire_ns);
  return moved > 0 ? IoResult::Bytes(moved) : nothing_moved();
}

uint32_t SharedPipe::EndTurn(bool receives, bool sends) {
  const auto owes_note = [&] { return out_.written != told_.written || has_news(); };
  if (owes_note()) Tell();
  const bool goes_on = (receives && in_.unread_nbytes() > 0) || (sends && out_.room_nbytes() > 0);
  return EPOLLIN | (goes_on || owes_note() ? EPOLLOUT : 0u);
}

void SharedPipe::Listen() {
  for (;;) {
    iovec iov{notes_.data() + notes_nbytes_, notes_.size() - notes_nbytes_};
    const IoResult result = ReceiveSome(socket_, &iov, 1);
    if (result.would_block() || error_ != 0) return;
    if (result.lost()) {
      closed_ = true;
      return;
    }
    notes_nbytes_ += result.nbytes();
    const size_t partial = notes_nbytes_ % sizeof(Note);
    const size_t whole = notes_nbytes_ - partial;
    if (whole == 0) continue;
    // Totals: the last note says everything.
    Note note;
    std::memcpy(&note, notes_.data() + whole - sizeof note, sizeof note);
    std::memmove(notes_.data(), notes_.data() + whole, partial);
    notes_nbytes_ = partial;
    if (note.written < in_.written || note.written - in_.read > in_.nbytes ||
        note.read < out_.read || note.read > out_.written) {
      error_ = EPROTO;
      return;
    }
    in_.written = note.written;
    out_.read = note.read;
    if (whole < notes_.size()) return;
  }
}

void SharedPipe::Tell() {
  Note note{out_.written, in_.read};
  auto* bytes = reinterpret_cast<uint8_t*>(&note);
  iovec iov{bytes, sizeof note};
  const IoResult result = SendSome(socket_, &iov, 1);
  if (result.would_block()) return;
  if (result.nbytes() != sizeof note) {
    // A stream socket takes so few bytes whole or not at all.
    if (error_ == 0) error_ = EPIPE;
    return;
  }
  told_ = note;
}

IoResult SharedPipe::nothing_moved() const {
  if (error_ != 0) return IoResult::Error(error_);
  return closed_ ? IoResult::Bytes(0) : IoResult::Error(EAGAIN);
}

}  // namespace tsr

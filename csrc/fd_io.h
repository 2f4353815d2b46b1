// Owned file descriptors, and reads and writes that don't block. EINTR and SIGPIPE end here.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <string>
#include <utility>

#include "status.h"

namespace tsr {

// Owns one descriptor and closes it. Not thread-safe.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { Close(); }

  int get() const { return fd_; }
  void Close();

 private:
  int fd_ = -1;
};

// What one read or write did.
class IoResult {
 public:
  static IoResult Bytes(size_t nbytes) { return IoResult(nbytes, 0); }
  static IoResult Error(int error) { return IoResult(0, error); }

  size_t nbytes() const { return nbytes_; }
  // Nothing moved: try again when the descriptor is ready.
  bool would_block() const;
  // The connection is of no use any more: end of stream, reset, or an error.
  bool lost() const { return nbytes_ == 0 && !would_block(); }
  // Why it is lost, for people; with the name of errno.
  std::string reason() const;

 private:
  IoResult(size_t nbytes, int error) : nbytes_(nbytes), error_(error) {}

  size_t nbytes_;
  int error_;
};

// Moves as many bytes as the kernel takes or has at once. `iov` holds at least one byte; entries
// beyond IOV_MAX are left for the next call.
IoResult SendSome(int fd, iovec* iov, size_t num_iov);
IoResult ReceiveSome(int fd, iovec* iov, size_t num_iov);

// Entries of one sendmsg or recvmsg, of which a front part has been moved already. Does not own
// what the entries point to.
class IovecCursor {
 public:
  IovecCursor() = default;
  IovecCursor(iovec* iov, size_t num_iov) : iov_(iov), num_iov_(num_iov) {}

  iovec* iov() const { return iov_; }
  size_t num_iov() const { return num_iov_; }
  bool done() const { return num_iov_ == 0; }
  // Drops `nbytes` bytes from the front; the entries are changed.
  void Advance(size_t nbytes);

 private:
  iovec* iov_ = nullptr;
  size_t num_iov_ = 0;
};

Status SetNonBlocking(int fd);

}  // namespace tsr

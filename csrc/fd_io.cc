#include "fd_io.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace tsr {

void UniqueFd::Close() {
  // On Linux the descriptor is gone even where close() reports EINTR.
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

bool IoResult::would_block() const { return error_ == EAGAIN || error_ == EWOULDBLOCK; }

std::string IoResult::reason() const {
  if (error_ == 0) return "closed by the peer";
  // Thread-safe, unlike strerror().
  const char* text = ::strerrordesc_np(error_);
  const char* name = ::strerrorname_np(error_);
  if (text == nullptr || name == nullptr) return "errno " + std::to_string(error_);
  return std::string(text) + " (" + name + ")";
}

namespace {

template <typename Call>
IoResult Repeat(Call call) {
  for (;;) {
    const ssize_t n = call();
    if (n >= 0) return IoResult::Bytes(static_cast<size_t>(n));
    if (errno != EINTR) return IoResult::Error(errno);
  }
}

msghdr MessageOf(iovec* iov, size_t num_iov) {
  msghdr message{};
  message.msg_iov = iov;
  message.msg_iovlen = std::min<size_t>(num_iov, IOV_MAX);
  return message;
}

}  // namespace

IoResult SendSome(int fd, iovec* iov, size_t num_iov) {
  const msghdr message = MessageOf(iov, num_iov);
  return Repeat([&] { return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
}

IoResult ReceiveSome(int fd, iovec* iov, size_t num_iov) {
  msghdr message = MessageOf(iov, num_iov);
  return Repeat([&] { return ::recvmsg(fd, &message, MSG_DONTWAIT); });
}

void IovecCursor::Advance(size_t nbytes) {
  while (num_iov_ > 0 && nbytes >= iov_->iov_len) {
    nbytes -= iov_->iov_len;
    ++iov_;
    --num_iov_;
  }
  if (nbytes > 0) {
    iov_->iov_base = static_cast<char*>(iov_->iov_base) + nbytes;
    iov_->iov_len -= nbytes;
  }
}

Status SetNonBlocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
    return Status(Code::kSystem, std::string("fcntl: ") + ::strerrordesc_np(errno));
  }
  return Status();
}

}  // namespace tsr

#include "pipe.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <limits>

#include "shared_pipe.h"

namespace tsr {

IoResult SocketPipe::Send(iovec* iov, size_t num_iov, Summed) {
  Stopwatch stopwatch;
  const IoResult result = SendSome(fd_, iov, num_iov);
  stopwatch.Lap(&stats_->wire_ns);
  return result;
}

IoResult SocketPipe::Receive(iovec* iov, size_t num_iov, Summed summed) {
  Stopwatch stopwatch;
  const IoResult result = ReceiveSome(fd_, iov, num_iov);
  stopwatch.Lap(&stats_->wire_ns);
  size_t left = std::min(summed.nbytes, result.nbytes());
  for (; left > 0; ++iov) {
    const size_t part = std::min(left, iov->iov_len);
    *summed.crc = Crc32c(*summed.crc, iov->iov_base, part);
    left -= part;
  }
  stopwatch.Lap(&stats_->checksum_ns);
  return result;
}

Clock::duration SocketPipe::Rtt() const {
  tcp_info info{};
  socklen_t nbytes = sizeof(info);
  if (::getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &nbytes) != 0) return Clock::duration(0);
  constexpr uint32_t kUnknown = std::numeric_limits<uint32_t>::max();
  // The least of the last minutes: that of now counts what waits in queues on the way, too.
  const uint32_t rtt_us = info.tcpi_min_rtt;
  return std::chrono::microseconds(rtt_us == kUnknown ? 0 : rtt_us);
}

Status MakePipe(const Connection& connection, End end, RailStats* stats,
                std::unique_ptr<Pipe>* out) {
  const int socket = connection.socket.get();
  TSR_RETURN_IF_ERROR(SetNonBlocking(socket));
  if (connection.ring.get() < 0) {
    *out = std::make_unique<SocketPipe>(socket, stats);
    return Status();
  }
  SharedRing ring;
  TSR_RETURN_IF_ERROR(SharedRing::Map(connection.ring.get(), &ring));
  *out = std::make_unique<SharedPipe>(socket, std::move(ring), end, stats);
  return Status();
}

}  // namespace tsr

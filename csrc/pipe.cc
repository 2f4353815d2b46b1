#include "pipe.h"

#include <algorithm>

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

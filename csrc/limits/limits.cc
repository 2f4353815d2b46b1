#include "limits.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace tsr::limits {
namespace {

constexpr char kAll = '.';                          // what the receiver says when it has all
constexpr size_t kPieceNbytes = size_t{256} << 10;  // fits into every cache of the second level
constexpr size_t kReadNbytes = size_t{64} << 20;    // of one call of process_vm_readv

// Runs `work(offset, nbytes, thread)`, which returns 0 or an errno, on equal parts of `nbytes`.
template <typename Work>
double Timed(size_t nbytes, int num_threads, Work work) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> error{0};
  const size_t part = nbytes / num_threads;
  const auto run = [&](int thread) {
    const size_t begin = thread * part;
    const size_t end = thread + 1 == num_threads ? nbytes : begin + part;
    if (const int failed = work(begin, end - begin, thread)) error = failed;
  };
  const Clock::time_point began = Clock::now();
  {
    std::vector<std::jthread> threads;
    for (int thread = 1; thread < num_threads; ++thread) threads.emplace_back(run, thread);
    run(0);
  }
  const std::chrono::duration<double> seconds = Clock::now() - began;
  return error != 0 ? -error : seconds.count();
}

// Calls `move(data, nbytes)` until `nbytes` are moved, at most `step` at a time. 0 or an errno.
template <typename Byte, typename Move>
int MoveAll(Byte* data, size_t nbytes, size_t step, Move move) {
  while (nbytes > 0) {
    const ssize_t moved = move(data, std::min(nbytes, step));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved == 0 ? ECONNRESET : errno;
    data += moved;
    nbytes -= moved;
  }
  return 0;
}

int SendAll(int fd, const uint8_t* data, size_t nbytes, size_t step) {
  return MoveAll(data, nbytes, step, [fd](const uint8_t* from, size_t length) {
    return ::send(fd, from, length, MSG_NOSIGNAL);
  });
}

int ReceiveAll(int fd, uint8_t* data, size_t nbytes, size_t step) {
  return MoveAll(data, nbytes, step,
                 [fd](uint8_t* to, size_t length) { return ::recv(fd, to, length, MSG_WAITALL); });
}

void CopyPieces(uint8_t* to, const uint8_t* from, size_t nbytes) {
  for (size_t done = 0; done < nbytes; done += kPieceNbytes) {
    std::memcpy(to + done, from + done, std::min(kPieceNbytes, nbytes - done));
  }
}

void CopyPastCache(uint8_t* to, const uint8_t* from, size_t nbytes) {
  size_t done = 0;
#if defined(__x86_64__)
  done = std::min(nbytes, -reinterpret_cast<uintptr_t>(to) % sizeof(__m128i));
  std::memcpy(to, from, done);
  constexpr size_t kLineNbytes = 64;
  constexpr int kStores = kLineNbytes / sizeof(__m128i);
  for (; done + kLineNbytes <= nbytes; done += kLineNbytes) {
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    auto* sink = reinterpret_cast<__m128i*>(to + done);
    __m128i line[kStores];
    for (int i = 0; i < kStores; ++i) line[i] = _mm_loadu_si128(source + i);
    for (int i = 0; i < kStores; ++i) _mm_stream_si128(sink + i, line[i]);
  }
  _mm_sfence();
#endif
  std::memcpy(to + done, from + done, nbytes - done);
}

}  // namespace

double Send(std::span<const int> fds, const uint8_t* data, size_t nbytes, size_t write_nbytes) {
  const int num_threads = static_cast<int>(fds.size());
  return Timed(nbytes, num_threads, [=](size_t offset, size_t length, int thread) {
    if (const int error = SendAll(fds[thread], data + offset, length, write_nbytes)) return error;
    uint8_t said;
    return ReceiveAll(fds[thread], &said, 1, 1);
  });
}

double Receive(std::span<const int> fds, uint8_t* data, size_t nbytes, size_t read_nbytes) {
  const int num_threads = static_cast<int>(fds.size());
  return Timed(nbytes, num_threads, [=](size_t offset, size_t length, int thread) {
    if (const int error = ReceiveAll(fds[thread], data + offset, length, read_nbytes)) return error;
    return SendAll(fds[thread], reinterpret_cast<const uint8_t*>(&kAll), 1, 1);
  });
}

double Copy(uint8_t* to, const uint8_t* from, size_t nbytes, int num_threads, CopyBy by) {
  return Timed(nbytes, num_threads, [=](size_t offset, size_t length, int) {
    switch (by) {
      case CopyBy::kMemcpy:
        std::memcpy(to + offset, from + offset, length);
        break;
      case CopyBy::kPieces:
        CopyPieces(to + offset, from + offset, length);
        break;
      case CopyBy::kStreaming:
        CopyPastCache(to + offset, from + offset, length);
        break;
    }
    return 0;
  });
}

double ReadProcess(pid_t pid, uint64_t address, uint8_t* to, size_t nbytes, int num_threads) {
  return Timed(nbytes, num_threads, [=](size_t offset, size_t length, int) {
    uint8_t* const begin = to + offset;
    return MoveAll(begin, length, kReadNbytes, [=](uint8_t* part, size_t part_nbytes) {
      const iovec here{part, part_nbytes};
      const iovec there{reinterpret_cast<void*>(address + offset + (part - begin)), part_nbytes};
      return ::process_vm_readv(pid, &here, 1, &there, 1, 0);
    });
  });
}

void LetOthersRead() {
  (void)::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // fails without Yama: all may then
}

}  // namespace tsr::limits

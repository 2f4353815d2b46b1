// What the machine and its kernel do at best, for the benchmarks alone: raw sockets, memcpy and
// process_vm_readv. The core neither uses this nor knows of it.
//
// Each function shares its bytes among threads, which end before it returns: seconds from the first
// byte to the last, or the negative errno of what failed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace tsr::limits {

// Sends `nbytes`, as much over each of `fds`, in writes of `write_nbytes`, and waits until the
// other end says on each that it has all. Sockets that block; what bounds a wait are their
// timeouts.
double Send(std::span<const int> fds, const uint8_t* data, size_t nbytes, size_t write_nbytes);

// The other end of that.
double Receive(std::span<const int> fds, uint8_t* data, size_t nbytes, size_t read_nbytes);

enum class CopyBy {
  kMemcpy,     // of all that a thread has to copy, so libc chooses
  kPieces,     // of what the cache holds
  kStreaming,  // stores past the cache
};
double Copy(uint8_t* to, const uint8_t* from, size_t nbytes, int num_threads, CopyBy by);

// From the memory of another process, at `address` there.
double ReadProcess(pid_t pid, uint64_t address, uint8_t* to, size_t nbytes, int num_threads);
// Lets any process of this user read that of the caller, where Yama allows that to parents only.
void LetOthersRead();

}  // namespace tsr::limits

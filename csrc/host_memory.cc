#include "host_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "share_out.h"

#ifndef MADV_POPULATE_WRITE  // since Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace tsr {
namespace {

constexpr size_t kHugePageNbytes = size_t{2} << 20;

size_t RoundUp(size_t nbytes) {
  return std::max(kHugePageNbytes, (nbytes + kHugePageNbytes - 1) & ~(kHugePageNbytes - 1));
}

Status SystemError(const char* what, size_t nbytes, int error) {
  return Status(Code::kSystem, std::string(what) + " of " + std::to_string(nbytes) +
                                   " bytes of host memory: " + ::strerrordesc_np(error));
}

// Maps memory that begins on a huge page, by cutting off both ends of a larger mapping.
void* MapAligned(size_t nbytes) {
  const size_t mapped = nbytes + kHugePageNbytes;
  void* base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  auto* begin = static_cast<uint8_t*>(base);
  const size_t head = -reinterpret_cast<uintptr_t>(begin) % kHugePageNbytes;
  if (head > 0) munmap(begin, head);
  if (head < kHugePageNbytes) munmap(begin + head + nbytes, kHugePageNbytes - head);
  return begin + head;
}

// Has pages that are not there yet come from `nodes`.
void Prefer(void* data, size_t nbytes, std::span<const int> nodes) {
  constexpr int kMaxNodes = 1024;
  constexpr int kWordBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMaxNodes / kWordBits] = {};
  for (const int node : nodes) {
    if (node >= 0 && node < kMaxNodes) mask[node / kWordBits] |= 1UL << (node % kWordBits);
  }
  const int policy = nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  // Without libnuma, and without a right to fail: memory far from the NIC does as well.
  if (!nodes.empty()) (void)::syscall(SYS_mbind, data, nbytes, policy, mask, kMaxNodes + 1, 0u);
}

// Makes every page present. Returns 0 or an errno.
int Populate(uint8_t* data, size_t nbytes) {
  int result;
  do {
    result = madvise(data, nbytes, MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return 0;
  // A kernel before 5.14, or a sandbox: written to, the pages come as well, only slower.
  if (errno != EINVAL && errno != EPERM && errno != ENOSYS) return errno;
  const auto page_nbytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t offset = 0; offset < nbytes; offset += page_nbytes) {
    static_cast<volatile uint8_t*>(data)[offset] = 0;
  }
  return 0;
}

}  // namespace

Status HostMemory::Allocate(size_t nbytes, int num_threads, std::span<const int> nodes,
                            std::unique_ptr<HostMemory>* out) {
  if (nbytes > SIZE_MAX / 2) return SystemError("mmap", nbytes, ENOMEM);
  const size_t mapped = RoundUp(nbytes);
  void* data = MapAligned(mapped);
  if (data == nullptr) return SystemError("mmap", mapped, errno);
  std::unique_ptr<HostMemory> memory(new HostMemory(static_cast<uint8_t*>(data), nbytes));
  // A kernel without huge pages refuses; small pages do as well, only slower.
  (void)madvise(data, mapped, MADV_HUGEPAGE);
  Prefer(data, mapped, nodes);

  // Threads take 64 MiB at a time, for a kernel zeroes some pages much faster than others.
  constexpr size_t kStepNbytes = 32 * kHugePageNbytes;
  std::atomic<size_t> next{0};
  std::atomic<int> error{0};
  const auto populate = [&] {
    while (error == 0) {
      const size_t offset = next.fetch_add(kStepNbytes);
      if (offset >= mapped) return;
      if (const int failed =
              Populate(memory->data_ + offset, std::min(kStepNbytes, mapped - offset))) {
        error = failed;
      }
    }
  };
  {
    const size_t num_useful = (mapped + kStepNbytes - 1) / kStepNbytes;
    const size_t num_others = std::min<size_t>(num_threads, std::max(num_useful, size_t{1})) - 1;
    const std::vector<std::jthread> others = StartThreads(num_others, populate);
    populate();
  }
  if (error != 0) return SystemError("MADV_POPULATE_WRITE", mapped, error);
  *out = std::move(memory);
  return Status();
}

HostMemory::~HostMemory() { munmap(data_, RoundUp(nbytes_)); }

}  // namespace tsr

// Pre-faulted memory, on huge pages where they can be had, for the generations of a sampler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "status.h"

namespace tsr {

// Owns one anonymous mapping. Not thread-safe to move; its bytes are whoever's holds data().
class HostMemory {
 public:
  // Maps `nbytes` (rounded up to 2 MiB), asks for huge pages and touches every page with
  // `num_threads` threads, so that no later write faults. kSystem names what the kernel refused.
  // Pages are asked for on the NUMA nodes `nodes`, in turns; where there are none, or the kernel
  // does not want to, they come from anywhere.
  static Status Allocate(size_t nbytes, int num_threads, std::span<const int> nodes,
                         std::unique_ptr<HostMemory>* out);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  uint8_t* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  HostMemory(uint8_t* data, size_t nbytes) : data_(data), nbytes_(nbytes) {}

  uint8_t* data_;
  size_t nbytes_;
};

}  // namespace tsr

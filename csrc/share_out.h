// Work that several threads take from one another's hands.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace tsr {

// Calls work(i) once for each i below `count`, on this thread and up to `num_threads` - 1 others,
// and returns when all are done.
template <typename Work>
void ShareOut(size_t count, int num_threads, Work work) {
  std::atomic<size_t> next = 0;
  const auto run = [&] {
    for (size_t i = next++; i < count; i = next++) work(i);
  };
  const size_t num_useful = std::min(static_cast<size_t>(std::max(1, num_threads)), count);
  std::vector<std::jthread> others;
  for (size_t i = 1; i < num_useful; ++i) others.emplace_back(run);
  run();
}

}  // namespace tsr

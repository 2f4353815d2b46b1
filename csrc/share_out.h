// Work that several threads take from one another's hands.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace tsr {

// Threads that run `work` beside this one, `count` of them, or as many as the system has left. They
// end with what is returned.
template <typename Work>
std::vector<std::jthread> StartThreads(size_t count, Work work) {
  std::vector<std::jthread> threads;
  threads.reserve(count);
  try {
    while (threads.size() < count) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Those that there are do it all.
  }
  return threads;
}

// Calls work(i) once for each i below `count`, on this thread and up to `num_threads` - 1 others,
// and returns when all are done.
template <typename Work>
void ShareOut(size_t count, int num_threads, Work work) {
  std::atomic<size_t> next = 0;
  const auto run = [&] {
    for (size_t i = next++; i < count; i = next++) work(i);
  };
  const size_t num_useful = std::min(static_cast<size_t>(std::max(1, num_threads)), count);
  const std::vector<std::jthread> others = StartThreads(std::max(num_useful, size_t{1}) - 1, run);
  run();
}

}  // namespace tsr

#include "host_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace tsr {
namespace {

constexpr size_t kHugePageNbytes = size_t{2} << 20;

TEST(HostMemoryTest, HasEveryPagePresentAndZero) {
  for (int num_threads : {1, 3}) {
    const size_t nbytes = 150 * 1000 * 1000;
    std::unique_ptr<HostMemory> memory;
    ASSERT_TRUE(HostMemory::Allocate(nbytes, num_threads, {}, &memory).ok());
    EXPECT_EQ(memory->nbytes(), nbytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data()) % kHugePageNbytes, 0u);
    std::vector<unsigned char> present(nbytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)));
    ASSERT_EQ(mincore(memory->data(), nbytes / 4096 * 4096, present.data()), 0);
    EXPECT_TRUE(std::all_of(present.begin(), present.end(), [](auto p) { return p & 1; }));
    EXPECT_TRUE(
        std::all_of(memory->data(), memory->data() + nbytes, [](auto b) { return b == 0; }));
    std::fill(memory->data(), memory->data() + nbytes, uint8_t{1});
  }
}

TEST(HostMemoryTest, TakesNoBytesAtAll) {
  std::unique_ptr<HostMemory> memory;
  ASSERT_TRUE(HostMemory::Allocate(0, 2, {}, &memory).ok());
  EXPECT_EQ(memory->nbytes(), 0u);
  EXPECT_NE(memory->data(), nullptr);
}

TEST(HostMemoryTest, UnmapsWhatItMapped) {
  uint8_t* data = nullptr;
  {
    std::unique_ptr<HostMemory> memory;
    ASSERT_TRUE(HostMemory::Allocate(3 * kHugePageNbytes - 1, 1, {}, &memory).ok());
    data = memory->data();
  }
  unsigned char present;
  for (size_t page = 0; page < 3; ++page) {
    EXPECT_EQ(mincore(data + page * kHugePageNbytes, 1, &present), -1);
  }
}

TEST(HostMemoryTest, SaysWhatTheKernelRefused) {
  for (const size_t nbytes : {size_t{1} << 55, SIZE_MAX}) {
    std::unique_ptr<HostMemory> memory;
    const Status status = HostMemory::Allocate(nbytes, 1, {}, &memory);
    EXPECT_EQ(status.code(), Code::kSystem);
    EXPECT_NE(status.message().find("mmap of "), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("Cannot allocate memory"), std::string::npos);
    EXPECT_EQ(memory, nullptr);
  }
}

TEST(HostMemoryTest, NodesThatTheKernelRefusesDoNoHarm) {
  const std::vector<std::vector<int>> choices = {{0}, {0, 1}, {63}, {-1, 5000}};
  for (const std::vector<int>& nodes : choices) {
    std::unique_ptr<HostMemory> memory;
    ASSERT_TRUE(HostMemory::Allocate(kHugePageNbytes, 1, nodes, &memory).ok());
    std::fill(memory->data(), memory->data() + kHugePageNbytes, uint8_t{1});
  }
}

}  // namespace
}  // namespace tsr

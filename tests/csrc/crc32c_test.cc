#include "crc32c.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace tsr {
namespace {

uint32_t BitByBit(uint32_t crc, const uint8_t* data, size_t nbytes) {
  crc = ~crc;
  for (size_t i = 0; i < nbytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

std::vector<uint8_t> RandomBytes(size_t nbytes) {
  std::mt19937 random(20);
  std::vector<uint8_t> bytes(nbytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(Crc32cTest, KnowsTheExamplesOfRfc3720) {
  std::vector<uint8_t> ascending(32);
  for (size_t i = 0; i < 32; ++i) ascending[i] = static_cast<uint8_t>(i);
  const std::vector<uint8_t> descending(ascending.rbegin(), ascending.rend());
  const std::vector<uint8_t> zeros(32, 0x00);
  const std::vector<uint8_t> ones(32, 0xFF);
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    SCOPED_TRACE(variant.name);
    EXPECT_EQ(variant.extend(0, zeros.data(), 32), 0x8A9136AAu);
    EXPECT_EQ(variant.extend(0, ones.data(), 32), 0x62A8AB43u);
    EXPECT_EQ(variant.extend(0, ascending.data(), 32), 0x46DD794Eu);
    EXPECT_EQ(variant.extend(0, descending.data(), 32), 0x113FDB5Cu);
    EXPECT_EQ(variant.extend(0, "123456789", 9), 0xE3069283u);
    EXPECT_EQ(variant.extend(0, nullptr, 0), 0u);
  }
}

TEST(Crc32cTest, VariantsAgreeForEveryLengthAndMisalignment) {
  const std::vector<uint8_t> bytes = RandomBytes(2100);
  for (size_t nbytes = 0; nbytes <= 2000; ++nbytes) {
    const size_t misalignment = nbytes * 7 % 67;
    const uint8_t* data = bytes.data() + misalignment;
    const uint32_t expected = BitByBit(0x12345678, data, nbytes);
    for (const Crc32cVariant& variant : Crc32cVariants()) {
      ASSERT_EQ(variant.extend(0x12345678, data, nbytes), expected)
          << variant.name << " of " << nbytes << " bytes, misaligned by " << misalignment;
    }
  }
  for (size_t misalignment = 0; misalignment < 65; ++misalignment) {
    const uint32_t expected = BitByBit(0, bytes.data() + misalignment, 1999);
    for (const Crc32cVariant& variant : Crc32cVariants()) {
      ASSERT_EQ(variant.extend(0, bytes.data() + misalignment, 1999), expected)
          << variant.name << ", misaligned by " << misalignment;
    }
  }
}

// Long enough for several blocks of every variant, and then any part of one.
TEST(Crc32cTest, VariantsAgreeForLongRuns) {
  const std::vector<uint8_t> bytes = RandomBytes(20'000);
  const Crc32cVariant table = Crc32cVariants().back();
  for (size_t nbytes = 2000; nbytes < 19'900; nbytes += nbytes < 6000 ? 13 : 53) {
    const uint8_t* data = bytes.data() + nbytes % 65;
    const uint32_t expected = table.extend(0x12345678, data, nbytes);
    for (const Crc32cVariant& variant : Crc32cVariants()) {
      ASSERT_EQ(variant.extend(0x12345678, data, nbytes), expected)
          << variant.name << " of " << nbytes << " bytes";
    }
  }
}

TEST(Crc32cTest, ContinuesFromAnyCut) {
  const std::vector<uint8_t> bytes = RandomBytes(20'011);
  const uint32_t whole = BitByBit(0, bytes.data(), bytes.size());
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    for (size_t cut = 0; cut <= bytes.size(); cut += 997) {
      const uint32_t first = variant.extend(0, bytes.data(), cut);
      ASSERT_EQ(variant.extend(first, bytes.data() + cut, bytes.size() - cut), whole)
          << variant.name << " cut at " << cut;
    }
  }
}

TEST(Crc32cTest, CopiesAreWholeAndSummed) {
  const std::vector<uint8_t> bytes = RandomBytes(2100);
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    SCOPED_TRACE(variant.name);
    for (const Stores stores : {Stores::kCached, Stores::kPastCache}) {
      for (size_t nbytes = 0; nbytes <= 1900; ++nbytes) {
        const uint8_t* from = bytes.data() + nbytes * 7 % 67;
        const size_t misalignment = nbytes * 5 % 71;
        std::vector<uint8_t> to(2000, 0xEE);
        const uint32_t crc = variant.copy(7, to.data() + misalignment, from, nbytes, stores);
        ASSERT_EQ(crc, BitByBit(7, from, nbytes)) << nbytes << " bytes";
        std::vector<uint8_t> expected(2000, 0xEE);
        std::copy(from, from + nbytes, expected.begin() + misalignment);
        ASSERT_EQ(to, expected) << nbytes << " bytes";
      }
    }
  }
}

TEST(Crc32cTest, SumOfACopyIsOfWhatWasStored) {
  // Another thread changes the source by another mapping, as another process would.
  constexpr size_t kNbytes = 64 << 10;
  const int memfd = ::memfd_create("test", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(memfd, kNbytes), 0);
  void* views[2];
  for (void*& view : views) {
    view = ::mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    ASSERT_NE(view, MAP_FAILED);
  }
  std::atomic<bool> stop = false;
  std::thread other([&] {
    for (uint8_t value = 0; !stop; ++value) std::memset(views[0], value, kNbytes);
  });
  std::vector<uint8_t> to(kNbytes);
  for (const Crc32cVariant& variant : Crc32cVariants()) {
    for (int i = 0; i < 300; ++i) {
      const uint32_t crc = variant.copy(0, to.data(), views[1], kNbytes, Stores::kPastCache);
      ASSERT_EQ(crc, Crc32c(0, to.data(), kNbytes)) << variant.name;
    }
  }
  stop = true;
  other.join();
  for (void* view : views) ::munmap(view, kNbytes);
  ::close(memfd);
}

TEST(Crc32cTest, UsesTheFirstVariantThatTheLevelHas) {
  const std::vector<Crc32cVariant> variants = Crc32cVariants();
  const auto used = std::ranges::find(variants, Crc32cImplementation(), &Crc32cVariant::name);
  ASSERT_NE(used, variants.end());
  EXPECT_LE(used->level, UsedCpuLevel());
  for (auto faster = variants.begin(); faster != used; ++faster) {
    EXPECT_GT(faster->level, UsedCpuLevel()) << faster->name;
  }
  const std::vector<uint8_t> bytes = RandomBytes(5000);
  EXPECT_EQ(Crc32c(7, bytes.data(), bytes.size()), used->extend(7, bytes.data(), bytes.size()));
}

}  // namespace
}  // namespace tsr

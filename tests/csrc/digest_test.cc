#include "digest.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "crc32c.h"
#include "digest_request.h"

namespace tsr {
namespace {

using Bytes = std::vector<uint8_t>;
using Ints = std::vector<int64_t>;

Bytes RandomBytes(size_t nbytes) {
  std::mt19937 random(1);
  Bytes bytes(nbytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// By the definition, byte after byte.
uint64_t DigestByByte(uint64_t position, const Bytes& bytes) {
  uint64_t sum = 0;
  for (const uint8_t byte : bytes) {
    sum += (uint64_t{byte} << (8 * (position % 4))) * DigestMultiplier(position / 4);
    ++position;
  }
  return sum;
}

// A leaf with elements of `itemsize` bytes, and any box of it in any order of dimensions.
struct Leaf {
  Ints shape;
  int64_t itemsize;
  Bytes bytes = RandomBytes(static_cast<size_t>(itemsize * Volume()));

  int64_t Volume() const {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies());
  }

  // The digest of `box` from memory of its own, whose dimensions are `order` from major to minor,
  // and the one by definition: of the whole leaf, with 0 for what is not in the box.
  void Check(const Ints& box, const std::vector<int>& order) const {
    Ints strides(shape.size());
    int64_t stride = itemsize;
    for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
      strides[*dim] = stride;
      stride *= ExtentOf(box, *dim);
    }
    Bytes memory(static_cast<size_t>(stride));
    Bytes masked(bytes.size(), 0);
    for (int64_t element = 0; element < Volume(); ++element) {
      int64_t rest = element;
      int64_t offset = 0;
      bool inside = true;
      for (int dim = static_cast<int>(shape.size()) - 1; dim >= 0; --dim) {
        const int64_t at = rest % shape[dim];
        rest /= shape[dim];
        inside = inside && at >= StartOf(box, dim) && at < StopOf(box, dim);
        offset += (at - StartOf(box, dim)) * strides[dim];
      }
      if (!inside) continue;
      std::memcpy(&memory[offset], &bytes[element * itemsize], itemsize);
      std::memcpy(&masked[element * itemsize], &bytes[element * itemsize], itemsize);
    }
    EXPECT_EQ(DigestOfBox(Op(), itemsize, shape, {box, memory.data(), strides}),
              DigestByByte(0, masked));
  }
};

TEST(DigestTest, RunsHaveTheirDigestWhereverTheyBegin) {
  const Bytes bytes = RandomBytes(1000);
  for (uint64_t position : {0, 1, 2, 3, 4, 1000001}) {
    for (size_t nbytes : {0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 1000}) {
      const Bytes run(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(nbytes));
      EXPECT_EQ(DigestOfRun(position, run.data(), nbytes), DigestByByte(position, run));
    }
  }
}

TEST(DigestTest, PartsAddUpWhereverTheyAreCut) {
  const Bytes bytes = RandomBytes(300);
  const uint64_t whole = DigestOfRun(17, bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    EXPECT_EQ(DigestOfRun(17, bytes.data(), cut) +
                  DigestOfRun(17 + cut, bytes.data() + cut, bytes.size() - cut),
              whole);
  }
}

TEST(DigestTest, BoxesHaveTheirDigestInEveryMemory) {
  for (const int64_t itemsize : {1, 2, 4, 8, 16}) {
    const Leaf leaf{{5, 6, 7}, itemsize};
    for (const auto& order : {std::vector{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {0, 2, 1}}) {
      leaf.Check({0, 5, 0, 6, 0, 7}, order);
      leaf.Check({1, 4, 0, 6, 0, 7}, order);
      leaf.Check({1, 4, 2, 5, 3, 6}, order);
      leaf.Check({2, 3, 1, 6, 6, 7}, order);
    }
    Leaf{{}, itemsize}.Check({}, {});
    Leaf{{1, 9, 1}, itemsize}.Check({0, 1, 2, 8, 0, 1}, {0, 1, 2});
  }
}

// The example in WIRE_FORMAT.md.
TEST(DigestTest, DigestIsAsDocumented) {
  EXPECT_EQ(DigestMultiplier(10), 0x657EECDDF64CE4B3u);
  EXPECT_EQ(DigestMultiplier(11), 0xC2D326E180FD9335u);
  const float values[] = {1, 2};
  const Ints shape{8, 4};
  const Ints box{5, 6, 1, 3};
  const Ints strides{16, 4};
  EXPECT_EQ(
      DigestOfBox(Op(0x32), 4, shape, {box, reinterpret_cast<const uint8_t*>(values), strides}),
      0xD85072F9CB4D4000u);
  const std::string bytes = EncodeDigestRequest({7, 1, Op(0x32), shape, box});
  EXPECT_EQ(bytes.size(), 60u);
  EXPECT_EQ(Crc32c(0, bytes.data(), bytes.size()), 0x13D7B50Du);
}

TEST(DigestTest, BoxWithoutElementsAddsNothing) {
  const Ints shape{4, 0};
  const Ints box{0, 4, 0, 0};
  const Ints strides{0, 4};
  EXPECT_EQ(DigestOfBox(Op(), 4, shape, {box, nullptr, strides}), 0u);
}

TEST(DigestTest, CastElementsCountAsWhatTheyBecome) {
  constexpr Op kOp = Op::Cast(FloatKind::kF32, FloatKind::kBF16);
  const Ints shape{3, 2500};
  std::vector<float> values(3 * 2500);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.37f * static_cast<float>(i);
  const auto* from = reinterpret_cast<const uint8_t*>(values.data());
  Bytes cast(values.size() * 2);
  CastRun(kOp, from, 4, cast.data(), static_cast<int64_t>(values.size()));
  const Ints rows{2500 * 4, 4};
  const Ints all{0, 3, 0, 2500};
  EXPECT_EQ(DigestOfBox(kOp, 4, shape, {all, from, rows}), DigestByByte(0, cast));
  // The same values, column by column.
  std::vector<float> turned(values.size());
  for (size_t i = 0; i < values.size(); ++i) turned[i % 2500 * 3 + i / 2500] = values[i];
  const Ints columns{4, 12};
  EXPECT_EQ(
      DigestOfBox(kOp, 4, shape, {all, reinterpret_cast<const uint8_t*>(turned.data()), columns}),
      DigestByByte(0, cast));
  Bytes scalar(2);
  CastRun(kOp, from + 4, 4, scalar.data(), 1);
  EXPECT_EQ(DigestOfBox(kOp, 4, {}, {{}, from + 4, {}}), DigestByByte(0, scalar));
}

TEST(DigestTest, EveryFlippedBitAndSwappedElementIsSeen) {
  Bytes bytes = RandomBytes(256);
  const uint64_t digest = DigestOfRun(0, bytes.data(), bytes.size());
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    EXPECT_NE(DigestOfRun(0, bytes.data(), bytes.size()), digest);
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
  for (size_t i = 0; i + 1 < bytes.size(); ++i) {
    if (bytes[i] == bytes[i + 1]) continue;
    std::swap(bytes[i], bytes[i + 1]);
    EXPECT_NE(DigestOfRun(0, bytes.data(), bytes.size()), digest);
    std::swap(bytes[i], bytes[i + 1]);
  }
}

// Shards of two leaves: rows 2 to 3 of the first one, columns first, and the whole second one.
TEST(DigestsOfShardsTest, AreThoseOfTheirBoxesOnAnyNumberOfThreads) {
  ShardDirectory directory;
  ASSERT_TRUE(
      ShardDirectory::Make({{0, 1, 4, FloatKind::kNone, 2, 0}, {1, 0, 1, FloatKind::kNone, 1, 4}},
                           {2, 4, 0, 3, 0, 5}, 2, &directory)
          .ok());
  const Bytes first = RandomBytes(24);
  const Bytes second = RandomBytes(5);
  const std::vector<uint64_t> addresses = {reinterpret_cast<uintptr_t>(first.data()),
                                           reinterpret_cast<uintptr_t>(second.data())};
  const Ints strides = {4, 8, 1};
  const std::vector<DigestRequest> requests = {
      {0, 1, Op(), {4, 3}, {2, 4, 0, 3}}, {1, 0, Op(), {5}, {1, 5}}, {1, 0, Op(), {5}, {3, 3}}};
  const std::vector<uint64_t> expected = {
      DigestOfBox(Op(), 4, Ints{4, 3}, {Ints{2, 4, 0, 3}, first.data(), Ints{4, 8}}),
      DigestOfBox(Op(), 1, Ints{5}, {Ints{1, 5}, second.data() + 1, Ints{1}}), 0};
  for (const int num_threads : {1, 2, 8}) {
    std::vector<uint64_t> digests;
    ASSERT_TRUE(
        DigestsOfShards(requests, directory, addresses, strides, {}, num_threads, &digests).ok());
    EXPECT_EQ(digests, expected);
  }
  std::vector<uint64_t> digests;
  const std::vector<DigestRequest> of_another = {{0, 0, Op(), {4, 3}, {0, 2, 0, 3}}};
  const Status not_held =
      DigestsOfShards(of_another, directory, addresses, strides, {}, 1, &digests);
  EXPECT_EQ(not_held.code(), Code::kInvalid);
  EXPECT_EQ(not_held.message(), "digest request: this process does not hold box 0 of leaf 0");
  EXPECT_EQ(DigestsOfShards(requests, directory, addresses, Ints{4, 8}, {}, 1, &digests).code(),
            Code::kInvalid);
}

}  // namespace
}  // namespace tsr

#include "region_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace tsr {
namespace {

std::mt19937& Random() {
  static std::mt19937 random(7);
  return random;
}

int64_t Between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(Random());
}

// One side of a region: strides in a random order of dimensions, with gaps here and there.
struct Side {
  std::vector<int64_t> strides;
  int64_t nbytes;

  static Side Make(int64_t itemsize, const std::vector<int64_t>& extents, bool row_major,
                   bool gaps) {
    std::vector<size_t> order(extents.size());
    std::iota(order.begin(), order.end(), size_t{0});
    if (!row_major) std::shuffle(order.begin(), order.end(), Random());
    Side side{std::vector<int64_t>(extents.size()), itemsize};
    for (size_t i = order.size(); i-- > 0;) {
      if (gaps && Between(0, 2) == 0) side.nbytes += itemsize * Between(0, 3);
      side.strides[order[i]] = side.nbytes;
      side.nbytes *= extents[order[i]];
    }
    return side;
  }
};

template <typename Visit>
void ForEachIndex(const std::vector<int64_t>& extents, Visit visit) {
  std::vector<int64_t> index(extents.size(), 0);
  while (true) {
    visit(index);
    size_t d = extents.size();
    while (d > 0 && ++index[d - 1] == extents[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

int64_t OffsetOf(const std::vector<int64_t>& index, const std::vector<int64_t>& strides) {
  return std::inner_product(index.begin(), index.end(), strides.begin(), int64_t{0});
}

std::vector<uint8_t> RandomBytes(int64_t nbytes) {
  std::vector<uint8_t> bytes(static_cast<size_t>(nbytes));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(Random()());
  return bytes;
}

// Copies one region both ways; nothing outside the region may change.
void ExpectCopies(Op op, int64_t itemsize, const std::vector<int64_t>& extents, const Side& from,
                  const Side& to) {
  const std::vector<uint8_t> source = RandomBytes(from.nbytes);
  std::vector<uint8_t> sink = RandomBytes(to.nbytes);
  std::vector<uint8_t> expected = sink;
  ForEachIndex(extents, [&](const std::vector<int64_t>& index) {
    const uint8_t* element = source.data() + OffsetOf(index, from.strides);
    uint8_t* place = expected.data() + OffsetOf(index, to.strides);
    if (op.is_copy()) {
      std::memcpy(place, element, static_cast<size_t>(itemsize));
    } else {
      CastRun(op, element, itemsize, place, 1);
    }
  });
  CopyRegion(op, itemsize, extents, {source.data(), from.strides}, {sink.data(), to.strides},
             Between(0, 1) == 0 ? Stores::kCached : Stores::kPastCache);
  ASSERT_EQ(sink, expected) << "extents " << testing::PrintToString(extents) << " from "
                            << testing::PrintToString(from.strides) << " to "
                            << testing::PrintToString(to.strides) << " itemsize " << itemsize;
}

std::vector<int64_t> RandomExtents(int64_t max_rank, int64_t max_volume) {
  std::vector<int64_t> extents(static_cast<size_t>(Between(0, max_rank)));
  int64_t left = max_volume;
  for (int64_t& extent : extents) {
    extent = Between(1, std::max<int64_t>(1, std::min<int64_t>(left, Between(1, 80))));
    left /= extent;
  }
  std::shuffle(extents.begin(), extents.end(), Random());
  return extents;
}

TEST(CopyRegionTest, CopiesLikeAnElementLoop) {
  for (int trial = 0; trial < 3000; ++trial) {
    const int64_t itemsize = std::vector<int64_t>{1, 2, 3, 4, 8, 16, 24}[trial % 7];
    const std::vector<int64_t> extents = RandomExtents(5, 4000);
    const bool from_row_major = Between(0, 1) == 0;
    const bool to_row_major = Between(0, 2) != 0;
    const Side from = Side::Make(itemsize, extents, from_row_major, Between(0, 1) == 0);
    const Side to = Side::Make(itemsize, extents, to_row_major, Between(0, 1) == 0);
    ASSERT_NO_FATAL_FAILURE(ExpectCopies(Op(), itemsize, extents, from, to));
  }
}

TEST(CopyRegionTest, CastsLikeAnElementLoop) {
  constexpr FloatKind kKinds[] = {FloatKind::kF16, FloatKind::kBF16, FloatKind::kF32,
                                  FloatKind::kF64};
  for (int trial = 0; trial < 1500; ++trial) {
    const FloatKind from_kind = kKinds[Between(0, 3)];
    const FloatKind to_kind = kKinds[Between(0, 3)];
    if (from_kind == to_kind) continue;
    const std::vector<int64_t> extents = RandomExtents(4, 4000);
    const Side from =
        Side::Make(ItemsizeOf(from_kind), extents, Between(0, 1) == 0, Between(0, 1) == 0);
    const Side to =
        Side::Make(ItemsizeOf(to_kind), extents, Between(0, 1) == 0, Between(0, 1) == 0);
    ASSERT_NO_FATAL_FAILURE(
        ExpectCopies(Op::Cast(from_kind, to_kind), ItemsizeOf(from_kind), extents, from, to));
  }
}

TEST(CopyRegionTest, TransposesPlanesLargerThanABlock) {
  for (int64_t itemsize : {1, 2, 3, 4, 8, 16, 24}) {
    const std::vector<int64_t> extents = {300, 2, 270};
    const Side from = Side::Make(itemsize, extents, true, itemsize == 4);
    const Side to{{itemsize, 300 * 270 * itemsize, 300 * itemsize}, 300 * 2 * 270 * itemsize};
    ASSERT_NO_FATAL_FAILURE(ExpectCopies(Op(), itemsize, extents, from, to));
  }
  const std::vector<int64_t> extents = {300, 270};
  const Side from = Side::Make(4, extents, true, false);
  ExpectCopies(Op::Cast(FloatKind::kF32, FloatKind::kBF16), 4, extents, from,
               Side{{2, 600}, 300 * 270 * 2});
}

TEST(CopyRegionTest, CopiesLongRunsAtAnyAlignment) {
  for (int64_t run : {255, 256, 257, 1024, 4099, 70'001}) {
    for (int64_t misalignment : {0, 1, 33, 63}) {
      const int64_t gap = misalignment == 33 ? 100 : 0;
      const std::vector<uint8_t> source = RandomBytes(3 * (run + gap) + 64);
      std::vector<uint8_t> sink = RandomBytes(4 * run + 64);
      std::vector<uint8_t> expected = sink;
      for (int64_t i = 0; i < 3; ++i) {
        std::memcpy(expected.data() + misalignment + i * (run + 7),
                    source.data() + 63 - misalignment + i * (run + gap), static_cast<size_t>(run));
      }
      const std::vector<int64_t> extents = {3, run};
      const std::vector<int64_t> from = {run + gap, 1};
      const std::vector<int64_t> to = {run + 7, 1};
      CopyRegion(Op(), 1, extents, {source.data() + 63 - misalignment, from},
                 {sink.data() + misalignment, to}, Stores::kPastCache);
      ASSERT_EQ(sink, expected) << run << " bytes, misaligned by " << misalignment;
    }
  }
}

TEST(CopyRegionTest, TakesTheHighestRank) {
  std::vector<int64_t> extents(RunIterator::kMaxRank, 1);
  for (size_t d : {0, 3, 9, 14, 20, 25, 31}) extents[d] = 2;
  const Side from = Side::Make(4, extents, false, true);
  const Side to = Side::Make(4, extents, true, false);
  ExpectCopies(Op(), 4, extents, from, to);
}

TEST(RunIteratorTest, WalksEveryByteInRowMajorOrder) {
  for (int trial = 0; trial < 500; ++trial) {
    const int64_t itemsize = std::vector<int64_t>{1, 2, 4, 24}[trial % 4];
    const std::vector<int64_t> extents = RandomExtents(5, 600);
    const Side side = Side::Make(itemsize, extents, Between(0, 2) != 0, Between(0, 1) == 0);
    std::vector<int64_t> expected;
    ForEachIndex(extents, [&](const std::vector<int64_t>& index) {
      const int64_t offset = OffsetOf(index, side.strides);
      for (int64_t byte = 0; byte < itemsize; ++byte) expected.push_back(offset + byte);
    });
    std::vector<int64_t> walked;
    int64_t num_runs = 0;
    RunIterator runs(itemsize, extents, side.strides);
    for (; !runs.done(); runs.Next(), ++num_runs) {
      for (int64_t i = 0; i < runs.run_nbytes(); ++i) walked.push_back(runs.offset() + i);
    }
    ASSERT_EQ(walked, expected);
    ASSERT_EQ(num_runs, runs.num_runs());
  }
}

TEST(RunIteratorTest, MergesWhatIsDense) {
  const std::vector<int64_t> extents = {4, 1, 3, 8};
  const std::vector<int64_t> dense = {48, 999, 16, 2};
  const RunIterator whole(2, extents, dense);
  EXPECT_EQ(whole.num_runs(), 1);
  EXPECT_EQ(whole.run_nbytes(), 192);
  const std::vector<int64_t> half_rows = {96, 96, 32, 2};
  const RunIterator rows(2, extents, half_rows);
  EXPECT_EQ(rows.num_runs(), 12);
  EXPECT_EQ(rows.run_nbytes(), 16);
  const RunIterator scalar(8, {}, {});
  EXPECT_EQ(scalar.num_runs(), 1);
  EXPECT_EQ(scalar.run_nbytes(), 8);
}

}  // namespace
}  // namespace tsr

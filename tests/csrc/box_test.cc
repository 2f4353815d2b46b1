#include "box.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace tsr {
namespace {

using Box = std::vector<int64_t>;
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

TEST(VolumeOf, MultipliesExtents) {
  EXPECT_EQ(VolumeOf(Box{0, 4, 8, 16}), 32);
  EXPECT_EQ(VolumeOf(Box{7, 7, 0, 5}), 0);
  EXPECT_EQ(VolumeOf(Box{}), 1);
}

TEST(VolumeOf, IsMinusOneWhereItDoesNotFit) {
  EXPECT_EQ(VolumeOf(Box{0, kMax}), kMax);
  EXPECT_EQ(VolumeOf(Box{0, kMax, 0, 2}), -1);
  EXPECT_EQ(VolumeOf(Box{0, int64_t{1} << 32, 0, int64_t{1} << 32}), -1);
  EXPECT_EQ(VolumeOf(Box{kMin, kMax}), -1);
  EXPECT_EQ(VolumeOf(Box{0, kMax, 0, kMax, 3, 3}), 0);
}

TEST(VolumeOf, IsMinusOneForNegativeRange) {
  EXPECT_EQ(VolumeOf(Box{4, 3}), -1);
  EXPECT_EQ(VolumeOf(Box{0, 0, 4, 3}), -1);
}

TEST(Intersect, GivesCommonElements) {
  Box out(4);
  EXPECT_TRUE(Intersect(Box{0, 4, 8, 16}, Box{2, 6, 0, 9}, out));
  EXPECT_EQ(out, (Box{2, 4, 8, 9}));
}

TEST(Intersect, IsFalseForTouchingAndEmptyBoxes) {
  Box out(2);
  EXPECT_FALSE(Intersect(Box{0, 4}, Box{4, 8}, out));
  EXPECT_FALSE(Intersect(Box{0, 4}, Box{2, 2}, out));
}

TEST(Intersect, OfRankZeroIsTheOneElement) { EXPECT_TRUE(Intersect(Box{}, Box{}, {})); }

TEST(Contains, HoldsForInnerBoxesAlone) {
  EXPECT_TRUE(Contains(Box{0, 4, 0, 4}, Box{0, 4, 1, 2}));
  EXPECT_FALSE(Contains(Box{0, 4, 0, 4}, Box{0, 5, 1, 2}));
  EXPECT_FALSE(Contains(Box{2, 4}, Box{1, 3}));
  EXPECT_TRUE(Contains(Box{0, 4}, Box{9, 9}));
  EXPECT_TRUE(Contains(Box{}, Box{}));
}

TEST(FormatBox, LooksLikeSlices) {
  EXPECT_EQ(FormatBox(Box{0, 4, 8, 16}), "[0:4, 8:16]");
  EXPECT_EQ(FormatBox(Box{}), "[]");
}

TEST(RowMajorStrides, CountBytesOfTheBox) {
  Box strides(3);
  RowMajorStrides(Box{1, 3, 4, 8, 0, 5}, 2, strides);
  EXPECT_EQ(strides, (Box{40, 10, 2}));
}

TEST(OffsetOf, CountsBytesFromTheOuterBox) {
  EXPECT_EQ(OffsetOf(Box{3, 4, 10, 12}, Box{1, 9, 8, 16}, Box{32, 4}), 2 * 32 + 2 * 4);
  EXPECT_EQ(OffsetOf(Box{}, Box{}, Box{}), 0);
}

}  // namespace
}  // namespace tsr

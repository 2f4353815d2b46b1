#include "shard_layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace tsr {
namespace {

using Tiles = std::vector<std::vector<int64_t>>;

ShardLayout Made(const std::vector<int64_t>& extents, int64_t itemsize,
                 const std::vector<int64_t>& major_to_minor, const Tiles& tiles) {
  ShardLayout layout;
  const Status status = ShardLayout::Make(extents, itemsize, major_to_minor, tiles, &layout);
  EXPECT_TRUE(status.ok()) << status.message();
  return layout;
}

std::vector<Digit> DigitsOf(const ShardLayout& layout, int dim) {
  const auto digits = layout.digits(dim);
  return {digits.begin(), digits.end()};
}

using Digits = std::vector<Digit>;

TEST(ShardLayout, CutsRowsAndColumnsIntoTilesAndRowsIntoPairs) {
  const ShardLayout layout = Made({20, 300}, 2, {0, 1}, {{8, 128}, {2, 1}});
  EXPECT_EQ(DigitsOf(layout, 0), (Digits{{8, 3 * 2048}, {2, 512}, {1, 2}}));
  EXPECT_EQ(DigitsOf(layout, 1), (Digits{{128, 2048}, {1, 4}}));
  EXPECT_EQ(layout.nbytes(), 24 * 384 * 2);
}

TEST(ShardLayout, LeavesOutDigitsThatGoOnAsTheOthers) {
  // One column of tiles: rows are one behind the other through all of them.
  const ShardLayout layout = Made({24, 100}, 4, {0, 1}, {{8, 128}});
  EXPECT_EQ(DigitsOf(layout, 0), (Digits{{1, 512}}));
  EXPECT_EQ(DigitsOf(layout, 1), (Digits{{1, 4}}));
}

TEST(ShardLayout, TilesTheMinorMostDimensions) {
  const ShardLayout layout = Made({4, 8, 16}, 4, {1, 2, 0}, {{2, 2}});
  EXPECT_EQ(DigitsOf(layout, 1), (Digits{{1, 256}}));
  EXPECT_EQ(DigitsOf(layout, 2), (Digits{{2, 32}, {1, 8}}));
  EXPECT_EQ(DigitsOf(layout, 0), (Digits{{2, 16}, {1, 4}}));
}

TEST(ShardLayout, TakesAVectorInATileOfTwoDimensionsAsOneRow) {
  const ShardLayout layout = Made({300}, 4, {0}, {{8, 128}});
  EXPECT_EQ(DigitsOf(layout, 0), (Digits{{128, 4096}, {1, 4}}));
  EXPECT_EQ(layout.nbytes(), 8 * 384 * 4);
}

TEST(ShardLayout, CountsIndicesNotPaddingOfTilesWithinTiles) {
  // Every element is padded to a tile of two.
  const ShardLayout layout = Made({3}, 1, {0}, {{1}, {2}});
  EXPECT_EQ(DigitsOf(layout, 0), (Digits{{1, 2}}));
  EXPECT_EQ(layout.nbytes(), 6);
}

TEST(ShardLayout, FitsBoxesOfItsExtentsAlone) {
  const ShardLayout layout = Made({4, 8}, 4, {0, 1}, {});
  const std::vector<int64_t> fits = {4, 8, 0, 8}, longer = {4, 8, 0, 9}, flat = {0, 4};
  EXPECT_TRUE(layout.Fits(fits, 4));
  EXPECT_FALSE(layout.Fits(fits, 2));
  EXPECT_FALSE(layout.Fits(longer, 4));
  EXPECT_FALSE(layout.Fits(flat, 4));
}

}  // namespace
}  // namespace tsr

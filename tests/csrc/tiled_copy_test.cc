#include "tiled_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace tsr {
namespace {

using Box = std::vector<int64_t>;
using Tiles = std::vector<std::vector<int64_t>>;

struct Shard {
  Box box;
  ShardLayout layout;
  std::vector<uint8_t> memory;
};

Shard Made(const Box& box, int64_t itemsize, const std::vector<int64_t>& major_to_minor,
           const Tiles& tiles) {
  Shard shard{box, {}, {}};
  std::vector<int64_t> extents;
  for (int dim = 0; dim < RankOf(box); ++dim) extents.push_back(ExtentOf(box, dim));
  const Status status = ShardLayout::Make(extents, itemsize, major_to_minor, tiles, &shard.layout);
  EXPECT_TRUE(status.ok()) << status.message();
  shard.memory.resize(static_cast<size_t>(shard.layout.nbytes()));
  return shard;
}

// Where an element lies, digit by digit.
int64_t PlaceOf(const Shard& shard, const std::vector<int64_t>& element) {
  int64_t place = 0;
  for (size_t dim = 0; dim < element.size(); ++dim) {
    int64_t index = element[dim] - shard.box[2 * dim];
    for (const Digit& digit : shard.layout.digits(static_cast<int>(dim))) {
      place += index / digit.weight * digit.stride;
      index %= digit.weight;
    }
  }
  return place;
}

// Copies `box` element by element, too, and expects every byte of the sink to be the same.
void ExpectCopied(const Shard& from, Shard to, const Box& box, int64_t itemsize) {
  std::mt19937 random(5);
  std::vector<uint8_t> source(from.memory.size());
  for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
  for (uint8_t& byte : to.memory) byte = static_cast<uint8_t>(random());
  std::vector<uint8_t> expected = to.memory;
  std::vector<int64_t> element(box.size() / 2);
  for (size_t dim = 0; dim < element.size(); ++dim) element[dim] = box[2 * dim];
  for (int64_t left = VolumeOf(box); left > 0; --left) {
    std::memcpy(&expected[static_cast<size_t>(PlaceOf(to, element))],
                &source[static_cast<size_t>(PlaceOf(from, element))],
                static_cast<size_t>(itemsize));
    for (size_t dim = element.size(); dim-- > 0;) {
      if (++element[dim] < box[2 * dim + 1]) break;
      element[dim] = box[2 * dim];
    }
  }
  CopyTiled(Op(), itemsize, box, {from.box, source.data(), &from.layout},
            {to.box, to.memory.data(), &to.layout}, Stores::kPastCache);
  EXPECT_EQ(to.memory, expected);
}

TEST(CopyTiled, MovesHeadsWholeTilesAndTails) {
  for (const int64_t itemsize : {1, 2, 4}) {
    const Tiles tiles = {{8, 16}, {4 / itemsize, 1}};
    const Shard tiled = Made({0, 30, 0, 70}, itemsize, {0, 1}, tiles);
    const Shard rows = Made({0, 30, 0, 70}, itemsize, {0, 1}, {});
    for (const Box& box : {Box{0, 30, 0, 70}, {3, 27, 5, 66}, {8, 16, 16, 32}, {9, 10, 17, 18}}) {
      ExpectCopied(tiled, rows, box, itemsize);
      ExpectCopied(rows, tiled, box, itemsize);
      ExpectCopied(tiled, tiled, box, itemsize);
    }
  }
}

TEST(CopyTiled, MovesTilesThatBeginAtOtherIndices) {
  // Rows 8 and 40 begin a tile of either shard; row 3 of the last begins one within them.
  const Shard from = Made({0, 64, 0, 48}, 2, {0, 1}, {{8, 16}, {2, 1}});
  const Box box = {9, 47, 17, 48};
  ExpectCopied(from, Made({8, 48, 16, 48}, 2, {0, 1}, {{8, 16}, {2, 1}}), box, 2);
  ExpectCopied(from, Made({8, 48, 16, 48}, 2, {0, 1}, {{16, 16}, {2, 1}}), box, 2);
  ExpectCopied(from, Made({0, 64, 0, 48}, 2, {1, 0}, {{3, 5}}), box, 2);
  ExpectCopied(from, Made({3, 48, 1, 48}, 2, {0, 1}, {{8, 16}, {2, 1}}), box, 2);
}

TEST(CopyTiled, MovesMoreThanItsBufferHolds) {
  const Box box = {0, 200, 0, 500};
  ExpectCopied(Made(box, 4, {0, 1}, {{8, 128}}), Made(box, 4, {0, 1}, {{3, 100}}), box, 4);
}

TEST(CopyTiled, MovesTheOneElementOfRankZero) {
  ExpectCopied(Made({}, 4, {}, {{8, 128}}), Made({}, 4, {}, {}), {}, 4);
}

TEST(CopyTiled, CastsWhatItMoves) {
  const Box box = {0, 3, 0, 5};
  Shard from = Made(box, 4, {0, 1}, {{2, 2}}), to = Made(box, 2, {0, 1}, {{2, 4}, {2, 1}});
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 5; ++column) {
      const float value = static_cast<float>(10 * row + column);
      std::memcpy(&from.memory[static_cast<size_t>(PlaceOf(from, {row, column}))], &value, 4);
    }
  }
  CopyTiled(Op::Cast(FloatKind::kF32, FloatKind::kBF16), 4, box,
            {box, from.memory.data(), &from.layout}, {box, to.memory.data(), &to.layout},
            Stores::kCached);
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 5; ++column) {
      const float value = static_cast<float>(10 * row + column);
      uint16_t found;
      std::memcpy(&found, &to.memory[static_cast<size_t>(PlaceOf(to, {row, column}))], 2);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      EXPECT_EQ(found, bits >> 16) << row << ", " << column;
    }
  }
}

}  // namespace
}  // namespace tsr

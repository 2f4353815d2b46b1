#include "box_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

namespace tsr {
namespace {

using Box = std::vector<int64_t>;

TEST(CopyCommon, MovesWhatBothBoxesHoldAndNothingElse) {
  // Rows 2 to 4 of a column-major source, of which the sink takes the last column.
  const Box source_box = {2, 5, 4, 6}, sink_box = {3, 9, 5, 8}, strides = {2, 6};
  std::vector<uint16_t> source(6);
  std::iota(source.begin(), source.end(), uint16_t{1});
  std::vector<uint16_t> sink(18, 0);
  CopyCommon(Op(), 2, {source_box, reinterpret_cast<const uint8_t*>(source.data()), strides},
             {sink_box, reinterpret_cast<uint8_t*>(sink.data())}, Stores::kPastCache);
  std::vector<uint16_t> expected(18, 0);
  expected[0] = source[4];
  expected[3] = source[5];
  EXPECT_EQ(sink, expected);
}

TEST(CopyCommon, CastsIntoElementsOfTheSinksSize) {
  const Box source_box = {0, 2, 0, 4}, sink_box = {1, 2, 2, 4}, strides = {16, 4};
  const std::vector<float> source = {0, 0, 0, 0, 0, 0, 1.0f, -2.0f};
  std::vector<uint16_t> sink(2, 0);
  CopyCommon(Op::Cast(FloatKind::kF32, FloatKind::kBF16), 4,
             {source_box, reinterpret_cast<const uint8_t*>(source.data()), strides},
             {sink_box, reinterpret_cast<uint8_t*>(sink.data())}, Stores::kPastCache);
  EXPECT_EQ(sink, (std::vector<uint16_t>{0x3F80, 0xC000}));
}

TEST(CopyCommon, LeavesASinkAloneThatHasNothingOfTheSource) {
  const Box source_box = {0, 2}, sink_box = {2, 4}, strides = {1};
  const std::vector<uint8_t> source = {1, 2};
  std::vector<uint8_t> sink = {7, 7};
  CopyCommon(Op(), 1, {source_box, source.data(), strides}, {sink_box, sink.data()},
             Stores::kCached);
  EXPECT_EQ(sink, (std::vector<uint8_t>{7, 7}));
}

TEST(CopyCommon, MovesTheOneElementOfRankZero) {
  const uint32_t source = 5;
  uint32_t sink = 0;
  CopyCommon(Op(), 4, {{}, reinterpret_cast<const uint8_t*>(&source), {}},
             {{}, reinterpret_cast<uint8_t*>(&sink)}, Stores::kPastCache);
  EXPECT_EQ(sink, 5u);
}

}  // namespace
}  // namespace tsr

#include "plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace tsr {
namespace {

constexpr int64_t kHuge = int64_t{1} << 62;

// Boxes that process `b`, or all of `holders`, hold.
BoxLayout Layout(std::vector<int64_t> shape, std::vector<std::vector<int64_t>> boxes,
                 std::vector<uint32_t> holders = {}) {
  BoxLayout layout{std::move(shape), {}, {0}, {}};
  for (uint32_t b = 0; b < boxes.size(); ++b) {
    layout.boxes.insert(layout.boxes.end(), boxes[b].begin(), boxes[b].end());
    if (holders.empty()) {
      layout.holders.push_back(b);
    } else {
      layout.holders.insert(layout.holders.end(), holders.begin(), holders.end());
    }
    layout.holder_offsets.push_back(static_cast<uint32_t>(layout.holders.size()));
  }
  return layout;
}

LeafPair Copy(uint32_t itemsize = 4) { return {0, 0, 0, 1, itemsize, itemsize, Op()}; }

PlanInput Input(BoxLayout source, BoxLayout sink, LeafPair pair = Copy(),
                int64_t chunk_nbytes = 1 << 20) {
  return {{std::move(source), std::move(sink)}, {pair}, 0, chunk_nbytes};
}

Plan MakeOrDie(PlanInput input) {
  Plan plan;
  const Status status = MakePlan(std::move(input), &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

void ExpectFails(PlanInput input, Code code, const std::string& part) {
  Plan plan;
  const Status status = MakePlan(std::move(input), &plan);
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

std::vector<std::string> BoxesOf(const Plan& plan) {
  std::vector<std::string> boxes;
  for (const Region& region : plan.regions) boxes.push_back(FormatBox(plan.region_box(region)));
  return boxes;
}

TEST(MakePlan, ReadsWhatBothSidesShare) {
  const Plan plan = MakeOrDie(Input(Layout({8}, {{0, 4}, {4, 8}}), Layout({8}, {{2, 6}})));
  EXPECT_EQ(BoxesOf(plan), (std::vector<std::string>{"[2:4]", "[4:6]"}));
  EXPECT_EQ(plan.sources.size(), 2u);
  EXPECT_EQ(plan.nbytes, 16u);
  EXPECT_EQ(plan.wire_nbytes, 16u);
}

TEST(MakePlan, TakesBoxesThatFormNoGrid) {
  // A pinwheel: no line cuts it into two.
  const Plan plan = MakeOrDie(
      Input(Layout({3, 3}, {{0, 1, 0, 2}, {0, 2, 2, 3}, {2, 3, 1, 3}, {1, 3, 0, 1}, {1, 2, 1, 2}}),
            Layout({3, 3}, {{0, 3, 0, 3}})));
  EXPECT_EQ(plan.regions.size(), 5u);
  EXPECT_EQ(plan.nbytes, 36u);
}

TEST(MakePlan, JoinsSinkBoxesThatTouchAndNoOthers) {
  const Plan plan =
      MakeOrDie(Input(Layout({2, 8}, {{0, 2, 0, 8}}),
                      Layout({2, 8}, {{0, 2, 0, 2}, {0, 1, 2, 4}, {1, 2, 2, 4}, {0, 2, 6, 8}})));
  EXPECT_EQ(BoxesOf(plan), (std::vector<std::string>{"[0:2, 0:4]", "[0:2, 6:8]"}));
  EXPECT_EQ(plan.regions[0].num_placements, 3u);
}

TEST(MakePlan, SharesBoxesAmongPairsOfTheSameLayouts) {
  PlanInput input = Input(Layout({8}, {{0, 8}}), Layout({8}, {{0, 8}}));
  input.pairs.push_back(Copy());
  input.pairs[1].source_leaf = input.pairs[1].sink_leaf = 1;
  const Plan plan = MakeOrDie(std::move(input));
  ASSERT_EQ(plan.regions.size(), 2u);
  EXPECT_EQ(plan.regions[0].box_offset, plan.regions[1].box_offset);
}

TEST(MakePlan, ReadsLeavesInTheOrderOfTheSource) {
  PlanInput input = Input(Layout({8}, {{0, 8}}), Layout({8}, {{0, 8}}));
  input.pairs.push_back(Copy());
  input.pairs[0].source_leaf = 5;
  input.pairs[1].sink_leaf = 1;
  const Plan plan = MakeOrDie(std::move(input));
  EXPECT_EQ(plan.regions[0].pair, 1u);
  EXPECT_EQ(plan.regions[1].pair, 0u);
}

TEST(MakePlan, HoldsAtMost4096RegionsInAChunk) {
  PlanInput input = Input(Layout({1}, {{0, 1}}), Layout({1}, {{0, 1}}));
  for (uint32_t i = 1; i < 5000; ++i) {
    input.pairs.push_back(Copy());
    input.pairs[i].source_leaf = input.pairs[i].sink_leaf = i;
  }
  const Plan plan = MakeOrDie(std::move(input));
  ASSERT_EQ(plan.chunks.size(), 2u);
  EXPECT_EQ(plan.chunks[0].num_regions, 4096u);
  EXPECT_EQ(plan.chunks[1].num_regions, 904u);
}

TEST(MakePlan, GivesAnElementLargerThanAChunkOneOfItsOwn) {
  const Plan plan =
      MakeOrDie(Input(Layout({3}, {{0, 3}}), Layout({3}, {{0, 3}}), Copy(16), /*chunk_nbytes=*/8));
  ASSERT_EQ(plan.chunks.size(), 3u);
  EXPECT_EQ(plan.chunks[0].nbytes, 16u);
}

TEST(MakePlan, CutsALeafAboveFourGiB) {
  const int64_t rows = int64_t{5} << 30;
  const Plan plan =
      MakeOrDie(Input(Layout({rows}, {{0, rows}}), Layout({rows}, {{0, rows}}), Copy(1), 64 << 20));
  EXPECT_EQ(plan.chunks.size(), 80u);
  EXPECT_EQ(plan.wire_nbytes, static_cast<uint64_t>(rows));
}

TEST(MakePlan, NamesWhatNoSourceHolds) {
  ExpectFails(Input(Layout({8, 8}, {{0, 8, 0, 3}, {0, 5, 3, 8}}), Layout({8, 8}, {{4, 8, 4, 8}})),
              Code::kPlan, "pair 0: sink box 0 [4:8, 4:8] lacks [5:8, 4:8]");
}

TEST(MakePlan, RefusesLayoutsThatAreNotSane) {
  const BoxLayout whole = Layout({8}, {{0, 8}});
  ExpectFails(Input(Layout({8}, {{0, 5}, {4, 8}}), whole), Code::kPlan, "layout 0: box 0 [0:5]");
  ExpectFails(Input(Layout({8}, {{0, 8}, {0, 8}}), whole), Code::kPlan, "overlaps box 1 [0:8]");
  ExpectFails(Input(whole, Layout({8}, {{0, 9}})), Code::kPlan, "layout 1: box 0 [0:9]");
  ExpectFails(Input(Layout({8}, {{5, 3}}), whole), Code::kPlan, "is not within the shape");
  ExpectFails(Input(Layout({}, {{}, {}}), Layout({}, {{}})), Code::kPlan, "overlaps");
  ExpectFails(Input(Layout({kHuge, 4}, {{0, 1, 0, 1}}), whole), Code::kInvalid,
              "too many elements");
  ExpectFails(Input(Layout({8}, {{0, 8}}, {3, 3}), whole), Code::kInvalid, "do not ascend");
  BoxLayout unheld = whole;
  unheld.holder_offsets = {0, 0};
  unheld.holders.clear();
  ExpectFails(Input(unheld, whole), Code::kPlan, "has no holder");
  BoxLayout ragged = whole;
  ragged.boxes.pop_back();
  ExpectFails(Input(ragged, whole), Code::kInvalid, "number of boxes");
  BoxLayout backward = Layout({8}, {{0, 4}, {4, 8}});
  backward.holder_offsets = {0, 7, 2};
  ExpectFails(Input(backward, whole), Code::kInvalid, "does not divide holders");
  BoxLayout none = whole;
  none.holder_offsets.clear();
  ExpectFails(Input(none, whole), Code::kInvalid, "holder_offsets");
  BoxLayout deep;
  deep.shape.assign(33, 1);
  ExpectFails(Input(deep, whole), Code::kInvalid, "rank 33");
}

TEST(MakePlan, RefusesPairsThatContradictThemselves) {
  const BoxLayout whole = Layout({8}, {{0, 8}});
  const auto with = [&](const std::function<void(PlanInput*)>& change) {
    PlanInput input = Input(whole, whole);
    change(&input);
    return input;
  };
  ExpectFails(with([](PlanInput* in) { in->pairs[0].sink_layout = 2; }), Code::kInvalid,
              "pair 0: no such layout");
  ExpectFails(with([](PlanInput* in) { in->pairs[0].wire_itemsize = 2; }), Code::kInvalid,
              "itemsizes");
  ExpectFails(with([](PlanInput* in) { in->pairs[0].op = Op(0x77); }), Code::kInvalid, "op");
  ExpectFails(
      with([](PlanInput* in) { in->pairs[0].op = Op::Cast(FloatKind::kF32, FloatKind::kBF16); }),
      Code::kInvalid, "op");
  ExpectFails(with([](PlanInput* in) { in->pairs.push_back(in->pairs[0]); }), Code::kPlan,
              "sink leaf 0 is in two pairs");
  ExpectFails(with([](PlanInput* in) { in->chunk_nbytes = 0; }), Code::kInvalid, "chunk_nbytes");
  ExpectFails(with([](PlanInput* in) { in->chunk_nbytes = int64_t{1} << 32; }), Code::kInvalid,
              "chunk_nbytes");
  ExpectFails(Input(whole, Layout({9}, {{0, 9}})), Code::kInvalid, "differ in shape");
  ExpectFails(Input(Layout({kHuge}, {{0, 1}}), Layout({kHuge}, {{0, 1}})), Code::kInvalid,
              "too many bytes");
  ExpectFails(
      Input(Layout({1 << 30}, {{0, 1 << 30}}), Layout({1 << 30}, {{0, 1 << 30}}), Copy(1), 1),
      Code::kInvalid, "too small");
}

TEST(MakePlan, CastsCountTheBytesOfTheWire) {
  const LeafPair cast{0, 0, 0, 1, 4, 2, Op::Cast(FloatKind::kF32, FloatKind::kBF16)};
  EXPECT_EQ(MakeOrDie(Input(Layout({8}, {{0, 8}}), Layout({8}, {{0, 8}}), cast)).wire_nbytes, 16u);
}

}  // namespace
}  // namespace tsr

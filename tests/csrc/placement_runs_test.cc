#include "placement_runs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace tsr {
namespace {

using Box = std::vector<int64_t>;

// Elements of one sink box, and their place in the leaf as the bytes of uint32 that end up there.
struct Sink {
  Box box;
  std::vector<uint32_t> elements;

  explicit Sink(Box sink_box) : box(std::move(sink_box)) {
    elements.assign(static_cast<size_t>(VolumeOf(box)), 0);
  }
  DenseBox dense() { return {box, reinterpret_cast<uint8_t*>(elements.data())}; }
};

// What lies at (row, column) of the leaf.
uint32_t ElementAt(int64_t row, int64_t column) {
  return static_cast<uint32_t>(1000 * row + column + 1);
}

std::vector<uint32_t> ElementsOf(BoxView box, BoxView within) {
  std::vector<uint32_t> elements;
  for (int64_t row = StartOf(box, 0); row < StopOf(box, 0); ++row) {
    for (int64_t column = StartOf(box, 1); column < StopOf(box, 1); ++column) {
      const Box element = {row, row + 1, column, column + 1};
      elements.push_back(Contains(within, element) ? ElementAt(row, column) : 0);
    }
  }
  return elements;
}

TEST(PlacementRuns, GivesEveryByteOfARegionToItsSinkBoxInOrder) {
  const Box region = {2, 6, 10, 40};
  for (const int64_t room : {int64_t{1}, int64_t{7}, std::numeric_limits<int64_t>::max()}) {
    // Two above, three below with columns of their own; one is larger than the region.
    std::vector<Sink> sinks = {Sink({0, 3, 0, 25}), Sink({0, 3, 25, 50}), Sink({3, 8, 10, 11}),
                               Sink({3, 6, 11, 30}), Sink({3, 7, 30, 40})};
    PlacementRuns runs;
    runs.Start(region, 4);
    for (Sink& sink : sinks) runs.Add(sink.dense());
    EXPECT_EQ(runs.min_run_nbytes(), 4);
    EXPECT_EQ(runs.one_run(), nullptr);

    const std::vector<uint32_t> wire = ElementsOf(region, region);
    int64_t offset = 0;
    while (!runs.done()) {
      const PlacementRuns::Run run = runs.Take(room);
      ASSERT_EQ(run.wire_offset, offset);
      ASSERT_GT(run.nbytes, 0);
      ASSERT_LE(run.nbytes, room);
      std::copy_n(reinterpret_cast<const uint8_t*>(wire.data()) + offset, run.nbytes, run.data);
      offset += run.nbytes;
    }
    EXPECT_EQ(offset, VolumeOf(region) * 4);
    for (const Sink& sink : sinks) EXPECT_EQ(sink.elements, ElementsOf(sink.box, region));
  }
}

TEST(PlacementRuns, OneBoxThatTakesTheRegionWholeIsOneRun) {
  const Box region = {2, 4, 0, 8};
  Sink sink({0, 10, 0, 8});
  Sink beside({4, 6, 0, 8});
  PlacementRuns runs;
  runs.Start(region, 4);
  runs.Add(beside.dense());
  runs.Add(sink.dense());
  EXPECT_EQ(runs.one_run(), sink.dense().base + 2 * 8 * 4);
  const PlacementRuns::Run run = runs.Take(1000);
  EXPECT_EQ(run.nbytes, 64);
  EXPECT_EQ(run.data, sink.dense().base + 2 * 8 * 4);
  EXPECT_TRUE(runs.done());
}

}  // namespace
}  // namespace tsr

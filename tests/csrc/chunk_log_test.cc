// What a log keeps of streams and their chunks.
#include "chunk_log.h"

#include <gtest/gtest.h>

namespace tsr {
namespace {

ChunkEvent Event(uint64_t chunk) {
  ChunkEvent event;
  event.chunk = chunk;
  return event;
}

TEST(ChunkLogTest, EventsAreTakenOnceAndInOrder) {
  ChunkLog log;
  ChunkTrack first(&log, "a");
  ChunkTrack second(&log, "a");
  ChunkTrack other(&log, "b");
  first.Add(Event(0));
  other.Add(Event(1));
  second.Add(Event(2));
  uint64_t num_dropped = 1;
  const ChunkLog::Events events = log.Take(&num_dropped);
  EXPECT_EQ(num_dropped, 0u);
  ASSERT_EQ(events.size(), 3u);
  const std::vector<std::pair<std::string, int>> expected = {{"a", 1}, {"b", 1}, {"a", 2}};
  for (uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(events[i].first->rail, expected[i].first);
    EXPECT_EQ(events[i].first->number, expected[i].second);
    EXPECT_EQ(events[i].second.chunk, i);
  }
  EXPECT_TRUE(log.Take(&num_dropped).empty());
}

TEST(ChunkLogTest, StreamTakesThePlaceOfOneThatIsGone) {
  ChunkLog log;
  auto first = std::make_unique<ChunkTrack>(&log, "a");
  ChunkTrack second(&log, "a");
  first.reset();
  ChunkTrack third(&log, "a");
  third.Add(Event(0));
  uint64_t num_dropped;
  EXPECT_EQ(log.Take(&num_dropped).front().first->number, 1);
}

TEST(ChunkLogTest, EventsThatThereIsNoRoomForAreCounted) {
  ChunkLog log;
  ChunkTrack track(&log, "a");
  for (uint64_t i = 0; i < 100'000; ++i) track.Add(Event(i));
  uint64_t num_dropped;
  const ChunkLog::Events events = log.Take(&num_dropped);
  EXPECT_GT(num_dropped, 0u);
  EXPECT_EQ(events.size() + num_dropped, 100'000u);
  EXPECT_EQ(events.back().second.chunk, events.size() - 1);
  track.Add(Event(0));
  EXPECT_EQ(log.Take(&num_dropped).size(), 1u);
  EXPECT_EQ(num_dropped, 0u);
}

TEST(ChunkLogTest, WithoutALogNothingIsKept) { EXPECT_FALSE(ChunkTrack(nullptr, "a").on()); }

}  // namespace
}  // namespace tsr

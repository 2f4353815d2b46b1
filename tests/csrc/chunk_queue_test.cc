// How streams share the chunks of a source.
#include "chunk_queue.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

namespace tsr {
namespace {

constexpr char kFast = 'f';
constexpr char kSlow = 's';

// The slow stream has done one since it began, the fast one 50, all later.
void Warm(ChunkQueue* queue) {
  uint64_t chunk;
  ASSERT_TRUE(queue->Take(&kSlow, 0, &chunk));
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(queue->Take(&kFast, 0, &chunk));
    queue->Finish(&kFast);
  }
  queue->Finish(&kSlow);
}

TEST(ChunkQueueTest, EveryChunkIsTakenOnce) {
  ChunkQueue queue(5);
  std::set<uint64_t> taken;
  uint64_t chunk;
  while (queue.Take(&kFast, 0, &chunk)) taken.insert(chunk);
  EXPECT_EQ(taken, (std::set<uint64_t>{0, 1, 2, 3, 4}));
}

TEST(ChunkQueueTest, StreamTakesManyAheadWhileItsPaceIsNotKnown) {
  ChunkQueue queue(5);
  uint64_t chunk;
  for (size_t num_in_flight = 0; num_in_flight < 5; ++num_in_flight) {
    EXPECT_TRUE(queue.Take(&kSlow, num_in_flight, &chunk)) << num_in_flight;
  }
}

TEST(ChunkQueueTest, SlowStreamLeavesTheLastChunksToTheFastOne) {
  ChunkQueue queue(71);
  Warm(&queue);
  uint64_t chunk;
  EXPECT_FALSE(queue.Take(&kSlow, 1, &chunk));
  EXPECT_TRUE(queue.Take(&kFast, 2, &chunk));
}

TEST(ChunkQueueTest, SlowStreamWithoutAnythingInFlightTakesWhatIsLeft) {
  ChunkQueue queue(52);
  Warm(&queue);
  uint64_t chunk;
  EXPECT_TRUE(queue.Take(&kSlow, 0, &chunk));
  EXPECT_EQ(chunk, 51u);
  EXPECT_FALSE(queue.Take(&kSlow, 0, &chunk));
}

TEST(ChunkQueueTest, EqualStreamsStayBusyToTheLastChunk) {
  ChunkQueue queue(100);
  uint64_t chunk;
  for (int i = 0; i < 10; ++i) {
    for (const char* stream : {&kFast, &kSlow}) ASSERT_TRUE(queue.Take(stream, i, &chunk));
  }
  // Whoever began a little earlier must not seem slower for it.
  const Clock::time_point began = Clock::now();
  while (Clock::now() < began + std::chrono::milliseconds(20)) std::this_thread::yield();
  // Each has ten in flight, as on a long way, and asks for one more whenever one has come.
  for (int i = 0; i < 39; ++i) {
    for (const char* stream : {&kFast, &kSlow}) {
      queue.Finish(stream);
      EXPECT_TRUE(queue.Take(stream, 9, &chunk)) << i;
    }
  }
}

TEST(ChunkQueueTest, ChunkThatIsGivenBackIsTakenAgain) {
  ChunkQueue queue(1);
  uint64_t chunk;
  ASSERT_TRUE(queue.Take(&kSlow, 0, &chunk));
  EXPECT_FALSE(queue.Take(&kFast, 0, &chunk));
  queue.GiveBack(&kSlow, 0);
  EXPECT_TRUE(queue.Take(&kFast, 0, &chunk));
  EXPECT_EQ(queue.GiveBackCorrupt(&kFast, chunk), 1);
  EXPECT_TRUE(queue.Take(&kSlow, 0, &chunk));
  EXPECT_EQ(queue.GiveBackCorrupt(&kSlow, chunk), 2);
}

}  // namespace
}  // namespace tsr

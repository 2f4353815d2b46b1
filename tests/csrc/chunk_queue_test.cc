// How streams share the chunks of a source.
#include "chunk_queue.h"

#include <gtest/gtest.h>

#include <set>

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

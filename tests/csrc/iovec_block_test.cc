#include "iovec_block.h"

#include <gtest/gtest.h>

#include <vector>

namespace tsr {
namespace {

TEST(IovecBlock, ListsBytesThatTouchAsOne) {
  const std::vector<uint8_t> bytes(100);
  IovecBlock block;
  EXPECT_TRUE(block.Continues(&bytes[50]));
  block.Append(&bytes[0], 10);
  EXPECT_TRUE(block.Continues(&bytes[10]));
  EXPECT_FALSE(block.Continues(&bytes[11]));
  block.Append(&bytes[10], 20);
  block.Append(&bytes[40], 5);
  ASSERT_EQ(block.iov().size(), 2u);
  EXPECT_EQ(block.iov()[0].iov_base, &bytes[0]);
  EXPECT_EQ(block.iov()[0].iov_len, 30u);
  EXPECT_EQ(block.iov()[1].iov_base, &bytes[40]);
  EXPECT_EQ(block.nbytes(), 35);
}

TEST(IovecBlock, PacksUntilItsScratchIsFull) {
  IovecBlock block;
  uint8_t* const first = block.AppendPacked(10);
  EXPECT_EQ(block.AppendPacked(20), first + 10);
  EXPECT_EQ(block.iov().size(), 1u);
  EXPECT_EQ(block.packed_room_nbytes(), kPackedNbytes - 30);
  EXPECT_EQ(block.room_nbytes(), kBlockNbytes - 30);
  block.Clear();
  EXPECT_EQ(block.iov().size(), 0u);
  EXPECT_EQ(block.nbytes(), 0);
  EXPECT_EQ(block.AppendPacked(kPackedNbytes), first);
  EXPECT_EQ(block.packed_room_nbytes(), 0);
}

TEST(IovecBlock, IsFullByBytesOrByRunsAndStillTakesATrailer) {
  const std::vector<uint8_t> bytes(kBlockNbytes);
  IovecBlock block;
  block.Append(bytes.data(), kBlockNbytes);
  EXPECT_TRUE(block.full());
  block.Clear();
  size_t num_runs = 0;
  for (; !block.full(); ++num_runs) block.Append(&bytes[2 * num_runs], 1);
  EXPECT_GE(num_runs, static_cast<size_t>(kBlockNbytes / kMinRunNbytes));
  block.Append(&bytes[2 * num_runs], 1);
  EXPECT_EQ(block.iov().size(), num_runs + 1);
}

TEST(IovecBlockPool, KeepsAFewBlocksForTheNext) {
  IovecBlockPool pool;
  std::unique_ptr<IovecBlock> block = pool.Take();
  const IovecBlock* const same = block.get();
  EXPECT_EQ(pool.num_taken(), 1u);
  pool.GiveBack(std::move(block));
  EXPECT_EQ(pool.num_taken(), 0u);
  EXPECT_EQ(pool.Take().get(), same);
  pool.GiveBack(nullptr);
}

}  // namespace
}  // namespace tsr

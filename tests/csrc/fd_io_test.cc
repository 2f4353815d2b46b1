#include "fd_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <sys/socket.h>

#include <array>
#include <string>
#include <vector>

namespace tsr {
namespace {

class FdIoTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    ours_ = UniqueFd(fds[0]);
    theirs_ = UniqueFd(fds[1]);
  }

  UniqueFd ours_, theirs_;
};

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

TEST_F(FdIoTest, DescriptorIsClosedOnceByItsLastOwner) {
  const int fd = ours_.get();
  {
    UniqueFd moved(std::move(ours_));
    EXPECT_EQ(ours_.get(), -1);
    EXPECT_EQ(moved.get(), fd);
    ours_ = std::move(moved);
    EXPECT_TRUE(IsOpen(fd));
  }
  EXPECT_TRUE(IsOpen(fd));
  ours_.Close();
  EXPECT_FALSE(IsOpen(fd));
  ours_.Close();
}

TEST_F(FdIoTest, BytesGoFromEntriesToEntries) {
  std::string a = "abc", b = "defgh";
  iovec out[2] = {{a.data(), 3}, {b.data(), 5}};
  EXPECT_EQ(SendSome(ours_.get(), out, 2).nbytes(), 8u);
  std::string c(6, ' '), d(9, ' ');
  iovec in[2] = {{c.data(), 6}, {d.data(), 9}};
  EXPECT_EQ(ReceiveSome(theirs_.get(), in, 2).nbytes(), 8u);
  EXPECT_EQ(c + d.substr(0, 2), "abcdefgh");
}

TEST_F(FdIoTest, NothingToReceiveAndNoRoomToSendIsNoLoss) {
  std::vector<char> bytes(1 << 20);
  iovec iov{bytes.data(), bytes.size()};
  EXPECT_TRUE(ReceiveSome(ours_.get(), &iov, 1).would_block());
  IoResult result = SendSome(ours_.get(), &iov, 1);
  while (result.nbytes() > 0) result = SendSome(ours_.get(), &iov, 1);
  EXPECT_TRUE(result.would_block());
  EXPECT_FALSE(result.lost());
}

TEST_F(FdIoTest, ClosedPeerIsLossWithoutASignal) {
  theirs_.Close();
  char byte = 'x';
  iovec iov{&byte, 1};
  IoResult result = SendSome(ours_.get(), &iov, 1);
  EXPECT_TRUE(result.lost());
  EXPECT_EQ(result.reason(), "Broken pipe (EPIPE)");
  result = ReceiveSome(ours_.get(), &iov, 1);
  EXPECT_TRUE(result.lost());
  EXPECT_EQ(result.reason(), "closed by the peer");
}

TEST_F(FdIoTest, MoreEntriesThanTheKernelTakesAreLeftForTheNextCall) {
  std::vector<char> bytes(IOV_MAX + 5);
  std::vector<iovec> iov;
  for (char& byte : bytes) iov.push_back({&byte, 1});
  IovecCursor cursor(iov.data(), iov.size());
  size_t sent = 0;
  while (!cursor.done()) {
    const IoResult result = SendSome(ours_.get(), cursor.iov(), cursor.num_iov());
    ASSERT_GT(result.nbytes(), 0u);
    cursor.Advance(result.nbytes());
    sent += result.nbytes();
  }
  EXPECT_EQ(sent, bytes.size());
}

TEST(IovecCursorTest, AdvancesWithinAndAcrossEntries) {
  char bytes[10];
  iovec iov[4] = {{bytes, 3}, {bytes + 3, 0}, {bytes + 3, 5}, {bytes + 8, 2}};
  IovecCursor cursor(iov, 4);
  cursor.Advance(2);
  EXPECT_EQ(cursor.iov()->iov_base, bytes + 2);
  EXPECT_EQ(cursor.iov()->iov_len, 1u);
  cursor.Advance(1);
  EXPECT_EQ(cursor.iov()->iov_base, bytes + 3);
  EXPECT_EQ(cursor.num_iov(), 2u);
  cursor.Advance(6);
  EXPECT_EQ(cursor.iov()->iov_base, bytes + 9);
  EXPECT_FALSE(cursor.done());
  cursor.Advance(1);
  EXPECT_TRUE(cursor.done());
}

TEST(SetNonBlockingTest, NamesWhatWentWrong) {
  EXPECT_EQ(SetNonBlocking(-1).message(), "fcntl: Bad file descriptor");
}

}  // namespace
}  // namespace tsr

// Bytes through shared memory, and ends of it that lie.
#include "shared_pipe.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <cerrno>
#include <random>

#include "raw_peer.h"
#include "transfer.h"

namespace tsr {
namespace {

constexpr int64_t kRingNbytes = 128 << 10;  // of the source

std::string Refusal(const UniqueFd& memfd) {
  SharedRing ring;
  const Status status = SharedRing::Map(memfd.get(), &ring);
  EXPECT_EQ(status.code(), Code::kPeerLost);
  EXPECT_EQ(ring.data(), nullptr);
  return status.message();
}

TEST(SharedRingTest, WhatCouldBeCutOffIsRefused) {
  auto [socket, other] = ConnectedPair();
  EXPECT_EQ(Refusal(socket), "the ring of the peer is refused: it is no memfd");
  const UniqueFd zeros(::open("/dev/zero", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(Refusal(zeros), "the ring of the peer is refused: it is no memfd");
  for (const int seals : {0, F_SEAL_SEAL, F_SEAL_GROW | F_SEAL_SEAL, F_SEAL_SHRINK | F_SEAL_SEAL,
                          F_SEAL_SHRINK | F_SEAL_GROW}) {
    EXPECT_EQ(Refusal(MakeRing(192 << 10, seals)),
              "the ring of the peer is refused: it is not sealed");
  }
  const UniqueFd read_only = MakeRing(192 << 10, kRingSeals | F_SEAL_WRITE);
  EXPECT_EQ(Refusal(read_only), "the ring of the peer is refused: Operation not permitted");
}

TEST(SharedRingTest, FilesOfATmpfsMountAreRefused) {
  UniqueFd file(::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file.get() < 0) GTEST_SKIP() << "no tmpfs at /dev/shm";
  ASSERT_EQ(::ftruncate(file.get(), 192 << 10), 0);
  EXPECT_EQ(Refusal(file), "the ring of the peer is refused: it is not sealed");
}

TEST(SharedRingTest, HugePagesAreRefused) {
  const UniqueFd huge = MakeRing(2 << 20, kRingSeals, MFD_HUGETLB);
  if (huge.get() < 0) GTEST_SKIP() << "no huge pages here";
  EXPECT_EQ(Refusal(huge), "the ring of the peer is refused: it is not of ordinary pages");
}

TEST(SharedRingTest, SizesThatNoSinkMakesAreRefused) {
  for (const int64_t nbytes : {int64_t{0}, int64_t{64} << 10, (int64_t{192} << 10) + 1,
                               (int64_t{65} << 20), int64_t{1} << 40}) {
    EXPECT_EQ(Refusal(MakeRing(nbytes)),
              "the ring of the peer is refused: it has " + std::to_string(nbytes) + " bytes");
  }
}

// Two ends in one process; they map the memory each for itself, as two processes would.
class SharedPipeTest : public ::testing::Test {
 protected:
  std::unique_ptr<Pipe> Make(const UniqueFd& socket, End end) {
    SharedRing ring;
    EXPECT_OK(SharedRing::Map(memfd_.get(), &ring));
    return std::make_unique<SharedPipe>(socket.get(), std::move(ring), end, &stats_);
  }

  static IoResult Send(Pipe* pipe, std::string_view bytes) {
    std::string copy(bytes);
    iovec iov[2] = {{copy.data(), copy.size() / 3},
                    {copy.data() + copy.size() / 3, copy.size() - copy.size() / 3}};
    return pipe->Send(iov, 2, {});
  }
  static std::string Receive(Pipe* pipe, size_t most_nbytes, uint32_t* crc = nullptr) {
    std::string bytes(most_nbytes, '?');
    iovec iov[2] = {{bytes.data(), most_nbytes / 2},
                    {bytes.data() + most_nbytes / 2, most_nbytes - most_nbytes / 2}};
    const Summed summed = crc ? Summed{most_nbytes, crc, Stores::kPastCache} : Summed();
    return bytes.substr(0, pipe->Receive(iov, 2, summed).nbytes());
  }
  static IoResult ReceiveOne(Pipe* pipe) {
    uint8_t byte;
    iovec iov{&byte, 1};
    return pipe->Receive(&iov, 1, {});
  }

  // What an end that lies tells.
  void Tell(uint64_t written, uint64_t read) const {
    const uint64_t note[2] = {written, read};
    ASSERT_EQ(::send(sink_socket_.get(), note, sizeof note, 0), 16);
  }
  void ExpectBroken() {
    const IoResult result = ReceiveOne(source_.get());
    EXPECT_TRUE(result.lost());
    EXPECT_EQ(result.reason(), "Protocol error (EPROTO)");
  }

  void SetUp() override {
    std::tie(source_socket_, sink_socket_) = ConnectedPair();
    ASSERT_OK(SetNonBlocking(source_socket_.get()));
    ASSERT_OK(SetNonBlocking(sink_socket_.get()));
    source_ = Make(source_socket_, End::kSource);
    sink_ = Make(sink_socket_, End::kSink);
  }

  RailStats stats_;
  UniqueFd memfd_ = MakeRing(kSinkRingNbytes + kRingNbytes);
  UniqueFd source_socket_;
  UniqueFd sink_socket_;
  std::unique_ptr<Pipe> source_;
  std::unique_ptr<Pipe> sink_;
};

TEST_F(SharedPipeTest, BytesComeInTheirOrderBothWays) {
  std::mt19937 random(5);
  for (const auto& [from, to] :
       {std::pair(source_.get(), sink_.get()), std::pair(sink_.get(), source_.get())}) {
    std::string sent;
    std::string received;
    uint32_t crc = 0;
    while (sent.size() < 2'000'000) {
      std::string bytes(1 + random() % 90'000, ' ');
      for (char& byte : bytes) byte = static_cast<char>(random());
      const IoResult result = Send(from, bytes);
      EXPECT_FALSE(result.lost());
      sent += bytes.substr(0, result.nbytes());
      from->EndTurn(false, true);
      received += Receive(to, 1 + random() % 90'000, &crc);
      to->EndTurn(true, false);
    }
    for (std::string part; !(part = Receive(to, 1'000'000, &crc)).empty();) received += part;
    EXPECT_TRUE(received == sent);
    EXPECT_EQ(crc, Crc32c(0, sent.data(), sent.size()));
  }
}

TEST_F(SharedPipeTest, OnlyTheFrontIsSummed) {
  EXPECT_EQ(Send(source_.get(), "abcdef").nbytes(), 6u);
  source_->EndTurn(false, false);
  char bytes[6];
  iovec iov[2] = {{bytes, 5}, {bytes + 5, 1}};
  uint32_t crc = 0;
  EXPECT_EQ(sink_->Receive(iov, 2, {4, &crc}).nbytes(), 6u);
  EXPECT_EQ(std::string_view(bytes, 6), "abcdef");
  EXPECT_EQ(crc, Crc32c(0, "abcd", 4));
}

TEST_F(SharedPipeTest, ChecksumIsSentBehindTheBytesThatMakeIt) {
  std::string bytes(5 * kRingNbytes / 2, ' ');  // more than the ring takes at once
  std::mt19937 random(7);
  for (char& byte : bytes) byte = static_cast<char>(random());
  ASSERT_TRUE(source_->sums_sent());
  uint32_t crc = 0;
  iovec iov[2] = {{bytes.data(), bytes.size()}, {&crc, sizeof crc}};
  IovecCursor cursor(iov, 2);
  size_t unsummed_nbytes = bytes.size();
  std::string received;
  while (received.size() < bytes.size() + sizeof crc) {
    if (!cursor.done()) {
      const IoResult result =
          source_->Send(cursor.iov(), cursor.num_iov(), {unsummed_nbytes, &crc});
      ASSERT_FALSE(result.lost());
      cursor.Advance(result.nbytes());
      unsummed_nbytes -= std::min(unsummed_nbytes, result.nbytes());
    }
    source_->EndTurn(false, true);
    received += Receive(sink_.get(), 50'000);
    sink_->EndTurn(true, false);
  }
  EXPECT_EQ(received.substr(0, bytes.size()), bytes);
  const uint32_t expected = Crc32c(0, bytes.data(), bytes.size());
  EXPECT_EQ(crc, expected);
  EXPECT_EQ(std::memcmp(received.data() + bytes.size(), &expected, sizeof expected), 0);
}

TEST_F(SharedPipeTest, FullRingTakesNoMoreUntilHalfOfItIsRead) {
  const std::string bytes(kRingNbytes + 5, 'x');
  EXPECT_EQ(Send(source_.get(), bytes).nbytes(), static_cast<size_t>(kRingNbytes));
  EXPECT_TRUE(Send(source_.get(), bytes).would_block());
  EXPECT_EQ(source_->EndTurn(false, true), static_cast<uint32_t>(EPOLLIN));
  EXPECT_EQ(Receive(sink_.get(), 100).size(), 100u);
  EXPECT_EQ(sink_->EndTurn(true, false), static_cast<uint32_t>(EPOLLIN | EPOLLOUT));
  EXPECT_TRUE(Send(source_.get(), bytes).would_block());
  EXPECT_EQ(Receive(sink_.get(), kRingNbytes / 2).size(), static_cast<size_t>(kRingNbytes / 2));
  EXPECT_EQ(Send(source_.get(), bytes).nbytes(), static_cast<size_t>(kRingNbytes / 2 + 100));
}

TEST_F(SharedPipeTest, BytesAreThereWhenTheTurnHasEnded) {
  EXPECT_EQ(Send(source_.get(), "abc").nbytes(), 3u);
  EXPECT_TRUE(ReceiveOne(sink_.get()).would_block());
  source_->EndTurn(false, false);
  EXPECT_EQ(Receive(sink_.get(), 10), "abc");
  EXPECT_EQ(sink_->EndTurn(true, false), static_cast<uint32_t>(EPOLLIN));
}

TEST_F(SharedPipeTest, NoteThatFindsTheSocketFullIsSentLater) {
  const std::string junk(1 << 20, 'x');
  while (::send(source_socket_.get(), junk.data(), junk.size(), 0) > 0) continue;
  while (::send(source_socket_.get(), junk.data(), 16, 0) > 0) continue;
  EXPECT_EQ(Send(source_.get(), "abc").nbytes(), 3u);
  EXPECT_EQ(source_->EndTurn(true, false), static_cast<uint32_t>(EPOLLIN | EPOLLOUT));
  std::string drained(1 << 20, ' ');
  while (::recv(sink_socket_.get(), drained.data(), drained.size(), 0) > 0) continue;
  EXPECT_EQ(source_->EndTurn(true, false), static_cast<uint32_t>(EPOLLIN));
  EXPECT_EQ(Receive(sink_.get(), 10), "abc");
}

TEST_F(SharedPipeTest, WhatCameBeforeTheEndIsReceived) {
  EXPECT_EQ(Send(source_.get(), "abc").nbytes(), 3u);
  source_->EndTurn(false, false);
  source_socket_.Close();
  EXPECT_EQ(Receive(sink_.get(), 2), "ab");
  EXPECT_EQ(Receive(sink_.get(), 2), "c");
  const IoResult result = ReceiveOne(sink_.get());
  EXPECT_TRUE(result.lost());
  EXPECT_EQ(result.reason(), "closed by the peer");
}

TEST_F(SharedPipeTest, SendingToNobodyIsALoss) {
  sink_socket_.Close();
  EXPECT_TRUE(Send(source_.get(), std::string(kRingNbytes, 'x')).lost());
}

TEST_F(SharedPipeTest, NotesComeInParts) {
  const uint64_t note[2] = {3, 0};
  const auto* bytes = reinterpret_cast<const char*>(note);
  ASSERT_EQ(::send(sink_socket_.get(), bytes, 5, 0), 5);
  EXPECT_TRUE(ReceiveOne(source_.get()).would_block());
  ASSERT_EQ(::send(sink_socket_.get(), bytes + 5, 11, 0), 11);
  EXPECT_EQ(Receive(source_.get(), 10).size(), 3u);
}

TEST_F(SharedPipeTest, MoreWrittenThanTheRingHoldsIsALie) {
  Tell(kSinkRingNbytes + 1, 0);
  ExpectBroken();
  EXPECT_TRUE(ReceiveOne(source_.get()).lost());
}

TEST_F(SharedPipeTest, MoreReadThanWasWrittenIsALie) {
  EXPECT_EQ(Send(source_.get(), "abc").nbytes(), 3u);
  Tell(0, 4);
  ExpectBroken();
}

TEST_F(SharedPipeTest, CountsThatGoBackAreALie) {
  Tell(2, 0);
  EXPECT_EQ(Receive(source_.get(), 10).size(), 2u);
  Tell(1, 0);
  ExpectBroken();
}

TEST_F(SharedPipeTest, CountsThatOverflowAreALie) {
  Tell(~uint64_t{0}, 0);
  ExpectBroken();
}

}  // namespace
}  // namespace tsr

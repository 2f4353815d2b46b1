// What an exporter does with sinks that are slow, wrong or hostile.
#include "source_stream.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include "digest.h"
#include "digest_request.h"
#include "raw_peer.h"
#include "transfer.h"

namespace tsr {
namespace {

std::string Encoded(const Frame& frame) {
  uint8_t bytes[kFrameNbytes];
  EncodeFrame(frame, bytes);
  return std::string(bytes, bytes + kFrameNbytes);
}

// A stream whose turns a test takes, instead of its worker's loop.
struct StreamByHand {
  StreamByHand(const ShardDirectory* directory, PublishedVersions* versions)
      : worker{.directory = directory,
               .versions = versions,
               .tables = &tables,
               .max_chunk_nbytes = 1 << 20,
               .peer_timeout = std::chrono::seconds(20),
               .blocks = {},
               .loop = nullptr} {
    EXPECT_OK(EventLoop::Start(std::chrono::seconds(20), &worker.loop));
    auto [ours, theirs] = ConnectedPair();
    EXPECT_OK(SetNonBlocking(ours.get()));
    peer = std::make_unique<RawPeer>(std::move(theirs));
    auto pipe = std::make_unique<SocketPipe>(ours.get(), &stats);
    stream = std::make_unique<SourceStream>(std::move(ours), std::move(pipe), 7, "rail", &stats,
                                            nullptr, &worker);
  }

  SinkTables tables;
  RailStats stats;
  SourceWorker worker;
  std::unique_ptr<RawPeer> peer;
  std::unique_ptr<SourceStream> stream;
};

class SourceStreamTest : public ::testing::Test {
 protected:
  void Start(double peer_timeout_s = kTestTimeoutS) {
    exporter_ = MakeExporter(
        *transfer_.sources[0],
        {.num_workers = 1, .max_chunk_nbytes = 1 << 20, .peer_timeout_s = peer_timeout_s});
    ASSERT_OK(transfer_.Publish(exporter_.get(), 0, 1));
  }

  RawPeer Connect(uint64_t sink = 7) {
    auto [ours, theirs] = ConnectedPair();
    EXPECT_OK(exporter_->AddConnection({std::move(ours)}, sink, "rail"));
    return RawPeer(std::move(theirs));
  }

  Frame Upload(const RawPeer& peer) {
    const Frame frame{.kind = FrameKind::kTable, .table = id_, .nbytes = table_.size()};
    peer.Write(frame);
    peer.Write(table_);
    return peer.ReadFrame();
  }

  Frame Fetch(uint64_t chunk) const { return {FrameKind::kFetch, id_, 1, chunk}; }

  void ExpectChunk(const RawPeer& peer, uint64_t chunk) const {
    const Frame frame = peer.ReadFrame();
    ASSERT_EQ(frame.kind, FrameKind::kChunk);
    EXPECT_EQ(frame.chunk, chunk);
    ASSERT_EQ(frame.nbytes, transfer_.plan.chunks[chunk].nbytes);
    const std::vector<uint8_t> payload = peer.Read(frame.nbytes);
    const std::vector<uint8_t> trailer = peer.Read(kTrailerNbytes);
    ASSERT_EQ(trailer.size(), kTrailerNbytes);
    const uint32_t crc = Crc32c(0, payload.data(), payload.size());
    EXPECT_EQ(std::memcmp(&crc, trailer.data(), kTrailerNbytes), 0);
  }

  // Column-major, so that every block is packed.
  Transfer transfer_{{{.shape = {1200, 1000}, .column_major = true}}, 1, 1 << 20};
  std::string table_ = EncodeChunkTable(transfer_.plan, 0);
  uint32_t id_ = Crc32c(0, table_.data(), table_.size());
  std::unique_ptr<Exporter> exporter_;
};

TEST_F(SourceStreamTest, AnswersInTheOrderOfTheRequests) {
  Start();
  const RawPeer peer = Connect();
  EXPECT_EQ(Upload(peer).kind, FrameKind::kTableOk);
  peer.Write(Fetch(1));
  peer.Write(Frame{.kind = FrameKind::kPing});
  peer.Write(Fetch(0));
  ExpectChunk(peer, 1);
  EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kPong);
  ExpectChunk(peer, 0);
}

TEST_F(SourceStreamTest, EchoIsTheBytesThatFollowedTheRequest) {
  Start();
  const RawPeer peer = Connect();
  for (const size_t nbytes : {size_t{0}, size_t{1}, size_t{5000}, size_t{kMaxEchoNbytes}}) {
    std::string bytes(nbytes, 'x');
    for (size_t i = 0; i < nbytes; ++i) bytes[i] = static_cast<char>(i * 7);
    const Frame echo{.kind = FrameKind::kEcho, .table = 1, .chunk = nbytes, .nbytes = nbytes};
    peer.Write(Encoded(echo) + bytes + Encoded({.kind = FrameKind::kPing}));
    const Frame answer = peer.ReadFrame();
    EXPECT_EQ(answer.kind, FrameKind::kEchoIs);
    EXPECT_EQ(answer.chunk, nbytes);
    ASSERT_EQ(answer.nbytes, nbytes);
    EXPECT_EQ(peer.ReadText(answer), bytes);
    EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kPong);
  }
}

TEST_F(SourceStreamTest, FloodOfRequestsIsMetTurnByTurn) {
  // The worker's other streams wait for the end of a turn, as does whoever withdraws a version.
  const ShardDirectory& directory = transfer_.sources[0]->directory;
  PublishedVersions versions(&directory);
  StreamByHand by_hand(&directory, &versions);
  const RawPeer& peer = *by_hand.peer;
  SourceStream& stream = *by_hand.stream;
  std::string flood;
  for (int i = 0; i < 1000; ++i) flood += Encoded({FrameKind::kDone, id_, 1, 0});
  peer.Write(flood + std::string(kFrameNbytes, 'x'));  // what is no frame ends it
  int num_turns = 0;
  for (; !stream.closed(); ++num_turns) stream.OnReady(EPOLLIN);
  EXPECT_GT(num_turns, 5);
}

TEST_F(SourceStreamTest, MemoryThatChangesBeforeItIsSentDoesNotMatchItsChecksum) {
  Transfer transfer({{.shape = {400'000}, .itemsize = 1}}, 1, 1 << 20);  // one block
  const Transfer::Source& source = *transfer.sources[0];
  const std::string table = EncodeChunkTable(transfer.plan, 0);
  const uint32_t id = Crc32c(0, table.data(), table.size());
  PublishedVersions versions(&source.directory);
  ASSERT_OK(versions.Publish(1, source.addresses, source.strides));
  StreamByHand by_hand(&source.directory, &versions);
  const RawPeer& peer = *by_hand.peer;
  SourceStream& stream = *by_hand.stream;
  peer.Write(Encoded({.kind = FrameKind::kTable, .table = id, .nbytes = table.size()}) + table);
  stream.OnReady(EPOLLIN);
  EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kTableOk);
  peer.Write(Encoded({FrameKind::kFetch, id, 1, 0}));
  stream.OnReady(EPOLLIN);  // sums all of it, and sends what the socket takes
  ASSERT_TRUE(stream.Reads(1));
  transfer.sources[0]->shards[0].bytes.back() ^= 1;
  std::string received;
  while (received.size() < kFrameNbytes + 400'000 + kTrailerNbytes) {
    stream.OnReady(EPOLLOUT);
    char bytes[1 << 16];
    const ssize_t n = ::recv(peer.fd(), bytes, sizeof(bytes), MSG_DONTWAIT);
    ASSERT_GT(n, 0);
    received.append(bytes, static_cast<size_t>(n));
  }
  const char* payload = received.data() + kFrameNbytes;
  const uint32_t crc = Crc32c(0, payload, 400'000);
  EXPECT_NE(std::memcmp(&crc, payload + 400'000, kTrailerNbytes), 0);
}

// Asks for a digest by these bytes; the answer, or the text of an error.
Frame Ask(const RawPeer& peer, const std::string& bytes, uint64_t version = 1) {
  const uint32_t crc = Crc32c(0, bytes.data(), bytes.size());
  peer.Write(Frame{FrameKind::kDigest, crc, version, 0, bytes.size()});
  peer.Write(bytes);
  return peer.ReadFrame();
}

TEST_F(SourceStreamTest, DigestIsOfTheMemoryAsItIsNow) {
  Start();
  const RawPeer peer = Connect();
  const std::vector<int64_t> shape{1200, 1000};
  const std::vector<int64_t> box{100, 300, 7, 900};
  const DigestRequest request{0, 0, Op(), shape, box};
  ShardMemory& memory = transfer_.sources[0]->shards[0];
  for (int i = 0; i < 2; ++i) {
    const Frame answer = Ask(peer, EncodeDigestRequest(request));
    EXPECT_EQ(answer.kind, FrameKind::kDigestIs);
    EXPECT_EQ(answer.version, 1u);
    const uint8_t* const base =
        memory.bytes.data() + 100 * memory.strides[0] + 7 * memory.strides[1];
    EXPECT_EQ(answer.chunk, DigestOfBox(Op(), 2, shape, {box, base, memory.strides}));
    memory.bytes[100 * memory.strides[0] + 7 * memory.strides[1]] ^= 1;
  }
}

TEST_F(SourceStreamTest, DigestOfWhatIsNotHeldIsGone) {
  Start();
  const RawPeer peer = Connect();
  const std::string bytes = EncodeDigestRequest({0, 0, Op(), {1200, 1000}, {0, 1, 0, 1}});
  const Frame other = Ask(peer, bytes, 2);
  EXPECT_EQ(other.kind, FrameKind::kGone);
  EXPECT_EQ(peer.ReadText(other), "version 2 is not published here");
  const uint32_t leaves[] = {0};
  ASSERT_OK(exporter_->DropLeaves(1, leaves));
  const Frame dropped = Ask(peer, bytes);
  EXPECT_EQ(dropped.kind, FrameKind::kGone);
  EXPECT_EQ(peer.ReadText(dropped), "leaf 0 of version 1 is not held any more");
}

TEST_F(SourceStreamTest, DigestRequestsThatMakeNoSenseAreRefused) {
  Start();
  const RawPeer peer = Connect();
  const auto refused = [&](const std::string& bytes) {
    const Frame answer = Ask(peer, bytes);
    EXPECT_EQ(answer.kind, FrameKind::kInvalid);
    return peer.ReadText(answer);
  };
  const DigestRequest good{0, 0, Op(), {1200, 1000}, {0, 300, 0, 900}};
  const auto changed = [&](auto change) {
    DigestRequest request = good;
    change(&request);
    return refused(EncodeDigestRequest(request));
  };
  const std::string bytes = EncodeDigestRequest(good);
  EXPECT_EQ(refused(""), "digest request: it is shorter than its head");
  EXPECT_EQ(refused(bytes.substr(0, bytes.size() - 1)), "digest request: its length is wrong");
  EXPECT_EQ(refused(bytes.substr(0, 9) + "\1" + bytes.substr(10)),
            "digest request: its rank is not that of the shard");
  std::string reserved = bytes;
  reserved[10] = 1;
  EXPECT_EQ(refused(reserved), "digest request: a reserved field is not 0");
  EXPECT_EQ(changed([](DigestRequest* r) { r->box = 1; }),
            "digest request: this process does not hold box 1 of leaf 0");
  EXPECT_EQ(changed([](DigestRequest* r) { r->op = Op::Cast(FloatKind::kF32, FloatKind::kBF16); }),
            "digest request: its shard does not take its op");
  for (const auto& [start, stop] :
       {std::pair<int64_t, int64_t>{-1, 2}, {2, 2}, {3, 2}, {0, 1201}}) {
    EXPECT_EQ(changed([&](DigestRequest* r) { r->ranges = {start, stop, 0, 1}; }),
              "digest request: its box is not within the shard");
  }
  EXPECT_EQ(changed([](DigestRequest* r) { r->shape = {1200, 999}; }),
            "digest request: its shape is too small for the shard");
  EXPECT_EQ(changed([](DigestRequest* r) { r->ranges = {0, 1200, 0, 1000}; }),
            "digest request: its box is too large");
  // The stream goes on.
  EXPECT_EQ(Ask(peer, bytes).kind, FrameKind::kDigestIs);
}

TEST_F(SourceStreamTest, DigestRequestOfWhichABitFlippedEndsTheStream) {
  Start();
  const RawPeer peer = Connect();
  const std::string bytes = EncodeDigestRequest({0, 0, Op(), {1200, 1000}, {0, 1, 0, 1}});
  peer.Write(Frame{FrameKind::kDigest, 1, 1, 0, bytes.size()});
  peer.Write(bytes);
  EXPECT_TRUE(peer.Ended());
}

TEST_F(SourceStreamTest, ChunkHasNoChecksumWhereNoneIsWanted) {
  Start();
  const RawPeer peer = Connect();
  EXPECT_EQ(Upload(peer).kind, FrameKind::kTableOk);
  Frame fetch = Fetch(0);
  fetch.kind = FrameKind::kFetchUnsummed;
  peer.Write(fetch);
  EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kChunk);
  peer.Read(transfer_.plan.chunks[0].nbytes);
  EXPECT_EQ(peer.Read(kTrailerNbytes), std::vector<uint8_t>(kTrailerNbytes, 0));
  peer.Write(Fetch(1));
  ExpectChunk(peer, 1);
}

TEST_F(SourceStreamTest, WhatATurnLeavesIsMetInTheNext) {
  Start();
  const RawPeer peer = Connect();
  for (int num_pings = 0; num_pings < 70; ++num_pings) {
    std::string bytes;
    for (int i = 0; i < num_pings; ++i) bytes += Encoded({FrameKind::kPing});
    bytes += Encoded({.kind = FrameKind::kTable, .table = id_, .nbytes = table_.size()});
    peer.Write(bytes + table_);  // at once, so that it lies in the stream's own buffer
    for (int i = 0; i < num_pings; ++i) EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kPong);
    ASSERT_EQ(peer.ReadFrame().kind, FrameKind::kTableOk);
  }
}

TEST_F(SourceStreamTest, StalledSinksHoldUpNobodyAndLoseNoBytes) {
  // More streams in the middle of a packed block than a worker keeps blocks for.
  constexpr int kNumStalled = 40;
  Start();
  std::vector<RawPeer> stalled;
  for (int i = 0; i < kNumStalled; ++i) {
    stalled.push_back(Connect());
    if (i == 0) {
      EXPECT_EQ(Upload(stalled[0]).kind, FrameKind::kTableOk);
    }
    stalled.back().Write(Fetch(0));
    ASSERT_TRUE(stalled.back().Readable());
  }
  const RawPeer quick = Connect();
  quick.Write(Fetch(1));
  ExpectChunk(quick, 1);
  for (const RawPeer& peer : stalled) ExpectChunk(peer, 0);
}

TEST_F(SourceStreamTest, TableBelongsToOneSinkAndAllItsStreams) {
  Start();
  const RawPeer first = Connect(7);
  EXPECT_EQ(Upload(first).kind, FrameKind::kTableOk);
  const RawPeer second = Connect(7);
  second.Write(Fetch(0));
  ExpectChunk(second, 0);
  const RawPeer other = Connect(8);
  other.Write(Fetch(0));
  const Frame answer = other.ReadFrame();
  EXPECT_EQ(answer.kind, FrameKind::kNoTable);
  EXPECT_EQ(other.ReadText(answer), "no such table of this sink");
  EXPECT_EQ(Upload(other).kind, FrameKind::kTableOk);
}

TEST_F(SourceStreamTest, TableThatDoesNotMatchItsChecksumEndsTheStream) {
  Start();
  const RawPeer peer = Connect();
  peer.Write(Frame{.kind = FrameKind::kTable, .table = id_ + 1, .nbytes = table_.size()});
  peer.Write(table_);
  EXPECT_TRUE(peer.Ended());
}

TEST_F(SourceStreamTest, WrongTableIsRefusedAndTheStreamGoesOn) {
  Start();
  const RawPeer peer = Connect();
  const std::string right = std::exchange(table_, std::string(1000, 'x'));
  const uint32_t right_id = std::exchange(id_, Crc32c(0, table_.data(), table_.size()));
  Frame answer = Upload(peer);
  EXPECT_EQ(answer.kind, FrameKind::kInvalid);
  EXPECT_NE(peer.ReadText(answer), "");
  peer.Write(Fetch(0));
  answer = peer.ReadFrame();
  EXPECT_EQ(answer.kind, FrameKind::kNoTable);
  peer.ReadText(answer);

  table_ = right;
  id_ = right_id;
  EXPECT_EQ(Upload(peer).kind, FrameKind::kTableOk);
  peer.Write(Fetch(transfer_.plan.chunks.size()));
  answer = peer.ReadFrame();
  EXPECT_EQ(answer.kind, FrameKind::kInvalid);
  EXPECT_EQ(peer.ReadText(answer), "no such chunk in the table");
  peer.Write(Fetch(0));
  ExpectChunk(peer, 0);
}

TEST_F(SourceStreamTest, GarbageEndsItsStreamAlone) {
  Start();
  const RawPeer good = Connect();
  EXPECT_EQ(Upload(good).kind, FrameKind::kTableOk);
  const RawPeer garbage = Connect();
  garbage.Write(std::string(kFrameNbytes, 'x'));
  EXPECT_TRUE(garbage.Ended());
  const RawPeer reply = Connect();
  reply.Write(Frame{.kind = FrameKind::kChunk});
  EXPECT_TRUE(reply.Ended());
  const RawPeer oversized = Connect();
  oversized.Write(Frame{.kind = FrameKind::kTable, .nbytes = kMaxTableNbytes + 1});
  EXPECT_TRUE(oversized.Ended());
  good.Write(Fetch(0));
  ExpectChunk(good, 0);
}

TEST_F(SourceStreamTest, MadeUpDonesCountForNothing) {
  Start();
  const RawPeer peer = Connect();
  EXPECT_EQ(Upload(peer).kind, FrameKind::kTableOk);
  const auto done = [&](uint32_t table, uint64_t version, uint64_t chunk) {
    peer.Write(Frame{FrameKind::kDone, table, version, chunk});
  };
  done(id_, 1, 1 << 20);
  done(id_ + 1, 1, 0);
  done(id_, 99, 0);
  for (size_t i = 0; i < transfer_.plan.chunks.size(); ++i) done(id_, 1, 0);
  peer.Write(Frame{.kind = FrameKind::kPing});
  EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kPong);
  EXPECT_EQ(exporter_->FinishedLeaves(1, std::vector<uint64_t>{7}), std::vector<uint32_t>());
  for (size_t i = 0; i < transfer_.plan.chunks.size(); ++i) {
    // The same table once more changes nothing.
    EXPECT_EQ(Upload(peer).kind, FrameKind::kTableOk);
    done(id_, 1, i);
  }
  peer.Write(Frame{.kind = FrameKind::kPing});
  EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kPong);
  EXPECT_EQ(exporter_->FinishedLeaves(1, std::vector<uint64_t>{7}), std::vector<uint32_t>{0});
}

TEST_F(SourceStreamTest, SilentSinkIsClosed) {
  Start(/*peer_timeout_s=*/0.05);
  EXPECT_TRUE(Connect().Ended());
  const RawPeer stalled = Connect();
  EXPECT_EQ(Upload(stalled).kind, FrameKind::kTableOk);
  stalled.Write(Fetch(0));
  EXPECT_TRUE(stalled.Readable());
  while (true) {
    // It reads nothing, so the exporter gives it up before it has the chunk.
    uint64_t num_lost = 0;
    exporter_->stats().ForEach(
        [&](const std::string&, const RailStats& stats) { num_lost = stats.num_lost; });
    if (num_lost == 2) break;
    std::this_thread::yield();
  }
  EXPECT_TRUE(stalled.Read(transfer_.plan.chunks[0].nbytes).empty());
}

TEST_F(SourceStreamTest, PeerThatGoesInTheMiddleIsForgotten) {
  Start();
  RawPeer peer = Connect();
  EXPECT_EQ(Upload(peer).kind, FrameKind::kTableOk);
  peer.Write(Fetch(0));
  EXPECT_TRUE(peer.Readable());
  peer.Close();
  const RawPeer other = Connect();
  // The table is forgotten with the sink's last stream, if that is noticed before.
  EXPECT_EQ(Upload(other).kind, FrameKind::kTableOk);
  other.Write(Fetch(0));
  ExpectChunk(other, 0);
}

}  // namespace
}  // namespace tsr

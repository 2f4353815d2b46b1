// What a fetcher does with sources that are slow, wrong or hostile.
#include "sink_stream.h"

#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <thread>

#include "raw_peer.h"
#include "transfer.h"

namespace tsr {
namespace {

class SinkStreamTest : public ::testing::Test {
 protected:
  void Start(FetcherOptions options = {
                 .num_workers = 2, .window = 2, .peer_timeout_s = kTestTimeoutS}) {
    fetcher_ = MakeFetcher(transfer_.plan, options);
  }

  RawPeer Connect() {
    auto [ours, theirs] = ConnectedPair();
    EXPECT_OK(fetcher_->AddStream(0, {std::move(ours)}, "rail"));
    return RawPeer(std::move(theirs));
  }

  void Begin(uint64_t version = 1) {
    ASSERT_OK(fetcher_->Begin(version, transfer_.sink_addresses));
  }

  Status Wait(bool* done) { return fetcher_->Wait(Deadline::After(kTestTimeoutS), done); }

  void WaitUntilStreams(int num_streams) {
    while (fetcher_->NumStreams(0) != num_streams) std::this_thread::yield();
  }

  std::string LostReason() {
    std::string reason;
    fetcher_->ForEachSource([&](SourceLink& source) {
      std::lock_guard lock(source.mutex);
      reason = source.lost_reason;
    });
    return reason;
  }

  // Bytes of the chunk that `fetch` asks for: the leaf is one dense shard.
  std::string_view PayloadOf(const Frame& fetch) const {
    uint64_t offset = 0;
    for (uint64_t i = 0; i < fetch.chunk; ++i) offset += transfer_.plan.chunks[i].nbytes;
    return {reinterpret_cast<const char*>(transfer_.sources[0]->shards[0].bytes.data()) + offset,
            transfer_.plan.chunks[fetch.chunk].nbytes};
  }

  // Serves until the stream ends; DONEs and PINGs are met, too.
  void Serve(const RawPeer& peer) {
    for (;;) {
      const std::vector<uint8_t> bytes = peer.Read(kFrameNbytes);
      if (bytes.empty()) return;
      Frame frame;
      ASSERT_OK(
          DecodeFrame(std::span<const uint8_t, kFrameNbytes>(bytes.data(), kFrameNbytes), &frame));
      if (frame.kind == FrameKind::kFetch) peer.WriteChunk(frame, PayloadOf(frame));
      if (frame.kind == FrameKind::kPing) peer.Write(Frame{.kind = FrameKind::kPong});
    }
  }

  Transfer transfer_{{{.shape = {2'000'000}}}, 1, 400'000};  // no small chunks
  std::unique_ptr<Fetcher> fetcher_;
};

TEST_F(SinkStreamTest, AsksForNoChecksumsAndTellsNothingWhereItIsToldSo) {
  Start({.num_workers = 1,
         .window = 1,
         .peer_timeout_s = kTestTimeoutS,
         .checksums = false,
         .tells_done = false});
  RawPeer peer = Connect();
  peer.TakeTable();
  Begin();
  for (size_t i = 0; i < transfer_.plan.chunks.size(); ++i) {
    const Frame fetch = peer.ReadFrame();  // no DONE comes before the next one
    EXPECT_EQ(fetch.kind, FrameKind::kFetchUnsummed);
    peer.WriteChunk(fetch, PayloadOf(fetch), 0);
  }
  bool done = false;
  EXPECT_OK(Wait(&done));
  EXPECT_TRUE(done);
  fetcher_->End();
  EXPECT_TRUE(transfer_.SinkIsRight());
}

TEST_F(SinkStreamTest, DigestsOfALostStreamAreAskedForOnAnother) {
  Start({.num_workers = 1, .window = 2, .peer_timeout_s = kTestTimeoutS});
  RawPeer first = Connect();
  first.TakeTable();
  const DigestRequest request{0, 0, Op(), {2'000'000}, {0, 2'000'000}};
  ASSERT_OK(fetcher_->BeginDigests(5, {{request, request, request}}));
  EXPECT_EQ(first.ReadFrame().kind, FrameKind::kDigest);
  first.Close();
  WaitUntilStreams(0);
  const RawPeer second = Connect();
  for (int i = 0; i < 3; ++i) {
    Frame frame = second.ReadFrame();
    ASSERT_EQ(frame.kind, FrameKind::kDigest);
    second.Read(frame.nbytes);
    frame.kind = FrameKind::kDigestIs;
    frame.nbytes = 0;
    frame.chunk += 10;
    second.Write(frame);
  }
  bool done = false;
  EXPECT_OK(Wait(&done));
  EXPECT_TRUE(done);
  EXPECT_EQ(fetcher_->Digests(), (std::vector<std::vector<uint64_t>>{{10, 11, 12}}));
  fetcher_->End();
}

TEST_F(SinkStreamTest, LostStreamGivesItsChunksToTheOthers) {
  Start();
  RawPeer first = Connect();
  first.TakeTable();
  Begin();
  const Frame fetch = first.ReadFrame();
  EXPECT_EQ(fetch.kind, FrameKind::kFetch);
  EXPECT_EQ(first.ReadFrame().kind, FrameKind::kFetch);
  first.Write(Frame{FrameKind::kChunk, fetch.table, 1, fetch.chunk, PayloadOf(fetch).size()});
  first.Write(std::string(100, 'x'));
  first.Close();
  WaitUntilStreams(0);
  const RawPeer second = Connect();
  std::thread source([&] { Serve(second); });
  bool done = false;
  EXPECT_OK(Wait(&done));
  EXPECT_TRUE(done);
  fetcher_->End();
  EXPECT_TRUE(transfer_.SinkIsRight());
  EXPECT_EQ(LostReason(), "closed by the peer");
  fetcher_->Close();
  source.join();
}

TEST_F(SinkStreamTest, SilentStreamGivesItsChunksToThoseThatAreNot) {
  Start();
  const RawPeer silent = Connect();
  silent.TakeTable();
  Begin();
  const Frame fetch = silent.ReadFrame();
  silent.Write(Frame{FrameKind::kChunk, fetch.table, 1, fetch.chunk, PayloadOf(fetch).size()});
  silent.Write(PayloadOf(fetch).substr(0, 10'000));
  const RawPeer lively = Connect();
  std::thread source([&] { Serve(lively); });
  bool done = false;
  EXPECT_OK(Wait(&done));
  EXPECT_TRUE(done);
  fetcher_->End();
  EXPECT_TRUE(transfer_.SinkIsRight());
  EXPECT_EQ(LostReason(), "silent while others of its source were not");
  EXPECT_EQ(fetcher_->NumStreams(0), 1);
  fetcher_->Close();
  source.join();
}

TEST_F(SinkStreamTest, StreamThatGetsNothingAndThoseThatWereLostAreTroubles) {
  Start({.num_workers = 1, .window = 2, .peer_timeout_s = kTestTimeoutS});
  RawPeer peer = Connect();
  peer.TakeTable();
  Begin();
  const Frame fetch = peer.ReadFrame();
  EXPECT_TRUE(fetcher_->Troubles().empty());
  while (fetcher_->Troubles().empty()) std::this_thread::yield();
  const Trouble stalled = fetcher_->Troubles().front();
  EXPECT_EQ(stalled.rail, "rail");
  EXPECT_EQ(stalled.num_stalled, 1u);
  EXPECT_EQ(stalled.stalled_nbytes, 800'000u);
  EXPECT_GE(stalled.stalled_s, 1.0);
  EXPECT_EQ(stalled.num_lost, 0);
  peer.WriteChunk(fetch, PayloadOf(fetch));
  while (!fetcher_->Troubles().empty()) std::this_thread::yield();
  peer.Close();
  WaitUntilStreams(0);
  const Trouble lost = fetcher_->Troubles().front();
  EXPECT_EQ(lost.num_stalled, 0u);
  EXPECT_EQ(lost.num_lost, 1);
  EXPECT_EQ(lost.lost_reason, LostReason());
  fetcher_->End();
  Begin(2);
  EXPECT_TRUE(fetcher_->Troubles().empty());
  fetcher_->End();
}

TEST_F(SinkStreamTest, StreamsAreCountedPerRail) {
  Start();
  std::vector<RawPeer> peers;
  for (const char* rail : {"a", "b", "b"}) {
    auto [ours, theirs] = ConnectedPair();
    EXPECT_OK(fetcher_->AddStream(0, {std::move(ours), {}}, rail));
    peers.emplace_back(std::move(theirs));
  }
  EXPECT_EQ(fetcher_->NumStreams(0), 3);
  EXPECT_EQ(fetcher_->NumStreams(0, "b"), 2);
  EXPECT_EQ(fetcher_->NumStreams(0, "c"), 0);
  peers.back().Close();
  WaitUntilStreams(2);
  EXPECT_EQ(fetcher_->NumStreams(0, "b"), 1);
}

// An emulator may answer with less than the kernel would.
bool TellsRoundTrips(int fd) {
  tcp_info info;
  socklen_t nbytes = sizeof info;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &nbytes) == 0 &&
         nbytes > offsetof(tcp_info, tcpi_min_rtt);
}

TEST_F(SinkStreamTest, RailIsFullOnceEachOfItsStreamsHasSoMuchUnderWay) {
  Start({.num_workers = 1,
         .window = 1,
         .peer_timeout_s = kTestTimeoutS,
         .full_nbytes = 1});  // over loopback it is little
  auto [ours, theirs] = ConnectedTcpPair();
  if (!TellsRoundTrips(ours.get())) GTEST_SKIP() << "no round trips are told here";
  ASSERT_OK(fetcher_->AddStream(0, {std::move(ours)}, "rail"));
  const RawPeer peer(std::move(theirs));
  peer.TakeTable();
  EXPECT_FALSE(fetcher_->IsFull(0, "rail"));
  Begin();
  std::thread source([&] { Serve(peer); });
  bool done = false;
  EXPECT_OK(Wait(&done));
  EXPECT_TRUE(done);
  fetcher_->End();
  // A round is a millisecond at least: the version may have come before the first one ended.
  const auto deadline = Clock::now() + std::chrono::duration<double>(kTestTimeoutS);
  while (!fetcher_->IsFull(0, "rail") && Clock::now() < deadline) {
    Begin();
    EXPECT_OK(Wait(&done));
    fetcher_->End();
  }
  EXPECT_TRUE(fetcher_->IsFull(0, "rail"));
  EXPECT_FALSE(fetcher_->IsFull(0, "other"));
  RawPeer idle = Connect();
  EXPECT_FALSE(fetcher_->IsFull(0, "rail"));
  idle.Close();
  WaitUntilStreams(1);
  EXPECT_TRUE(fetcher_->IsFull(0, "rail"));
  fetcher_->Close();
  source.join();
}

TEST_F(SinkStreamTest, ChunkThatFailsItsChecksumIsFetchedAgainOnAnotherStream) {
  Start({.num_workers = 2, .window = 1, .peer_timeout_s = kTestTimeoutS});
  const RawPeer first = Connect();
  first.TakeTable();
  Begin();
  const Frame fetch = first.ReadFrame();
  std::string flipped(PayloadOf(fetch));
  flipped[flipped.size() / 2] = static_cast<char>(flipped[flipped.size() / 2] ^ 1);
  const std::string_view right = PayloadOf(fetch);
  first.WriteChunk(fetch, flipped, Crc32c(0, right.data(), right.size()));
  EXPECT_TRUE(first.Ended());
  const RawPeer second = Connect();
  std::thread source([&] { Serve(second); });
  bool done = false;
  EXPECT_OK(Wait(&done));
  EXPECT_TRUE(done);
  fetcher_->End();
  EXPECT_TRUE(transfer_.SinkIsRight());
  EXPECT_EQ(LostReason(), "chunk 0 of source process 0 does not match its checksum");
  fetcher_->Close();
  source.join();
}

TEST_F(SinkStreamTest, ChunkThatFailsAgainAndAgainIsCorrupt) {
  Start({.num_workers = 1, .window = 1, .peer_timeout_s = kTestTimeoutS});
  for (int i = 0; i < 3; ++i) {
    const RawPeer peer = Connect();
    if (i == 0) {
      peer.TakeTable();
      Begin();
    }
    const Frame fetch = peer.ReadFrame();
    EXPECT_EQ(fetch.chunk, 0u);
    peer.WriteChunk(fetch, PayloadOf(fetch), 0);
    EXPECT_TRUE(peer.Ended());
  }
  bool done = true;
  const Status status = Wait(&done);
  EXPECT_EQ(status.code(), Code::kCorruption);
  EXPECT_EQ(status.message(), "chunk 0 of source process 0 does not match its checksum");
  EXPECT_FALSE(done);
  fetcher_->End();
}

TEST_F(SinkStreamTest, SmallChunksAreAskedForBeyondTheWindow) {
  const Transfer small({{.shape = {2000}}}, 1, 400);
  const std::unique_ptr<Fetcher> fetcher =
      MakeFetcher(small.plan, {.num_workers = 1, .window = 1, .peer_timeout_s = kTestTimeoutS});
  auto [ours, theirs] = ConnectedPair();
  ASSERT_OK(fetcher->AddStream(0, {std::move(ours)}, "rail"));
  const RawPeer peer(std::move(theirs));
  peer.TakeTable();
  ASSERT_OK(fetcher->Begin(1, small.sink_addresses));
  for (uint64_t chunk = 0; chunk < small.plan.chunks.size(); ++chunk) {
    const Frame fetch = peer.ReadFrame();
    EXPECT_EQ(fetch.kind, FrameKind::kFetch);
    EXPECT_EQ(fetch.chunk, chunk);
  }
  fetcher->End();
}

TEST_F(SinkStreamTest, NoByteLandsAfterTheEnd) {
  Start();
  const RawPeer peer = Connect();
  peer.TakeTable();
  Begin();
  const Frame fetch = peer.ReadFrame();
  peer.Write(Frame{FrameKind::kChunk, fetch.table, 1, fetch.chunk, PayloadOf(fetch).size()});
  peer.Write(PayloadOf(fetch).substr(0, 10'000));
  while (!peer.AllTaken()) std::this_thread::yield();
  fetcher_->End();
  // ASan sees a late write.
  transfer_.sink.clear();
  transfer_.sink.shrink_to_fit();
  EXPECT_EQ(fetcher_->NumStreams(0), 0);
  fetcher_->End();
}

TEST_F(SinkStreamTest, IdleStreamsStayForTheNextVersion) {
  Start({.num_workers = 1, .window = 1, .peer_timeout_s = kTestTimeoutS});
  const RawPeer first = Connect();
  first.TakeTable();
  const RawPeer second = Connect();
  std::thread source([&] { Serve(second); });
  Begin();
  const uint64_t in_flight = transfer_.plan.chunks[first.ReadFrame().chunk].nbytes;
  const uint64_t others = transfer_.plan.wire_nbytes - in_flight;
  while (fetcher_->ProgressNbytes() != others) std::this_thread::yield();
  fetcher_->End();
  EXPECT_TRUE(first.Ended());
  Begin(2);
  bool done = false;
  EXPECT_OK(Wait(&done));
  EXPECT_TRUE(done);
  fetcher_->End();
  EXPECT_EQ(fetcher_->NumStreams(0), 1);
  fetcher_->Close();
  source.join();
}

TEST_F(SinkStreamTest, SourceThatLostTheTableGetsItAgain) {
  Start({.num_workers = 1, .window = 2, .peer_timeout_s = kTestTimeoutS});
  const RawPeer peer = Connect();
  peer.TakeTable();
  Begin();
  for (int i = 0; i < 2; ++i) {
    Frame answer = peer.ReadFrame();
    EXPECT_EQ(answer.kind, FrameKind::kFetch);
    answer.kind = FrameKind::kNoTable;
    peer.Write(answer);
  }
  peer.TakeTable();
  std::thread source([&] { Serve(peer); });
  bool done = false;
  EXPECT_OK(Wait(&done));
  EXPECT_TRUE(done);
  fetcher_->End();
  EXPECT_TRUE(transfer_.SinkIsRight());
  fetcher_->Close();
  source.join();
}

TEST_F(SinkStreamTest, RefusedTableFailsTheVersion) {
  Start();
  Begin();
  const RawPeer peer = Connect();
  Frame frame = peer.ReadFrame();
  peer.Read(frame.nbytes);
  frame.kind = FrameKind::kInvalid;
  frame.nbytes = 4;
  peer.Write(frame);
  peer.Write("why?");
  bool done;
  const Status status = Wait(&done);
  EXPECT_EQ(status.code(), Code::kPlan);
  EXPECT_EQ(status.message(), "source process 0: why?");
  EXPECT_TRUE(peer.Ended());
  fetcher_->End();
}

TEST_F(SinkStreamTest, RepliesThatNobodyAskedForEndTheStream) {
  const auto answer_with = [&](auto change) {
    Start();
    const RawPeer peer = Connect();
    peer.TakeTable();
    Begin();
    Frame reply = peer.ReadFrame();
    reply.kind = FrameKind::kChunk;
    reply.nbytes = 40'000;
    change(&reply);
    peer.Write(reply);
    WaitUntilStreams(0);
    fetcher_->End();
    return LostReason();
  };
  const std::string other = "a chunk that was not asked for";
  EXPECT_EQ(answer_with([](Frame* reply) { ++reply->nbytes; }), other);
  EXPECT_EQ(answer_with([](Frame* reply) { ++reply->chunk; }), other);
  EXPECT_EQ(answer_with([](Frame* reply) { ++reply->version; }), other);
  EXPECT_EQ(answer_with([](Frame* reply) { ++reply->table; }), other);
  EXPECT_EQ(answer_with([](Frame* reply) { *reply = Frame{.kind = FrameKind::kPong}; }),
            "a reply of another kind than the request");
  EXPECT_EQ(answer_with([](Frame* reply) {
              *reply = Frame{.kind = FrameKind::kGone, .nbytes = kMaxTextNbytes + 1};
            }),
            "frame of kind 20 that announces 513 bytes");
  Start();
  const RawPeer peer = Connect();
  peer.TakeTable();
  peer.Write(Frame{.kind = FrameKind::kPong});
  WaitUntilStreams(0);
  EXPECT_EQ(LostReason(), "a reply without a request");
}

TEST_F(SinkStreamTest, SilentSourceIsLostAndAnIdleOneIsAsked) {
  Start({.num_workers = 1, .window = 2, .peer_timeout_s = 0.2});
  const RawPeer peer = Connect();
  peer.TakeTable();
  EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kPing);
  peer.Write(Frame{.kind = FrameKind::kPong});
  EXPECT_EQ(peer.ReadFrame().kind, FrameKind::kPing);
  EXPECT_TRUE(peer.Ended());
  EXPECT_EQ(LostReason(), "silent for peer_timeout");
}

}  // namespace
}  // namespace tsr

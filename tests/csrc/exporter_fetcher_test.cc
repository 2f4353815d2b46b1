#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "digest.h"
#include "tiled_copy.h"
#include "transfer.h"

namespace tsr {
namespace {

// Runs of every length, boxes of every kind: long and short, cut across, cast, transposed.
std::vector<LeafSpec> VariedLeaves() {
  constexpr FloatKind kF32 = FloatKind::kF32;
  constexpr FloatKind kBF16 = FloatKind::kBF16;
  return {
      {.shape = {128, 1024}},
      {.shape = {128, 1024}, .source_dim = 1, .num_source_boxes = 4, .num_sink_boxes = 2},
      {.shape = {96, 3000}, .num_source_boxes = 3, .sink_dim = 1, .num_sink_boxes = 2},
      {.shape = {40, 1500, 3},
       .source_dim = 1,
       .num_source_boxes = 2,
       .sink_dim = 2,
       .num_sink_boxes = 3,
       .itemsize = 4},
      {.shape = {300, 700},
       .num_source_boxes = 2,
       .sink_dim = 1,
       .num_sink_boxes = 4,
       .itemsize = 4,
       .kind = kF32,
       .sink_kind = kBF16},
      {.shape = {257, 129},
       .source_dim = 1,
       .num_source_boxes = 2,
       .itemsize = 8,
       .column_major = true},
      {.shape = {2304}, .num_source_boxes = 4, .num_sink_boxes = 2, .itemsize = 1},
      {.shape = {}, .itemsize = 8},
      {.shape = {1, 1, 5, 1, 2}, .sink_dim = 2, .num_sink_boxes = 5, .itemsize = 16},
      {.shape = {3, 200000}, .source_dim = 1, .num_source_boxes = 2, .itemsize = 1},
      {.shape = {3, 90'000}, .sink_dim = 1, .num_sink_boxes = 2},
  };
}

class EveryRailTest : public ::testing::TestWithParam<bool> {
 protected:
  static void Connect(Exporter* exporter, Fetcher* fetcher, uint32_t process) {
    GetParam() ? ConnectByMemory(exporter, fetcher, process)
               : tsr::Connect(exporter, fetcher, process);
  }
};
INSTANTIATE_TEST_SUITE_P(, EveryRailTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Memory" : "Socket"; });

TEST_P(EveryRailTest, EveryByteArrivesWhereItBelongs) {
  Transfer transfer(VariedLeaves(), /*num_sources=*/2, /*chunk_nbytes=*/200'000);
  std::vector<std::unique_ptr<Exporter>> exporters;
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  for (uint32_t process = 0; process < 2; ++process) {
    exporters.push_back(MakeExporter(*transfer.sources[process]));
    for (int i = 0; i < 2; ++i) Connect(exporters.back().get(), fetcher.get(), process);
  }
  for (const uint64_t version : {3, 9}) {
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_OK(transfer.Publish(exporters[i].get(), i, version));
    }
    transfer.ClearSink();
    ASSERT_OK(FetchAll(fetcher.get(), transfer, version));
    EXPECT_TRUE(transfer.SinkIsRight());
    EXPECT_EQ(fetcher->ProgressNbytes(), transfer.plan.wire_nbytes);
    EXPECT_EQ(fetcher->NumStreams(0), 2);
  }
}

TEST_P(EveryRailTest, DigestsOfEveryBoxComeFromTheSourcesMemory) {
  Transfer transfer(VariedLeaves(), /*num_sources=*/1, /*chunk_nbytes=*/200'000);
  const auto exporter = MakeExporter(*transfer.sources[0]);
  const auto fetcher = MakeFetcher(transfer.plan);
  for (int i = 0; i < 2; ++i) Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 3));
  const ShardDirectory& directory = transfer.sources[0]->directory;
  std::vector<DigestRequest> requests;
  std::vector<uint64_t> expected;
  for (size_t i = 0; i < directory.num_shards(); ++i) {
    const ShardDirectory::Shard& shard = directory.shard(i);
    const BoxView range = directory.range(shard);
    const LeafPair& pair = transfer.plan.input.pairs[shard.leaf];
    const std::vector<int64_t>& shape = transfer.plan.input.layouts[pair.source_layout].shape;
    const ShardMemory& memory = transfer.sources[0]->shards[i];
    requests.push_back({shard.leaf, shard.box, pair.op, shape, {range.begin(), range.end()}});
    expected.push_back(
        DigestOfBox(pair.op, shard.itemsize, shape, {range, memory.bytes.data(), memory.strides}));
  }
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK(fetcher->BeginDigests(3, {requests}));
    bool done = false;
    ASSERT_OK(fetcher->Wait(Deadline::After(kTestTimeoutS), &done));
    fetcher->End();
    ASSERT_TRUE(done);
    EXPECT_EQ(fetcher->Digests().at(0), expected);
  }
  ASSERT_OK(FetchAll(fetcher.get(), transfer, 3));
  EXPECT_TRUE(transfer.SinkIsRight());
  EXPECT_EQ(fetcher->BeginDigests(3, {}).message(),
            "digests: expected requests to 1 sources, got 0");
}

TEST_P(EveryRailTest, EveryByteArrivesWithoutChecksums) {
  Transfer transfer(VariedLeaves(), 1, 200'000);
  const auto exporter = MakeExporter(*transfer.sources[0]);
  const auto fetcher = MakeFetcher(
      transfer.plan,
      {.num_workers = 1, .window = 3, .peer_timeout_s = kTestTimeoutS, .checksums = false});
  Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 3));
  ASSERT_OK(FetchAll(fetcher.get(), transfer, 3));
  EXPECT_TRUE(transfer.SinkIsRight());
}

TEST_P(EveryRailTest, TilesArriveInOtherTiles) {
  const std::vector<int64_t> extents = {300, 700}, order = {0, 1};
  const Transfer transfer({{.shape = extents}}, 1, 100'000);
  const std::vector<std::vector<int64_t>> pairs = {{8, 128}, {2, 1}}, squares = {{16, 16}};
  auto from = std::make_shared<ShardLayout>(), to = std::make_shared<ShardLayout>();
  ASSERT_OK(ShardLayout::Make(extents, 2, order, pairs, from.get()));
  ASSERT_OK(ShardLayout::Make(extents, 2, order, squares, to.get()));
  const BoxView box = from->box();
  const ShardLayout rows = ShardLayout::RowMajor(box, 2);
  const uint8_t* const leaf = transfer.sources[0]->shards[0].bytes.data();
  std::vector<uint8_t> source(from->nbytes()), sink(to->nbytes()), found(VolumeOf(box) * 2);
  CopyTiled(Op(), 2, box, {box, leaf, &rows}, {box, source.data(), from.get()}, Stores::kCached);

  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  Connect(exporter.get(), fetcher.get(), 0);
  const std::vector<uint64_t> address = {reinterpret_cast<uint64_t>(source.data())};
  const std::vector<uint64_t> sink_address = {reinterpret_cast<uint64_t>(sink.data())};
  const std::vector<int64_t> no_strides(2);
  ASSERT_OK(exporter->Publish(1, address, no_strides, /*coming=*/false, {{0, from}}));
  ASSERT_OK(fetcher->Begin(1, sink_address, {{0, to}}));
  bool done = false;
  ASSERT_OK(fetcher->Wait(Deadline::After(kTestTimeoutS), &done));
  EXPECT_TRUE(done);
  fetcher->End();
  CopyTiled(Op(), 2, box, {box, sink.data(), to.get()}, {box, found.data(), &rows},
            Stores::kCached);
  EXPECT_EQ(found, transfer.sources[0]->shards[0].bytes);
}

TEST_P(EveryRailTest, ThousandsOfSmallLeavesShareChunks) {
  std::vector<LeafSpec> leaves;
  for (int64_t i = 0; i < 3000; ++i) leaves.push_back({.shape = {1 + i % 7, 1 + i % 41}});
  Transfer transfer(leaves, 1, 64 << 10);
  EXPECT_LT(transfer.plan.chunks.size(), 30u);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  ASSERT_OK(FetchAll(fetcher.get(), transfer, 1));
  EXPECT_TRUE(transfer.SinkIsRight());
}

TEST_P(EveryRailTest, ChunkOfManyMebibytesGoesByBlocks) {
  Transfer transfer(
      {{.shape = {1'000'001}}, {.shape = {300, 1000}, .sink_dim = 1, .num_sink_boxes = 3}}, 1,
      3 << 20);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  ASSERT_OK(FetchAll(fetcher.get(), transfer, 1));
  EXPECT_TRUE(transfer.SinkIsRight());
}

TEST(ExporterFetcherTest, SinksDoNotDisturbOneAnother) {
  Transfer first(VariedLeaves(), 1, 100'000);
  std::vector<LeafSpec> other_cut = VariedLeaves();
  for (LeafSpec& leaf : other_cut) leaf.num_sink_boxes = 1;
  Transfer second(other_cut, 1, 30'000);
  std::unique_ptr<Exporter> exporter = MakeExporter(*first.sources[0]);
  ASSERT_OK(first.Publish(exporter.get(), 0, 1));
  std::vector<std::thread> sinks;
  for (Transfer* transfer : {&first, &second}) {
    sinks.emplace_back([&exporter, transfer, id = sinks.size()] {
      std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer->plan);
      for (int i = 0; i < 2; ++i) Connect(exporter.get(), fetcher.get(), 0, id);
      for (int round = 0; round < 3; ++round) EXPECT_OK(FetchAll(fetcher.get(), *transfer, 1));
    });
  }
  for (std::thread& sink : sinks) sink.join();
  EXPECT_TRUE(first.SinkIsRight());
  EXPECT_TRUE(second.SinkIsRight());
}

TEST(ExporterFetcherTest, ChunksWaitForAStreamAndATableIsUploadedOnce) {
  Transfer transfer({{.shape = {100, 100}}}, 1, 4096);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  ASSERT_OK(fetcher->Begin(1, transfer.sink_addresses));
  bool done = true;
  ASSERT_OK(fetcher->Wait(Deadline::After(0), &done));
  EXPECT_FALSE(done);
  Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(fetcher->Wait(Deadline::After(kTestTimeoutS), &done));
  EXPECT_TRUE(done);
  fetcher->End();
  EXPECT_TRUE(transfer.SinkIsRight());
}

TEST(ExporterFetcherTest, VersionThatIsNotPublishedIsGone) {
  Transfer transfer({{.shape = {100, 100}}}, 1, 4096);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  Connect(exporter.get(), fetcher.get(), 0);
  const Status status = FetchAll(fetcher.get(), transfer, 5);
  EXPECT_EQ(status.code(), Code::kGone);
  EXPECT_EQ(status.message(), "source process 0: version 5 is not published here");
}

TEST(ExporterFetcherTest, DroppedLeafIsGoneUntilItIsPublishedAgain) {
  Transfer transfer({{.shape = {2000}}, {.shape = {2000}}}, 1, 4000);
  Transfer::Source& source = *transfer.sources[0];
  std::unique_ptr<Exporter> exporter = MakeExporter(source);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  ASSERT_OK(exporter->DropLeaves(1, std::vector<uint32_t>{1}));
  const Status status = FetchAll(fetcher.get(), transfer, 1);
  EXPECT_EQ(status.code(), Code::kGone);
  EXPECT_EQ(status.message(), "source process 0: leaf 1 of version 1 is not held any more");

  std::vector<uint8_t> moved = source.shards[1].bytes;
  source.addresses[1] = reinterpret_cast<uint64_t>(moved.data());
  std::fill(source.shards[1].bytes.begin(), source.shards[1].bytes.end(), 0);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(FetchAll(fetcher.get(), transfer, 1));
  EXPECT_TRUE(transfer.SinkIsRight());
  exporter->Withdraw(1);
}

TEST_P(EveryRailTest, LeavesAreServedAsTheyCome) {
  Transfer transfer(VariedLeaves(), 1, 50'000);
  const Transfer::Source& source = *transfer.sources[0];
  std::unique_ptr<Exporter> exporter = MakeExporter(source);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  for (int i = 0; i < 2; ++i) Connect(exporter.get(), fetcher.get(), 0);
  const std::vector<uint64_t> nowhere(source.addresses.size(), 0);
  ASSERT_OK(exporter->Publish(1, nowhere, source.strides, /*coming=*/true));
  ASSERT_OK(fetcher->Begin(1, transfer.sink_addresses));
  EXPECT_TRUE(fetcher->TakeFinished(Deadline::After(0)).empty());
  std::multiset<uint32_t> finished;
  for (uint32_t leaf = 0; leaf < VariedLeaves().size(); ++leaf) {
    const uint32_t leaves[] = {leaf};
    ASSERT_OK(exporter->AddLeaves(1, leaves, source.addresses, source.strides));
    for (const uint32_t done : fetcher->TakeFinished(Deadline::After(0))) {
      EXPECT_LE(done, leaf);
      finished.insert(done);
    }
  }
  bool done = false;
  ASSERT_OK(fetcher->Wait(Deadline::After(kTestTimeoutS), &done));
  for (const uint32_t leaf : fetcher->TakeFinished(Deadline::After(0))) finished.insert(leaf);
  fetcher->End();
  EXPECT_TRUE(done && transfer.SinkIsRight());
  EXPECT_EQ(finished.size(), VariedLeaves().size());
  EXPECT_EQ(std::set(finished.begin(), finished.end()).size(), VariedLeaves().size());
  EXPECT_EQ(fetcher->NumStreams(0), 2);
}

TEST_P(EveryRailTest, VersionThatIsWithdrawnWhileItComesIsGone) {
  Transfer transfer({{.shape = {1000}}}, 1, 1 << 20);
  const Transfer::Source& source = *transfer.sources[0];
  std::unique_ptr<Exporter> exporter = MakeExporter(source);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(exporter->Publish(1, source.addresses, source.strides, /*coming=*/true));
  ASSERT_OK(fetcher->Begin(1, transfer.sink_addresses));
  bool done = false;
  EXPECT_OK(fetcher->Wait(Deadline::After(0.05), &done));
  exporter->Withdraw(1);
  EXPECT_EQ(fetcher->Wait(Deadline::After(kTestTimeoutS), &done).code(), Code::kGone);
  fetcher->End();
  const uint32_t leaves[] = {0};
  EXPECT_EQ(exporter->AddLeaves(1, leaves, source.addresses, source.strides).code(), Code::kGone);
}

// One stream waits for its chunk, longer than a silent one is borne, while another one is heard.
TEST(ExporterFetcherTest, StreamThatWaitsForItsChunkIsKept) {
  Transfer transfer({{.shape = {1000}}}, 1, 1 << 20);
  const Transfer::Source& source = *transfer.sources[0];
  std::unique_ptr<Exporter> exporter =
      MakeExporter(source, {.num_workers = 2, .max_chunk_nbytes = 1 << 20, .peer_timeout_s = 0.4});
  std::unique_ptr<Fetcher> fetcher =
      MakeFetcher(transfer.plan, {.num_workers = 2, .window = 3, .peer_timeout_s = 0.4});
  for (int i = 0; i < 2; ++i) Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(exporter->Publish(1, source.addresses, source.strides, /*coming=*/true));
  ASSERT_OK(fetcher->Begin(1, transfer.sink_addresses));
  bool done = true;
  ASSERT_OK(fetcher->Wait(Deadline::After(1), &done));
  EXPECT_FALSE(done);
  const uint32_t leaves[] = {0};
  ASSERT_OK(exporter->AddLeaves(1, leaves, source.addresses, source.strides));
  ASSERT_OK(fetcher->Wait(Deadline::After(kTestTimeoutS), &done));
  EXPECT_TRUE(done);
  EXPECT_EQ(fetcher->NumStreams(0), 2);
  fetcher->End();
}

TEST(ExporterFetcherTest, LeavesAreFinishedWhenEverySinkHasThem) {
  Transfer transfer({{.shape = {3000}}, {.shape = {20}}, {.shape = {30000}}}, 1, 4000);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  std::vector<std::unique_ptr<Fetcher>> fetchers;
  for (uint64_t sink : {7, 8}) {
    fetchers.push_back(MakeFetcher(transfer.plan));
    Connect(exporter.get(), fetchers.back().get(), 0, sink);
  }
  const auto finished = [&](std::vector<uint64_t> sinks) {
    return exporter->FinishedLeaves(1, sinks);
  };
  const std::vector<uint32_t> all = {0, 1, 2};
  ASSERT_OK(FetchAll(fetchers[0].get(), transfer, 1));
  while (finished({7}) != all) std::this_thread::yield();  // the last word is not answered
  EXPECT_EQ(finished({7, 8}), std::vector<uint32_t>());
  EXPECT_EQ(finished({7, 99}), std::vector<uint32_t>());
  ASSERT_OK(FetchAll(fetchers[1].get(), transfer, 1));
  while (finished({7, 8}) != all) std::this_thread::yield();
  // What is dropped is not named again.
  ASSERT_OK(exporter->DropLeaves(1, std::vector<uint32_t>{1}));
  EXPECT_EQ(finished({7, 8}), (std::vector<uint32_t>{0, 2}));
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  // A sink without a stream is forgotten.
  fetchers[1]->Close();
  while (finished({7, 8}) == all) std::this_thread::yield();
  exporter->Withdraw(1);
  EXPECT_EQ(finished({7}), std::vector<uint32_t>());
}

TEST_P(EveryRailTest, WithdrawnMemoryIsNotTouched) {
  // The memory goes away for good right after Withdraw() and DropLeaves(): ASan sees a late read.
  const std::vector<LeafSpec> leaves = {{.shape = {1000, 1000}},
                                        {.shape = {1000, 500}, .column_major = true}};
  for (const bool whole : {true, false}) {
    Transfer transfer(leaves, 1, 300'000);
    Transfer::Source& source = *transfer.sources[0];
    std::unique_ptr<Exporter> exporter = MakeExporter(source);
    std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
    for (int i = 0; i < 3; ++i) Connect(exporter.get(), fetcher.get(), 0);
    ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
    ASSERT_OK(fetcher->Begin(1, transfer.sink_addresses));
    while (fetcher->ProgressNbytes() == 0) std::this_thread::yield();
    if (whole) {
      exporter->Withdraw(1);
    } else {
      ASSERT_OK(exporter->DropLeaves(1, std::vector<uint32_t>{0, 1}));
    }
    source.shards.clear();
    source.shards.shrink_to_fit();
    fetcher->End();
  }
}

TEST_P(EveryRailTest, SourceThatDiesInTheMiddleCostsNoByte) {
  Transfer transfer({{.shape = {1000, 1000}}, {.shape = {999, 500}, .column_major = true}}, 1,
                    300'000);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  for (int i = 0; i < 2; ++i) Connect(exporter.get(), fetcher.get(), 0);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  ASSERT_OK(fetcher->Begin(1, transfer.sink_addresses));
  while (fetcher->ProgressNbytes() == 0) std::this_thread::yield();
  exporter = MakeExporter(*transfer.sources[0]);
  ASSERT_OK(transfer.Publish(exporter.get(), 0, 1));
  for (int i = 0; i < 2; ++i) Connect(exporter.get(), fetcher.get(), 0);
  bool done = false;
  ASSERT_OK(fetcher->Wait(Deadline::After(kTestTimeoutS), &done));
  EXPECT_TRUE(done);
  fetcher->End();
  EXPECT_TRUE(transfer.SinkIsRight());
}

TEST(ExporterFetcherTest, RingThatIsNotSealedIsRefusedByBothEnds) {
  Transfer transfer({{.shape = {100}}}, 1, 4096);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  auto [ours, theirs] = ConnectedPair();
  EXPECT_EQ(exporter->AddConnection({std::move(ours), MakeRing(192 << 10, 0)}, 7, "shm").code(),
            Code::kPeerLost);
  EXPECT_EQ(fetcher->AddStream(0, {std::move(theirs), MakeRing(192 << 10, 0)}, "shm").code(),
            Code::kPeerLost);
  EXPECT_EQ(fetcher->NumStreams(0), 0);
}

TEST(ExporterFetcherTest, ClosedOnesTakeNoMore) {
  Transfer transfer({{.shape = {100}}}, 1, 4096);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  ASSERT_OK(fetcher->Begin(1, transfer.sink_addresses));
  exporter->Close();
  fetcher->Close();
  exporter->Close();
  fetcher->Close();
  auto [ours, theirs] = ConnectedPair();
  EXPECT_EQ(exporter->AddConnection({std::move(ours)}, 7, "rail").code(), Code::kCancelled);
  EXPECT_EQ(fetcher->AddStream(0, {std::move(theirs)}, "rail").code(), Code::kCancelled);
  bool done = true;
  EXPECT_EQ(fetcher->Wait(Deadline::After(kTestTimeoutS), &done).code(), Code::kCancelled);
  EXPECT_FALSE(done);
  fetcher->End();
  EXPECT_EQ(fetcher->Begin(2, transfer.sink_addresses).code(), Code::kCancelled);
}

TEST(ExporterFetcherTest, MistakesOfTheCallerAreNamed) {
  Transfer transfer({{.shape = {100}}}, 1, 4096);
  std::unique_ptr<Exporter> exporter = MakeExporter(*transfer.sources[0]);
  std::unique_ptr<Fetcher> fetcher = MakeFetcher(transfer.plan);
  EXPECT_EQ(exporter->Publish(1, {}, {}).message(),
            "publish: expected 1 addresses and 1 strides, got 0 and 0");
  EXPECT_EQ(exporter->DropLeaves(1, std::vector<uint32_t>{0}).code(), Code::kGone);
  EXPECT_EQ(exporter->DropLeaves(1, std::vector<uint32_t>{9}).message(), "there is no leaf 9");
  EXPECT_EQ(fetcher->Begin(1, {}).message(), "fetch: expected 1 sink addresses, got 0");
  bool done;
  EXPECT_EQ(fetcher->Wait(Deadline::After(0), &done).message(), "wait: no version has begun");
  ASSERT_OK(fetcher->Begin(1, transfer.sink_addresses));
  EXPECT_EQ(fetcher->Begin(2, transfer.sink_addresses).message(),
            "begin: the version before has not ended");
  auto [ours, theirs] = ConnectedPair();
  EXPECT_EQ(fetcher->AddStream(3, {std::move(ours)}, "rail").message(),
            "the plan reads nothing from process 3");
  EXPECT_EQ(fetcher->NumStreams(3), 0);
}

}  // namespace
}  // namespace tsr

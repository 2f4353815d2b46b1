#include "chunk_table.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>

namespace tsr {
namespace {

constexpr uint64_t kMaxChunkNbytes = 1 << 20;

// Where the fields of the worked example in WIRE_FORMAT.md lie.
constexpr size_t kNumChunks = 8, kNumRegions = 16, kChunkRegions = 24, kChunkNbytes = 28;
constexpr size_t kLeaf = 32, kBox = 36, kOp = 40, kRank = 41, kReserved = 42;
constexpr size_t kStart0 = 44, kExtent0 = 52;

// The worked example: of leaf 7, a float32 array of shape (8, 4), this source holds box 1, rows 4
// to 8; the sink wants rows 5 to 7 as bfloat16.
Plan ExamplePlan() {
  const BoxLayout source{{8, 4}, {0, 4, 0, 4, 4, 8, 0, 4}, {0, 1, 2}, {0, 3}};
  const BoxLayout sink{{8, 4}, {5, 7, 0, 4}, {0, 1}, {0}};
  const LeafPair pair{7, 0, 0, 1, 4, 2, Op::Cast(FloatKind::kF32, FloatKind::kBF16)};
  Plan plan;
  const Status status = MakePlan({{source, sink}, {pair}, 0, kMaxChunkNbytes}, &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return plan;
}

ShardDirectory ExampleDirectory() {
  ShardDirectory directory;
  const Status status =
      ShardDirectory::Make({{9, 0, 2, FloatKind::kNone, 0, 0}, {7, 1, 4, FloatKind::kF32, 2, 0}},
                           {4, 8, 0, 4}, 10, &directory);
  EXPECT_TRUE(status.ok()) << status.message();
  return directory;
}

Status Decode(const std::string& bytes, ChunkTable* table) {
  return DecodeChunkTable({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                          ExampleDirectory(), kMaxChunkNbytes, table);
}

template <typename T>
std::string With(std::string bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(value));
  return bytes;
}

void ExpectRefused(const std::string& bytes, const std::string& part) {
  ChunkTable table;
  const Status status = Decode(bytes, &table);
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
}

TEST(EncodeChunkTable, WritesTheWorkedExample) {
  const std::string bytes = EncodeChunkTable(ExamplePlan(), 0);
  const uint8_t expected[] = {
      'T', 'S', 'R', 'C', 1,  0, 0, 0,                             // magic, format
      1,   0,   0,   0,   0,  0, 0, 0,                             // chunks
      1,   0,   0,   0,   0,  0, 0, 0,                             // regions
      1,   0,   0,   0,   16, 0, 0, 0,                             // of chunk 0: regions, bytes
      7,   0,   0,   0,   1,  0, 0, 0, 0x32, 2, 0, 0,              // leaf, box, op, rank, reserved
      1,   0,   0,   0,   0,  0, 0, 0, 2,    0, 0, 0, 0, 0, 0, 0,  // start, extent
      0,   0,   0,   0,   0,  0, 0, 0, 4,    0, 0, 0, 0, 0, 0, 0,
  };
  EXPECT_EQ(bytes, std::string(reinterpret_cast<const char*>(expected), sizeof(expected)));
}

TEST(DecodeChunkTable, GivesBackWhatWasEncoded) {
  ChunkTable table;
  const Status status = Decode(EncodeChunkTable(ExamplePlan(), 0), &table);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(table.chunks.size(), 1u);
  EXPECT_EQ(table.chunks[0].nbytes, 16u);
  ASSERT_EQ(table.regions.size(), 1u);
  EXPECT_EQ(table.regions[0].shard, 1u);
  EXPECT_EQ(table.regions[0].op, Op::Cast(FloatKind::kF32, FloatKind::kBF16));
  EXPECT_EQ(table.boxes, (std::vector<int64_t>{1, 3, 0, 4}));
  EXPECT_EQ(table.chunks_per_leaf, (std::vector<uint32_t>{0, 0, 0, 0, 0, 0, 0, 1, 0, 0}));
}

TEST(DecodeChunkTable, RefusesEveryWrongNumber) {
  const std::string good = EncodeChunkTable(ExamplePlan(), 0);
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  ExpectRefused(With<uint8_t>(good, 0, 'X'), "magic");
  ExpectRefused(With<uint32_t>(good, 4, 2), "format 2");
  ExpectRefused(With<uint64_t>(good, kNumChunks, kMost), "more chunks than bytes");
  ExpectRefused(With<uint64_t>(good, kNumChunks, kMost / 8 + 2), "more chunks than bytes");
  ExpectRefused(With<uint64_t>(good, kNumRegions, kMost), "more regions than bytes");
  ExpectRefused(With<uint64_t>(good, kNumRegions, 2), "ends within a range");
  ExpectRefused(With<uint32_t>(good, kChunkRegions, 0), "chunk 0 has 0 regions");
  ExpectRefused(With<uint32_t>(good, kChunkRegions, 4097), "chunk 0 has 4097 regions");
  ExpectRefused(With<uint32_t>(good, kChunkRegions, 2), "number of regions");
  ExpectRefused(With<uint32_t>(good, kChunkNbytes, kMaxChunkNbytes + 1), "bytes");
  ExpectRefused(With<uint32_t>(good, kChunkNbytes, 15), "fewer bytes than its regions");
  ExpectRefused(With<uint32_t>(good, kChunkNbytes, 17), "more bytes than its regions");
  ExpectRefused(With<uint32_t>(good, kLeaf, 8), "does not hold");
  ExpectRefused(With<uint32_t>(good, kBox, 0), "does not hold");
  ExpectRefused(With<uint8_t>(good, kOp, 0x24), "an op that its shard does not take");
  ExpectRefused(With<uint8_t>(good, kOp, 0x3f), "an op that its shard does not take");
  ExpectRefused(With<uint8_t>(good, kRank, 1), "another rank");
  ExpectRefused(With<uint16_t>(good, kReserved, 1), "reserved");
  ExpectRefused(With<uint64_t>(good, kStart0, 3), "not within its shard");
  ExpectRefused(With<uint64_t>(good, kStart0, kMost), "not within its shard");
  ExpectRefused(With<uint64_t>(good, kExtent0, 0), "not within its shard");
  ExpectRefused(With<uint64_t>(good, kExtent0, kMost), "not within its shard");
  ExpectRefused(good + std::string(16, '\0'), "left over");
}

TEST(DecodeChunkTable, RefusesRegionsOfAnEmptyShardOfHugeExtents) {
  constexpr auto kHuge = int64_t{1} << 62;
  ShardDirectory directory;
  ASSERT_TRUE(ShardDirectory::Make({{7, 1, 4, FloatKind::kF32, 3, 0}}, {0, kHuge, 0, kHuge, 0, 0},
                                   10, &directory)
                  .ok());
  std::string bytes = EncodeChunkTable(ExamplePlan(), 0) + std::string(16, '\0');
  bytes = With<uint8_t>(bytes, kRank, 3);
  bytes = With<uint64_t>(bytes, kStart0, 0);
  bytes = With<uint64_t>(bytes, kExtent0, kHuge);
  bytes = With<uint64_t>(bytes, kExtent0 + 16, kHuge);
  bytes = With<uint64_t>(bytes, kExtent0 + 32, 1);
  ChunkTable table;
  const Status status =
      DecodeChunkTable({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, directory,
                       kMaxChunkNbytes, &table);
  EXPECT_EQ(status.message(), "chunk table: region 0 is not within its shard");
}

TEST(DecodeChunkTable, RefusesEveryPrefix) {
  const std::string good = EncodeChunkTable(ExamplePlan(), 0);
  for (size_t n = 0; n < good.size(); ++n) {
    ChunkTable table;
    EXPECT_FALSE(Decode(good.substr(0, n), &table).ok()) << n;
  }
}

TEST(DecodeChunkTable, StaysWithinItsBytesWhateverTheyAre) {
  const std::string good = EncodeChunkTable(ExamplePlan(), 0);
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = good;
    for (int flips = 0; flips < 3; ++flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    ChunkTable table;
    if (!Decode(bytes, &table).ok()) continue;
    for (size_t c = 0; c < 4; c += 2) EXPECT_LE(table.boxes[c + 1], 4);
  }
}

TEST(DecodeChunkTable, CountsALeafOncePerChunk) {
  // Two leaves of three elements each, in chunks of two elements, the last of which they share.
  PlanInput input{{}, {}, 0, 12};
  input.layouts = {{{4}, {0, 4}, {0, 1}, {0}}, {{4}, {0, 4}, {0, 1}, {0}}};
  for (uint32_t leaf = 0; leaf < 2; ++leaf) input.pairs.push_back({leaf, leaf, 0, 1, 4, 4, Op()});
  Plan plan;
  ASSERT_TRUE(MakePlan(std::move(input), &plan).ok());
  ShardDirectory directory;
  ASSERT_TRUE(
      ShardDirectory::Make({{0, 0, 4, FloatKind::kNone, 1, 0}, {1, 0, 4, FloatKind::kNone, 1, 2}},
                           {0, 4, 0, 4}, 2, &directory)
          .ok());
  const std::string bytes = EncodeChunkTable(plan, 0);
  ChunkTable table;
  ASSERT_TRUE(DecodeChunkTable({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                               directory, 12, &table)
                  .ok());
  EXPECT_EQ(table.chunks.size(), 4u);
  EXPECT_EQ(table.chunks_per_leaf, (std::vector<uint32_t>{2, 2}));
  std::vector<std::vector<uint32_t>> leaves;
  for (const TableChunk& chunk : table.chunks) {
    leaves.emplace_back(table.leaves_of(chunk).begin(), table.leaves_of(chunk).end());
  }
  EXPECT_EQ(leaves, (std::vector<std::vector<uint32_t>>{{0}, {0}, {1}, {1}}));
}

TEST(ShardDirectory, FindsShardsByName) {
  const ShardDirectory directory = ExampleDirectory();
  EXPECT_EQ(directory.Find(7, 1), 1);
  EXPECT_EQ(directory.Find(9, 0), 0);
  EXPECT_EQ(directory.Find(7, 0), -1);
  EXPECT_EQ(directory.Find(10, 0), -1);
  EXPECT_EQ(FormatBox(directory.range(directory.shard(1))), "[4:8, 0:4]");
}

TEST(ShardDirectory, RefusesShardsThatAreNotSane) {
  constexpr auto kNone = FloatKind::kNone;
  const auto refuses = [](std::vector<ShardDirectory::Shard> shards, std::vector<int64_t> ranges,
                          const std::string& part) {
    ShardDirectory directory;
    const Status status = ShardDirectory::Make(std::move(shards), std::move(ranges), 4, &directory);
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  refuses({{0, 0, 4, kNone, 0, 0}, {0, 0, 4, kNone, 0, 0}}, {}, "is there twice");
  refuses({{4, 0, 4, kNone, 0, 0}}, {}, "no such leaf");
  refuses({{0, 0, 4, kNone, 33, 0}}, std::vector<int64_t>(66, 0), "rank");
  refuses({{0, 0, 4, kNone, 1, 0}}, {0}, "too few");
  refuses({{0, 0, 4, kNone, 1, std::numeric_limits<uint64_t>::max()}}, {0, 1}, "too few");
  refuses({{0, 0, 4, kNone, 1, 0}}, {3, 2}, "bad range");
  refuses({{0, 0, 1, kNone, 1, 0}}, {0, int64_t{1} << 61}, "bad range");
  refuses({{0, 0, 0, kNone, 0, 0}}, {}, "itemsize 0");
  refuses({{0, 0, 2, FloatKind::kF32, 0, 0}}, {}, "itemsize 2");
  refuses({{0, 0, 2, static_cast<FloatKind>(200), 0, 0}}, {}, "itemsize 2");
}

}  // namespace
}  // namespace tsr

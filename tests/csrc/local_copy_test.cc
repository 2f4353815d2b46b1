#include "local_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace tsr {
namespace {

// A grid of boxes over `shape`; box b is held by process b % num_processes.
BoxLayout GridOf(const std::vector<int64_t>& shape, const std::vector<int64_t>& parts,
                 uint32_t num_processes) {
  BoxLayout layout{shape, {}, {0}, {}};
  const int64_t num_boxes = std::accumulate(parts.begin(), parts.end(), int64_t{1},
                                            [](int64_t a, int64_t b) { return a * b; });
  for (int64_t b = 0; b < num_boxes; ++b) {
    std::vector<int64_t> box(2 * shape.size());
    int64_t rest = b;
    for (size_t d = shape.size(); d-- > 0;) {
      const int64_t extent = shape[d] / parts[d];
      box[2 * d] = rest % parts[d] * extent;
      box[2 * d + 1] = box[2 * d] + extent;
      rest /= parts[d];
    }
    layout.boxes.insert(layout.boxes.end(), box.begin(), box.end());
    layout.holders.push_back(static_cast<uint32_t>(b) % num_processes);
    layout.holder_offsets.push_back(static_cast<uint32_t>(layout.holders.size()));
  }
  return layout;
}

// Boxes of one side and their memory, filled from or compared with a whole array.
struct Side {
  std::vector<std::vector<uint8_t>> boxes;
  std::vector<uint64_t> addresses;
  std::vector<int64_t> strides;

  void Add(BoxView box, int64_t itemsize, bool column_major) {
    const auto rank = static_cast<size_t>(RankOf(box));
    boxes.emplace_back(static_cast<size_t>(VolumeOf(box) * itemsize));
    addresses.push_back(reinterpret_cast<uint64_t>(boxes.back().data()));
    std::vector<int64_t> own(rank);
    RowMajorStrides(box, itemsize, own);
    for (size_t d = 0; column_major && d < rank; ++d) {
      own[d] = d == 0 ? itemsize : own[d - 1] * ExtentOf(box, static_cast<int>(d) - 1);
    }
    strides.insert(strides.end(), own.begin(), own.end());
  }
};

// One leaf of each of some shapes, on a trainer of three processes and one sampler process.
class LocalCopyTest : public testing::Test {
 protected:
  struct LeafCase {
    std::vector<int64_t> shape, source_parts, sink_parts;
    FloatKind kind;
    Op op;
    bool column_major;
  };

  void Make(const std::vector<LeafCase>& cases) {
    PlanInput input{{}, {}, 0, 4096};
    std::vector<ShardDirectory::Shard> shards;
    std::vector<int64_t> ranges;
    std::mt19937 random(11);
    for (uint32_t i = 0; i < cases.size(); ++i) {
      const LeafCase& leaf = cases[i];
      const BoxLayout source = GridOf(leaf.shape, leaf.source_parts, 3);
      const BoxLayout sink = GridOf(leaf.shape, leaf.sink_parts, 1);
      const int64_t itemsize = ItemsizeOf(leaf.kind);
      const int64_t wire_itemsize = leaf.op.is_copy() ? itemsize : ItemsizeOf(leaf.op.to());
      for (int64_t b = 0; b < source.num_boxes(); ++b) {
        shards.push_back({i, static_cast<uint32_t>(b), static_cast<uint32_t>(itemsize), leaf.kind,
                          static_cast<uint32_t>(source.rank()), ranges.size()});
        ranges.insert(ranges.end(), source.box(b).begin(), source.box(b).end());
        sources_.Add(source.box(b), itemsize, leaf.column_major);
        for (uint8_t& byte : sources_.boxes.back()) byte = static_cast<uint8_t>(random());
      }
      for (int64_t b = 0; b < sink.num_boxes(); ++b) sinks_.Add(sink.box(b), wire_itemsize, false);
      const auto first_layout = static_cast<uint32_t>(input.layouts.size());
      input.pairs.push_back({i, i, first_layout, first_layout + 1, static_cast<uint32_t>(itemsize),
                             static_cast<uint32_t>(wire_itemsize), leaf.op});
      input.layouts.push_back(source);
      input.layouts.push_back(sink);
    }
    const auto num_leaves = static_cast<uint32_t>(cases.size());
    const Status made =
        ShardDirectory::Make(std::move(shards), std::move(ranges), num_leaves, &directory_);
    ASSERT_TRUE(made.ok()) << made.message();
    const Status planned = MakePlan(std::move(input), &plan_);
    ASSERT_TRUE(planned.ok()) << planned.message();
  }

  LocalMemory memory() const { return {sources_.addresses, sources_.strides, sinks_.addresses}; }

  // Element by element: finds each of a sink box in the source box that has it.
  void ExpectCopied() {
    size_t sink_index = 0;
    for (const LeafPair& pair : plan_.input.pairs) {
      const BoxLayout& layout = plan_.input.layouts[pair.sink_layout];
      for (int64_t b = 0; b < layout.num_boxes(); ++b, ++sink_index) {
        ASSERT_EQ(sinks_.boxes[sink_index], Expected(pair, layout.box(b)))
            << "leaf " << pair.sink_leaf << ", box " << b;
      }
    }
  }

  std::vector<uint8_t> Expected(const LeafPair& pair, BoxView sink) const {
    std::vector<uint8_t> bytes;
    const auto rank = static_cast<size_t>(RankOf(sink));
    for (int64_t i = 0; i < VolumeOf(sink); ++i) {
      std::vector<int64_t> element(2 * rank);
      int64_t rest = i;
      for (size_t d = rank; d-- > 0;) {
        const int64_t extent = ExtentOf(sink, static_cast<int>(d));
        element[2 * d] = StartOf(sink, static_cast<int>(d)) + rest % extent;
        element[2 * d + 1] = element[2 * d] + 1;
        rest /= extent;
      }
      std::vector<uint8_t> converted(pair.wire_itemsize);
      const uint8_t* at = Find(pair, element);
      if (pair.op.is_copy()) {
        std::memcpy(converted.data(), at, pair.itemsize);
      } else {
        CastRun(pair.op, at, pair.itemsize, converted.data(), 1);
      }
      bytes.insert(bytes.end(), converted.begin(), converted.end());
    }
    return bytes;
  }

  const uint8_t* Find(const LeafPair& pair, BoxView element) const {
    size_t first_stride = 0;
    for (size_t s = 0; s < directory_.num_shards(); ++s) {
      const ShardDirectory::Shard& shard = directory_.shard(s);
      const BoxView range = directory_.range(shard);
      if (shard.leaf == pair.source_leaf && Contains(range, element)) {
        int64_t offset = 0;
        for (int d = 0; d < RankOf(range); ++d) {
          offset += (StartOf(element, d) - StartOf(range, d)) * sources_.strides[first_stride + d];
        }
        return sources_.boxes[s].data() + offset;
      }
      first_stride += shard.rank;
    }
    return nullptr;
  }

  Status Copy(const LocalMemory& memory, int num_threads) {
    std::unique_ptr<LocalCopy> copy;
    TSR_RETURN_IF_ERROR(LocalCopy::Start(plan_, directory_, memory, num_threads, &copy));
    TSR_RETURN_IF_ERROR(copy->SetPinned(directory_.num_shards()));
    return copy->Finish();
  }

  void ExpectInvalid(const LocalMemory& memory, int num_threads, const std::string& message) {
    const Status status = Copy(memory, num_threads);
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
    for (const auto& box : sinks_.boxes) EXPECT_EQ(box, std::vector<uint8_t>(box.size()));
  }

  const std::vector<LeafCase> kSmall = {
      {{8, 12}, {4, 1}, {1, 2}, FloatKind::kBF16, Op(), false},
      {{6}, {2}, {3}, FloatKind::kF32, Op(), false},
  };

  Side sources_;
  Side sinks_;
  ShardDirectory directory_;
  Plan plan_;
};

TEST_F(LocalCopyTest, MovesEveryElementToEverySinkBox) {
  const Op narrow = Op::Cast(FloatKind::kF32, FloatKind::kBF16);
  const Op widen = Op::Cast(FloatKind::kF16, FloatKind::kF32);
  for (int num_threads : {1, 3}) {
    SCOPED_TRACE(num_threads);
    sources_ = {};
    sinks_ = {};
    ASSERT_NO_FATAL_FAILURE(Make({
        {{64, 96}, {1, 4}, {2, 2}, FloatKind::kBF16, Op(), false},
        {{96, 64}, {4, 1}, {1, 8}, FloatKind::kF32, Op(), true},
        {{64, 48}, {2, 2}, {4, 1}, FloatKind::kF32, narrow, false},
        {{48, 64}, {2, 2}, {1, 1}, FloatKind::kF32, narrow, true},
        {{4, 6, 10}, {2, 3, 1}, {1, 2, 5}, FloatKind::kF16, widen, false},
        {{}, {}, {}, FloatKind::kF32, Op(), false},
        {{0, 8}, {1, 2}, {1, 1}, FloatKind::kF32, Op(), false},
        {{2304}, {3}, {2}, FloatKind::kF8E4M3FN, Op(), false},
        {{16, 1080}, {2, 1}, {1, 4}, FloatKind::kBF16, Op(), false},
        {{6, 1040}, {1, 1}, {2, 2}, FloatKind::kF32, narrow, false},
        {{2, 2, 2, 2, 6}, {2, 1, 2, 1, 3}, {1, 2, 1, 2, 2}, FloatKind::kF64, Op(), true},
    }));
    const Status status = Copy(memory(), num_threads);
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectCopied();
  }
}

TEST_F(LocalCopyTest, CopiesShardAfterShardAsTheyArePinned) {
  for (int num_threads : {1, 4}) {
    SCOPED_TRACE(num_threads);
    sources_ = {};
    sinks_ = {};
    ASSERT_NO_FATAL_FAILURE(Make({
        {{64, 96}, {4, 1}, {1, 2}, FloatKind::kBF16, Op(), false},
        {{96, 64}, {4, 1}, {1, 8}, FloatKind::kF32, Op(), true},
    }));
    const std::vector<uint64_t> addresses = sources_.addresses;
    const std::vector<int64_t> strides = sources_.strides;
    std::fill(sources_.addresses.begin(), sources_.addresses.end(), 0);
    std::fill(sources_.strides.begin(), sources_.strides.end(), -1);
    std::unique_ptr<LocalCopy> copy;
    ASSERT_TRUE(LocalCopy::Start(plan_, directory_, memory(), num_threads, &copy).ok());
    for (size_t i = 0; i < addresses.size(); ++i) {
      EXPECT_EQ(copy->Finish().code(), Code::kInvalid);
      sources_.addresses[i] = addresses[i];
      for (size_t d = 2 * i; d < 2 * i + 2; ++d) sources_.strides[d] = strides[d];
      ASSERT_TRUE(copy->SetPinned(i + 1).ok());
    }
    EXPECT_EQ(copy->SetPinned(addresses.size() - 1).code(), Code::kInvalid);
    EXPECT_EQ(copy->SetPinned(addresses.size() + 1).code(), Code::kInvalid);
    ASSERT_TRUE(copy->Finish().ok());
    ExpectCopied();
  }
}

TEST_F(LocalCopyTest, WritesNoMoreOnceItIsGivenUp) {
  Make(kSmall);
  std::unique_ptr<LocalCopy> copy;
  ASSERT_TRUE(LocalCopy::Start(plan_, directory_, memory(), 3, &copy).ok());
  copy->Close();
  EXPECT_EQ(copy->Finish().message(), "the copy is closed");
  for (const auto& box : sinks_.boxes) EXPECT_EQ(box, std::vector<uint8_t>(box.size()));
}

TEST_F(LocalCopyTest, RefusesArraysOfTheWrongLength) {
  Make(kSmall);
  LocalMemory wrong = memory();
  wrong.addresses = wrong.addresses.first(1);
  ExpectInvalid(wrong, 1, "1 addresses for 6 shards");
  wrong = memory();
  wrong.strides = wrong.strides.first(2);
  ExpectInvalid(wrong, 1, "2 strides where the shards have 10 dimensions");
  wrong = memory();
  wrong.sink_addresses = {};
  ExpectInvalid(wrong, 1, "0 sink addresses for 5 sink boxes");
  ExpectInvalid(memory(), 0, "num_threads is 0");
}

TEST_F(LocalCopyTest, RefusesMemoryThatCannotBe) {
  Make(kSmall);
  sources_.strides[3] = -2;
  ExpectInvalid(memory(), 2, "box 1 of leaf 0 has a negative stride");
  sources_.strides[3] = 2;
  sources_.addresses[4] = 0;
  ExpectInvalid(memory(), 2, "box 0 of leaf 1 has a null address");
  sources_.addresses[4] = reinterpret_cast<uint64_t>(sources_.boxes[4].data());
  sinks_.addresses[1] = 0;
  ExpectInvalid(memory(), 2, "sink box 1 of leaf 0 has a null address");
}

TEST_F(LocalCopyTest, RefusesADirectoryOfOtherShards) {
  Make(kSmall);
  ASSERT_TRUE(
      ShardDirectory::Make({{0, 0, 2, FloatKind::kBF16, 2, 0}}, {0, 2, 0, 12}, 2, &directory_)
          .ok());
  LocalMemory one = memory();
  one.addresses = one.addresses.first(1);
  one.strides = one.strides.first(2);
  ExpectInvalid(one, 1, "is not in the directory");
  ASSERT_TRUE(
      ShardDirectory::Make({{0, 0, 4, FloatKind::kF32, 2, 0}}, {0, 2, 0, 12}, 2, &directory_).ok());
  ExpectInvalid(one, 1, "box 0 of leaf 0 is another one in the directory");
}

}  // namespace
}  // namespace tsr

// Leaves, plans and memory of several sources and one sink, for tests of what moves between them.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cast.h"
#include "chunk_table.h"
#include "exporter.h"
#include "fetcher.h"
#include "plan.h"
#include "region_copy.h"

namespace tsr {

inline constexpr double kTestTimeoutS = 20;

#define ASSERT_OK(expr)                             \
  do {                                              \
    const ::tsr::Status status_ = (expr);           \
    ASSERT_TRUE(status_.ok()) << status_.message(); \
  } while (false)
#define EXPECT_OK(expr)                             \
  do {                                              \
    const ::tsr::Status status_ = (expr);           \
    EXPECT_TRUE(status_.ok()) << status_.message(); \
  } while (false)

// A leaf that is cut along one dimension at the sources, and along another at the sink.
struct LeafSpec {
  std::vector<int64_t> shape;
  int source_dim = 0;
  int64_t num_source_boxes = 1;  // box b is held by process b modulo num_sources
  int sink_dim = 0;
  int64_t num_sink_boxes = 1;
  uint32_t itemsize = 2;
  FloatKind kind = FloatKind::kNone;
  FloatKind sink_kind = FloatKind::kNone;
  bool column_major = false;

  Op op() const { return kind == sink_kind ? Op() : Op::Cast(kind, sink_kind); }
  uint32_t sink_itemsize() const {
    return op().is_copy() ? itemsize : static_cast<uint32_t>(ItemsizeOf(sink_kind));
  }
};

// One shard's memory, filled with the leaf's bytes.
struct ShardMemory {
  std::vector<uint8_t> bytes;
  std::vector<int64_t> strides;
};

class Transfer {
 public:
  Transfer(std::vector<LeafSpec> leaves, uint32_t num_sources, int64_t chunk_nbytes)
      : leaves_(std::move(leaves)) {
    PlanInput input;
    input.sink_process = 0;
    input.chunk_nbytes = chunk_nbytes;
    for (uint32_t i = 0; i < leaves_.size(); ++i) {
      const LeafSpec& leaf = leaves_[i];
      input.layouts.push_back(
          Layout(leaf.shape, leaf.source_dim, leaf.num_source_boxes, num_sources));
      input.layouts.push_back(Layout(leaf.shape, leaf.sink_dim, leaf.num_sink_boxes, 1));
      input.pairs.push_back(
          {i, i, 2 * i, 2 * i + 1, leaf.itemsize, leaf.sink_itemsize(), leaf.op()});
    }
    const Status status = MakePlan(std::move(input), &plan);
    if (!status.ok()) throw std::runtime_error(status.message());
    for (uint32_t process = 0; process < num_sources; ++process) AddSource(process);
    for (size_t i = 0; i < leaves_.size(); ++i) {
      const BoxLayout& layout = plan.input.layouts[2 * i + 1];
      for (int64_t b = 0; b < layout.num_boxes(); ++b) {
        sink.emplace_back(VolumeOf(layout.box(b)) * leaves_[i].sink_itemsize(), 0xEE);
        sink_addresses.push_back(reinterpret_cast<uint64_t>(sink.back().data()));
      }
    }
  }

  struct Source {
    ShardDirectory directory;
    std::vector<ShardMemory> shards;
    std::vector<uint64_t> addresses;
    std::vector<int64_t> strides;
  };

  Status Publish(Exporter* exporter, size_t source, uint64_t version) const {
    return exporter->Publish(version, sources[source]->addresses, sources[source]->strides);
  }

  void ClearSink() {
    for (auto& box : sink) std::fill(box.begin(), box.end(), 0xEE);
  }

  // Whether every sink box holds what its leaf holds, element by element.
  ::testing::AssertionResult SinkIsRight() const {
    size_t index = 0;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      const BoxLayout& layout = plan.input.layouts[2 * i + 1];
      for (int64_t b = 0; b < layout.num_boxes(); ++b, ++index) {
        if (sink[index] != Expected(leaves_[i], i, layout.box(b))) {
          return ::testing::AssertionFailure() << "leaf " << i << ", sink box " << b << " differs";
        }
      }
    }
    return ::testing::AssertionSuccess();
  }

  Plan plan;
  std::vector<std::unique_ptr<Source>> sources;
  std::vector<std::vector<uint8_t>> sink;
  std::vector<uint64_t> sink_addresses;

 private:
  static BoxLayout Layout(const std::vector<int64_t>& shape, int dim, int64_t num_boxes,
                          uint32_t num_processes) {
    BoxLayout layout{shape, {}, {0}, {}};
    for (int64_t b = 0; b < num_boxes; ++b) {
      for (size_t d = 0; d < shape.size(); ++d) {
        const bool is_cut = static_cast<int>(d) == dim;
        layout.boxes.push_back(is_cut ? shape[d] * b / num_boxes : 0);
        layout.boxes.push_back(is_cut ? shape[d] * (b + 1) / num_boxes : shape[d]);
      }
      layout.holders.push_back(static_cast<uint32_t>(b) % num_processes);
      layout.holder_offsets.push_back(static_cast<uint32_t>(layout.holders.size()));
    }
    return layout;
  }

  // Bytes of the whole leaf, row-major: floats that any kind can hold, or anything.
  static std::vector<uint8_t> Global(const LeafSpec& leaf, size_t index) {
    int64_t volume = 1;
    for (const int64_t extent : leaf.shape) volume *= extent;
    std::vector<uint8_t> bytes(volume * leaf.itemsize);
    std::mt19937 random(static_cast<uint32_t>(index));
    if (leaf.kind == FloatKind::kF32) {
      for (int64_t i = 0; i < volume; ++i) {
        const float value = static_cast<float>(random() % 20000) / 64 - 100;
        std::memcpy(&bytes[4 * i], &value, 4);
      }
    } else {
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    }
    return bytes;
  }

  // The bytes of a box, in an order of dimensions: strides are those of the memory to fill.
  static std::vector<uint8_t> Part(const LeafSpec& leaf, size_t index, BoxView box,
                                   std::span<const int64_t> strides) {
    const std::vector<uint8_t> global = Global(leaf, index);
    std::vector<uint8_t> bytes(VolumeOf(box) * leaf.itemsize);
    std::vector<int64_t> at(leaf.shape.size(), 0);
    for (int64_t n = VolumeOf(box); n > 0; --n) {
      int64_t from = 0;
      int64_t to = 0;
      for (size_t d = 0; d < at.size(); ++d) {
        from = from * leaf.shape[d] + box[2 * d] + at[d];
        to += at[d] * strides[d];
      }
      std::memcpy(&bytes[to], &global[from * leaf.itemsize], leaf.itemsize);
      for (size_t d = at.size(); d-- > 0;) {
        if (++at[d] < box[2 * d + 1] - box[2 * d]) break;
        at[d] = 0;
      }
    }
    return bytes;
  }

  static std::vector<uint8_t> Expected(const LeafSpec& leaf, size_t index, BoxView box) {
    std::vector<int64_t> strides(leaf.shape.size());
    RowMajorStrides(box, leaf.itemsize, strides);
    const std::vector<uint8_t> bytes = Part(leaf, index, box, strides);
    if (leaf.op().is_copy()) return bytes;
    std::vector<uint8_t> cast(VolumeOf(box) * leaf.sink_itemsize());
    CastRun(leaf.op(), bytes.data(), leaf.itemsize, cast.data(), VolumeOf(box));
    return cast;
  }

  void AddSource(uint32_t process) {
    auto source = std::make_unique<Source>();
    std::vector<ShardDirectory::Shard> shards;
    std::vector<int64_t> ranges;
    for (uint32_t i = 0; i < leaves_.size(); ++i) {
      const LeafSpec& leaf = leaves_[i];
      const BoxLayout& layout = plan.input.layouts[2 * i];
      const auto rank = static_cast<uint32_t>(leaf.shape.size());
      for (uint32_t b = 0; b < layout.num_boxes(); ++b) {
        if (layout.holders[b] != process) continue;
        const BoxView box = layout.box(b);
        shards.push_back({i, b, leaf.itemsize, leaf.kind, rank, ranges.size()});
        ranges.insert(ranges.end(), box.begin(), box.end());
        ShardMemory memory;
        memory.strides.resize(rank);
        RowMajorStrides(box, leaf.itemsize, memory.strides);
        if (leaf.column_major) {
          int64_t stride = leaf.itemsize;
          for (uint32_t d = 0; d < rank; ++d) {
            memory.strides[d] = stride;
            stride *= box[2 * d + 1] - box[2 * d];
          }
        }
        memory.bytes = Part(leaf, i, box, memory.strides);
        source->strides.insert(source->strides.end(), memory.strides.begin(), memory.strides.end());
        source->addresses.push_back(reinterpret_cast<uint64_t>(memory.bytes.data()));
        source->shards.push_back(std::move(memory));
      }
    }
    const Status status =
        ShardDirectory::Make(std::move(shards), std::move(ranges),
                             static_cast<uint32_t>(leaves_.size()), &source->directory);
    if (!status.ok()) throw std::runtime_error(status.message());
    sources.push_back(std::move(source));
  }

  const std::vector<LeafSpec> leaves_;
};

// Two ends of a stream that behaves as TCP does.
inline std::pair<UniqueFd, UniqueFd> ConnectedPair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    throw std::runtime_error("socketpair");
  }
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

inline std::pair<UniqueFd, UniqueFd> ConnectedTcpPair() {
  UniqueFd listening(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  UniqueFd ours(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t nbytes = sizeof(at);
  auto* address = reinterpret_cast<sockaddr*>(&at);
  if (::bind(listening.get(), address, nbytes) != 0 || ::listen(listening.get(), 1) != 0 ||
      ::getsockname(listening.get(), address, &nbytes) != 0 ||
      ::connect(ours.get(), address, nbytes) != 0) {
    throw std::runtime_error("a connection over loopback");
  }
  return {std::move(ours), UniqueFd(::accept(listening.get(), nullptr, nullptr))};
}

inline std::unique_ptr<Exporter> MakeExporter(const Transfer::Source& source,
                                              ExporterOptions options = {
                                                  .num_workers = 2,
                                                  .max_chunk_nbytes = 16 << 20,
                                                  .peer_timeout_s = kTestTimeoutS}) {
  std::unique_ptr<Exporter> exporter;
  EXPECT_OK(Exporter::Make(&source.directory, options, &exporter));
  return exporter;
}

inline std::unique_ptr<Fetcher> MakeFetcher(
    const Plan& plan,
    FetcherOptions options = {.num_workers = 2, .window = 3, .peer_timeout_s = kTestTimeoutS}) {
  std::unique_ptr<Fetcher> fetcher;
  EXPECT_OK(Fetcher::Make(&plan, options, &fetcher));
  return fetcher;
}

inline void Connect(Exporter* exporter, Fetcher* fetcher, uint32_t process, uint64_t sink = 7) {
  auto [ours, theirs] = ConnectedPair();
  EXPECT_OK(exporter->AddConnection({std::move(ours)}, sink, "rail"));
  EXPECT_OK(fetcher->AddStream(process, {std::move(theirs)}, "rail"));
}

inline constexpr int kRingSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Memory for one connection, as a sink makes it.
inline UniqueFd MakeRing(int64_t nbytes = 192 << 10, int seals = kRingSeals, unsigned flags = 0) {
  UniqueFd ring(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (ring.get() < 0 || ::ftruncate(ring.get(), nbytes) != 0) return UniqueFd();
  EXPECT_EQ(::fcntl(ring.get(), F_ADD_SEALS, seals), 0);
  return ring;
}

inline void ConnectByMemory(Exporter* exporter, Fetcher* fetcher, uint32_t process) {
  auto [ours, theirs] = ConnectedPair();
  UniqueFd ring = MakeRing();
  UniqueFd copy(::dup(ring.get()));
  EXPECT_OK(exporter->AddConnection({std::move(ours), std::move(ring)}, 7, "shm"));
  EXPECT_OK(fetcher->AddStream(process, {std::move(theirs), std::move(copy)}, "shm"));
}

// Fetches a version whole; the status says what went wrong, a deadline that passed among it.
inline Status FetchAll(Fetcher* fetcher, const Transfer& transfer, uint64_t version) {
  TSR_RETURN_IF_ERROR(fetcher->Begin(version, transfer.sink_addresses));
  bool done = false;
  Status status = fetcher->Wait(Deadline::After(kTestTimeoutS), &done);
  fetcher->End();
  if (status.ok() && !done) return Status(Code::kTimeout, "not done within the test's time");
  return status;
}

}  // namespace tsr

// A source's end of a connection to a sink that sends anything: what it answers stays well formed,
// and every chunk has the bytes of its version.
#include <sys/epoll.h>

#include <cstring>

#include "crc32c.h"
#include "digest_request.h"
#include "fuzz_input.h"
#include "source_stream.h"
#include "transfer.h"

namespace tsr {
namespace {

constexpr int kTurns = 8;  // after each step
constexpr uint64_t kVersion = 1;

enum Op : uint8_t {
  kRaw,
  kAny,
  kUpload,
  kFetch,
  kDone,
  kPing,
  kDrain,
  kTick,
  kDrop,
  kPublish,
  kDigest,
  kUnsummed,
  kComing,
  kAdd,
  kNumOps
};

struct World {
  World() {
    const Status status = EventLoop::Start(std::chrono::hours(1), &worker.loop);
    Check(status.ok(), "there is a loop");
    Publish();
  }

  void Publish(bool coming = false) {
    const Transfer::Source& source = *transfer.sources[0];
    Check(versions.Publish(kVersion, source.addresses, source.strides, coming).ok(),
          "it is published");
  }

  // Runs of every length, a cast, and memory that is column-major.
  Transfer transfer{
      {{.shape = {300, 40}, .num_source_boxes = 2, .sink_dim = 1, .num_sink_boxes = 3},
       {.shape = {64, 64}, .itemsize = 4, .kind = FloatKind::kF32, .sink_kind = FloatKind::kBF16},
       {.shape = {100, 30}, .column_major = true},
       {.shape = {}}},
      1,
      8192};
  const ShardDirectory& directory = transfer.sources[0]->directory;
  std::string table = EncodeChunkTable(transfer.plan, 0);
  uint32_t id = Crc32c(0, table.data(), table.size());
  PublishedVersions versions{&directory};
  SinkTables tables;
  RailStats stats;
  SourceWorker worker{.directory = &directory,
                      .versions = &versions,
                      .tables = &tables,
                      .max_chunk_nbytes = 1 << 16,
                      .peer_timeout = std::chrono::seconds(10),
                      .blocks = {},
                      .loop = nullptr};
};

// Answers that have come whole are held against the wire format.
void CheckReplies(const World& world, std::string* received) {
  Frame frame;
  while (TakeFrame(received, &frame)) {
    Check(!IsRequest(frame.kind), "a source answers");
    const size_t trailer_nbytes = frame.kind == FrameKind::kChunk ? kTrailerNbytes : 0;
    const size_t nbytes = kFrameNbytes + frame.nbytes + trailer_nbytes;
    if (received->size() < nbytes) return;
    if (frame.kind == FrameKind::kChunk) {
      const char* payload = received->data() + kFrameNbytes;
      const uint32_t crc = Crc32c(0, payload, frame.nbytes);
      const uint32_t none = 0;
      Check(std::memcmp(&crc, payload + frame.nbytes, kTrailerNbytes) == 0 ||
                std::memcmp(&none, payload + frame.nbytes, kTrailerNbytes) == 0,
            "a chunk has its sum, or none");
      if (frame.table == world.id) {
        Check(frame.chunk < world.transfer.plan.chunks.size() &&
                  frame.nbytes == world.transfer.plan.chunks[frame.chunk].nbytes,
              "a chunk is that of the table");
      }
    }
    received->erase(0, nbytes);
  }
}

// Of a shard that may be there, and a box that may be within it.
DigestRequest AnyRequest(FuzzInput* input) {
  DigestRequest request{input->Byte() % uint32_t{5},
                        input->Byte() % uint32_t{3},
                        tsr::Op(input->Byte() % 4 == 0 ? 0x32 : 0),
                        {},
                        {}};
  const int rank = request.leaf == 3 ? 0 : input->Byte() % 8 == 0 ? input->Byte() % 40 : 2;
  for (int dim = 0; dim < rank; ++dim) {
    request.shape.push_back(300);
    request.ranges.push_back(input->Byte() % 64);
    request.ranges.push_back(input->Byte() % 64);
  }
  return request;
}

std::string Bent(std::string bytes, FuzzInput* input) {
  bytes[input->Number(2) % bytes.size()] ^= static_cast<char>(1 + input->Byte() % 255);
  return bytes;
}

void Run(World* world, FuzzInput input) {
  auto [ours, theirs] = ConnectedPair();
  auto pipe = std::make_unique<SocketPipe>(ours.get(), &world->stats);
  Check(SetNonBlocking(ours.get()).ok(), "the socket is set");
  SourceStream stream(std::move(ours), std::move(pipe), 7, "rail", &world->stats, nullptr,
                      &world->worker);
  const Clock::time_point began = Clock::now();
  const uint64_t num_chunks = world->transfer.plan.chunks.size();
  std::string received;
  while (!input.empty() && !stream.closed()) {
    std::string bytes;
    switch (input.Byte() % kNumOps) {
      case kRaw:
        bytes = input.Bytes(1 + input.Byte());
        break;
      case kAny:
        bytes = Encoded(input.AnyFrame());
        break;
      case kUpload:
        bytes =
            Encoded(
                {.kind = FrameKind::kTable, .table = world->id, .nbytes = world->table.size()}) +
            world->table;
        break;
      case kFetch:
        bytes = Encoded({FrameKind::kFetch, world->id, kVersion, input.Byte() % num_chunks});
        break;
      case kDone:
        bytes = Encoded({FrameKind::kDone, world->id, input.Number(1), input.Number(2)});
        break;
      case kPing:
        bytes = Encoded({.kind = FrameKind::kPing});
        break;
      case kDrain:
        ReceiveAll(theirs.get(), &received);
        CheckReplies(*world, &received);
        break;
      case kTick:
        stream.OnTick(began + std::chrono::seconds(input.Byte() % 12));
        break;
      case kDrop: {
        const uint32_t leaves[] = {input.Byte() % uint32_t{4}};
        Check(world->versions.DropLeaves(kVersion, leaves).ok(), "the leaf is dropped");
        if (stream.Reads(kVersion, leaves)) stream.Close();
        break;
      }
      case kDigest: {
        std::string request = EncodeDigestRequest(AnyRequest(&input));
        if (input.Byte() % 4 == 0) request = Bent(request, &input);
        const uint32_t crc = Crc32c(0, request.data(), request.size());
        bytes = Encoded({FrameKind::kDigest, crc, kVersion, 0, request.size()}) + request;
        break;
      }
      case kUnsummed:
        bytes =
            Encoded({FrameKind::kFetchUnsummed, world->id, kVersion, input.Byte() % num_chunks});
        break;
      case kComing:
        world->versions.Withdraw(kVersion);
        if (stream.Reads(kVersion)) stream.Close();
        world->Publish(/*coming=*/true);
        break;
      case kAdd: {
        const uint32_t leaves[] = {input.Byte() % uint32_t{4}};
        const Transfer::Source& source = *world->transfer.sources[0];
        Check(world->versions.AddLeaves(kVersion, leaves, source.addresses, source.strides).ok(),
              "the leaf is added");
        if (!stream.closed()) stream.Wake();
        break;
      }
      default:
        world->Publish();
    }
    SendAll(theirs.get(), bytes);
    for (int turn = 0; turn < kTurns && !stream.closed(); ++turn) {
      pollfd polled{stream.fd(), POLLIN, 0};
      stream.OnReady(::poll(&polled, 1, 0) == 1 ? EPOLLIN | EPOLLOUT : EPOLLOUT);
    }
  }
  ReceiveAll(theirs.get(), &received);
  CheckReplies(*world, &received);
  world->Publish();
}

}  // namespace
}  // namespace tsr

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  static tsr::World world;
  tsr::Run(&world, {data, nbytes});
  return 0;
}

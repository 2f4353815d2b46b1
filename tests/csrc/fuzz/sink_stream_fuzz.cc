// A sink's end of two connections to a source that sends anything: it writes to its own memory
// alone, and what it calls verified is right where only honest answers were bent on the way.
#include <sys/epoll.h>

#include <deque>

#include "crc32c.h"
#include "fuzz_input.h"
#include "sink_stream.h"
#include "transfer.h"

namespace tsr {
namespace {

constexpr int kMostTurns = 64;

enum Op : uint8_t { kRaw, kAny, kAnswer, kBent, kTick, kWake, kNext, kOpen, kNumOps };

class World {
 public:
  World() {
    Check(EventLoop::Start(std::chrono::hours(1), &worker_.loop).ok(), "there is a loop");
    source_.process = 0;
    source_.index = 0;
    FillPayloads();
  }

  void Run(FuzzInput input) {
    Begin();
    Open(0);
    Open(1);
    while (!input.empty()) {
      const uint8_t op = input.Byte();
      Peer& peer = peers_[op >> 7];
      switch (op % kNumOps) {
        case kRaw:
          honest_ = false;
          Feed(&peer, input.Bytes(1 + input.Byte()));
          break;
        case kAny:
          honest_ = false;
          Feed(&peer, Encoded(input.AnyFrame()));
          break;
        case kAnswer:
          Feed(&peer, Answer(&peer));
          break;
        case kBent:
          Feed(&peer, Bent(Answer(&peer), static_cast<uint32_t>(input.Number(3))));
          break;
        case kTick:
          peer.stream->OnTick(Clock::now() + std::chrono::milliseconds(100 * input.Byte()));
          break;
        case kWake:
          peer.stream->Wake();
          break;
        case kNext:
          End();
          (op & kNumOps) == 0 ? Begin() : BeginDigests();
          break;
        default:
          if (peer.stream->closed()) Open(op >> 7);
      }
      WakeAll();
      CheckDone();
    }
    End();
    for (Peer& peer : peers_) {
      peer.stream.reset();
      peer.requests.clear();
      peer.sent.clear();
    }
    source_.table = SourceLink::Table::kAbsent;
  }

 private:
  struct Peer {
    UniqueFd fd;
    std::unique_ptr<SinkStream> stream;
    std::string sent;  // by the stream, and not taken apart yet
    std::deque<Frame> requests;
  };

  // What an honest source answers, and what the sink's memory is then.
  void FillPayloads() {
    const auto exporter = MakeExporter(*transfer_.sources[0]);
    const auto fetcher = MakeFetcher(transfer_.plan);
    Check(transfer_.Publish(exporter.get(), 0, 1).ok(), "it is published");
    Connect(exporter.get(), fetcher.get(), 0);
    Check(FetchAll(fetcher.get(), transfer_, 1).ok(), "it is fetched");
    Check(static_cast<bool>(transfer_.SinkIsRight()), "it is right");
    expected_ = transfer_.sink;
    auto [ours, theirs] = ConnectedPair();
    Check(exporter->AddConnection({std::move(ours)}, 8, "rail").ok(), "it is connected");
    const std::string table = EncodeChunkTable(transfer_.plan, 0);
    const uint32_t id = Crc32c(0, table.data(), table.size());
    SendAll(theirs.get(),
            Encoded({.kind = FrameKind::kTable, .table = id, .nbytes = table.size()}) + table);
    Read(theirs.get(), kFrameNbytes);
    for (size_t i = 0; i < transfer_.plan.chunks.size(); ++i) {
      SendAll(theirs.get(), Encoded({FrameKind::kFetch, id, 1, i}));
      Read(theirs.get(), kFrameNbytes);
      payloads_.push_back(Read(theirs.get(), transfer_.plan.chunks[i].nbytes + kTrailerNbytes));
    }
  }

  static std::string Read(int fd, size_t nbytes) {
    std::string bytes(nbytes, '\0');
    Check(::recv(fd, bytes.data(), nbytes, MSG_WAITALL) == static_cast<ssize_t>(nbytes), "it came");
    return bytes;
  }

  void Begin() {
    transfer_.ClearSink();
    honest_ = true;
    ++version_;
    Check(Fetch::Make(transfer_.plan, version_, transfer_.sink_addresses, {}, &worker_.fetch).ok(),
          "a fetch begins");
  }

  // Of every shard of the source.
  void BeginDigests() {
    honest_ = true;
    const ShardDirectory& directory = transfer_.sources[0]->directory;
    std::vector<DigestRequest> requests;
    for (size_t i = 0; i < directory.num_shards(); ++i) {
      const ShardDirectory::Shard& shard = directory.shard(i);
      const BoxView range = directory.range(shard);
      const LeafPair& pair = transfer_.plan.input.pairs[shard.leaf];
      requests.push_back({shard.leaf,
                          shard.box,
                          pair.op,
                          transfer_.plan.input.layouts[pair.source_layout].shape,
                          {range.begin(), range.end()}});
    }
    Check(Fetch::MakeDigests(transfer_.plan, ++version_, {requests}, &worker_.fetch).ok(),
          "digests begin");
  }

  void End() {
    for (Peer& peer : peers_) {
      if (peer.stream->has_chunks()) peer.stream->Close();
    }
    worker_.fetch.reset();
  }

  void Open(size_t index) {
    auto [ours, theirs] = ConnectedPair();
    Check(SetNonBlocking(ours.get()).ok(), "the socket is set");
    auto pipe = std::make_unique<SocketPipe>(ours.get(), &stats_);
    peers_[index] = Peer{std::move(theirs),
                         std::make_unique<SinkStream>(std::move(ours), std::move(pipe), &source_,
                                                      "rail", &stats_, nullptr, &worker_),
                         {},
                         {}};
    peers_[index].stream->Wake();
  }

  void WakeAll() {
    while (std::exchange(wanted_, false)) {
      for (Peer& peer : peers_) peer.stream->Wake();
    }
  }

  void Feed(Peer* peer, const std::string& bytes) {
    SendAll(peer->fd.get(), bytes);
    for (int turn = 0; turn < kMostTurns && !peer->stream->closed(); ++turn) {
      pollfd polled{peer->stream->fd(), POLLIN, 0};
      if (::poll(&polled, 1, 0) == 0) break;
      peer->stream->OnReady(EPOLLIN);
    }
  }

  // The honest answer to the oldest request that has none yet.
  std::string Answer(Peer* peer) {
    ReceiveAll(peer->fd.get(), &peer->sent);
    Frame frame;
    while (TakeFrame(&peer->sent, &frame)) {
      if (peer->sent.size() < kFrameNbytes + frame.nbytes) break;
      peer->sent.erase(0, kFrameNbytes + frame.nbytes);
      if (frame.kind != FrameKind::kDone) peer->requests.push_back(frame);
    }
    if (peer->requests.empty()) return {};
    frame = peer->requests.front();
    peer->requests.pop_front();
    if (frame.kind == FrameKind::kPing) return Encoded({.kind = FrameKind::kPong});
    if (frame.kind == FrameKind::kTable) {
      return Encoded({.kind = FrameKind::kTableOk, .table = frame.table});
    }
    if (frame.kind == FrameKind::kDigest) {
      return Encoded({FrameKind::kDigestIs, frame.table, version_, AnswerTo(frame.chunk)});
    }
    Check(frame.chunk < payloads_.size(), "a sink asks for chunks of its plan");
    const std::string& payload = payloads_[frame.chunk];
    frame.kind = FrameKind::kChunk;
    frame.nbytes = payload.size() - kTrailerNbytes;
    return Encoded(frame) + payload;
  }

  // What stands for a digest, so that one that is mistaken for another shows.
  static uint64_t AnswerTo(uint64_t index) { return index + 100; }

  static std::string Bent(std::string bytes, uint32_t where) {
    if (!bytes.empty()) bytes[where / 8 % bytes.size()] ^= static_cast<char>(1 << where % 8);
    return bytes;
  }

  void CheckDone() const {
    bool done = false;
    if (!worker_.fetch->Wait(Deadline::After(0), &done).ok() || !done) return;
    if (!honest_) return;
    if (!worker_.fetch->asks_for_digests()) {
      Check(transfer_.sink == expected_, "what is verified is right");
      return;
    }
    const std::vector<uint64_t>& digests = worker_.fetch->digests().front();
    for (size_t i = 0; i < digests.size(); ++i) {
      Check(digests[i] == AnswerTo(i), "a digest is that of its request");
    }
  }

  Transfer transfer_{
      {{.shape = {300, 40}, .num_source_boxes = 2, .sink_dim = 1, .num_sink_boxes = 3},
       {.shape = {64, 64}, .itemsize = 4, .kind = FloatKind::kF32, .sink_kind = FloatKind::kBF16},
       {.shape = {}}},
      1,
      8192};
  std::vector<std::vector<uint8_t>> expected_;
  std::vector<std::string> payloads_;
  RailStats stats_;
  SourceLink source_;
  bool wanted_ = false;
  SinkWorker worker_{.plan = &transfer_.plan,
                     .window = 2,
                     .peer_timeout = std::chrono::seconds(10),
                     .full_nbytes = 2 << 20,
                     .checksums = true,
                     .tells_done = true,
                     .wake_all = [this] { wanted_ = true; },
                     .fetch = nullptr,
                     .blocks = {},
                     .loop = nullptr};
  uint64_t version_ = 0;
  bool honest_ = true;
  std::array<Peer, 2> peers_;
};

}  // namespace
}  // namespace tsr

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  static tsr::World world;
  world.Run({data, nbytes});
  return 0;
}

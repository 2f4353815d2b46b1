#include "exporter.h"

#include <sys/epoll.h>

#include <algorithm>

#include "cpu.h"

namespace tsr {
namespace {

// Often enough that a sink does not give up a stream whose chunk is still to come.
constexpr Clock::duration kMaxTick = std::chrono::milliseconds(500);

}  // namespace

Status Exporter::Make(const ShardDirectory* directory, const ExporterOptions& options,
                      std::unique_ptr<Exporter>* out) {
  if (options.num_workers < 1 || options.max_chunk_nbytes < 1 || !(options.peer_timeout_s > 0)) {
    return Status(Code::kInvalid, "exporter: every option has to be positive");
  }
  TSR_RETURN_IF_ERROR(CheckCpuLevel());
  const auto peer_timeout = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(options.peer_timeout_s));
  std::unique_ptr<Exporter> exporter(new Exporter(directory));
  if (options.traced) exporter->log_ = std::make_unique<ChunkLog>();
  for (int i = 0; i < options.num_workers; ++i) {
    auto worker =
        std::make_unique<SourceWorker>(SourceWorker{.directory = directory,
                                                    .versions = &exporter->versions_,
                                                    .tables = &exporter->tables_,
                                                    .max_chunk_nbytes = options.max_chunk_nbytes,
                                                    .peer_timeout = peer_timeout,
                                                    .blocks = {},
                                                    .loop = nullptr});
    TSR_RETURN_IF_ERROR(
        EventLoop::Start(std::min(peer_timeout / kTicksPerTimeout, kMaxTick), &worker->loop));
    exporter->workers_.push_back(std::move(worker));
  }
  *out = std::move(exporter);
  return Status();
}

template <typename Condition>
void Exporter::CloseStreams(Condition condition) {
  for (const auto& worker : workers_) {
    worker->loop->PostAndWait([&] {
      worker->loop->ForEach<SourceStream>([&](SourceStream& stream) {
        if (condition(stream)) stream.Close();
      });
    });
  }
}

void Exporter::WakeStreams() {
  for (const auto& worker : workers_) {
    worker->loop->Post([loop = worker->loop.get()] {
      loop->ForEach<SourceStream>([](SourceStream& stream) { stream.Wake(); });
    });
  }
}

Status Exporter::AddLeaves(uint64_t version, std::span<const uint32_t> leaves,
                           std::span<const uint64_t> addresses, std::span<const int64_t> strides,
                           const ShardLayouts& layouts) {
  TSR_RETURN_IF_ERROR(versions_.AddLeaves(version, leaves, addresses, strides, layouts));
  WakeStreams();
  return Status();
}

Status Exporter::DropLeaves(uint64_t version, std::span<const uint32_t> leaves) {
  TSR_RETURN_IF_ERROR(versions_.DropLeaves(version, leaves));
  CloseStreams([&](const SourceStream& stream) { return stream.Reads(version, leaves); });
  return Status();
}

void Exporter::Withdraw(uint64_t version) {
  versions_.Withdraw(version);
  // Also where another call has withdrawn it: that one may not have come to its end yet.
  CloseStreams([&](const SourceStream& stream) { return stream.Reads(version); });
  // Only now: no worker can be about to count a chunk of it.
  tables_.ForgetVersion(version);
  WakeStreams();
}

Status Exporter::AddConnection(Connection connection, uint64_t sink, const std::string& rail) {
  RailStats* const stats = stats_.Get(rail);
  std::unique_ptr<Pipe> pipe;
  TSR_RETURN_IF_ERROR(MakePipe(connection, End::kSource, stats, &pipe));
  SourceWorker& worker = *workers_[next_worker_++ % workers_.size()];
  auto stream = std::make_unique<SourceStream>(std::move(connection.socket), std::move(pipe), sink,
                                               rail, stats, log_.get(), &worker);
  Status status(Code::kCancelled, "the exporter is closed");
  worker.loop->PostAndWait([&] { status = worker.loop->Add(std::move(stream), EPOLLIN); });
  return status;
}

void Exporter::Close() {
  for (const auto& worker : workers_) worker->loop->Stop();
}

}  // namespace tsr

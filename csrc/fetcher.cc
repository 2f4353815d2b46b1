#include "fetcher.h"

#include <sys/epoll.h>

#include <algorithm>

#include "cpu.h"

namespace tsr {
namespace {

constexpr Clock::duration kMaxTick = std::chrono::milliseconds(250);

}  // namespace

Status Fetcher::Make(const Plan* plan, const FetcherOptions& options,
                     std::unique_ptr<Fetcher>* out) {
  if (options.num_workers < 1 || options.window < 1 || !(options.peer_timeout_s > 0)) {
    return Status(Code::kInvalid, "fetcher: every option has to be positive");
  }
  TSR_RETURN_IF_ERROR(CheckCpuLevel());
  const auto peer_timeout = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(options.peer_timeout_s));
  std::unique_ptr<Fetcher> fetcher(new Fetcher(plan));
  if (options.traced) fetcher->log_ = std::make_unique<ChunkLog>();
  for (size_t i = 0; i < plan->sources.size(); ++i) {
    SourceLink& source = fetcher->sources_.emplace_back();
    source.process = plan->sources[i].process;
    source.index = i;
  }
  for (int i = 0; i < options.num_workers; ++i) {
    auto worker = std::make_unique<SinkWorker>(
        SinkWorker{.plan = plan,
                   .window = static_cast<size_t>(options.window),
                   .peer_timeout = peer_timeout,
                   .full_nbytes = options.full_nbytes,
                   .checksums = options.checksums,
                   .tells_done = options.tells_done,
                   .wake_all = [self = fetcher.get()] { self->WakeAll(); },
                   .fetch = nullptr,
                   .blocks = {},
                   .loop = nullptr});
    TSR_RETURN_IF_ERROR(
        EventLoop::Start(std::min(peer_timeout / kTicksPerTimeout, kMaxTick), &worker->loop));
    fetcher->workers_.push_back(std::move(worker));
  }
  *out = std::move(fetcher);
  return Status();
}

SourceLink* Fetcher::Find(uint32_t process) {
  const auto it = std::ranges::find(sources_, process, &SourceLink::process);
  return it == sources_.end() ? nullptr : &*it;
}

void Fetcher::WakeAll() {
  for (const auto& worker : workers_) {
    worker->loop->Post([loop = worker->loop.get()] {
      loop->ForEach<SinkStream>([](SinkStream& stream) { stream.Wake(); });
    });
  }
}

std::shared_ptr<Fetch> Fetcher::current() const {
  std::lock_guard lock(mutex_);
  return fetch_;
}

Status Fetcher::AddStream(uint32_t process, Connection connection, const std::string& rail) {
  SourceLink* source = Find(process);
  if (source == nullptr) {
    return Status(Code::kInvalid, "the plan reads nothing from process " + std::to_string(process));
  }
  RailStats* const stats = stats_.Get(rail);
  std::unique_ptr<Pipe> pipe;
  TSR_RETURN_IF_ERROR(MakePipe(connection, End::kSink, stats, &pipe));
  SinkWorker& worker = *workers_[next_worker_++ % workers_.size()];
  auto stream = std::make_unique<SinkStream>(std::move(connection.socket), std::move(pipe), source,
                                             rail, stats, log_.get(), &worker);
  Status status(Code::kCancelled, "the fetcher is closed");
  worker.loop->PostAndWait([&] {
    SinkStream* added = stream.get();
    status = worker.loop->Add(std::move(stream), EPOLLIN);
    if (status.ok()) added->Wake();
  });
  return status;
}

int Fetcher::NumStreams(uint32_t process, const std::optional<std::string>& rail) {
  SourceLink* source = Find(process);
  if (source == nullptr) return 0;
  std::lock_guard lock(source->mutex);
  int num_streams = 0;
  for (const auto& [name, streams] : source->rails) {
    if (!rail || name == *rail) num_streams += streams.num_streams;
  }
  return num_streams;
}

bool Fetcher::IsFull(uint32_t process, const std::string& rail) {
  SourceLink* source = Find(process);
  if (source == nullptr) return false;
  std::lock_guard lock(source->mutex);
  const auto found = source->rails.find(rail);
  return found != source->rails.end() && found->second.num_streams > 0 &&
         found->second.num_full == found->second.num_streams;
}

std::vector<Trouble> Fetcher::Troubles() {
  std::vector<Trouble> troubles;
  for (SourceLink& source : sources_) AddTroubles(&source, &troubles);
  return troubles;
}

Status Fetcher::Begin(uint64_t version, std::span<const uint64_t> sink_addresses,
                      const ShardLayouts& sink_layouts) {
  std::shared_ptr<Fetch> fetch;
  TSR_RETURN_IF_ERROR(Fetch::Make(*plan_, version, sink_addresses, sink_layouts, &fetch));
  return Begin(std::move(fetch));
}

Status Fetcher::BeginDigests(uint64_t version, std::vector<std::vector<DigestRequest>> requests) {
  std::shared_ptr<Fetch> fetch;
  TSR_RETURN_IF_ERROR(Fetch::MakeDigests(*plan_, version, std::move(requests), &fetch));
  return Begin(std::move(fetch));
}

std::vector<std::vector<uint64_t>> Fetcher::Digests() const {
  const std::shared_ptr<Fetch> fetch = current();
  if (fetch == nullptr) return {};
  return fetch->digests();
}

Status Fetcher::Begin(std::shared_ptr<Fetch> fetch) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Status(Code::kCancelled, "the fetcher is closed");
    if (active_) return Status(Code::kInvalid, "begin: the version before has not ended");
    active_ = true;
    fetch_ = fetch;
  }
  for (SourceLink& source : sources_) ForgetLosses(&source);
  for (const auto& worker : workers_) {
    worker->loop->Post([worker = worker.get(), fetch] {
      worker->fetch = fetch;
      worker->loop->ForEach<SinkStream>([](SinkStream& stream) { stream.Wake(); });
    });
  }
  return Status();
}

Status Fetcher::Wait(Deadline deadline, bool* done) const {
  const std::shared_ptr<Fetch> fetch = current();
  if (fetch == nullptr) return Status(Code::kInvalid, "wait: no version has begun");
  return fetch->Wait(deadline, done);
}

std::vector<uint32_t> Fetcher::TakeFinished(Deadline deadline) {
  const std::shared_ptr<Fetch> fetch = current();
  return fetch == nullptr ? std::vector<uint32_t>() : fetch->TakeFinished(deadline);
}

uint64_t Fetcher::ProgressNbytes() const {
  const std::shared_ptr<Fetch> fetch = current();
  return fetch == nullptr ? 0 : fetch->verified_nbytes();
}

double Fetcher::fetch_seconds() const {
  const std::shared_ptr<Fetch> fetch = current();
  return fetch == nullptr ? 0 : fetch->seconds();
}

void Fetcher::End() {
  const std::shared_ptr<Fetch> fetch = current();
  if (fetch == nullptr) return;
  fetch->Fail(Status(Code::kCancelled, "the fetch was ended before every chunk was verified"));
  for (const auto& worker : workers_) {
    worker->loop->PostAndWait([&] {
      worker->loop->ForEach<SinkStream>([](SinkStream& stream) {
        if (stream.has_chunks()) stream.Close();
      });
      worker->fetch.reset();
    });
  }
  std::lock_guard lock(mutex_);
  active_ = false;
}

void Fetcher::Close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    if (fetch_) fetch_->Fail(Status(Code::kCancelled, "the fetcher is closed"));
  }
  // All of them before any is destroyed: streams wake those of other workers.
  for (const auto& worker : workers_) worker->loop->Stop();
}

}  // namespace tsr

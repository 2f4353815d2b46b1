#include "sink_stream.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstring>

#include "chunk_table.h"
#include "crc32c.h"

namespace tsr {
namespace {

constexpr int kReceivesPerTurn = 8;
// The ends would wake each other for every few chunks where those are small: more than a window of
// them are asked for until they come to this, and at once when a turn ends. CPU of both ends, of
// chunks of 4 KiB: 15 µs a chunk without, 10 µs with it (2-core Zen 5 VM, 2026-11-29).
constexpr uint64_t kSmallNbytes = 256 << 10;
constexpr int kMaxCorrupt = 3;
constexpr size_t kMaxSpareBlocks = 8;
// An idle stream is heard from at least this often, whatever this side's own peer_timeout.
constexpr Clock::duration kPingEvery = std::chrono::milliseconds(500);
// A stream whose source is heard on others is given up after this long: its link is down, and its
// chunks must not wait for TCP to find out. Above what three lost packets in a row cost it.
constexpr Clock::duration kMaxSilence = std::chrono::milliseconds(1500);
// A stream that waits for longer than this is told of.
constexpr Clock::duration kStalledAfter = std::chrono::seconds(1);

}  // namespace

SinkStream::SinkStream(UniqueFd fd, std::unique_ptr<Pipe> pipe, SourceLink* source,
                       const std::string& rail, RailStats* stats, ChunkLog* log, SinkWorker* worker)
    : Pollable(std::move(fd)),
      pipe_(std::move(pipe)),
      source_(source),
      stats_(stats),
      worker_(worker),
      on_rail_(source, rail, stats, worker->full_nbytes,
               worker->window * static_cast<uint64_t>(worker->plan->input.chunk_nbytes)),
      track_(log, rail),
      window_(worker->window, kSmallNbytes) {}

void SinkStream::Close() {
  if (closed()) return;
  GiveBackBlock();
  for (const Request& request : requests_) {
    if (request.kind == FrameKind::kTable) source_->table = SourceLink::Table::kAbsent;
  }
  requests_.clear();
  requested_nbytes_ = 0;
  busy_.Set(false);
  on_rail_.Leave();
  CloseFd();
}

void SinkStream::GiveBackBlock() {
  if (block_ && worker_->blocks.size() < kMaxSpareBlocks) {
    worker_->blocks.push_back(std::move(block_));
  }
  block_.reset();
}

void SinkStream::Lose(const std::string& reason) {
  if (closed()) return;
  for (const Request& request : requests_) {
    if (!request.is_from_queue()) continue;
    Trace(request, 0);
    worker_->fetch->queue(source_->index).GiveBack(this, request.chunk);
    stats_->num_retries.fetch_add(1, std::memory_order_relaxed);
  }
  on_rail_.Lost(reason);
  Close();
  worker_->wake_all();
}

void SinkStream::Trace(const Request& request, uint64_t nbytes) {
  if (!track_.on() || request.kind == FrameKind::kDigest) return;
  Fetch& fetch = *worker_->fetch;
  const int num_retries = fetch.queue(source_->index).num_retries(request.chunk);
  track_.Add({source_->process, fetch.version(), request.chunk, nbytes, num_retries, request.asked,
              Clock::now()});
}

bool SinkStream::has_chunks() const {
  return std::ranges::any_of(requests_,
                             [](const Request& request) { return request.is_from_queue(); });
}

void SinkStream::OnTick(Clock::time_point now) {
  if (!requests_.empty()) {
    if (now - last_progress_ > worker_->peer_timeout) {
      Lose("silent for peer_timeout");
    } else if (source_->last_heard.load() > last_progress_ + kMaxSilence &&
               requests_.front().kind != FrameKind::kTable) {
      Lose("silent while others of its source were not");
    } else if (now - last_progress_ > kStalledAfter) {
      on_rail_.SetStalled({last_progress_, requested_nbytes_});
    }
  } else if (now - last_sent_ > std::min(kPingEvery, worker_->peer_timeout / 4)) {
    Ask(Frame{.kind = FrameKind::kPing});
    Flush();
    EndTurn();
  }
}

void SinkStream::OnReady(uint32_t) {
  Flush();
  for (int i = 0; i < kReceivesPerTurn && !closed(); ++i) {
    if (Receive() == Step::kBlocked) break;
  }
  Flush();
  EndTurn();
}

void SinkStream::Wake() {
  Pump();
  Flush();
  EndTurn();
}

void SinkStream::EndTurn() {
  if (closed()) return;
  busy_.Set(has_chunks());
  worker_->loop->SetInterest(this, pipe_->EndTurn(/*receives=*/true, unsent_nbytes() > 0));
}

void SinkStream::Pump() {
  if (closed()) return;
  if (source_->table == SourceLink::Table::kHeld) {
    AskForChunks();
  } else if (requests_.empty()) {
    // Nothing may be sent between a table's frame and its bytes, so nothing may be in flight.
    auto absent = SourceLink::Table::kAbsent;
    if (source_->table.compare_exchange_strong(absent, SourceLink::Table::kUploading)) {
      StartUpload();
    }
  }
}

void SinkStream::AskForChunks() {
  if (worker_->fetch == nullptr) return;
  Fetch& fetch = *worker_->fetch;
  uint64_t chunk;
  const SourceChunks& source = fetch.plan().sources[source_->index];
  const FrameKind kind = worker_->checksums ? FrameKind::kFetch : FrameKind::kFetchUnsummed;
  if (requests_.empty()) window_.Resume(Clock::now());
  while (!fetch.over() && window_.HasRoom(requests_.size(), requested_nbytes_) &&
         fetch.queue(source_->index).Take(this, requests_.size(), &chunk)) {
    if (fetch.asks_for_digests()) {
      AskForDigest(chunk);
    } else {
      Ask(Frame{kind, source_->table_id, fetch.version(), chunk},
          fetch.plan().chunks[source.first_chunk + chunk].nbytes);
    }
    busy_.Set(true);
  }
}

void SinkStream::AskForDigest(uint64_t index) {
  const DigestRequest& request = worker_->fetch->digest_request(source_->index, index);
  const std::string bytes = EncodeDigestRequest(request);
  const uint32_t crc = Crc32c(0, bytes.data(), bytes.size());
  Ask(Frame{FrameKind::kDigest, crc, worker_->fetch->version(), index, bytes.size()},
      static_cast<uint64_t>(VolumeOf(request.ranges)));
  out_.insert(out_.end(), bytes.begin(), bytes.end());
}

void SinkStream::Ask(const Frame& request, uint64_t chunk_nbytes) {
  if (requests_.empty()) last_progress_ = Clock::now();
  const Clock::time_point asked = track_.on() ? Clock::now() : last_progress_;
  requests_.push_back(Request{request.kind, request.chunk, chunk_nbytes, asked});
  requested_nbytes_ += chunk_nbytes;
  Append(request);
}

SinkStream::Request SinkStream::TakeRequest() {
  const Request request = requests_.front();
  requests_.pop_front();
  requested_nbytes_ -= request.nbytes;
  return request;
}

void SinkStream::Append(const Frame& frame) {
  out_.resize(out_.size() + kFrameNbytes);
  EncodeFrame(frame, FrameBytes(out_.data() + out_.size() - kFrameNbytes, kFrameNbytes));
}

void SinkStream::StartUpload() {
  table_ = EncodeChunkTable(*worker_->plan, source_->index);
  source_->table_id = Crc32c(0, table_.data(), table_.size());
  Ask(Frame{.kind = FrameKind::kTable, .table = source_->table_id, .nbytes = table_.size()});
}

void SinkStream::Flush() {
  while (!closed() && unsent_nbytes() > 0) {
    iovec iov[2] = {{out_.data(), out_.size()}, {table_.data(), table_.size()}};
    IovecCursor cursor(iov, 2);
    cursor.Advance(out_sent_nbytes_);
    const IoResult result = pipe_->Send(cursor.iov(), cursor.num_iov(), {});
    if (result.lost()) return Lose(result.reason());
    if (result.would_block()) return;
    out_sent_nbytes_ += result.nbytes();
    last_sent_ = Clock::now();
    if (requests_.size() == 1) last_progress_ = last_sent_;
  }
  out_.clear();
  table_ = std::string();
  out_sent_nbytes_ = 0;
}

SinkStream::Step SinkStream::Receive() {
  iovec rest;
  IovecCursor into(&rest, 1);
  Summed summed;
  if (payload_left_ > 0) {
    into = cursor_;
    // What is staged is read again soon, what is in its place is not.
    const Stores stores = block_->pieces().empty() ? Stores::kPastCache : Stores::kCached;
    summed = {worker_->checksums ? payload_left_ : 0, &crc_, stores};
  } else if (text_left_ > 0) {
    rest = {text_.data() + reply_.nbytes - text_left_, text_left_};
  } else {
    rest = {tail_.data() + tail_nbytes_, tail_.size() - tail_nbytes_};
  }
  const IoResult result = pipe_->Receive(into.iov(), into.num_iov(), summed);
  if (result.lost()) Lose(result.reason());
  if (result.nbytes() == 0) return Step::kBlocked;
  last_progress_ = Clock::now();
  source_->last_heard.store(last_progress_, std::memory_order_relaxed);
  on_rail_.SetMoving();
  if (window_.Received(result.nbytes(), last_progress_, [this] { return pipe_->Rtt(); })) {
    on_rail_.Measured(window_);
  }

  if (payload_left_ > 0) {
    TakePayload(result.nbytes());
  } else if (text_left_ > 0) {
    text_left_ -= result.nbytes();
    if (text_left_ == 0) HandleError();
  } else {
    tail_nbytes_ += result.nbytes();
  }
  if (in_chunk_ && payload_left_ == 0 && tail_nbytes_ >= kTrailerNbytes) Verify();
  if (!closed() && tail_nbytes_ == tail_.size()) HandleReply();
  return closed() ? Step::kBlocked : Step::kMoved;
}

void SinkStream::TakePayload(size_t nbytes) {
  const size_t payload_nbytes = std::min(nbytes, payload_left_);
  cursor_.Advance(nbytes);
  payload_left_ -= payload_nbytes;
  tail_nbytes_ += nbytes - payload_nbytes;
  if (payload_left_ > 0) return;
  Stopwatch stopwatch;
  scatter_.Finish(*block_);
  stopwatch.Lap(&stats_->copy_ns);
  if (!scatter_.done()) FillBlock();
}

void SinkStream::FillBlock() {
  Stopwatch stopwatch;
  block_->Clear();
  scatter_.Fill(block_.get());
  payload_left_ = static_cast<size_t>(block_->nbytes());
  if (scatter_.done()) block_->Append(tail_.data(), static_cast<int64_t>(tail_.size()));
  cursor_ = IovecCursor(block_->iov().data(), block_->iov().size());
  stopwatch.Lap(&stats_->copy_ns);
}

void SinkStream::HandleReply() {
  const Status status = DecodeFrame(
      std::span<const uint8_t, kFrameNbytes>(tail_.data() + kTrailerNbytes, kFrameNbytes), &reply_);
  tail_nbytes_ = kTrailerNbytes;
  if (!status.ok()) return Lose(status.message());
  if (requests_.empty()) return Lose("a reply without a request");
  const FrameKind asked = requests_.front().kind;
  if (HasText(reply_.kind)) {
    text_left_ = reply_.nbytes;
    if (text_left_ == 0) HandleError();
  } else if (reply_.kind == FrameKind::kChunk &&
             (asked == FrameKind::kFetch || asked == FrameKind::kFetchUnsummed)) {
    StartChunk();
  } else if (reply_.kind == FrameKind::kDigestIs && asked == FrameKind::kDigest) {
    TakeDigest();
  } else if (reply_.kind == FrameKind::kLater && requests_.front().is_from_queue()) {
    return;  // that it came is all it says
  } else if (reply_.kind == FrameKind::kTableOk && asked == FrameKind::kTable) {
    TakeRequest();
    source_->table = SourceLink::Table::kHeld;
    worker_->wake_all();
  } else if (reply_.kind == FrameKind::kPong && asked == FrameKind::kPing) {
    TakeRequest();
    Pump();
  } else {
    Lose("a reply of another kind than the request");
  }
}

void SinkStream::HandleError() {
  const std::string text = "source process " + std::to_string(source_->process) + ": " +
                           std::string(text_.data(), reply_.nbytes);
  const Request request = requests_.front();
  if (request.is_from_queue() && reply_.kind == FrameKind::kGone) {
    TakeRequest();
    return worker_->fetch->Fail(Status(Code::kGone, text));
  }
  if (request.is_from_queue() && reply_.kind == FrameKind::kNoTable) {
    TakeRequest();
    worker_->fetch->queue(source_->index).GiveBack(this, request.chunk);
    auto held = SourceLink::Table::kHeld;
    source_->table.compare_exchange_strong(held, SourceLink::Table::kAbsent);
    return Pump();
  }
  if (worker_->fetch) worker_->fetch->Fail(Status(Code::kPlan, text));
  Lose(text);
}

void SinkStream::TakeDigest() {
  Fetch& fetch = *worker_->fetch;
  if (reply_.version != fetch.version()) return Lose("a digest that was not asked for");
  const Request request = TakeRequest();
  fetch.queue(source_->index).Finish(this);
  fetch.SetDigest(source_->index, request.chunk, reply_.chunk);
  Pump();
}

void SinkStream::StartChunk() {
  const Fetch& fetch = *worker_->fetch;
  const uint64_t chunk = requests_.front().chunk;
  const uint64_t index = fetch.plan().sources[source_->index].first_chunk + chunk;
  if (reply_.table != source_->table_id || reply_.version != fetch.version() ||
      reply_.chunk != chunk || reply_.nbytes != fetch.plan().chunks[index].nbytes) {
    return Lose("a chunk that was not asked for");
  }
  if (block_ == nullptr && !worker_->blocks.empty()) {
    block_ = std::move(worker_->blocks.back());
    worker_->blocks.pop_back();
  }
  if (block_ == nullptr) block_ = std::make_unique<ScatterBlock>();
  in_chunk_ = true;
  tail_nbytes_ = 0;
  crc_ = 0;
  scatter_.Start(fetch, index, pipe_->min_placed_nbytes());
  FillBlock();
}

void SinkStream::Verify() {
  Fetch& fetch = *worker_->fetch;
  const Request request = TakeRequest();
  const uint64_t chunk = request.chunk;
  uint32_t expected;
  std::memcpy(&expected, tail_.data(), kTrailerNbytes);
  in_chunk_ = false;
  Trace(request, crc_ == expected ? reply_.nbytes : 0);
  if (crc_ != expected) {
    const std::string reason = "chunk " + std::to_string(chunk) + " of source process " +
                               std::to_string(source_->process) + " does not match its checksum";
    stats_->num_retries.fetch_add(1, std::memory_order_relaxed);
    if (fetch.queue(source_->index).GiveBackCorrupt(this, chunk) >= kMaxCorrupt) {
      fetch.Fail(Status(Code::kCorruption, reason));
    }
    return Lose(reason);
  }
  if (requests_.empty()) GiveBackBlock();
  stats_->nbytes.fetch_add(reply_.nbytes, std::memory_order_relaxed);
  stats_->num_chunks.fetch_add(1, std::memory_order_relaxed);
  if (worker_->tells_done) {
    Append(Frame{FrameKind::kDone, source_->table_id, fetch.version(), chunk});
  }
  fetch.queue(source_->index).Finish(this);
  fetch.Verified(fetch.plan().sources[source_->index].first_chunk + chunk);
  Pump();
  if (reply_.nbytes >= kSmallNbytes) Flush();
}

}  // namespace tsr

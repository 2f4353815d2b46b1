#include "source_stream.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "crc32c.h"
#include "digest_request.h"

namespace tsr {
namespace {

// A table is taken in by steps, so that memory follows bytes that came, not a number in a frame.
constexpr size_t kBodyStepNbytes = 1 << 20;
constexpr int kStepsPerTurn = 128;
constexpr uint64_t kTurnNbytes = 256 << 10;
// Stalled streams of a worker that may keep their blocks; others fill theirs again.
constexpr size_t kMaxTakenBlocks = 16;

}  // namespace

SourceStream::SourceStream(UniqueFd fd, std::unique_ptr<Pipe> pipe, uint64_t sink,
                           const std::string& rail, RailStats* stats, ChunkLog* log,
                           SourceWorker* worker)
    : Pollable(std::move(fd)),
      pipe_(std::move(pipe)),
      sink_(sink),
      stats_(stats),
      worker_(worker),
      track_(log, rail) {
  worker_->tables->AddStream(sink_);
}

SourceStream::~SourceStream() {
  Close();
  worker_->tables->RemoveStream(sink_);
}

void SourceStream::Close() {
  worker_->blocks.GiveBack(std::move(block_));
  gather_.reset();
  block_gather_.reset();
  busy_.Set(false);
  CloseFd();
}

void SourceStream::Trace(uint64_t nbytes) {
  if (!track_.on()) return;
  // How often a chunk was asked for, the sink knows.
  track_.Add({sink_, gather_->version(), traced_chunk_, nbytes, /*num_retries=*/0, received_,
              Clock::now()});
}

void SourceStream::Lose() {
  if (gather_) Trace(0);
  stats_->num_lost.fetch_add(1, std::memory_order_relaxed);
  Close();
}

bool SourceStream::Reads(uint64_t version, std::span<const uint32_t> leaves) const {
  return Reads(version) &&
         std::ranges::any_of(leaves, [&](uint32_t leaf) { return gather_->ReadsLeaf(leaf); });
}

void SourceStream::OnTick(Clock::time_point now) {
  if (now - last_progress_ > worker_->peer_timeout) return Lose();
  if (!waits()) return;
  Reply(FrameKind::kLater, *later_);
  OnReady(0);
}

void SourceStream::Wake() {
  if (waits()) OnReady(0);
}

void SourceStream::OnReady(uint32_t events) {
  // Where there is something to read its end is met there, after what came before it.
  if (events & (EPOLLERR | EPOLLHUP) && !(events & EPOLLIN)) return Lose();
  // The other streams of this worker wait, and so does who withdraws a version: a turn ends after a
  // large chunk or several small ones, and after some steps though the peer sends faster than they
  // are taken.
  read_nbytes_ = 0;
  for (int i = 0; i < kStepsPerTurn && read_nbytes_ < kTurnNbytes && !closed(); ++i) {
    if (replying()) {
      const uint64_t chunk_nbytes = gather_ ? gather_->chunk().nbytes : 0;
      if (SendReply() == Step::kBlocked) break;
      read_nbytes_ += chunk_nbytes;
    } else {
      later_.reset();
      const Step step = arriving_ ? ReceiveBody() : ReceiveRequest();
      if (step == Step::kBlocked || later_) break;
    }
  }
  if (closed()) return;
  // Nothing is read until the leaf is there: others are woken then, and only losses bring events.
  if (waits()) {
    busy_.Set(false);
    pipe_->EndTurn(/*receives=*/false, /*sends=*/false);
    return worker_->loop->SetInterest(this, 0);
  }
  // What is here already brings no event; that the socket is writable does.
  const bool more = replying() || has_input();
  busy_.Set(more);
  worker_->loop->SetInterest(this, pipe_->EndTurn(!more, more));
}

bool SourceStream::has_input() const {
  if (!arriving_) return has_request();
  return in_end_ > in_begin_ || body_nbytes_ == arriving_->nbytes;
}

SourceStream::Step SourceStream::ReceiveRequest() {
  if (!has_request()) {
    std::copy(in_.begin() + in_begin_, in_.begin() + in_end_, in_.begin());
    in_end_ -= in_begin_;
    in_begin_ = 0;
    iovec iov{in_.data() + in_end_, in_.size() - in_end_};
    const IoResult result = pipe_->Receive(&iov, 1, {});
    if (!Received(result)) return Step::kBlocked;
    in_end_ += result.nbytes();
    return Step::kMoved;
  }
  if (digest_request_) {
    const std::span bytes(in_.data() + in_begin_, digest_request_->nbytes);
    in_begin_ += bytes.size();
    HandleDigest(bytes);
    return Step::kMoved;
  }
  Frame request;
  const Status status = DecodeFrame(
      std::span<const uint8_t, kFrameNbytes>(in_.data() + in_begin_, kFrameNbytes), &request);
  in_begin_ += kFrameNbytes;
  if (!status.ok() || !IsRequest(request.kind)) {
    Lose();
    return Step::kBlocked;
  }
  Handle(request);
  return Step::kMoved;
}

SourceStream::Step SourceStream::ReceiveBody() {
  const size_t want = arriving_->nbytes - body_nbytes_;
  if (want == 0) {
    arriving_->kind == FrameKind::kTable ? HandleTable() : HandleEcho();
    return Step::kMoved;
  }
  if (body_nbytes_ == body_.size()) {
    body_.resize(body_nbytes_ + std::min(want, kBodyStepNbytes));
  }
  iovec iov{body_.data() + body_nbytes_, body_.size() - body_nbytes_};
  const size_t buffered = std::min(iov.iov_len, in_end_ - in_begin_);
  if (buffered > 0) {
    std::copy_n(in_.begin() + in_begin_, buffered, body_.begin() + body_nbytes_);
    in_begin_ += buffered;
    body_nbytes_ += buffered;
    return Step::kMoved;
  }
  const IoResult result = pipe_->Receive(&iov, 1, {});
  body_nbytes_ += result.nbytes();
  return Received(result) ? Step::kMoved : Step::kBlocked;
}

bool SourceStream::Received(const IoResult& result) {
  if (result.lost()) Lose();
  if (result.nbytes() == 0) return false;
  last_progress_ = received_ = Clock::now();
  return true;
}

void SourceStream::Handle(const Frame& request) {
  switch (request.kind) {
    case FrameKind::kTable:
    case FrameKind::kEcho:
      arriving_ = request;
      return;
    case FrameKind::kFetch:
    case FrameKind::kFetchUnsummed:
      return HandleFetch(request);
    case FrameKind::kDigest:
      digest_request_ = request;
      return;
    case FrameKind::kDone:
      // Only of a version that is here, so that what is kept of it is forgotten with it.
      if (worker_->versions->Holds(request.version)) {
        worker_->tables->MarkDone(sink_, request.table, request.version, request.chunk);
      }
      return;
    default:
      return Reply(FrameKind::kPong, request);
  }
}

void SourceStream::HandleTable() {
  const Frame request = *arriving_;
  const std::vector<uint8_t> bytes = std::exchange(body_, {});
  arriving_.reset();
  body_nbytes_ = 0;
  // Bits that flipped on the way: the sink shows it again on another stream, as after any loss.
  if (Crc32c(0, bytes.data(), bytes.size()) != request.table) return Lose();
  auto table = std::make_shared<ChunkTable>();
  const Status status =
      DecodeChunkTable(bytes, *worker_->directory, worker_->max_chunk_nbytes, table.get());
  if (!status.ok()) return Reply(FrameKind::kInvalid, request, status.message());
  worker_->tables->Set(sink_, request.table, std::move(table));
  Reply(FrameKind::kTableOk, request);
}

void SourceStream::HandleEcho() {
  Frame head = *std::exchange(arriving_, std::nullopt);
  head.kind = FrameKind::kEchoIs;
  echo_ = std::exchange(body_, {});
  body_nbytes_ = 0;
  read_nbytes_ += echo_.size();
  EncodeFrame(head, FrameBytes(head_.data(), kFrameNbytes));
  head_iov_ = {iovec{head_.data(), kFrameNbytes}, iovec{echo_.data(), echo_.size()}};
  cursor_ = IovecCursor(head_iov_.data(), echo_.empty() ? 1 : 2);
}

void SourceStream::HandleFetch(const Frame& request) {
  std::shared_ptr<const ChunkTable> table = worker_->tables->Find(sink_, request.table);
  if (table == nullptr) return Reply(FrameKind::kNoTable, request, "no such table of this sink");
  if (request.chunk >= table->chunks.size()) {
    return Reply(FrameKind::kInvalid, request, "no such chunk in the table");
  }
  const TableChunk& chunk = table->chunks[request.chunk];
  std::shared_ptr<const PublishedVersion> published;
  const Status status =
      worker_->versions->Find(request.version, table->leaves_of(chunk), &published);
  if (!status.ok()) return Reply(FrameKind::kGone, request, status.message());
  if (published == nullptr) return Defer(request, kFrameNbytes);
  Frame head = request;
  head.kind = FrameKind::kChunk;
  head.nbytes = chunk.nbytes;
  EncodeFrame(head, FrameBytes(head_.data(), kFrameNbytes));
  gather_.emplace(*worker_->directory, std::move(table), std::move(published), request.chunk);
  summed_ = request.kind == FrameKind::kFetch;
  crc_ = 0;
  traced_chunk_ = request.chunk;
  busy_.Set(true);
  block_has_head_ = true;
  FillBlock();
}

// The memory is read here and now, so whoever withdraws it waits for the end of the turn.
void SourceStream::HandleDigest(std::span<const uint8_t> bytes) {
  const Frame frame = *std::exchange(digest_request_, std::nullopt);
  if (Crc32c(0, bytes.data(), bytes.size()) != frame.table) return Lose();
  DigestRequest request;
  size_t index = 0;
  Status status =
      DecodeDigestRequest(bytes, *worker_->directory, worker_->max_chunk_nbytes, &request, &index);
  if (!status.ok()) return Reply(FrameKind::kInvalid, frame, status.message());
  std::shared_ptr<const PublishedVersion> published;
  status = worker_->versions->Find(frame.version, std::span(&request.leaf, 1), &published);
  if (!status.ok()) return Reply(FrameKind::kGone, frame, status.message());
  if (published == nullptr) {
    digest_request_ = frame;
    return Defer(frame, bytes.size());
  }
  Frame answer = frame;
  answer.chunk = DigestOf(request, *worker_->directory, *published, index);
  read_nbytes_ +=
      static_cast<uint64_t>(VolumeOf(request.ranges)) * worker_->directory->shard(index).itemsize;
  Reply(FrameKind::kDigestIs, answer);
}

void SourceStream::Defer(const Frame& request, size_t nbytes) {
  later_ = request;
  in_begin_ -= nbytes;
}

void SourceStream::Reply(FrameKind kind, const Frame& request, std::string_view text) {
  text = text.substr(0, kMaxTextNbytes);
  Frame head = request;
  head.kind = kind;
  head.nbytes = text.size();
  EncodeFrame(head, FrameBytes(head_.data(), kFrameNbytes));
  std::copy(text.begin(), text.end(), head_.begin() + kFrameNbytes);
  head_iov_[0] = iovec{head_.data(), kFrameNbytes + text.size()};
  cursor_ = IovecCursor(head_iov_.data(), 1);
}

SourceStream::Step SourceStream::SendReply() {
  for (;;) {
    if (cursor_.done()) {
      if (rebuild_) {
        gather_ = block_gather_;
      } else if (!gather_ || gather_->done()) {
        break;
      } else {
        block_has_head_ = false;
      }
      FillBlock();
    }
    const IoResult result = SendBlock();
    if (result.lost()) {
      Lose();
      return Step::kBlocked;
    }
    if (result.would_block()) {
      Park();
      return Step::kBlocked;
    }
    cursor_.Advance(result.nbytes());
    block_sent_nbytes_ += result.nbytes();
    last_progress_ = Clock::now();
  }
  echo_ = {};
  if (gather_) {
    stats_->nbytes.fetch_add(gather_->chunk().nbytes, std::memory_order_relaxed);
    stats_->num_chunks.fetch_add(1, std::memory_order_relaxed);
    Trace(gather_->chunk().nbytes);
    gather_.reset();
    block_gather_.reset();
    worker_->blocks.GiveBack(std::move(block_));
  }
  return Step::kMoved;
}

IoResult SourceStream::SendBlock() {
  if (!gather_ || !summed_ || !pipe_->sums_sent())
    return pipe_->Send(cursor_.iov(), cursor_.num_iov(), {});
  // The checksum begins behind the head, which goes alone.
  const bool head_left = block_has_head_ && block_sent_nbytes_ < kFrameNbytes;
  if (head_left) return pipe_->Send(cursor_.iov(), 1, {});
  const size_t unsummed_nbytes = payload_end_ - std::min(payload_end_, block_sent_nbytes_);
  return pipe_->Send(cursor_.iov(), cursor_.num_iov(), {unsummed_nbytes, &crc_});
}

void SourceStream::FillBlock() {
  Stopwatch stopwatch;
  if (block_ == nullptr) block_ = worker_->blocks.Take();
  if (!rebuild_) {
    block_gather_ = gather_;
    block_sent_nbytes_ = 0;
  }
  block_->Clear();
  if (block_has_head_) block_->Append(head_.data(), kFrameNbytes);
  gather_->Fill(block_.get());
  stopwatch.Lap(&stats_->copy_ns);
  if (!rebuild_ && summed_ && !pipe_->sums_sent()) {
    for (const iovec& iov : block_->iov().subspan(block_has_head_ ? 1 : 0)) {
      crc_ = Crc32c(crc_, iov.iov_base, iov.iov_len);
    }
    stopwatch.Lap(&stats_->checksum_ns);
  }
  payload_end_ = static_cast<size_t>(block_->nbytes());
  if (gather_->done()) {
    block_->Append(reinterpret_cast<const uint8_t*>(&crc_), kTrailerNbytes);
  }
  cursor_ = IovecCursor(block_->iov().data(), block_->iov().size());
  cursor_.Advance(block_sent_nbytes_);
  rebuild_ = false;
}

// Slow peers must not make this worker's memory grow, nor keep the others from a block.
void SourceStream::Park() {
  if (block_ == nullptr || worker_->blocks.num_taken() <= kMaxTakenBlocks) return;
  worker_->blocks.GiveBack(std::move(block_));
  cursor_ = IovecCursor();
  rebuild_ = true;
}

}  // namespace tsr

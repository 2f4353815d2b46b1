// The source's end of one connection: answers requests one after another.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chunk_gather.h"
#include "chunk_log.h"
#include "event_loop.h"
#include "pipe.h"
#include "published.h"
#include "rail_stats.h"
#include "sink_tables.h"
#include "wire.h"

namespace tsr {

// What the streams of one worker share. Outlives them.
struct SourceWorker {
  const ShardDirectory* directory;
  PublishedVersions* versions;
  SinkTables* tables;
  uint64_t max_chunk_nbytes;
  Clock::duration peer_timeout;
  IovecBlockPool blocks;
  std::unique_ptr<EventLoop> loop;
};

// Lives on its worker's thread. Closes itself when the peer breaks off, breaks the rules, or falls
// silent; a stream in the middle of a chunk can only be closed, not turned to something else.
class SourceStream final : public Pollable {
 public:
  SourceStream(UniqueFd fd, std::unique_ptr<Pipe> pipe, uint64_t sink, const std::string& rail,
               RailStats* stats, ChunkLog* log, SourceWorker* worker);
  ~SourceStream() override;

  void OnReady(uint32_t events) override;
  void OnTick(Clock::time_point now) override;
  // Looks again for a leaf that was still to come.
  void Wake();

  // Whether it is in the middle of sending this version, or these leaves of it.
  bool Reads(uint64_t version) const { return gather_ && gather_->version() == version; }
  bool Reads(uint64_t version, std::span<const uint32_t> leaves) const;
  void Close();

 private:
  enum class Step { kMoved, kBlocked };

  // Requests.
  Step ReceiveRequest();
  Step ReceiveBody();
  bool Received(const IoResult& result);
  // Whether the next frame is here, or all that follows the one of a digest.
  bool has_request() const { return in_end_ - in_begin_ >= wanted_nbytes(); }
  size_t wanted_nbytes() const { return digest_request_ ? digest_request_->nbytes : kFrameNbytes; }
  // Whether received bytes can be handled without another one.
  bool has_input() const;
  void Handle(const Frame& request);
  void HandleTable();
  void HandleEcho();
  void HandleFetch(const Frame& request);
  void HandleDigest(std::span<const uint8_t> bytes);
  // Leaves a request of `nbytes`, which was taken, for when its leaf is there.
  void Defer(const Frame& request, size_t nbytes);

  // Replies.
  void Reply(FrameKind kind, const Frame& request, std::string_view text = {});
  bool waits() const { return later_ && !replying(); }
  bool replying() const { return !cursor_.done() || gather_ || rebuild_; }
  Step SendReply();
  void FillBlock();
  IoResult SendBlock();
  void Park();
  void Trace(uint64_t nbytes);
  void Lose();

  const std::unique_ptr<Pipe> pipe_;
  const uint64_t sink_;
  RailStats* const stats_;
  SourceWorker* const worker_;
  BusyStream busy_{&stats_->busy};
  ChunkTrack track_;
  Clock::time_point received_ = Clock::now();  // the last bytes of requests
  Clock::time_point last_progress_ = Clock::now();

  std::array<uint8_t, 4096> in_;  // requests that were received and not yet handled
  size_t in_begin_ = 0;
  size_t in_end_ = 0;
  std::optional<Frame> digest_request_;  // until what follows it is there
  uint64_t read_nbytes_ = 0;             // of the version's memory, in this turn
  std::optional<Frame> arriving_;        // while its table, or what it wants echoed, arrives
  std::optional<Frame> later_;  // the request at the front, of a leaf that is still to come
  std::vector<uint8_t> body_;
  size_t body_nbytes_ = 0;     // received
  std::vector<uint8_t> echo_;  // while it is sent

  std::array<uint8_t, kFrameNbytes + kMaxTextNbytes> head_;
  std::array<iovec, 2> head_iov_;  // the head, and what is echoed
  IovecCursor cursor_;             // what is left of the reply's current block
  // Only while a chunk is being sent.
  std::optional<ChunkGather> gather_;
  uint64_t traced_chunk_ = 0;
  std::optional<ChunkGather> block_gather_;  // as it was before the current block
  std::unique_ptr<IovecBlock> block_;
  bool block_has_head_ = false;
  size_t block_sent_nbytes_ = 0;
  size_t payload_end_ = 0;  // of the block
  bool rebuild_ = false;    // the block was given back in the middle
  bool summed_ = true;      // whether the sink wants a checksum
  uint32_t crc_ = 0;        // the trailer, once all of the chunk is in it
};

}  // namespace tsr

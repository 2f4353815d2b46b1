// The sink's end of one connection: asks for chunks and takes them in.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "chunk_log.h"
#include "chunk_scatter.h"
#include "event_loop.h"
#include "fetch.h"
#include "pipe.h"
#include "rail_stats.h"
#include "request_window.h"
#include "source_link.h"
#include "wire.h"

namespace tsr {

// What the streams of one worker share. Outlives them.
struct SinkWorker {
  const Plan* plan;
  size_t window;  // requests in flight on a stream, at least; see RequestWindow
  Clock::duration peer_timeout;
  uint64_t full_nbytes;  // see FetcherOptions, as the rest
  bool checksums;
  bool tells_done;
  // Has every stream of every worker look for something to do. Any thread.
  std::function<void()> wake_all;
  std::shared_ptr<Fetch> fetch;  // on the worker's thread; null between versions
  std::vector<std::unique_ptr<ScatterBlock>> blocks;
  std::unique_ptr<EventLoop> loop;
};

// Lives on its worker's thread. Writes to the fetch's memory only while it has chunks in flight.
class SinkStream final : public Pollable {
 public:
  SinkStream(UniqueFd fd, std::unique_ptr<Pipe> pipe, SourceLink* source, const std::string& rail,
             RailStats* stats, ChunkLog* log, SinkWorker* worker);
  ~SinkStream() override { Close(); }

  void OnReady(uint32_t events) override;
  void OnTick(Clock::time_point now) override;

  // Looks for something to do, and does it.
  void Wake();
  bool has_chunks() const;
  // Breaks off without giving chunks back.
  void Close();

 private:
  // A request that has not been answered to its last byte.
  struct Request {
    FrameKind kind;
    uint64_t chunk;
    uint64_t nbytes;          // of the chunk
    Clock::time_point asked;  // of a chunk that is traced

    bool is_from_queue() const { return kind != FrameKind::kTable && kind != FrameKind::kPing; }
  };
  enum class Step { kMoved, kBlocked };

  void EndTurn();

  // Requests. Pump() uploads the table if nobody has, else asks for chunks while the window has
  // room; Flush() sends, once for all that a turn has to say, or sooner.
  void Pump();
  void AskForChunks();
  void AskForDigest(uint64_t index);
  void Ask(const Frame& request, uint64_t chunk_nbytes = 0);
  Request TakeRequest();
  void Append(const Frame& frame);
  void StartUpload();
  void Flush();
  size_t unsent_nbytes() const { return out_.size() + table_.size() - out_sent_nbytes_; }

  // Replies. What follows payload or text is always the trailer of a chunk, then the next frame.
  Step Receive();
  void TakePayload(size_t nbytes);
  void FillBlock();
  void HandleReply();
  void HandleError();
  void StartChunk();
  void TakeDigest();
  void Verify();
  void GiveBackBlock();
  void Trace(const Request& request, uint64_t nbytes);
  // Closes; what was in flight goes back to the queue for other streams.
  void Lose(const std::string& reason);

  const std::unique_ptr<Pipe> pipe_;
  SourceLink* const source_;
  RailStats* const stats_;
  SinkWorker* const worker_;
  StreamOnRail on_rail_;
  BusyStream busy_{&stats_->busy};
  ChunkTrack track_;
  Clock::time_point last_progress_ = Clock::now();
  Clock::time_point last_sent_ = Clock::now();

  RequestWindow window_;
  std::deque<Request> requests_;
  uint64_t requested_nbytes_ = 0;  // by them
  std::vector<uint8_t> out_;       // frames to send, then the table
  std::string table_;
  size_t out_sent_nbytes_ = 0;  // of both

  std::array<uint8_t, kTrailerNbytes + kFrameNbytes> tail_;
  size_t tail_nbytes_ = kTrailerNbytes;  // received; no trailer comes before the first frame
  Frame reply_{};
  std::array<char, kMaxTextNbytes> text_;
  size_t text_left_ = 0;

  // Only while a chunk arrives.
  bool in_chunk_ = false;
  ChunkScatter scatter_;
  std::unique_ptr<ScatterBlock> block_;
  IovecCursor cursor_;       // what is left of the block, and the tail if it is the last
  size_t payload_left_ = 0;  // of the block
  uint32_t crc_ = 0;
};

}  // namespace tsr

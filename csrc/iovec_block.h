// Bytes that go through one call of sendmsg or recvmsg: where they lie, and scratch for some of
// them.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tsr {

// Runs of at least this many bytes may go by an iovec of their own: below it the kernel's work per
// iovec costs more than a copy into scratch.
inline constexpr int64_t kMinRunNbytes = 2048;
// Bytes of a block: small enough to be in cache from its checksum to its send.
inline constexpr int64_t kBlockNbytes = 512 << 10;
inline constexpr int64_t kPackedNbytes = 256 << 10;

// Not thread-safe. Does not own the memory that it lists, but for what is packed.
class IovecBlock {
 public:
  void Clear();
  // Whether no more of a chunk goes in; a frame before it and a trailer after it always do.
  bool full() const { return num_iov_ > kMaxRuns || nbytes_ >= kBlockNbytes; }
  // Bytes that may be appended, and packed, before the block is full.
  int64_t room_nbytes() const { return kBlockNbytes - nbytes_; }
  int64_t packed_room_nbytes() const { return kPackedNbytes - packed_nbytes_; }
  // Whether bytes at `data` need no iovec of their own, or the first one.
  bool Continues(const uint8_t* data) const;
  // Lists bytes, in one iovec with those before where they lie right behind them.
  void Append(const uint8_t* data, int64_t nbytes);
  // Lists the next bytes of the scratch. Returns where they lie.
  uint8_t* AppendPacked(int64_t nbytes);

  std::span<iovec> iov() { return {iov_.data(), num_iov_}; }
  int64_t nbytes() const { return nbytes_; }

 private:
  static constexpr size_t kMaxRuns = kBlockNbytes / kMinRunNbytes;

  std::unique_ptr<uint8_t[]> packed_ = std::make_unique_for_overwrite<uint8_t[]>(kPackedNbytes);
  std::array<iovec, kMaxRuns + 3> iov_;
  size_t num_iov_ = 0;
  int64_t nbytes_ = 0;
  int64_t packed_nbytes_ = 0;
};

// Blocks of one worker, at most kMaxSpare of them unused. Not thread-safe.
class IovecBlockPool {
 public:
  std::unique_ptr<IovecBlock> Take();
  void GiveBack(std::unique_ptr<IovecBlock> block);
  // How many are with connections now.
  size_t num_taken() const { return num_taken_; }

 private:
  static constexpr size_t kMaxSpare = 4;

  std::vector<std::unique_ptr<IovecBlock>> spare_;
  size_t num_taken_ = 0;
};

}  // namespace tsr

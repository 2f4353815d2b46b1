// CRC32C by carry-less products, for registers of any width.
//
// Only files of one level include this, each between TSR_BEGIN_TARGET and TSR_END_TARGET and after
// "crc32c_kernels.h". Nothing here has a name outside of the file that includes it, for each of
// them compiles it for another CPU.
#pragma once

#include "crc32c_kernels.h"

namespace tsr {
namespace {

// What `Register` has: functions of a Value of kNbytes in lanes of 128 bits.
//   Load, Store, StorePastCache   the last two to aligned memory
//   Pin                           keeps the compiler from loading the value a second time
//   FromCrc                       a plain remainder in the first bytes, nothing behind it
//   Factors                       two words, the same in every lane
//   Xor; Fold                     products of a lane's words and those of Factors, plus what
//   follows ExtendByWord, ExtendByByte    the CPU's own instruction on a plain remainder MoveAhead
//   a plain remainder by one of Ahead() kWordsPerFold                 see FoldBlocks(); 0 where
//   folding alone is as fast kShort                        who takes what fills less than Sums;
//   null where nobody does

// Factor by which a carry-less product moves a remainder `num_bits` ahead: x^(num_bits - 32) mod P.
// The missing x^32 is what the CPU's own CRC instruction multiplies by; the shift makes up for the
// bit that the product of two reflected numbers falls short by.
constexpr uint64_t Ahead(size_t num_bits) {
  uint32_t power = 0x80000000;  // x^0
  for (size_t bit = 32; bit < num_bits; ++bit) power = TimesX(power);
  return static_cast<uint64_t>(power) << 1;
}

// Factors that move ahead by `kNbytes`. In each lane the low half lies 64 bits further from the
// message's end.
template <typename Register, size_t kNbytes>
inline typename Register::Value FactorsFor() {
  constexpr uint64_t kLow = Ahead(8 * kNbytes + 64);
  constexpr uint64_t kHigh = Ahead(8 * kNbytes);
  return Register::Factors(kLow, kHigh);
}

template <typename Register>
uint32_t Serial(uint32_t crc, const uint8_t* data, size_t nbytes) {
  for (; nbytes >= 8; data += 8, nbytes -= 8) crc = Register::ExtendByWord(crc, LoadWord(data));
  for (; nbytes > 0; ++data, --nbytes) crc = Register::ExtendByByte(crc, *data);
  return crc;
}

enum class Keep { kNothing, kCached, kPastCache };

// Where the byte `nbytes` after `to` goes. Nothing may be added to a null pointer.
template <Keep kKeep>
inline uint8_t* Past(uint8_t* to, size_t nbytes) {
  if constexpr (kKeep == Keep::kNothing) return nullptr;
  return to + nbytes;
}

// Loads a register, once, and keeps what it has loaded.
template <typename Register, Keep kKeep>
inline typename Register::Value Take(uint8_t* to, const uint8_t* from) {
  typename Register::Value loaded = Register::Load(from);
  if constexpr (kKeep != Keep::kNothing) {
    Register::Pin(loaded);
    if constexpr (kKeep == Keep::kCached) Register::Store(to, loaded);
    if constexpr (kKeep == Keep::kPastCache) Register::StorePastCache(to, loaded);
  }
  return loaded;
}

// Bytes that fill no register. Takes and returns the plain remainder.
template <typename Register, Keep kKeep>
uint32_t TakeSerial(uint32_t crc, uint8_t* to, const uint8_t* from, size_t nbytes) {
  if constexpr (kKeep == Keep::kNothing) return Serial<Register>(crc, from, nbytes);
  std::memcpy(to, from, nbytes);
  return Serial<Register>(crc, to, nbytes);
}

// So many registers are folded side by side, because of a product's latency.
constexpr size_t kNumSums = 8;

template <typename Register>
struct Sums {
  using Value = typename Register::Value;
  static constexpr size_t kNbytes = kNumSums * Register::kNbytes;

  // Moves all ahead, to the registers that follow, and adds those.
  template <Keep kKeep>
  void Fold(Value factors, uint8_t* to, const uint8_t* from) {
#pragma GCC unroll 8
    for (size_t i = 0; i < kNumSums; ++i) {
      const size_t offset = i * Register::kNbytes;
      values[i] = Register::Fold(values[i], factors,
                                 Take<Register, kKeep>(Past<kKeep>(to, offset), from + offset));
    }
  }

  // Adds the plain remainder of what lies before the first.
  void AddCrc(uint32_t crc) { values[0] = Register::Xor(values[0], Register::FromCrc(crc)); }

  Value values[kNumSums];
};

// Fetches lines that are read soon: from DRAM that makes 25 GB/s with 256 bits where there were 22,
// and no less with the others (2-core Zen 4 VM, 2026-12-01).
template <size_t kNbytes>
inline void Prefetch(const uint8_t* from) {
  constexpr size_t kAheadNbytes = 2048;
  constexpr size_t kLineNbytes = 64;
#pragma GCC unroll 16
  for (size_t i = 0; i < kNbytes; i += kLineNbytes) __builtin_prefetch(from + kAheadNbytes + i);
}

// Folds blocks while one and another Sums are left, and then that; returns where it ended. In a
// block the sums fold the first part, and the CPU's own instruction takes three lanes behind it,
// three because of its latency: it has another unit than the products, which would stand idle. Each
// fold of a register goes with kWordsPerFold words of every lane. GB/s from L2 and from DRAM: 42
// and 32 with 256 bits, 36 and 29 with 128, where folding alone has 29 and 25, 14 and 14 (2-core
// Zen 4 VM, 2026-12-01).
template <typename Register>
const uint8_t* FoldBlocks(Sums<Register>* sums, const uint8_t* data, const uint8_t* end) {
  constexpr int kNumSteps = 4;
  constexpr size_t kStep = Sums<Register>::kNbytes;
  constexpr size_t kWords = kNumSums * Register::kWordsPerFold;
  constexpr size_t kLane = kNumSteps * kWords * sizeof(uint64_t);
  constexpr size_t kBlock = kNumSteps * kStep + 3 * kLane;
  const auto by_step = FactorsFor<Register, kStep>();
  auto factors = by_step;
  uint32_t crc = 0;  // of the lanes of the block before, which the sums have yet to pass
  while (static_cast<size_t>(end - data) >= kBlock + kStep) {
    const uint8_t* folded = data;
    const uint8_t* word = data + kNumSteps * kStep;
    uint32_t lanes[3] = {0, 0, 0};
    for (int step = 0; step < kNumSteps; ++step) {
      Prefetch<kBlock / kNumSteps>(data + static_cast<size_t>(step) * (kBlock / kNumSteps));
#pragma GCC unroll 8
      for (size_t i = 0; i < kNumSums; ++i, folded += Register::kNbytes) {
        sums->values[i] = Register::Fold(sums->values[i], factors, Register::Load(folded));
#pragma GCC unroll 2
        for (size_t w = 0; w < Register::kWordsPerFold; ++w, word += sizeof(uint64_t)) {
          lanes[0] = Register::ExtendByWord(lanes[0], LoadWord(word));
          lanes[1] = Register::ExtendByWord(lanes[1], LoadWord(word + kLane));
          lanes[2] = Register::ExtendByWord(lanes[2], LoadWord(word + 2 * kLane));
        }
      }
      sums->AddCrc(crc);
      crc = 0;
      factors = by_step;
    }
    constexpr uint64_t kOneLane = Ahead(8 * kLane);
    constexpr uint64_t kTwoLanes = Ahead(16 * kLane);
    crc = Register::MoveAhead(lanes[0], kTwoLanes) ^ Register::MoveAhead(lanes[1], kOneLane) ^
          lanes[2];
    factors = FactorsFor<Register, kStep + 3 * kLane>();
    data += kBlock;
  }
  sums->template Fold<Keep::kNothing>(factors, nullptr, data);
  sums->AddCrc(crc);
  return data + kStep;
}

// `nbytes` fills at least Sums, wherever it begins.
template <typename Register, Keep kKeep>
uint32_t FoldAll(uint32_t crc, uint8_t* to, const uint8_t* from, size_t nbytes) {
  constexpr size_t kRegister = Register::kNbytes;
  constexpr size_t kStep = Sums<Register>::kNbytes;
  const auto aligned = reinterpret_cast<uintptr_t>(kKeep == Keep::kNothing ? from : to);
  const size_t head = -aligned % kRegister;
  crc = TakeSerial<Register, kKeep>(~crc, to, from, head);
  size_t done = head;

  Sums<Register> sums;
#pragma GCC unroll 8
  for (size_t i = 0; i < kNumSums; ++i, done += kRegister) {
    sums.values[i] = Take<Register, kKeep>(Past<kKeep>(to, done), from + done);
  }
  sums.AddCrc(crc);
  if constexpr (kKeep == Keep::kNothing && Register::kWordsPerFold > 0) {
    if (done + kStep <= nbytes) {
      done = static_cast<size_t>(FoldBlocks<Register>(&sums, from + done, from + nbytes) - from);
    }
  }
  const auto by_step = FactorsFor<Register, kStep>();
  for (; done + kStep <= nbytes; done += kStep) {
    Prefetch<kStep>(from + done);
    sums.template Fold<kKeep>(by_step, Past<kKeep>(to, done), from + done);
  }

  const auto by_register = FactorsFor<Register, kRegister>();
  auto sum = sums.values[0];
#pragma GCC unroll 8
  for (size_t i = 1; i < kNumSums; ++i) sum = Register::Fold(sum, by_register, sums.values[i]);
  for (; done + kRegister <= nbytes; done += kRegister) {
    sum =
        Register::Fold(sum, by_register, Take<Register, kKeep>(Past<kKeep>(to, done), from + done));
  }
  if constexpr (kKeep == Keep::kPastCache) FenceStores();

  alignas(kRegister) uint8_t lanes[kRegister];
  Register::Store(lanes, sum);
  crc = Serial<Register>(0, lanes, kRegister);
  return ~TakeSerial<Register, kKeep>(crc, Past<kKeep>(to, done), from + done, nbytes - done);
}

template <typename Register>
constexpr size_t kLeastNbytes = Sums<Register>::kNbytes + Register::kNbytes;

template <typename Register>
uint32_t Extend(uint32_t crc, const void* data, size_t nbytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  if (nbytes >= kLeastNbytes<Register>) {
    return FoldAll<Register, Keep::kNothing>(crc, nullptr, from, nbytes);
  }
  if (Register::kShort != nullptr) return Register::kShort->extend(crc, data, nbytes);
  return ~Serial<Register>(~crc, from, nbytes);
}

template <typename Register>
uint32_t Copy(uint32_t crc, void* to, const void* from, size_t nbytes, Stores stores) {
  auto* sink = static_cast<uint8_t*>(to);
  const auto* source = static_cast<const uint8_t*>(from);
  if (nbytes >= kLeastNbytes<Register>) {
    const auto fold = stores == Stores::kCached ? FoldAll<Register, Keep::kCached>
                                                : FoldAll<Register, Keep::kPastCache>;
    return fold(crc, sink, source, nbytes);
  }
  if (Register::kShort != nullptr) {
    return Register::kShort->copy(crc, to, from, nbytes, stores);
  }
  return ~TakeSerial<Register, Keep::kCached>(~crc, sink, source, nbytes);
}

}  // namespace
}  // namespace tsr

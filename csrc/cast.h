// Conversions between floating-point types, to nearest even, NaN and infinity kept.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tsr {

// Values are on the wire (WIRE_FORMAT.md): never renumber.
enum class FloatKind : uint8_t {
  kNone = 0,
  kF16 = 1,
  kBF16 = 2,
  kF32 = 3,
  kF64 = 4,
  kF8E4M3FN = 5,  // has no infinity: what overflows is NaN
  kF8E5M2 = 6,
};

// What happens to the elements of a region on their way. On the wire one byte: 0 copies; else
// (from << 4 | to), two FloatKinds that differ.
class Op {
 public:
  constexpr Op() = default;
  constexpr explicit Op(uint8_t code) : code_(code) {}
  static constexpr Op Cast(FloatKind from, FloatKind to) {
    return Op(static_cast<uint8_t>(static_cast<uint8_t>(from) << 4 | static_cast<uint8_t>(to)));
  }

  constexpr bool is_copy() const { return code_ == 0; }
  constexpr uint8_t code() const { return code_; }
  constexpr FloatKind from() const { return static_cast<FloatKind>(code_ >> 4); }
  constexpr FloatKind to() const { return static_cast<FloatKind>(code_ & 15); }
  // True for 0 and for every pair of different kinds that CastRun() knows.
  bool valid() const;

  friend constexpr bool operator==(Op, Op) = default;

 private:
  uint8_t code_ = 0;
};

// Bytes of one element; 0 for kNone and for a value that is no kind.
int64_t ItemsizeOf(FloatKind kind);

// Bytes that `op` makes of an element of `itemsize` bytes.
int64_t SinkItemsize(Op op, int64_t itemsize);

// Converts `count` elements of op.from() at `from`, `from_stride` bytes apart, into dense elements
// of op.to() at `to`. The sides don't overlap and need no alignment. `op` is a valid cast.
void CastRun(Op op, const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t count);

}  // namespace tsr

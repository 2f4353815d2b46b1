// What registers of every width share on x86-64. Included as "crc32c_fold.h" is.
#pragma once

#include "crc32c_fold.h"

namespace tsr {
namespace {

struct Crc32cInstructions {
  static uint32_t ExtendByWord(uint32_t crc, uint64_t word) {
    return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
  }
  static uint32_t ExtendByByte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
  static uint32_t MoveAhead(uint32_t crc, uint64_t factor) {
    const __m128i product = _mm_clmulepi64_si128(
        _mm_cvtsi64_si128(crc), _mm_cvtsi64_si128(static_cast<int64_t>(factor)), 0);
    return ExtendByWord(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
  }
};

}  // namespace
}  // namespace tsr

// What the implementations of CRC32C have in common, and their names.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "crc32c.h"

namespace tsr {

// The polynomial without its x^32, most significant coefficient in bit 0, as all implementations
// have them: CRC32C takes the first bit of a message from bit 0 of its first byte.
constexpr uint32_t kCrc32cPolynomial = 0x82F63B78;

constexpr uint32_t TimesX(uint32_t p) { return (p >> 1) ^ (p & 1 ? kCrc32cPolynomial : 0); }

static_assert(std::endian::native == std::endian::little);

inline uint64_t LoadWord(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Each in a file of its own, which only its own architecture has.
extern const Crc32cVariant kCrc32cSse42;
extern const Crc32cVariant kCrc32cAvx2;
extern const Crc32cVariant kCrc32cAvx512;
extern const Crc32cVariant kCrc32cPmull;

}  // namespace tsr

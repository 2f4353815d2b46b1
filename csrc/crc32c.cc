#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "crc32c_kernels.h"

namespace tsr {
namespace {

// kTables[k][b]: remainder of byte b followed by k zero bytes.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t remainder = b;
    for (int bit = 0; bit < 8; ++bit) remainder = TimesX(remainder);
    tables[0][b] = remainder;
  }
  for (int k = 1; k < 8; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      const uint32_t before = tables[k - 1][b];
      tables[k][b] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}();

// Eight table lookups for each little-endian word of eight bytes.
uint32_t ExtendTable(uint32_t crc, const void* data, size_t nbytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; nbytes >= 8; p += 8, nbytes -= 8) {
    const uint64_t word = LoadWord(p) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 255];
  }
  for (; nbytes > 0; ++p, --nbytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 255];
  return ~crc;
}

// Sums what has just been stored, so it doesn't matter what becomes of `from`.
uint32_t CopyTable(uint32_t crc, void* to, const void* from, size_t nbytes, Stores) {
  constexpr size_t kPiece = 8 << 10;  // within the nearest cache
  for (size_t done = 0; done < nbytes; done += kPiece) {
    uint8_t* out = static_cast<uint8_t*>(to) + done;
    const size_t piece = std::min(kPiece, nbytes - done);
    std::memcpy(out, static_cast<const uint8_t*>(from) + done, piece);
    crc = ExtendTable(crc, out, piece);
  }
  return crc;
}

const Crc32cVariant& Used() {
  static const Crc32cVariant used = [] {
    const std::vector<Crc32cVariant> variants = Crc32cVariants();
    return *std::ranges::find_if(
        variants, [](CpuLevel level) { return level <= UsedCpuLevel(); }, &Crc32cVariant::level);
  }();
  return used;
}

}  // namespace

std::vector<Crc32cVariant> Crc32cVariants() {
  const CpuLevel best = CpuLevels().front();
  std::vector<Crc32cVariant> variants;
#if defined(__x86_64__)
  if (best >= CpuLevel::kAvx512 && HasVpclmulqdq()) variants.push_back(kCrc32cAvx512);
  if (best >= CpuLevel::kAvx2 && HasVpclmulqdq()) variants.push_back(kCrc32cAvx2);
  if (best >= CpuLevel::kSse42) variants.push_back(kCrc32cSse42);
#elif defined(__aarch64__)
  if (best >= CpuLevel::kPmull) variants.push_back(kCrc32cPmull);
#endif
  variants.push_back({"table", CpuLevel::kPortable, ExtendTable, CopyTable});
  return variants;
}

uint32_t Crc32c(uint32_t crc, const void* data, size_t nbytes) {
  return Used().extend(crc, data, nbytes);
}

uint32_t CopyCrc32c(uint32_t crc, void* to, const void* from, size_t nbytes, Stores stores) {
  return Used().copy(crc, to, from, nbytes, stores);
}

std::string_view Crc32cImplementation() { return Used().name; }

}  // namespace tsr

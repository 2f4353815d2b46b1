// CRC32C (Castagnoli), by the fastest instructions of the level in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cpu.h"
#include "stores.h"

namespace tsr {

// CRC32C of `nbytes` bytes at `data`, continued from `crc`, the value for the bytes before them
// (0 at first). Thread-safe; the implementation is chosen once, at the first call.
uint32_t Crc32c(uint32_t crc, const void* data, size_t nbytes);

// Copies `nbytes` bytes and returns what Crc32c() returns for them as they lie at `to`. Every byte
// of `from` is read once, so another process may change it meanwhile: what is summed is what is
// stored. Thread-safe where `to` is; sides don't overlap.
uint32_t CopyCrc32c(uint32_t crc, void* to, const void* from, size_t nbytes, Stores stores);

// One way to do both.
struct Crc32cVariant {
  std::string_view name;
  CpuLevel level;  // the least that it needs
  uint32_t (*extend)(uint32_t crc, const void* data, size_t nbytes);
  uint32_t (*copy)(uint32_t crc, void* to, const void* from, size_t nbytes, Stores stores);
};
// All that this CPU can run, the fastest first, so that a test holds each against the others.
std::vector<Crc32cVariant> Crc32cVariants();

// Name of the one that Crc32c() uses: "vpclmulqdq-512", "vpclmulqdq-256", "pclmulqdq", "pmull" or
// "table".
std::string_view Crc32cImplementation();

}  // namespace tsr

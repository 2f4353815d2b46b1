// CRC32C (Castagnoli), by the fastest instructions that this CPU has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "stores.h"

namespace tsr {

// CRC32C of `nbytes` bytes at `data`, continued from `crc`, the value for the bytes before them
// (0 at first). Thread-safe; the implementation is chosen once, at the first call.
uint32_t Crc32c(uint32_t crc, const void* data, size_t nbytes);

// Copies `nbytes` bytes and returns what Crc32c() returns for them as they lie at `to`. Every byte
// of `from` is read once, so another process may change it meanwhile: what is summed is what is
// stored. Thread-safe where `to` is; sides don't overlap.
uint32_t CopyCrc32c(uint32_t crc, void* to, const void* from, size_t nbytes, Stores stores);

// Name of the implementation that Crc32c() uses here: "vpclmulqdq", "sse4.2" or "table".
std::string_view Crc32cImplementation();

// Every implementation that this CPU can run, so that a test holds each against the others.
struct Crc32cVariant {
  std::string_view name;
  uint32_t (*extend)(uint32_t crc, const void* data, size_t nbytes);
  uint32_t (*copy)(uint32_t crc, void* to, const void* from, size_t nbytes, Stores stores);
};
std::vector<Crc32cVariant> Crc32cVariants();

}  // namespace tsr

// Digests of elements that tell where in their leaf each of them belongs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "box_copy.h"
#include "cast.h"
#include "status.h"
#include "tiled_copy.h"

namespace tsr {

// A leaf is a string of bytes here: its elements, dense and row-major. Its unit w, the bytes from
// 4 w to 4 w + 3 as a little-endian number, adds unit × DigestMultiplier(w) to a digest, modulo
// 2^64; bytes that are not in a part count as 0 in it. So digests of disjoint parts add up to that
// of the whole, wherever the parts were cut. An error in one unit is always seen, any other one but
// for odds of 2^-32.

// Odd, and like nothing of `unit` (the finalizer of SplitMix64).
constexpr uint64_t DigestMultiplier(uint64_t unit) {
  uint64_t bits = (unit + 1) * 0x9E3779B97F4A7C15;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits | 1;
}

// Of `nbytes` bytes that have their place in the leaf from byte `position` on.
uint64_t DigestOfRun(uint64_t position, const uint8_t* data, size_t nbytes);

// Of the elements of a box, in coordinates of the leaf, wherever they lie: they are `itemsize`
// bytes each, and count as what `op` makes of them. `shape` is that of the leaf.
uint64_t DigestOfBox(Op op, int64_t itemsize, std::span<const int64_t> shape,
                     const StridedBox& from);
// The same of a box, not empty, in the memory of a shard in tiles.
uint64_t DigestOfTiledBox(Op op, int64_t itemsize, std::span<const int64_t> shape, BoxView box,
                          const TiledSource& from);

// Boxes of several leaves in memory, as columns; those of box i lie behind those of the one before.
struct BoxColumns {
  std::span<const uint64_t> addresses;  // shape=[num_boxes], as the next two
  std::span<const uint32_t> itemsizes;
  std::span<const uint32_t> ranks;
  std::span<const int64_t> shapes;   // of the leaves: shape=[sum of ranks]
  std::span<const int64_t> ranges;   // shape=[sum of ranks, 2]
  std::span<const int64_t> strides;  // in bytes; shape=[sum of ranks]
};

// The digest of each box; they are shared out among threads. kInvalid where the columns don't fit.
Status DigestsOfBoxes(const BoxColumns& boxes, int num_threads, std::vector<uint64_t>* out);

}  // namespace tsr

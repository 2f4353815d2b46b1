// Half-open N-d index ranges.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace tsr {

// [start, stop) pairs, one per dimension, as an int64 array of shape [rank, 2] lies in memory.
// Rank 0 has no pair and holds one element. Does not own its memory.
using BoxView = std::span<const int64_t>;

// Layouts and tables with more dimensions are refused.
inline constexpr int kMaxRank = 32;

inline int RankOf(BoxView box) { return static_cast<int>(box.size() / 2); }
inline int64_t StartOf(BoxView box, int dim) { return box[2 * dim]; }
inline int64_t StopOf(BoxView box, int dim) { return box[2 * dim + 1]; }
inline int64_t ExtentOf(BoxView box, int dim) { return box[2 * dim + 1] - box[2 * dim]; }

// Number of elements, or -1 where it does not fit into 63 bits or a range is negative.
int64_t VolumeOf(BoxView box);

// Writes the intersection to `out` (same rank). Returns whether it has any element; where it has
// none, what `out` holds is unspecified.
bool Intersect(BoxView a, BoxView b, std::span<int64_t> out);

// True where every element of `inner` is in `outer`; both of the same rank.
bool Contains(BoxView outer, BoxView inner);

// For people, as Python slices: "[0:4, 8:16]".
std::string FormatBox(BoxView box);

// Byte strides of a dense row-major array with the extents of `box`.
void RowMajorStrides(BoxView box, int64_t itemsize, std::span<int64_t> strides);

// Bytes from the first element of `outer`, whose neighbours along each dimension are `strides`
// bytes apart, to the first one of `inner`.
int64_t OffsetOf(BoxView inner, BoxView outer, std::span<const int64_t> strides);

}  // namespace tsr

// How the elements of one shard lie in memory: in rows of any order, or in XLA's tiles.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "box.h"
#include "status.h"

namespace tsr {

// A part of an index: how often `weight` goes into what the digits before it have left. Every time
// moves `stride` bytes on.
struct Digit {
  int64_t weight;
  int64_t stride;

  friend bool operator==(const Digit&, const Digit&) = default;
};

// Tiles cut every dimension by itself, so that an element lies where the digits of all its indices
// add up to. Rows in tiles T(8,128)(2,1) have digits of the weights 8, 2 and 1: the tile, the pair
// of rows in it, the row of the pair. Without tiles each dimension has one digit, its stride.
// Immutable once made; shared by threads freely.
class ShardLayout {
 public:
  ShardLayout() = default;
  // The layout that XLA means: dimensions from major to minor, of which the first tile cuts the
  // last ones; every later tile cuts the last dimensions of what that made, which are the tile's
  // own. What is cut is padded up to whole tiles, and dimensions that a tile has too many count as
  // of extent 1. kInvalid where that is no order, where a tile has an extent below 1, as XLA writes
  // it where dimensions are combined, or where more than kMaxRank digits are left.
  static Status Make(std::span<const int64_t> extents, int64_t itemsize,
                     std::span<const int64_t> major_to_minor,
                     std::span<const std::vector<int64_t>> tiles, ShardLayout* out);
  // Dense rows with the extents of `box`.
  static ShardLayout RowMajor(BoxView box, int64_t itemsize);
  // Neighbours along each dimension are `strides` bytes apart.
  static ShardLayout Strided(BoxView box, int64_t itemsize, std::span<const int64_t> strides);

  // From 0 to the extents: padding is not in it.
  BoxView box() const { return {box_.data(), 2 * static_cast<size_t>(rank_)}; }
  int64_t itemsize() const { return itemsize_; }
  // From the first byte to the last, with the padding between and behind; 0 if not known.
  int64_t nbytes() const { return nbytes_; }
  // From the greatest weight to the least, which is 1.
  std::span<const Digit> digits(int dim) const {
    return std::span(digits_).subspan(first_digit_[dim], first_digit_[dim + 1] - first_digit_[dim]);
  }
  // Whether it is one of elements of `itemsize` bytes in a box with the extents of `box`.
  bool Fits(BoxView box, int64_t itemsize) const;

 private:
  int rank_ = 0;
  int64_t itemsize_ = 0;
  int64_t nbytes_ = 0;
  std::array<int64_t, 2 * kMaxRank> box_;
  std::array<Digit, kMaxRank> digits_;  // of all dimensions, one after another
  std::array<int, kMaxRank + 1> first_digit_ = {0};
};

// Of memory in tiles alone, by an index that its owner names.
using ShardLayouts = std::map<uint32_t, std::shared_ptr<const ShardLayout>>;

}  // namespace tsr

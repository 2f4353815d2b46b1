#include "shard_layout.h"

#include <algorithm>
#include <string>
#include <utility>

namespace tsr {
namespace {

// A dimension of memory, and which part of which dimension of the shard it counts.
struct Axis {
  int dim;  // -1: of none, where a tile has more dimensions than there are
  int64_t weight;
  int64_t extent;  // with the padding
  int64_t range;   // without: how many values it takes
};

Status Invalid(const std::string& message) { return Status(Code::kInvalid, message); }

bool IsOrder(std::span<const int64_t> major_to_minor, size_t rank) {
  std::vector<int64_t> sorted(major_to_minor.begin(), major_to_minor.end());
  std::ranges::sort(sorted);
  for (size_t dim = 0; dim < sorted.size(); ++dim) {
    if (sorted[dim] != static_cast<int64_t>(dim)) return false;
  }
  return sorted.size() == rank;
}

int64_t NumTiles(int64_t extent, int64_t tile) { return extent / tile + (extent % tile != 0); }

// Cuts the last axes into whole tiles, and what is in a tile into axes behind all others.
Status CutAxes(std::span<const int64_t> tile, std::vector<Axis>* axes) {
  if (tile.size() > axes->size()) {
    axes->insert(axes->begin(), tile.size() - axes->size(), Axis{-1, 1, 1, 1});
  }
  const size_t first = axes->size() - tile.size();
  for (size_t i = 0; i < tile.size(); ++i) {
    if (tile[i] < 1) return Invalid("a tile has the extent " + std::to_string(tile[i]));
    Axis& cut = (*axes)[first + i];
    const Axis inner{cut.dim, cut.weight, tile[i], std::min(cut.range, tile[i])};
    cut.extent = NumTiles(cut.extent, tile[i]);
    cut.range = NumTiles(cut.range, tile[i]);
    if (__builtin_mul_overflow(cut.weight, tile[i], &cut.weight)) return Invalid("too many bytes");
    axes->push_back(inner);
  }
  return Status();
}

// The digits of a dimension, each next to the last: one that goes on as those after it is left out.
std::vector<Digit> DigitsOf(std::vector<Digit> all, int64_t itemsize) {
  std::ranges::sort(all, std::ranges::greater(), &Digit::weight);
  std::vector<Digit> digits;
  for (const Digit& digit : all) {
    while (!digits.empty() && digits.back().weight % digit.weight == 0 &&
           digits.back().stride == digits.back().weight / digit.weight * digit.stride) {
      digits.pop_back();
    }
    digits.push_back(digit);
  }
  if (digits.empty()) digits.push_back({1, itemsize});
  return digits;
}

}  // namespace

Status ShardLayout::Make(std::span<const int64_t> extents, int64_t itemsize,
                         std::span<const int64_t> major_to_minor,
                         std::span<const std::vector<int64_t>> tiles, ShardLayout* out) {
  if (extents.size() > kMaxRank) return Invalid("rank is above 32");
  if (!IsOrder(major_to_minor, extents.size())) return Invalid("major_to_minor is no permutation");
  if (itemsize < 1) return Invalid("itemsize is " + std::to_string(itemsize));
  std::vector<Axis> axes;
  for (const int64_t dim : major_to_minor) {
    if (extents[dim] < 0) return Invalid("an extent is negative");
    axes.push_back({static_cast<int>(dim), 1, extents[dim], extents[dim]});
  }
  for (const std::vector<int64_t>& tile : tiles) TSR_RETURN_IF_ERROR(CutAxes(tile, &axes));

  std::vector<std::vector<Digit>> digits(extents.size());
  int64_t stride = itemsize;
  for (size_t i = axes.size(); i-- > 0;) {
    const Axis& axis = axes[i];
    if (axis.dim >= 0 && axis.range > 1) digits[axis.dim].push_back({axis.weight, stride});
    if (__builtin_mul_overflow(stride, axis.extent, &stride)) return Invalid("too many bytes");
  }

  ShardLayout layout;
  layout.rank_ = static_cast<int>(extents.size());
  layout.itemsize_ = itemsize;
  layout.nbytes_ = stride;
  int num_digits = 0;
  for (int dim = 0; dim < layout.rank_; ++dim) {
    layout.box_[2 * dim] = 0;
    layout.box_[2 * dim + 1] = extents[dim];
    for (const Digit& digit : DigitsOf(std::move(digits[dim]), itemsize)) {
      if (num_digits == kMaxRank) return Invalid("tiles cut dimensions into more than 32 parts");
      layout.digits_[num_digits++] = digit;
    }
    layout.first_digit_[dim + 1] = num_digits;
  }
  *out = layout;
  return Status();
}

ShardLayout ShardLayout::RowMajor(BoxView box, int64_t itemsize) {
  std::array<int64_t, kMaxRank> strides;
  const auto rank = static_cast<size_t>(RankOf(box));
  RowMajorStrides(box, itemsize, std::span(strides).first(rank));
  return Strided(box, itemsize, std::span(strides).first(rank));
}

ShardLayout ShardLayout::Strided(BoxView box, int64_t itemsize, std::span<const int64_t> strides) {
  ShardLayout layout;
  layout.rank_ = RankOf(box);
  layout.itemsize_ = itemsize;
  for (int dim = 0; dim < layout.rank_; ++dim) {
    layout.box_[2 * dim] = 0;
    layout.box_[2 * dim + 1] = ExtentOf(box, dim);
    layout.digits_[dim] = {1, strides[dim]};
    layout.first_digit_[dim + 1] = dim + 1;
  }
  return layout;
}

bool ShardLayout::Fits(BoxView box, int64_t itemsize) const {
  if (itemsize != itemsize_ || RankOf(box) != rank_) return false;
  for (int dim = 0; dim < rank_; ++dim) {
    if (ExtentOf(box, dim) != ExtentOf(this->box(), dim)) return false;
  }
  return true;
}

}  // namespace tsr

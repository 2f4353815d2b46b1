#include "tiled_copy.h"

#include <algorithm>
#include <array>
#include <span>

#include "region_copy.h"

namespace tsr {
namespace {

// A box of two shards as boxes that are strided on both sides: along each dimension, and there from
// digit to digit, a range is what is left of a first tile, whole tiles, and a part of a last one.
class StridedParts {
 public:
  StridedParts(Op op, int64_t itemsize, Stores stores)
      : op_(op), itemsize_(itemsize), stores_(stores) {}

  // Adds a dimension of which `extent` indices are moved, from where they begin in either shard.
  // False where tiles of one side begin within those of the other.
  bool Add(std::span<const Digit> from, int64_t from_begin, std::span<const Digit> to,
           int64_t to_begin, int64_t extent) {
    // Indices that are whole tiles apart have the same digits but for the first.
    const bool as_source = (to_begin - from_begin) % to.front().weight == 0;
    if (!as_source && (to_begin - from_begin) % from.front().weight != 0) return false;
    const int64_t begin = as_source ? from_begin : to_begin;
    from_offset_ += (from_begin - begin) / from.front().weight * from.front().stride;
    to_offset_ += (to_begin - begin) / to.front().weight * to.front().stride;
    dims_[rank_++] = {begin, begin + extent, num_steps_};
    return AddSteps(from, to);
  }

  void Copy(const uint8_t* from, uint8_t* to) { CopyDim(0, from + from_offset_, to + to_offset_); }

 private:
  struct Dim {
    int64_t begin;
    int64_t end;
    size_t first_step;
  };

  // A digit, as both sides count it.
  struct Step {
    int64_t weight;
    int64_t from_stride;
    int64_t to_stride;
  };

  // The digits of both sides. Where they differ, each has to divide the one before it.
  bool AddSteps(std::span<const Digit> from, std::span<const Digit> to) {
    const bool alike = from.size() == 1 || to.size() == 1 ||
                       std::ranges::equal(from, to, {}, &Digit::weight, &Digit::weight);
    for (int64_t before = 0; before != 1;) {
      const int64_t weight = std::max(from.front().weight, to.front().weight);
      if (num_steps_ == steps_.size() || (!alike && before % weight != 0)) return false;
      steps_[num_steps_++] = {weight, weight / from.front().weight * from.front().stride,
                              weight / to.front().weight * to.front().stride};
      if (from.front().weight == weight && weight > 1) from = from.subspan(1);
      if (to.front().weight == weight && weight > 1) to = to.subspan(1);
      before = weight;
    }
    return true;
  }

  void CopyDim(size_t dim, const uint8_t* from, uint8_t* to) {
    if (dim < rank_) {
      return CopyRange(dim, dims_[dim].first_step, dims_[dim].begin, dims_[dim].end, from, to);
    }
    CopyRegion(op_, itemsize_, std::span(extents_).first(num_extents_), {from, from_strides_},
               {to, to_strides_}, stores_);
  }

  void CopyRange(size_t dim, size_t index, int64_t begin, int64_t end, const uint8_t* from,
                 uint8_t* to) {
    const Step& step = steps_[index];
    const auto go_on = [&](int64_t digit, int64_t rest_begin, int64_t rest_end) {
      const uint8_t* source = from + digit * step.from_stride;
      uint8_t* sink = to + digit * step.to_stride;
      if (step.weight == 1) return CopyDim(dim + 1, source, sink);
      CopyRange(dim, index + 1, rest_begin, rest_end, source, sink);
    };
    int64_t first = begin / step.weight;
    const int64_t last = end / step.weight;
    const int64_t head = begin % step.weight, tail = end % step.weight;
    if (first == last) return go_on(first, head, tail);
    if (head > 0) go_on(first++, head, step.weight);
    if (first < last) {
      extents_[num_extents_] = last - first;
      from_strides_[num_extents_] = step.from_stride;
      to_strides_[num_extents_++] = step.to_stride;
      go_on(first, 0, step.weight);
      --num_extents_;
    }
    if (tail > 0) go_on(last, 0, tail);
  }

  const Op op_;
  const int64_t itemsize_;
  const Stores stores_;
  int64_t from_offset_ = 0;
  int64_t to_offset_ = 0;
  size_t rank_ = 0;
  std::array<Dim, kMaxRank> dims_;
  size_t num_steps_ = 0;
  std::array<Step, kMaxRank> steps_;
  // The dimensions of the strided box that is being put together.
  size_t num_extents_ = 0;
  std::array<int64_t, kMaxRank> extents_;
  std::array<int64_t, kMaxRank> from_strides_;
  std::array<int64_t, kMaxRank> to_strides_;
};

}  // namespace

void CopyTiled(Op op, int64_t itemsize, BoxView box, const TiledSource& from, const TiledSink& to,
               Stores stores) {
  StridedParts parts(op, itemsize, stores);
  bool is_strided = true;
  for (int dim = 0; is_strided && dim < RankOf(box); ++dim) {
    is_strided = parts.Add(from.layout->digits(dim), StartOf(box, dim) - StartOf(from.box, dim),
                           to.layout->digits(dim), StartOf(box, dim) - StartOf(to.box, dim),
                           ExtentOf(box, dim));
  }
  if (is_strided) return parts.Copy(from.base, to.base);

  const int64_t to_itemsize = SinkItemsize(op, itemsize);
  ForEachDensePart(op, itemsize, box, from, [&](BoxView part, const uint8_t* data) {
    const ShardLayout dense = ShardLayout::RowMajor(part, to_itemsize);
    CopyTiled(Op(), to_itemsize, part, {part, data, &dense}, to, stores);
  });
}

}  // namespace tsr

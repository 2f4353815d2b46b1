#include "box_copy.h"

#include <array>

#include "region_copy.h"

namespace tsr {

bool IsRowMajor(const StridedBox& box, int64_t itemsize) {
  int64_t stride = itemsize;
  for (int dim = RankOf(box.box) - 1; dim >= 0; --dim) {
    const int64_t extent = ExtentOf(box.box, dim);
    if (extent > 1 && box.strides[dim] != stride) return false;
    stride *= extent;
  }
  return true;
}

void CopyCommon(Op op, int64_t itemsize, const StridedBox& from, const DenseBox& to,
                Stores stores) {
  const auto rank = static_cast<size_t>(RankOf(from.box));
  std::array<int64_t, 2 * kMaxRank> common_ranges;
  const std::span<int64_t> common(common_ranges.data(), 2 * rank);
  if (!Intersect(from.box, to.box, common)) return;

  std::array<int64_t, kMaxRank> extents;
  for (size_t dim = 0; dim < rank; ++dim) extents[dim] = ExtentOf(common, static_cast<int>(dim));
  std::array<int64_t, kMaxRank> to_stride_array;
  const std::span<int64_t> to_strides(to_stride_array.data(), rank);
  RowMajorStrides(to.box, SinkItemsize(op, itemsize), to_strides);
  CopyRegion(op, itemsize, std::span(extents).first(rank),
             {from.base + OffsetOf(common, from.box, from.strides), from.strides},
             {to.base + OffsetOf(common, to.box, to_strides), to_strides}, stores);
}

}  // namespace tsr

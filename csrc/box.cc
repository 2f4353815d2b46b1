#include "box.h"

#include <algorithm>

namespace tsr {

int64_t VolumeOf(BoxView box) {
  int64_t volume = 1;
  bool overflows = false;
  bool empty = false;
  for (int dim = 0; dim < RankOf(box); ++dim) {
    int64_t extent;
    if (__builtin_sub_overflow(StopOf(box, dim), StartOf(box, dim), &extent) || extent < 0) {
      return -1;
    }
    empty |= extent == 0;
    overflows |= __builtin_mul_overflow(volume, extent, &volume);
  }
  if (empty) return 0;
  return overflows ? -1 : volume;
}

bool Intersect(BoxView a, BoxView b, std::span<int64_t> out) {
  bool any = true;
  for (int dim = 0; dim < RankOf(a); ++dim) {
    const int64_t start = std::max(StartOf(a, dim), StartOf(b, dim));
    const int64_t stop = std::min(StopOf(a, dim), StopOf(b, dim));
    any &= start < stop;
    out[2 * dim] = start;
    out[2 * dim + 1] = stop;
  }
  return any;
}

bool Contains(BoxView outer, BoxView inner) {
  bool within = true;
  bool empty = false;
  for (int dim = 0; dim < RankOf(outer); ++dim) {
    within &=
        StartOf(outer, dim) <= StartOf(inner, dim) && StopOf(inner, dim) <= StopOf(outer, dim);
    empty |= StartOf(inner, dim) >= StopOf(inner, dim);
  }
  return within || empty;
}

std::string FormatBox(BoxView box) {
  std::string text = "[";
  for (int dim = 0; dim < RankOf(box); ++dim) {
    if (dim > 0) text += ", ";
    text += std::to_string(StartOf(box, dim)) + ":" + std::to_string(StopOf(box, dim));
  }
  return text + "]";
}

void RowMajorStrides(BoxView box, int64_t itemsize, std::span<int64_t> strides) {
  int64_t stride = itemsize;
  for (int dim = RankOf(box) - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= ExtentOf(box, dim);
  }
}

int64_t OffsetOf(BoxView inner, BoxView outer, std::span<const int64_t> strides) {
  int64_t offset = 0;
  for (int dim = 0; dim < RankOf(inner); ++dim) {
    offset += (StartOf(inner, dim) - StartOf(outer, dim)) * strides[dim];
  }
  return offset;
}

}  // namespace tsr

#include "digest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "cpu.h"
#include "share_out.h"

namespace tsr {
namespace {

constexpr size_t kUnitNbytes = 4;
constexpr int64_t kMostCast = 1024;  // elements that are cast at a time

#define TSR_INLINE inline __attribute__((always_inline))

// Whole units, from unit `first` on.
TSR_INLINE uint64_t SumUnits(uint64_t first, const uint8_t* data, size_t num_units) {
  uint64_t sum = 0;
  for (size_t i = 0; i < num_units; ++i) {
    uint32_t unit;
    std::memcpy(&unit, data + i * kUnitNbytes, kUnitNbytes);
    sum += unit * DigestMultiplier(first + i);
  }
  return sum;
}

// Elements that are no longer than a unit and lie side by side in memory, but `step` bytes apart in
// the leaf.
template <typename Element>
TSR_INLINE uint64_t SumApart(uint64_t position, uint64_t step, const uint8_t* data, size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    Element element;
    std::memcpy(&element, data + i * sizeof element, sizeof element);
    const uint64_t at = position + i * step;
    sum += (uint64_t{element} << (8 * (at % kUnitNbytes))) * DigestMultiplier(at / kUnitNbytes);
  }
  return sum;
}

TSR_INLINE uint64_t SumElements(size_t itemsize, uint64_t position, uint64_t step,
                                const uint8_t* data, size_t count) {
  if (itemsize == 1) return SumApart<uint8_t>(position, step, data, count);
  if (itemsize == 2) return SumApart<uint16_t>(position, step, data, count);
  return SumApart<uint32_t>(position, step, data, count);
}

struct Sums {
  uint64_t (*units)(uint64_t first, const uint8_t* data, size_t num_units);
  uint64_t (*elements)(size_t itemsize, uint64_t position, uint64_t step, const uint8_t* data,
                       size_t count);
};

#if defined(__x86_64__)
// The compiler makes eight products at a time of each.
#define TSR_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw")))

TSR_AVX512 uint64_t UnitsAvx512(uint64_t first, const uint8_t* data, size_t num_units) {
  return SumUnits(first, data, num_units);
}
TSR_AVX512 uint64_t ElementsAvx512(size_t itemsize, uint64_t position, uint64_t step,
                                   const uint8_t* data, size_t count) {
  return SumElements(itemsize, position, step, data, count);
}
#endif

const Sums& Fastest() {
  static const Sums fastest = [] {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
      return Sums{UnitsAvx512, ElementsAvx512};
    }
#endif
    return Sums{SumUnits, SumElements};
  }();
  return fastest;
}

// Part of a unit.
uint64_t DigestOfPart(uint64_t position, const uint8_t* data, size_t nbytes) {
  uint32_t unit = 0;
  std::memcpy(reinterpret_cast<uint8_t*>(&unit) + position % kUnitNbytes, data, nbytes);
  return unit * DigestMultiplier(position / kUnitNbytes);
}

// Elements that lie side by side in memory, but `step` bytes apart in the leaf.
uint64_t DigestOfElements(size_t itemsize, uint64_t position, uint64_t step, const uint8_t* data,
                          size_t count) {
  if (step == itemsize) return DigestOfRun(position, data, count * itemsize);
  if (itemsize <= kUnitNbytes && std::has_single_bit(itemsize)) {
    return Fastest().elements(itemsize, position, step, data, count);
  }
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) {
    sum += DigestOfRun(position + i * step, data + i * itemsize, itemsize);
  }
  return sum;
}

// A dimension as both sides have it: bytes between neighbours in memory and in the leaf.
struct Dim {
  int64_t extent;
  int64_t memory;
  uint64_t leaf;
};

// A box, walked in the order of its memory.
class Walk {
 public:
  Walk(Op op, int64_t itemsize, std::span<const int64_t> shape, const StridedBox& from)
      : op_(op), run_nbytes_(SinkItemsize(op, itemsize)) {
    auto leaf_stride = static_cast<uint64_t>(run_nbytes_);
    for (int dim = RankOf(from.box) - 1; dim >= 0; --dim) {
      const int64_t extent = ExtentOf(from.box, dim);
      first_position_ += leaf_stride * static_cast<uint64_t>(StartOf(from.box, dim));
      if (extent != 1) dims_[rank_++] = {extent, from.strides[dim], leaf_stride};
      leaf_stride *= static_cast<uint64_t>(shape[dim]);
    }
    std::stable_sort(dims_.begin(), dims_.begin() + rank_,
                     [](const Dim& a, const Dim& b) { return a.memory < b.memory; });
    if (!op.is_copy()) {
      if (rank_ == 0) dims_[rank_++] = {1, itemsize, 0};
      return;
    }
    while (run_dims_ < rank_ && dims_[run_dims_].memory == run_nbytes_ &&
           dims_[run_dims_].leaf == static_cast<uint64_t>(run_nbytes_)) {
      run_nbytes_ *= dims_[run_dims_++].extent;
    }
  }

  uint64_t Digest(const uint8_t* base) const { return OfDims(rank_, first_position_, base); }

 private:
  // Of the innermost `num_dims` dimensions.
  uint64_t OfDims(size_t num_dims, uint64_t position, const uint8_t* data) const {
    if (num_dims == run_dims_) {
      return DigestOfRun(position, data, static_cast<size_t>(run_nbytes_));
    }
    const Dim& dim = dims_[num_dims - 1];
    if (num_dims == 1) {
      if (!op_.is_copy()) return OfCastRow(dim, position, data);
      if (dim.memory == run_nbytes_) {
        return DigestOfElements(static_cast<size_t>(run_nbytes_), position, dim.leaf, data,
                                static_cast<size_t>(dim.extent));
      }
    }
    uint64_t sum = 0;
    for (int64_t i = 0; i < dim.extent; ++i) {
      sum += OfDims(num_dims - 1, position, data);
      position += dim.leaf;
      data += dim.memory;
    }
    return sum;
  }

  uint64_t OfCastRow(const Dim& dim, uint64_t position, const uint8_t* data) const {
    std::array<uint8_t, kMostCast * sizeof(double)> cast;
    uint64_t sum = 0;
    for (int64_t done = 0; done < dim.extent; done += kMostCast) {
      const int64_t count = std::min(kMostCast, dim.extent - done);
      CastRun(op_, data + done * dim.memory, dim.memory, cast.data(), count);
      sum += DigestOfElements(static_cast<size_t>(run_nbytes_), position, dim.leaf, cast.data(),
                              static_cast<size_t>(count));
      position += static_cast<uint64_t>(count) * dim.leaf;
    }
    return sum;
  }

  const Op op_;
  int64_t run_nbytes_;  // dense on both sides; those of one element where it is cast
  size_t run_dims_ = 0;
  size_t rank_ = 0;
  uint64_t first_position_ = 0;
  std::array<Dim, kMaxRank> dims_;  // innermost first
};

}  // namespace

uint64_t DigestOfRun(uint64_t position, const uint8_t* data, size_t nbytes) {
  const size_t head = std::min(nbytes, (kUnitNbytes - position % kUnitNbytes) % kUnitNbytes);
  const size_t tail = (nbytes - head) % kUnitNbytes;
  uint64_t sum = 0;
  if (head > 0) sum += DigestOfPart(position, data, head);
  if (tail > 0) sum += DigestOfPart(position + nbytes - tail, data + nbytes - tail, tail);
  const size_t num_units = (nbytes - head) / kUnitNbytes;
  if (num_units > 0)
    sum += Fastest().units((position + head) / kUnitNbytes, data + head, num_units);
  return sum;
}

uint64_t DigestOfBox(Op op, int64_t itemsize, std::span<const int64_t> shape,
                     const StridedBox& from) {
  if (VolumeOf(from.box) <= 0) return 0;
  return Walk(op, itemsize, shape, from).Digest(from.base);
}

uint64_t DigestOfTiledBox(Op op, int64_t itemsize, std::span<const int64_t> shape, BoxView box,
                          const TiledSource& from) {
  const int64_t to_itemsize = SinkItemsize(op, itemsize);
  std::array<int64_t, kMaxRank> strides;
  const std::span<int64_t> dense = std::span(strides).first(shape.size());
  uint64_t sum = 0;
  ForEachDensePart(op, itemsize, box, from, [&](BoxView part, const uint8_t* data) {
    RowMajorStrides(part, to_itemsize, dense);
    sum += DigestOfBox(Op(), to_itemsize, shape, {part, data, dense});
  });
  return sum;
}

Status DigestsOfBoxes(const BoxColumns& boxes, int num_threads, std::vector<uint64_t>* out) {
  TSR_RETURN_IF_ERROR(CheckCpuLevel());
  const size_t num_boxes = boxes.addresses.size();
  std::vector<size_t> first_dim = {0};
  for (const uint32_t rank : boxes.ranks) {
    if (rank > kMaxRank) return Status(Code::kInvalid, "digests: a rank is above 32");
    first_dim.push_back(first_dim.back() + rank);
  }
  if (boxes.itemsizes.size() != num_boxes || boxes.ranks.size() != num_boxes ||
      boxes.shapes.size() != first_dim.back() || boxes.ranges.size() != 2 * first_dim.back() ||
      boxes.strides.size() != first_dim.back()) {
    return Status(Code::kInvalid, "digests: the columns of the boxes differ in length");
  }
  out->assign(num_boxes, 0);
  ShareOut(num_boxes, num_threads, [&](size_t i) {
    const size_t first = first_dim[i];
    const size_t rank = boxes.ranks[i];
    const StridedBox from{boxes.ranges.subspan(2 * first, 2 * rank),
                          reinterpret_cast<const uint8_t*>(boxes.addresses[i]),
                          boxes.strides.subspan(first, rank)};
    (*out)[i] = DigestOfBox(Op(), boxes.itemsizes[i], boxes.shapes.subspan(first, rank), from);
  });
  return Status();
}

}  // namespace tsr

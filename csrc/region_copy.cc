#include "region_copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "transpose.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace tsr {
namespace {

struct Dim {
  int64_t extent;
  int64_t from_stride;
  int64_t to_stride;
};

// What moves in one piece: bytes that are dense on both sides, or one element that is cast.
struct Unit {
  Op op;
  int64_t from_nbytes;
  int64_t to_nbytes;
  Stores stores;
};

constexpr int64_t kLine = 64;

// Moves `count` units that lie a stride apart on either side.
using Row = void (*)(const Unit& unit, const uint8_t* from, int64_t from_stride, uint8_t* to,
                     int64_t to_stride, int64_t count);

template <int kNbytes>
void SmallRow(const Unit&, const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride,
              int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, kNbytes);
  }
}

void RunRow(const Unit& unit, const uint8_t* from, int64_t from_stride, uint8_t* to,
            int64_t to_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, static_cast<size_t>(unit.from_nbytes));
  }
}

#if defined(__x86_64__)

// Writes whole lines past the cache, and the ends of a run into it. Who calls fences.
void StreamRow(const Unit& unit, const uint8_t* from, int64_t from_stride, uint8_t* to,
               int64_t to_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* source = from + i * from_stride;
    uint8_t* sink = to + i * to_stride;
    const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(sink) % kLine);
    std::memcpy(sink, source, static_cast<size_t>(head));
    int64_t done = head;
    for (; done + kLine <= unit.from_nbytes; done += kLine) {
      const auto* line = reinterpret_cast<const __m128i*>(source + done);
      auto* out = reinterpret_cast<__m128i*>(sink + done);
      const __m128i a = _mm_loadu_si128(line);
      const __m128i b = _mm_loadu_si128(line + 1);
      const __m128i c = _mm_loadu_si128(line + 2);
      const __m128i d = _mm_loadu_si128(line + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    std::memcpy(sink + done, source + done, static_cast<size_t>(unit.from_nbytes - done));
  }
}

#else

constexpr Row StreamRow = RunRow;

#endif  // defined(__x86_64__)

void CastRow(const Unit& unit, const uint8_t* from, int64_t from_stride, uint8_t* to,
             int64_t to_stride, int64_t count);

Row RowOf(const Unit& unit) {
  if (!unit.op.is_copy()) return CastRow;
  switch (unit.from_nbytes) {
    case 1:
      return SmallRow<1>;
    case 2:
      return SmallRow<2>;
    case 4:
      return SmallRow<4>;
    case 8:
      return SmallRow<8>;
    case 16:
      return SmallRow<16>;
  }
  // Of memcpy into reused memory, past the cache and through it: runs of 256 B to 16 KiB that the
  // source has in order 1.2 to 1.4 and 0.9 to 1.1; shorter ones gain nothing where they don't begin
  // at a line (2 threads, 2-core Zen 5 VM, 2026-11-29).
  constexpr int64_t kMinStreamNbytes = 256;
  const bool streams = unit.stores == Stores::kPastCache && unit.from_nbytes >= kMinStreamNbytes;
  return streams ? StreamRow : RunRow;
}

// Units that touch on both sides move as one run.
void MoveRow(Unit unit, const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride,
             int64_t count) {
  if (unit.op.is_copy() && from_stride == unit.from_nbytes && to_stride == unit.to_nbytes) {
    unit.from_nbytes *= count;
    unit.to_nbytes *= count;
    count = 1;
  }
  RowOf(unit)(unit, from, from_stride, to, to_stride, count);
}

// Casts into dense memory: the sink's own, or a buffer from which the elements go on.
void CastRow(const Unit& unit, const uint8_t* from, int64_t from_stride, uint8_t* to,
             int64_t to_stride, int64_t count) {
  if (to_stride == unit.to_nbytes && unit.stores == Stores::kCached) {
    return CastRun(unit.op, from, from_stride, to, count);
  }
  constexpr int64_t kMostElements = 1024;
  alignas(kLine) std::array<uint8_t, kMostElements * sizeof(double)> dense;
  const Unit converted{Op(), unit.to_nbytes, unit.to_nbytes, unit.stores};
  for (int64_t done = 0; done < count; done += kMostElements) {
    const int64_t n = std::min(count - done, kMostElements);
    CastRun(unit.op, from + done * from_stride, from_stride, dense.data(), n);
    MoveRow(converted, dense.data(), unit.to_nbytes, to + done * to_stride, to_stride, n);
  }
}

// The dimensions of a region in the order of the source's memory, those that both sides walk as
// one merged. Gathering stalls where scattering does not, so it's the source that is read in order.
class Dims {
 public:
  Dims(std::span<const int64_t> extents, StridedSource from, StridedSink to) {
    for (size_t d = 0; d < extents.size(); ++d) {
      if (extents[d] != 1) dims_[size_++] = {extents[d], from.strides[d], to.strides[d]};
    }
    std::stable_sort(dims_.begin(), dims_.begin() + size_,
                     [](const Dim& a, const Dim& b) { return a.from_stride > b.from_stride; });
    size_t merged = 0;
    for (size_t d = 0; d < size_; ++d) {
      const Dim& inner = dims_[d];
      Dim* outer = merged > 0 ? &dims_[merged - 1] : nullptr;
      if (outer != nullptr && outer->from_stride == inner.from_stride * inner.extent &&
          outer->to_stride == inner.to_stride * inner.extent) {
        *outer = {outer->extent * inner.extent, inner.from_stride, inner.to_stride};
      } else {
        dims_[merged++] = inner;
      }
    }
    size_ = merged;
  }

  bool empty() const { return size_ == 0; }
  std::span<const Dim> span() const { return std::span(dims_).first(size_); }
  const Dim& innermost() const { return dims_[size_ - 1]; }

  // Index of the dimension along which the sink's neighbours are closest.
  size_t sink_innermost() const {
    const auto closer = [](const Dim& a, const Dim& b) { return a.to_stride <= b.to_stride; };
    return static_cast<size_t>(std::min_element(dims_.begin(), dims_.begin() + size_, closer) -
                               dims_.begin());
  }

  Dim Take(size_t index) {
    const Dim dim = dims_[index];
    std::copy(dims_.begin() + index + 1, dims_.begin() + size_, dims_.begin() + index);
    --size_;
    return dim;
  }

 private:
  size_t size_ = 0;
  std::array<Dim, RunIterator::kMaxRank> dims_;
};

template <typename Visit>
void ForEach(std::span<const Dim> dims, const uint8_t* from, uint8_t* to, const Visit& visit) {
  if (dims.empty()) return visit(from, to);
  const Dim& outer = dims.front();
  for (int64_t i = 0; i < outer.extent; ++i) {
    ForEach(dims.subspan(1), from + i * outer.from_stride, to + i * outer.to_stride, visit);
  }
}

void Prefetch(const uint8_t* from, int64_t nbytes) {
  for (int64_t done = 0; done < nbytes; done += kLine) __builtin_prefetch(from + done);
}

// Moves a plane that the source walks along `inner` and the sink along `row`, block by block: the
// lines of both sides are then touched only once, where a stride that is a multiple of a page would
// throw them out of the cache half done. GB/s of one thread for elements of 1, 2, 4 and 8 bytes:
// 10, 12, 12 and 13, where memcpy has 22 (2-core Zen 5 VM, 2026-11-29).
void MovePlane(const Unit& unit, const Dim& row, const Dim& inner, const uint8_t* from,
               uint8_t* to) {
  constexpr int64_t kRowNbytes = 512;             // of a block, either way
  constexpr int64_t kMostInner = 256;             // so that a block of bytes stays in cache, too
  constexpr int64_t kPitch = kRowNbytes + kLine;  // so that rows don't share a set of the cache
  alignas(kLine) std::array<uint8_t, kTileNbytes * kPitch> strip;
  alignas(kLine) std::array<uint8_t, kMostInner * kPitch> turned;
  const int64_t most_rows = kRowNbytes / unit.to_nbytes;
  const int64_t most_inner = std::min(most_rows, kMostInner);
  const int64_t most_in_strip = std::max<int64_t>(1, kTileNbytes / unit.to_nbytes);
  const Unit packed{unit.op, unit.from_nbytes, unit.to_nbytes, Stores::kCached};
  const Unit spread{Op(), unit.to_nbytes, unit.to_nbytes, unit.stores};
  for (int64_t r = 0; r < row.extent; r += most_rows) {
    const int64_t num_rows = std::min(row.extent - r, most_rows);
    for (int64_t i = 0; i < inner.extent; i += most_inner) {
      const int64_t num_inner = std::min(inner.extent - i, most_inner);
      const uint8_t* source = from + r * row.from_stride + i * inner.from_stride;
      uint8_t* sink = to + r * row.to_stride + i * inner.to_stride;
      for (int64_t done = 0; done < num_rows; done += most_in_strip) {
        const int64_t num_in_strip = std::min(num_rows - done, most_in_strip);
        for (int64_t k = 0; k < num_in_strip; ++k) {
          const uint8_t* next = source + (done + k) * row.from_stride;
          Prefetch(next + 2 * most_in_strip * row.from_stride, num_inner * unit.from_nbytes);
          MoveRow(packed, next, inner.from_stride, strip.data() + k * kPitch, unit.to_nbytes,
                  num_inner);
        }
        TransposeBlock(unit.to_nbytes, strip.data(), kPitch, num_in_strip, num_inner,
                       turned.data() + done * unit.to_nbytes, kPitch);
      }
      for (int64_t k = 0; k < num_inner; ++k) {
        MoveRow(spread, turned.data() + k * kPitch, unit.to_nbytes, sink + k * inner.to_stride,
                row.to_stride, num_rows);
      }
    }
  }
}

// As MovePlane() does: the source or the sink has words of narrow elements, one of every row.
void UnpackPlane(const Unit& unit, const Dim& row, const Dim& inner, const uint8_t* from,
                 uint8_t* to) {
  UnpackWords(unit.to_nbytes, from, row.extent, to, inner.to_stride, unit.stores);
}
void PackPlane(const Unit& unit, const Dim& row, const Dim& inner, const uint8_t* from,
               uint8_t* to) {
  PackWords(unit.to_nbytes, from, row.from_stride, inner.extent, to, unit.stores);
}

using Plane = void (*)(const Unit& unit, const Dim& row, const Dim& inner, const uint8_t* from,
                       uint8_t* to);

Plane PlaneOf(const Unit& unit, const Dim& row, const Dim& inner) {
  const int64_t itemsize = unit.to_nbytes;
  if (!unit.op.is_copy() || itemsize > 2) return MovePlane;
  const int64_t num_rows = kWordNbytes / itemsize;
  if (inner.extent == num_rows && inner.from_stride == itemsize && row.from_stride == kWordNbytes &&
      row.to_stride == itemsize) {
    return UnpackPlane;
  }
  if (row.extent == num_rows && row.to_stride == itemsize && inner.to_stride == kWordNbytes &&
      inner.from_stride == itemsize) {
    return PackPlane;
  }
  return MovePlane;
}

}  // namespace

void CopyRegion(Op op, int64_t itemsize, std::span<const int64_t> extents, StridedSource from,
                StridedSink to, Stores stores) {
  Dims dims(extents, from, to);
  Unit unit{op, itemsize, SinkItemsize(op, itemsize), stores};
  if (op.is_copy() && !dims.empty() && dims.innermost().from_stride == itemsize &&
      dims.innermost().to_stride == itemsize) {
    unit.from_nbytes *= dims.innermost().extent;
    unit.to_nbytes = unit.from_nbytes;
    dims.Take(dims.span().size() - 1);
  }
  const size_t last = dims.span().size() - 1;
  if (dims.empty()) {
    MoveRow(unit, from.base, 0, to.base, 0, 1);
  } else if (dims.sink_innermost() == last || unit.to_nbytes >= kLine) {
    const Dim row = dims.Take(last);
    const Row move = RowOf(unit);
    ForEach(dims.span(), from.base, to.base, [&](const uint8_t* source, uint8_t* sink) {
      move(unit, source, row.from_stride, sink, row.to_stride, row.extent);
    });
  } else {
    const Dim row = dims.Take(dims.sink_innermost());
    const Dim inner = dims.Take(last - 1);
    const Plane move = PlaneOf(unit, row, inner);
    ForEach(dims.span(), from.base, to.base,
            [&](const uint8_t* source, uint8_t* sink) { move(unit, row, inner, source, sink); });
  }
  if (stores == Stores::kPastCache) FenceStores();
}

void CopyRun(Op op, int64_t itemsize, const uint8_t* from, uint8_t* to, int64_t count,
             Stores stores) {
  const int64_t to_itemsize = SinkItemsize(op, itemsize);
  MoveRow({op, itemsize, to_itemsize, stores}, from, itemsize, to, to_itemsize, count);
}

RunIterator::RunIterator(int64_t itemsize, std::span<const int64_t> extents,
                         std::span<const int64_t> strides)
    : run_nbytes_(itemsize), num_runs_(1) {
  for (size_t d = extents.size(); d-- > 0;) {
    if (extents[d] == 1) continue;
    if (rank_ == 0 && strides[d] == run_nbytes_) {
      run_nbytes_ *= extents[d];
      continue;
    }
    num_runs_ *= extents[d];
    if (rank_ > 0 && strides[d] == strides_[rank_ - 1] * extents_[rank_ - 1]) {
      extents_[rank_ - 1] *= extents[d];
      continue;
    }
    extents_[rank_] = extents[d];
    strides_[rank_] = strides[d];
    index_[rank_] = 0;
    ++rank_;
  }
  left_ = num_runs_;
}

void RunIterator::Next() {
  --left_;
  for (int d = 0; d < rank_; ++d) {
    offset_ += strides_[d];
    if (++index_[d] < extents_[d]) return;
    offset_ -= strides_[d] * extents_[d];
    index_[d] = 0;
  }
}

}  // namespace tsr

// Moves what two boxes of one leaf have in common from the memory of one to that of the other.
#pragma once

#include <cstdint>
#include <span>

#include "box.h"
#include "cast.h"
#include "stores.h"

namespace tsr {

// Elements of a box, in memory where neighbours along each dimension are `strides` bytes apart.
// Does not own its memory.
struct StridedBox {
  BoxView box;
  const uint8_t* base;
  std::span<const int64_t> strides;  // shape=[rank]
};

// Whether the elements of the box, of `itemsize` bytes, lie dense and row-major.
bool IsRowMajor(const StridedBox& box, int64_t itemsize);

// Elements of a box, dense and row-major at `base`. Does not own its memory.
struct DenseBox {
  BoxView box;
  uint8_t* base;
};

// Copies or casts the elements that both boxes hold; nothing where there are none. `itemsize` is
// that of the source; `stores` as for CopyRegion(). Sides don't overlap in memory.
void CopyCommon(Op op, int64_t itemsize, const StridedBox& from, const DenseBox& to, Stores stores);

}  // namespace tsr

// Where a copy's bytes are written.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace tsr {

// Into the cache, or past it: for what nobody reads soon, and then the sink's lines are not read
// before they are overwritten.
enum class Stores { kCached, kPastCache };

// What was written past the cache before is seen by other threads before what is written after.
inline void FenceStores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace tsr

#include "transpose.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace tsr {
namespace {

#if defined(__x86_64__)

template <int kItemsize>
__m128i InterleaveLow(__m128i a, __m128i b) {
  if constexpr (kItemsize == 1) return _mm_unpacklo_epi8(a, b);
  if constexpr (kItemsize == 2) return _mm_unpacklo_epi16(a, b);
  if constexpr (kItemsize == 4) return _mm_unpacklo_epi32(a, b);
  if constexpr (kItemsize == 8) return _mm_unpacklo_epi64(a, b);
}

template <int kItemsize>
__m128i InterleaveHigh(__m128i a, __m128i b) {
  if constexpr (kItemsize == 1) return _mm_unpackhi_epi8(a, b);
  if constexpr (kItemsize == 2) return _mm_unpackhi_epi16(a, b);
  if constexpr (kItemsize == 4) return _mm_unpackhi_epi32(a, b);
  if constexpr (kItemsize == 8) return _mm_unpackhi_epi64(a, b);
}

// A tile of n rows of n elements is one sequence of n * n, whose index is a row's bits followed by
// a column's. Interleaving its two halves moves the first bit of the index to the end; once for
// every bit of a row, and the column's bits stand before the row's.
template <int kItemsize>
void TransposeTile(const uint8_t* from, int64_t from_pitch, uint8_t* to, int64_t to_pitch) {
  constexpr int kRows = kTileNbytes / kItemsize;
  __m128i rows[kRows];
  for (int i = 0; i < kRows; ++i) {
    rows[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_pitch));
  }
#pragma GCC unroll 4
  for (int bit = 1; bit < kRows; bit *= 2) {
    __m128i interleaved[kRows];
    for (int i = 0; i < kRows / 2; ++i) {
      interleaved[2 * i] = InterleaveLow<kItemsize>(rows[i], rows[i + kRows / 2]);
      interleaved[2 * i + 1] = InterleaveHigh<kItemsize>(rows[i], rows[i + kRows / 2]);
    }
    std::copy_n(interleaved, kRows, rows);
  }
  for (int i = 0; i < kRows; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_pitch), rows[i]);
  }
}

#else

template <int kItemsize>
void TransposeTile(const uint8_t* from, int64_t from_pitch, uint8_t* to, int64_t to_pitch) {
  constexpr int64_t kRows = kTileNbytes / kItemsize;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t column = 0; column < kRows; ++column) {
      std::memcpy(to + column * to_pitch + row * kItemsize,
                  from + row * from_pitch + column * kItemsize, kItemsize);
    }
  }
}

#endif  // defined(__x86_64__)

template <int kItemsize>
void Transpose(const uint8_t* from, int64_t from_pitch, int64_t num_rows, int64_t num_columns,
               uint8_t* to, int64_t to_pitch) {
  constexpr int64_t kStep = kTileNbytes / kItemsize;
  for (int64_t row = 0; row < num_rows; row += kStep) {
    for (int64_t column = 0; column < num_columns; column += kStep) {
      TransposeTile<kItemsize>(from + row * from_pitch + column * kItemsize, from_pitch,
                               to + column * to_pitch + row * kItemsize, to_pitch);
    }
  }
}

}  // namespace

void TransposeBlock(int64_t itemsize, const uint8_t* from, int64_t from_pitch, int64_t num_rows,
                    int64_t num_columns, uint8_t* to, int64_t to_pitch) {
  switch (itemsize) {
    case 1:
      return Transpose<1>(from, from_pitch, num_rows, num_columns, to, to_pitch);
    case 2:
      return Transpose<2>(from, from_pitch, num_rows, num_columns, to, to_pitch);
    case 4:
      return Transpose<4>(from, from_pitch, num_rows, num_columns, to, to_pitch);
    case 8:
      return Transpose<8>(from, from_pitch, num_rows, num_columns, to, to_pitch);
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t column = 0; column < num_columns; ++column) {
      std::memcpy(to + column * to_pitch + row * itemsize,
                  from + row * from_pitch + column * itemsize, static_cast<size_t>(itemsize));
    }
  }
}

}  // namespace tsr

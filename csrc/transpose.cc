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

// Registers are one sequence of elements. Interleaving its two halves moves the first bit of every
// index to the end; this does it for as many bits as number `kTimes` rows or columns.
template <int kItemsize, int kTimes, int kRegisters>
void TurnIndex(__m128i (&registers)[kRegisters]) {
#pragma GCC unroll 4
  for (int bit = 1; bit < kTimes; bit *= 2) {
    __m128i interleaved[kRegisters];
    for (int i = 0; i < kRegisters / 2; ++i) {
      interleaved[2 * i] = InterleaveLow<kItemsize>(registers[i], registers[i + kRegisters / 2]);
      interleaved[2 * i + 1] =
          InterleaveHigh<kItemsize>(registers[i], registers[i + kRegisters / 2]);
    }
    std::copy_n(interleaved, kRegisters, registers);
  }
}

// The index of an element is a row's bits followed by a column's; once those of the row have moved,
// the column's stand before them.
template <int kItemsize>
void TransposeTile(const uint8_t* from, int64_t from_pitch, uint8_t* to, int64_t to_pitch) {
  constexpr int kRows = kTileNbytes / kItemsize;
  __m128i rows[kRows];
  for (int i = 0; i < kRows; ++i) {
    rows[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_pitch));
  }
  TurnIndex<kItemsize, kRows>(rows);
  for (int i = 0; i < kRows; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_pitch), rows[i]);
  }
}

bool IsAligned(const uint8_t* to, int64_t pitch) {
  return reinterpret_cast<uintptr_t>(to) % kTileNbytes == 0 && pitch % kTileNbytes == 0;
}

template <Stores kStores>
void Store(uint8_t* to, __m128i value) {
  if constexpr (kStores == Stores::kPastCache) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), value);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), value);
  }
}

// As many words as fill a register of every row; returns how many are done. Stores past the cache
// go to aligned rows.
template <int kItemsize, Stores kStores>
int64_t UnpackMost(const uint8_t* from, int64_t num_words, uint8_t* to, int64_t to_pitch) {
  constexpr int kRows = kWordNbytes / kItemsize;
  constexpr int64_t kWords = kTileNbytes / kItemsize;
  int64_t word = 0;
  for (; word + kWords <= num_words; word += kWords) {
    __m128i rows[kRows];
    const auto* words = reinterpret_cast<const __m128i*>(from + word * kWordNbytes);
    for (int i = 0; i < kRows; ++i) rows[i] = _mm_loadu_si128(words + i);
    TurnIndex<kItemsize, kWords>(rows);
    for (int i = 0; i < kRows; ++i) Store<kStores>(to + i * to_pitch + word * kItemsize, rows[i]);
  }
  return word;
}

template <int kItemsize, Stores kStores>
int64_t PackMost(const uint8_t* from, int64_t from_pitch, int64_t num_words, uint8_t* to) {
  constexpr int kRows = kWordNbytes / kItemsize;
  constexpr int64_t kWords = kTileNbytes / kItemsize;
  int64_t word = 0;
  for (; word + kWords <= num_words; word += kWords) {
    __m128i rows[kRows];
    for (int i = 0; i < kRows; ++i) {
      rows[i] = _mm_loadu_si128(
          reinterpret_cast<const __m128i*>(from + i * from_pitch + word * kItemsize));
    }
    TurnIndex<kItemsize, kRows>(rows);
    for (int i = 0; i < kRows; ++i) {
      Store<kStores>(to + word * kWordNbytes + i * kTileNbytes, rows[i]);
    }
  }
  return word;
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

bool IsAligned(const uint8_t*, int64_t) { return false; }

template <int kItemsize, Stores kStores>
int64_t UnpackMost(const uint8_t*, int64_t, uint8_t*, int64_t) {
  return 0;
}

template <int kItemsize, Stores kStores>
int64_t PackMost(const uint8_t*, int64_t, int64_t, uint8_t*) {
  return 0;
}

#endif  // defined(__x86_64__)

template <int kItemsize>
void Unpack(const uint8_t* from, int64_t num_words, uint8_t* to, int64_t to_pitch, Stores stores) {
  const bool past_cache = stores == Stores::kPastCache && IsAligned(to, to_pitch);
  const auto most = past_cache ? UnpackMost<kItemsize, Stores::kPastCache>
                               : UnpackMost<kItemsize, Stores::kCached>;
  for (int64_t word = most(from, num_words, to, to_pitch); word < num_words; ++word) {
    for (int64_t row = 0; row < kWordNbytes / kItemsize; ++row) {
      std::memcpy(to + row * to_pitch + word * kItemsize,
                  from + word * kWordNbytes + row * kItemsize, kItemsize);
    }
  }
}

template <int kItemsize>
void Pack(const uint8_t* from, int64_t from_pitch, int64_t num_words, uint8_t* to, Stores stores) {
  const bool past_cache = stores == Stores::kPastCache && IsAligned(to, kTileNbytes);
  const auto most =
      past_cache ? PackMost<kItemsize, Stores::kPastCache> : PackMost<kItemsize, Stores::kCached>;
  for (int64_t word = most(from, from_pitch, num_words, to); word < num_words; ++word) {
    for (int64_t row = 0; row < kWordNbytes / kItemsize; ++row) {
      std::memcpy(to + word * kWordNbytes + row * kItemsize,
                  from + row * from_pitch + word * kItemsize, kItemsize);
    }
  }
}

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

void UnpackWords(int64_t itemsize, const uint8_t* from, int64_t num_words, uint8_t* to,
                 int64_t to_pitch, Stores stores) {
  (itemsize == 1 ? Unpack<1> : Unpack<2>)(from, num_words, to, to_pitch, stores);
}

void PackWords(int64_t itemsize, const uint8_t* from, int64_t from_pitch, int64_t num_words,
               uint8_t* to, Stores stores) {
  (itemsize == 1 ? Pack<1> : Pack<2>)(from, from_pitch, num_words, to, stores);
}

}  // namespace tsr

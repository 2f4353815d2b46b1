// Turns blocks of small elements between row-major and column-major.
#pragma once

#include <cstdint>

#include "stores.h"

namespace tsr {

inline constexpr int64_t kTileNbytes = 16;

// Writes element (row, column) at `from` to (column, row) at `to`. Rows of `from` are `from_pitch`
// bytes apart, those of `to` `to_pitch`. Sides don't overlap. Elements of 1, 2, 4 and 8 bytes move
// by tiles of kTileNbytes each way: both sides have room for whole ones, and what lies there is
// read and overwritten.
void TransposeBlock(int64_t itemsize, const uint8_t* from, int64_t from_pitch, int64_t num_rows,
                    int64_t num_columns, uint8_t* to, int64_t to_pitch);

// Rows of elements of 1 or 2 bytes as tiles T(...)(4,1) and T(...)(2,1) hold them: in words of
// which each has an element of every row.
inline constexpr int64_t kWordNbytes = 4;

// Takes `num_words` words at `from` apart into dense rows, `to_pitch` bytes apart. As for all that
// follows here, `itemsize` is 1 or 2, and sides don't overlap; who has it write past the cache
// calls FenceStores() behind the last.
void UnpackWords(int64_t itemsize, const uint8_t* from, int64_t num_words, uint8_t* to,
                 int64_t to_pitch, Stores stores);
// Puts `num_words` words at `to` together from dense rows, `from_pitch` bytes apart.
void PackWords(int64_t itemsize, const uint8_t* from, int64_t from_pitch, int64_t num_words,
               uint8_t* to, Stores stores);

}  // namespace tsr

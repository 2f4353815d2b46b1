// Turns blocks of small elements between row-major and column-major.
#pragma once

#include <cstdint>

namespace tsr {

inline constexpr int64_t kTileNbytes = 16;

// Writes element (row, column) at `from` to (column, row) at `to`. Rows of `from` are `from_pitch`
// bytes apart, those of `to` `to_pitch`. Sides don't overlap. Elements of 1, 2, 4 and 8 bytes move
// by tiles of kTileNbytes each way: both sides have room for whole ones, and what lies there is
// read and overwritten.
void TransposeBlock(int64_t itemsize, const uint8_t* from, int64_t from_pitch, int64_t num_rows,
                    int64_t num_columns, uint8_t* to, int64_t to_pitch);

}  // namespace tsr

#include "transpose.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <vector>

namespace tsr {
namespace {

TEST(TransposeBlock, PutsRowsWhereColumnsWere) {
  std::mt19937 random(3);
  for (const int64_t itemsize : {1, 2, 3, 4, 8, 16, 24}) {
    for (const auto& [num_rows, num_columns] : {std::pair{1, 1}, {16, 16}, {5, 33}, {40, 17}}) {
      const int64_t from_pitch = 64 * itemsize + 3, to_pitch = 64 * itemsize;
      std::vector<uint8_t> from(static_cast<size_t>(64 * from_pitch));
      for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
      std::vector<uint8_t> to(static_cast<size_t>(64 * to_pitch));
      TransposeBlock(itemsize, from.data(), from_pitch, num_rows, num_columns, to.data(), to_pitch);
      for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t column = 0; column < num_columns; ++column) {
          ASSERT_EQ(std::memcmp(&to[static_cast<size_t>(column * to_pitch + row * itemsize)],
                                &from[static_cast<size_t>(row * from_pitch + column * itemsize)],
                                static_cast<size_t>(itemsize)),
                    0)
              << itemsize << " bytes, row " << row << ", column " << column;
        }
      }
    }
  }
}

TEST(Words, AreTakenApartAndPutTogether) {
  std::mt19937 random(3);
  for (const int64_t itemsize : {1, 2}) {
    const int64_t num_rows = kWordNbytes / itemsize;
    for (const int64_t num_words : {1, 7, 16, 100}) {
      for (const int64_t pitch : {208, 211}) {  // of lines, and of any bytes
        for (const Stores stores : {Stores::kCached, Stores::kPastCache}) {
          alignas(64) std::array<uint8_t, 400> words;
          for (uint8_t& byte : words) byte = static_cast<uint8_t>(random());
          alignas(64) std::array<uint8_t, 4 * 211> rows;
          UnpackWords(itemsize, words.data(), num_words, rows.data(), pitch, stores);
          alignas(64) std::array<uint8_t, 400> packed;
          PackWords(itemsize, rows.data(), pitch, num_words, packed.data(), stores);
          FenceStores();
          for (int64_t i = 0; i < num_words * kWordNbytes; ++i) {
            const int64_t element = i / itemsize;
            const int64_t row = element % num_rows, column = element / num_rows;
            ASSERT_EQ(rows[static_cast<size_t>(row * pitch + column * itemsize + i % itemsize)],
                      words[static_cast<size_t>(i)]);
            ASSERT_EQ(packed[static_cast<size_t>(i)], words[static_cast<size_t>(i)]);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tsr

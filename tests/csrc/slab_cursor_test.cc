#include "slab_cursor.h"

#include <gtest/gtest.h>

#include <vector>

namespace tsr {
namespace {

// Linear indices of a slab's elements in row-major order of the box.
void AppendElements(std::span<const int64_t> extents, const SlabCursor& slab,
                    std::vector<int64_t>* out) {
  std::vector<int64_t> at(extents.size(), 0);
  for (;;) {
    int64_t index = 0;
    for (size_t d = 0; d < extents.size(); ++d) {
      index = index * extents[d] + slab.start()[d] + at[d];
    }
    out->push_back(index);
    size_t d = extents.size();
    for (; d > 0; --d) {
      if (++at[d - 1] < slab.extents()[d - 1]) break;
      at[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

TEST(SlabCursorTest, SlabsGoThroughTheBoxInOrderWhateverRoomThereIs) {
  const std::vector<std::vector<int64_t>> shapes = {
      {}, {1}, {7}, {1, 1}, {3, 4}, {1, 5, 1, 3}, {2, 3, 4, 5}, {2, 100}, {100, 2}};
  for (const auto& shape : shapes) {
    for (const int64_t itemsize : {1, 4}) {
      for (const int64_t limit : {4, 16, 37, 64, 10'000}) {
        SlabCursor slab(shape, itemsize, limit);
        std::vector<int64_t> elements;
        for (int64_t room = limit; !slab.done(); room = room == limit ? limit / 2 : limit) {
          const int64_t nbytes = slab.Take(room);
          ASSERT_LE(nbytes, room);
          if (room == limit) {
            ASSERT_GT(nbytes, 0);
          }
          if (nbytes == 0) continue;
          const size_t before = elements.size();
          AppendElements(shape, slab, &elements);
          EXPECT_EQ(static_cast<int64_t>(elements.size() - before) * itemsize, nbytes);
        }
        int64_t volume = 1;
        for (const int64_t extent : shape) volume *= extent;
        ASSERT_EQ(static_cast<int64_t>(elements.size()), volume);
        for (int64_t i = 0; i < volume; ++i) ASSERT_EQ(elements[i], i);
      }
    }
  }
}

TEST(SlabCursorTest, BoxThatFitsIsOneSlab) {
  SlabCursor slab(std::vector<int64_t>{3, 4}, 2, 24);
  EXPECT_EQ(slab.Take(24), 24);
  EXPECT_TRUE(slab.done());
}

}  // namespace
}  // namespace tsr

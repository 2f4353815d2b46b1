#include "slab_cursor.h"

#include <gtest/gtest.h>

#include <vector>

namespace tsr {
namespace {

// Linear indices of a slab's elements in row-major order of the box.
void AppendElements(BoxView box, BoxView slab, std::vector<int64_t>* out) {
  const int rank = RankOf(box);
  std::vector<int64_t> at(static_cast<size_t>(rank));
  for (int dim = 0; dim < rank; ++dim) at[dim] = StartOf(slab, dim);
  for (;;) {
    int64_t index = 0;
    for (int dim = 0; dim < rank; ++dim) {
      index = index * ExtentOf(box, dim) + at[dim] - StartOf(box, dim);
    }
    out->push_back(index);
    int dim = rank;
    for (; dim > 0; --dim) {
      if (++at[dim - 1] < StopOf(slab, dim - 1)) break;
      at[dim - 1] = StartOf(slab, dim - 1);
    }
    if (dim == 0) return;
  }
}

TEST(SlabCursorTest, SlabsGoThroughTheBoxInOrderWhateverRoomThereIs) {
  const std::vector<std::vector<int64_t>> boxes = {{},
                                                   {0, 1},
                                                   {5, 12},
                                                   {3, 4, 0, 1},
                                                   {2, 5, 0, 4},
                                                   {0, 1, 7, 12, 0, 1, 0, 3},
                                                   {4, 6, 0, 3, 1, 5, 0, 5},
                                                   {0, 2, 0, 100},
                                                   {1, 101, 1, 3}};
  for (const auto& box : boxes) {
    for (const int64_t itemsize : {1, 4}) {
      for (const int64_t limit : {4, 16, 37, 64, 10'000}) {
        SlabCursor slabs(box, itemsize, limit);
        std::vector<int64_t> elements;
        for (int64_t room = limit; !slabs.done(); room = room == limit ? limit / 2 : limit) {
          const int64_t nbytes = slabs.Take(room);
          ASSERT_LE(nbytes, room);
          if (room == limit) {
            ASSERT_GT(nbytes, 0);
          }
          if (nbytes == 0) continue;
          EXPECT_EQ(VolumeOf(slabs.slab()) * itemsize, nbytes);
          AppendElements(box, slabs.slab(), &elements);
        }
        ASSERT_EQ(static_cast<int64_t>(elements.size()), VolumeOf(box));
        for (int64_t i = 0; i < VolumeOf(box); ++i) ASSERT_EQ(elements[i], i);
      }
    }
  }
}

TEST(SlabCursorTest, BoxThatFitsIsOneSlab) {
  SlabCursor slab(std::vector<int64_t>{1, 4, 0, 4}, 2, 24);
  EXPECT_EQ(slab.Take(24), 24);
  EXPECT_TRUE(slab.done());
}

}  // namespace
}  // namespace tsr

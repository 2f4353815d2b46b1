// A layout that has been proved sane, and which of its boxes share elements with a given box.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"
#include "status.h"

namespace tsr {

// Immutable once made; shared by threads freely. Keeps a pointer to the layout, which outlives it.
class LayoutIndex {
 public:
  // kInvalid where the arrays don't fit together; kPlan where a box leaves the shape, overlaps
  // another or has no holder. Boxes that form a grid, as those of a NamedSharding do, cost
  // O(n log n rank); others are compared with one another.
  static Status Make(const BoxLayout& layout, LayoutIndex* out);

  const BoxLayout& layout() const { return *layout_; }
  // Elements of the global shape.
  int64_t volume() const { return volume_; }

  // Sets `out` to the boxes that share an element with `box`.
  void FindIntersecting(BoxView box, std::vector<uint32_t>* out) const;

 private:
  struct Interval {
    int64_t start;
    int64_t stop;
    friend auto operator<=>(const Interval&, const Interval&) = default;
  };

  Status CheckArrays() const;
  Status CheckBoxes() const;
  // Fills the grid; false, and no grid, where the boxes don't form one.
  bool MakeGrid();
  Status CheckDisjoint() const;

  const BoxLayout* layout_ = nullptr;
  int64_t volume_ = 0;
  std::vector<uint32_t> filled_;  // boxes that hold an element
  // The grid: ascending disjoint intervals of each dimension, and per cell, row-major, its box + 1
  // or 0 for none. No cells where the boxes form no grid.
  std::vector<std::vector<Interval>> intervals_;
  std::vector<uint32_t> cells_;
};

}  // namespace tsr

#include "layout_index.h"

#include <algorithm>
#include <functional>
#include <string>

namespace tsr {
namespace {

// Cells that a grid may have per box: a few boxes on the diagonal of a fine grid form none.
constexpr size_t kMaxCellsPerBox = 64;
constexpr size_t kMaxBoxes = size_t{1} << 24;

Status Invalid(const std::string& message) { return Status(Code::kInvalid, message); }

std::string BoxName(const BoxLayout& layout, uint32_t box) {
  return "box " + std::to_string(box) + " " + FormatBox(layout.box(box));
}

}  // namespace

Status LayoutIndex::Make(const BoxLayout& layout, LayoutIndex* out) {
  LayoutIndex index;
  index.layout_ = &layout;
  TSR_RETURN_IF_ERROR(index.CheckArrays());
  std::vector<int64_t> whole;
  for (const int64_t extent : layout.shape) whole.insert(whole.end(), {0, extent});
  index.volume_ = VolumeOf(whole);
  if (index.volume_ < 0) return Invalid("shape " + FormatBox(whole) + " has too many elements");
  TSR_RETURN_IF_ERROR(index.CheckBoxes());
  for (uint32_t b = 0; b < layout.num_boxes(); ++b) {
    if (VolumeOf(layout.box(b)) > 0) index.filled_.push_back(b);
  }
  if (!index.MakeGrid()) TSR_RETURN_IF_ERROR(index.CheckDisjoint());
  *out = std::move(index);
  return Status();
}

Status LayoutIndex::CheckArrays() const {
  const auto& [shape, boxes, offsets, holders] = *layout_;
  if (shape.size() > kMaxRank)
    return Invalid("rank " + std::to_string(shape.size()) + " is above 32");
  if (offsets.empty() || offsets.size() - 1 > kMaxBoxes) {
    return Invalid("holder_offsets has a wrong number of elements");
  }
  if (boxes.size() != (offsets.size() - 1) * 2 * shape.size()) {
    return Invalid("boxes and holder_offsets differ in their number of boxes");
  }
  if (offsets.front() != 0 || offsets.back() != holders.size() ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    return Invalid("holder_offsets does not divide holders");
  }
  return Status();
}

Status LayoutIndex::CheckBoxes() const {
  const auto& [shape, boxes, offsets, holders] = *layout_;
  for (uint32_t b = 0; b < layout_->num_boxes(); ++b) {
    const BoxView box = layout_->box(b);
    for (int dim = 0; dim < layout_->rank(); ++dim) {
      if (StartOf(box, dim) < 0 || StartOf(box, dim) > StopOf(box, dim) ||
          StopOf(box, dim) > shape[dim]) {
        return Status(Code::kPlan, BoxName(*layout_, b) + " is not within the shape");
      }
    }
    const auto first = holders.begin() + offsets[b];
    const auto last = holders.begin() + offsets[b + 1];
    if (first == last) return Status(Code::kPlan, BoxName(*layout_, b) + " has no holder");
    if (std::adjacent_find(first, last, std::greater_equal<>()) != last) {
      return Invalid("holders of " + BoxName(*layout_, b) + " do not ascend");
    }
  }
  return Status();
}

bool LayoutIndex::MakeGrid() {
  const int rank = layout_->rank();
  std::vector<std::vector<Interval>> intervals(rank);
  size_t num_cells = 1;
  for (int dim = 0; dim < rank; ++dim) {
    auto& row = intervals[dim];
    for (const uint32_t b : filled_) {
      row.push_back({StartOf(layout_->box(b), dim), StopOf(layout_->box(b), dim)});
    }
    std::sort(row.begin(), row.end());
    row.erase(std::unique(row.begin(), row.end()), row.end());
    for (size_t i = 1; i < row.size(); ++i) {
      if (row[i].start < row[i - 1].stop) return false;
    }
    num_cells *= row.size();
    if (num_cells > kMaxCellsPerBox * filled_.size()) return false;
  }
  // Distinct cells of disjoint intervals are disjoint: no two boxes need to be compared.
  std::vector<uint32_t> cells(num_cells, 0);
  for (const uint32_t b : filled_) {
    size_t cell = 0;
    for (int dim = 0; dim < rank; ++dim) {
      const auto& row = intervals[dim];
      const Interval own{StartOf(layout_->box(b), dim), StopOf(layout_->box(b), dim)};
      cell = cell * row.size() + (std::lower_bound(row.begin(), row.end(), own) - row.begin());
    }
    if (cells[cell] != 0) return false;
    cells[cell] = b + 1;
  }
  intervals_ = std::move(intervals);
  cells_ = std::move(cells);
  return true;
}

Status LayoutIndex::CheckDisjoint() const {
  // A grid that failed at rank 0 has its one element twice; else sweep along the first dimension.
  const auto start = [this](uint32_t b) {
    return layout_->rank() ? StartOf(layout_->box(b), 0) : 0;
  };
  const auto stop = [this](uint32_t b) { return layout_->rank() ? StopOf(layout_->box(b), 0) : 1; };
  std::vector<uint32_t> order = filled_;
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return start(a) < start(b); });
  std::vector<int64_t> common(2 * layout_->shape.size());
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t j = i + 1; j < order.size() && start(order[j]) < stop(order[i]); ++j) {
      if (Intersect(layout_->box(order[i]), layout_->box(order[j]), common)) {
        return Status(Code::kPlan,
                      BoxName(*layout_, order[i]) + " overlaps " + BoxName(*layout_, order[j]));
      }
    }
  }
  return Status();
}

void LayoutIndex::FindIntersecting(BoxView box, std::vector<uint32_t>* out) const {
  out->clear();
  if (cells_.empty()) {
    std::vector<int64_t> common(box.size());
    for (const uint32_t b : filled_) {
      if (Intersect(layout_->box(b), box, common)) out->push_back(b);
    }
    return;
  }
  // The cells whose intervals meet the box in every dimension, one dimension after another.
  std::vector<size_t> prefixes = {0};
  for (int dim = 0; dim < layout_->rank(); ++dim) {
    const auto& row = intervals_[dim];
    const auto first = std::upper_bound(row.begin(), row.end(), StartOf(box, dim),
                                        [](int64_t at, const Interval& i) { return at < i.stop; });
    const auto last = std::lower_bound(first, row.end(), StopOf(box, dim),
                                       [](const Interval& i, int64_t at) { return i.start < at; });
    std::vector<size_t> longer;
    longer.reserve(prefixes.size() * (last - first));
    for (const size_t prefix : prefixes) {
      for (auto it = first; it < last; ++it) {
        longer.push_back(prefix * row.size() + (it - row.begin()));
      }
    }
    prefixes = std::move(longer);
  }
  for (const size_t cell : prefixes) {
    if (cells_[cell] != 0) out->push_back(cells_[cell] - 1);
  }
}

}  // namespace tsr

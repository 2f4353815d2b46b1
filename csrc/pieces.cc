#include "pieces.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <span>
#include <string>

namespace tsr {
namespace {

using Box = std::vector<int64_t>;

constexpr int64_t kMaxPieces = int64_t{1} << 28;  // of one pair of layouts

// A source box and a sink box that share an element.
struct Meeting {
  uint32_t source_box;
  uint32_t sink_box;
  friend auto operator<=>(const Meeting&, const Meeting&) = default;
};

// A part of `wanted` that no box of `source` holds; there is one.
Box FindMissing(const LayoutIndex& source, BoxView wanted) {
  std::vector<Box> open = {Box(wanted.begin(), wanted.end())};
  std::vector<uint32_t> held;
  while (!open.empty()) {
    Box box = std::move(open.back());
    open.pop_back();
    source.FindIntersecting(box, &held);
    if (held.empty()) return box;
    // Peels off what lies beside one of them, slab by slab; that in the middle halves the rest.
    const BoxView hole = source.layout().box(held[held.size() / 2]);
    for (int dim = 0; dim < RankOf(box); ++dim) {
      Box below = box, above = box;
      below[2 * dim + 1] = box[2 * dim] = std::max(StartOf(box, dim), StartOf(hole, dim));
      above[2 * dim] = box[2 * dim + 1] = std::min(StopOf(box, dim), StopOf(hole, dim));
      for (Box& slab : {std::ref(below), std::ref(above)}) {
        if (VolumeOf(slab) > 0) open.push_back(std::move(slab));
      }
    }
  }
  return {};
}

// All meetings, ascending. Source boxes are disjoint, so that a sink box whose meetings add up to
// its own volume is held exactly once.
Status FindMeetings(const LayoutIndex& source, const LayoutIndex& sink,
                    std::vector<Meeting>* meetings) {
  std::vector<uint32_t> held;
  Box common(2 * sink.layout().shape.size());
  for (uint32_t t = 0; t < sink.layout().num_boxes(); ++t) {
    const BoxView box = sink.layout().box(t);
    const int64_t wanted = VolumeOf(box);
    if (wanted == 0) continue;
    int64_t covered = 0;
    source.FindIntersecting(box, &held);
    for (const uint32_t s : held) {
      Intersect(source.layout().box(s), box, common);
      covered += VolumeOf(common);
      meetings->push_back({s, t});
    }
    if (covered != wanted) {
      return Status(Code::kPlan, "sink box " + std::to_string(t) + " " + FormatBox(box) +
                                     " lacks " + FormatBox(FindMissing(source, box)) +
                                     ", which no source box holds");
    }
  }
  std::sort(meetings->begin(), meetings->end());
  return Status();
}

// Joins boxes that touch along `dim` and agree in all other dimensions.
void JoinAlong(int dim, std::vector<Box>* boxes) {
  const auto without = [dim](Box box) {
    box[2 * dim] = box[2 * dim + 1] = 0;
    return box;
  };
  // Boxes that agree in all other dimensions become neighbours.
  std::sort(boxes->begin(), boxes->end(), [&](const Box& a, const Box& b) {
    const Box others_a = without(a), others_b = without(b);
    return others_a != others_b ? others_a < others_b : a[2 * dim] < b[2 * dim];
  });
  std::vector<Box> joined;
  for (Box& box : *boxes) {
    if (!joined.empty() && joined.back()[2 * dim + 1] == box[2 * dim] &&
        without(joined.back()) == without(box)) {
      joined.back()[2 * dim + 1] = box[2 * dim + 1];
    } else {
      joined.push_back(std::move(box));
    }
  }
  *boxes = std::move(joined);
}

// What one source box gives to its sink boxes, as few disjoint boxes in row-major order.
std::vector<Box> JoinMeetings(const LayoutIndex& source, const LayoutIndex& sink,
                              std::span<const Meeting> meetings) {
  std::vector<Box> parts;
  int64_t volume = 0;
  for (const auto& [s, t] : meetings) {
    Box& part = parts.emplace_back(2 * source.layout().shape.size());
    Intersect(source.layout().box(s), sink.layout().box(t), part);
    volume += VolumeOf(part);
  }
  Box hull = parts.front();
  for (const Box& part : parts) {
    for (size_t i = 0; i < hull.size(); i += 2) {
      hull[i] = std::min(hull[i], part[i]);
      hull[i + 1] = std::max(hull[i + 1], part[i + 1]);
    }
  }
  // Disjoint parts that fill their hull are one box.
  if (VolumeOf(hull) == volume) return {hull};
  for (size_t num_before = 0; num_before != parts.size();) {
    num_before = parts.size();
    for (int dim = RankOf(hull) - 1; dim >= 0; --dim) JoinAlong(dim, &parts);
  }
  std::sort(parts.begin(), parts.end());
  return parts;
}

// How a box is cut: to single indices in the dimensions before `dim`, into `num_parts` parts along
// it, and not at all behind it.
struct Cut {
  int dim = 0;
  int64_t num_parts = 1;
  int64_t num_pieces = 1;
};

Cut CutOf(BoxView box, int64_t itemsize, int64_t chunk_nbytes) {
  Cut cut;
  int64_t row_nbytes = VolumeOf(box) * itemsize;
  if (row_nbytes <= chunk_nbytes) return cut;
  for (cut.dim = 0; cut.dim < RankOf(box); ++cut.dim) {
    const int64_t extent = ExtentOf(box, cut.dim);
    row_nbytes /= extent;
    if (row_nbytes <= chunk_nbytes || cut.dim == RankOf(box) - 1) {
      const int64_t most = std::max<int64_t>(1, chunk_nbytes / row_nbytes);
      cut.num_parts = (extent + most - 1) / most;
      cut.num_pieces *= cut.num_parts;
      break;
    }
    cut.num_pieces *= extent;
  }
  return cut;
}

// Start of part `i` of `extent` indices in `num_parts` parts, whose extents differ by at most one.
int64_t PartStart(int64_t extent, int64_t num_parts, int64_t i) {
  return extent / num_parts * i + std::min(extent % num_parts, i);
}

// The piece `index` of `cut`, in row-major order.
void PieceOf(BoxView box, const Cut& cut, int64_t index, Box* piece) {
  piece->assign(box.begin(), box.end());
  if (cut.num_pieces == 1) return;
  const int64_t start = StartOf(box, cut.dim);
  const int64_t extent = ExtentOf(box, cut.dim);
  const int64_t part = index % cut.num_parts;
  (*piece)[2 * cut.dim] = start + PartStart(extent, cut.num_parts, part);
  (*piece)[2 * cut.dim + 1] = start + PartStart(extent, cut.num_parts, part + 1);
  index /= cut.num_parts;
  for (int dim = cut.dim - 1; dim >= 0; --dim) {
    (*piece)[2 * dim] = StartOf(box, dim) + index % ExtentOf(box, dim);
    (*piece)[2 * dim + 1] = (*piece)[2 * dim] + 1;
    index /= ExtentOf(box, dim);
  }
}

}  // namespace

Status AppendPieces(const LayoutIndex& source, const LayoutIndex& sink, uint32_t wire_itemsize,
                    uint32_t chunk_nbytes, PieceTable* out) {
  std::vector<Meeting> meetings;
  TSR_RETURN_IF_ERROR(FindMeetings(source, sink, &meetings));
  const size_t num_before = out->pieces.size();
  Box box, common(2 * source.layout().shape.size());
  for (size_t first = 0, last; first < meetings.size(); first = last) {
    const uint32_t s = meetings[first].source_box;
    for (last = first; last < meetings.size() && meetings[last].source_box == s;) ++last;
    const std::span<const Meeting> own(&meetings[first], last - first);
    for (const Box& region : JoinMeetings(source, sink, own)) {
      const Cut cut = CutOf(region, wire_itemsize, chunk_nbytes);
      const auto num_so_far = static_cast<int64_t>(out->pieces.size() - num_before);
      if (cut.num_pieces > kMaxPieces - num_so_far) {
        return Status(Code::kInvalid, "chunks of " + std::to_string(chunk_nbytes) +
                                          " bytes are too small for box " + FormatBox(region));
      }
      for (int64_t i = 0; i < cut.num_pieces; ++i) {
        PieceOf(region, cut, i, &box);
        Piece& piece = out->pieces.emplace_back();
        piece.source_box = s;
        piece.nbytes = static_cast<uint32_t>(VolumeOf(box) * wire_itemsize);
        piece.box_offset = out->boxes.size();
        piece.first_placement = out->placements.size();
        out->boxes.insert(out->boxes.end(), box.begin(), box.end());
        for (const Meeting& meeting : own) {
          if (Intersect(sink.layout().box(meeting.sink_box), box, common)) {
            out->placements.push_back(meeting.sink_box);
          }
        }
        piece.num_placements =
            static_cast<uint32_t>(out->placements.size() - piece.first_placement);
      }
    }
  }
  return Status();
}

}  // namespace tsr

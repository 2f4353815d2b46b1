// What the boxes of one layout give to the boxes of another, cut to the size of chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "layout_index.h"
#include "status.h"

namespace tsr {

// A box that is read whole from one source box; at most one chunk long.
struct Piece {
  uint32_t source_box;
  uint32_t nbytes;           // on the wire
  uint64_t box_offset;       // in PieceTable::boxes
  uint64_t first_placement;  // in PieceTable::placements
  uint32_t num_placements;
};

// Pieces of many pairs of layouts. All leaf pairs with the same two layouts and the same bytes per
// element share the pieces, so that a model of many leaves is intersected a few times only.
struct PieceTable {
  std::vector<Piece> pieces;         // of one pair of layouts: by source box, row-major within
  std::vector<int64_t> boxes;        // [rank, 2] each, global coordinates
  std::vector<uint32_t> placements;  // sink boxes that take a part of a piece
};

// Appends the pieces of (source, sink) to `out`: together they hold every element of every sink box
// once. Both have the same shape. kPlan names a box that no source box
// holds; kInvalid where `chunk_nbytes` would make too many pieces.
Status AppendPieces(const LayoutIndex& source, const LayoutIndex& sink, uint32_t wire_itemsize,
                    uint32_t chunk_nbytes, PieceTable* out);

}  // namespace tsr

// Which box of which leaf one sampler process reads from which source process.
#pragma once

#include <cstdint>
#include <vector>

#include "box.h"
#include "cast.h"
#include "shard_layout.h"
#include "status.h"

namespace tsr {

// How a leaf of one global shape lies over processes. Leaves with equal shape and sharding share
// one. `boxes` are distinct; `holders` of box b are the processes
// holders[holder_offsets[b] .. holder_offsets[b + 1]), ascending.
struct BoxLayout {
  std::vector<int64_t> shape;            // shape=[rank]
  std::vector<int64_t> boxes;            // shape=[num_boxes, rank, 2]
  std::vector<uint32_t> holder_offsets;  // shape=[num_boxes + 1]
  std::vector<uint32_t> holders;

  int rank() const { return static_cast<int>(shape.size()); }
  int64_t num_boxes() const { return static_cast<int64_t>(holder_offsets.size()) - 1; }
  BoxView box(int64_t b) const {
    const size_t stride = 2 * shape.size();
    return BoxView(boxes).subspan(static_cast<size_t>(b) * stride, stride);
  }
};

// One leaf of the trainer and the leaf of the sampler that takes its bytes.
struct LeafPair {
  uint32_t source_leaf;    // index in the trainer's manifest; on the wire
  uint32_t sink_leaf;      // index in the sampler's manifest
  uint32_t source_layout;  // index in PlanInput::layouts
  uint32_t sink_layout;    // index in PlanInput::layouts; its boxes are those of this process alone
  uint32_t itemsize;       // bytes of an element at the source
  uint32_t wire_itemsize;  // bytes of an element on the wire and at the sink
  Op op;
};

struct PlanInput {
  std::vector<BoxLayout> layouts;
  std::vector<LeafPair> pairs;
  uint32_t sink_process;  // turns the order in which equal holders are tried
  int64_t chunk_nbytes;   // most bytes that a chunk has on the wire
};

// A box that is read whole from one shard of the source; row-major on the wire.
struct Region {
  uint32_t pair;             // index in PlanInput::pairs
  uint32_t source_box;       // index in the source layout's boxes; on the wire
  uint64_t box_offset;       // in Plan::boxes: [rank, 2], global coordinates; pairs may share it
  uint64_t first_placement;  // in Plan::placements: sink boxes that take a part of it
  uint32_t num_placements;
};

inline constexpr uint32_t kMaxRegionsPerChunk = 4096;

struct Chunk {
  uint64_t first_region;
  uint32_t num_regions;
  uint32_t nbytes;  // on the wire
};

// Chunks first_chunk .. first_chunk + num_chunks are read from `process`; on the wire they are
// numbered from 0 within it.
struct SourceChunks {
  uint32_t process;
  uint64_t first_chunk;
  uint64_t num_chunks;
  uint64_t nbytes;
};

// Immutable once made; shared by threads freely.
struct Plan {
  PlanInput input;
  std::vector<int64_t> boxes;
  std::vector<uint32_t> placements;        // box indices in the sink layout
  std::vector<Region> regions;             // grouped by chunk; within a source in its memory order
  std::vector<Chunk> chunks;               // grouped by source
  std::vector<uint64_t> regions_per_pair;  // shape=[num_pairs]
  std::vector<SourceChunks> sources;       // ascending by process; only those that are read
  uint64_t nbytes = 0;                     // at the sink, each distinct byte once
  uint64_t wire_nbytes = 0;

  const LeafPair& pair(const Region& region) const { return input.pairs[region.pair]; }
  BoxView region_box(const Region& region) const {
    const size_t n = 2 * input.layouts[pair(region).source_layout].shape.size();
    return BoxView(boxes).subspan(region.box_offset, n);
  }
};

// Makes the plan, a pure function of `input`, whose numbers may come from a peer (kInvalid says
// what is wrong with them):
// - every element of every sink box is covered by exactly one region (proved, else kPlan names the
//   pair and the box that lacks or repeats elements);
// - boxes of a layout are proved disjoint and within the shape before they are used;
// - what one source box gives to this process is one region where the union is a box, so that a
//   source reads in its own memory's order; large ones are cut into pieces of about chunk_nbytes
//   along the outermost dimension that allows it, small ones share a chunk;
// - pieces of a box with several holders go to the one with the fewest bytes so far, beginning at
//   sink_process modulo their number.
Status MakePlan(PlanInput input, Plan* out);

// kInvalid where a pair of `layouts` is none, or its layout not one of the pair's sink boxes.
Status CheckSinkLayouts(const Plan& plan, const ShardLayouts& layouts);

}  // namespace tsr

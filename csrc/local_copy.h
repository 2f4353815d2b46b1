// Carries out a whole plan from memory to memory, for one program that reaches both sides.
#pragma once

#include <cstdint>
#include <span>

#include "chunk_table.h"
#include "plan.h"
#include "status.h"

namespace tsr {

// Where the bytes of both sides lie. Does not own its arrays, nor the memory that they point to.
struct LocalMemory {
  std::span<const uint64_t> addresses;  // of the first element of each shard of the directory
  std::span<const int64_t> strides;     // in bytes, those of a shard after those of the former
  // Of each (pair, sink box), boxes in the order of the pair's sink layout: dense row-major memory
  // with the extents of the box, elements of the pair's wire_itemsize.
  std::span<const uint64_t> sink_addresses;
};

// Copies every region of `plan`, whatever process it is planned from, with `num_threads` threads
// (this one among them) that take chunks in the order of the sources' memory. Returns when all is
// copied. Sides don't overlap. kInvalid, before the first byte moves, where arrays don't have the
// lengths that plan and directory ask for, where the directory lacks what the plan reads, or where
// an address is null or a stride negative.
Status CopyPlan(const Plan& plan, const ShardDirectory& directory, const LocalMemory& memory,
                int num_threads);

}  // namespace tsr

#include "plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <tuple>

#include "layout_index.h"
#include "pieces.h"

namespace tsr {
namespace {

constexpr uint64_t kMaxRegions = uint64_t{1} << 32;

Status Within(const std::string& what, size_t index, const Status& status) {
  return Status(status.code(), what + " " + std::to_string(index) + ": " + status.message());
}

// Chooses the source of every piece, and fills the chunks of each source.
class Sources {
 public:
  explicit Sources(const PlanInput& input) : input_(input), dense_holders_(input.layouts.size()) {
    for (const LeafPair& pair : input.pairs) {
      const std::vector<uint32_t>& holders = input.layouts[pair.source_layout].holders;
      if (!dense_holders_[pair.source_layout].empty()) continue;
      dense_holders_[pair.source_layout] = holders;
      processes_.insert(processes_.end(), holders.begin(), holders.end());
    }
    std::sort(processes_.begin(), processes_.end());
    processes_.erase(std::unique(processes_.begin(), processes_.end()), processes_.end());
    for (std::vector<uint32_t>& holders : dense_holders_) {
      for (uint32_t& holder : holders) {
        holder =
            std::lower_bound(processes_.begin(), processes_.end(), holder) - processes_.begin();
      }
    }
    queues_.resize(processes_.size());
  }

  // Adds `piece` of a pair to the holder with the fewest bytes, and returns which that is.
  uint32_t Add(const LeafPair& pair, const Piece& piece) {
    const BoxLayout& layout = input_.layouts[pair.source_layout];
    const uint32_t* holders =
        &dense_holders_[pair.source_layout][layout.holder_offsets[piece.source_box]];
    const uint32_t num_holders =
        layout.holder_offsets[piece.source_box + 1] - layout.holder_offsets[piece.source_box];
    uint32_t turn = input_.sink_process % num_holders;
    uint32_t chosen = holders[turn];
    for (uint32_t i = 1; i < num_holders; ++i) {
      if (++turn == num_holders) turn = 0;
      if (queues_[holders[turn]].nbytes < queues_[chosen].nbytes) chosen = holders[turn];
    }
    Queue& queue = queues_[chosen];
    if (queue.chunks.empty() || queue.chunks.back().num_regions == kMaxRegionsPerChunk ||
        int64_t{queue.chunks.back().nbytes} + piece.nbytes > input_.chunk_nbytes) {
      queue.chunks.push_back({queue.num_regions, 0, 0});
    }
    queue.chunks.back().num_regions += 1;
    queue.chunks.back().nbytes += piece.nbytes;
    queue.num_regions += 1;
    queue.nbytes += piece.nbytes;
    return chosen;
  }

  // Writes sources and chunks to `plan`; returns where the regions of each source begin.
  std::vector<uint64_t> Finish(Plan* plan) {
    std::vector<uint64_t> first_region;
    uint64_t num_regions = 0;
    for (size_t i = 0; i < queues_.size(); ++i) {
      Queue& queue = queues_[i];
      first_region.push_back(num_regions);
      if (queue.num_regions == 0) continue;
      plan->sources.push_back(
          {processes_[i], plan->chunks.size(), queue.chunks.size(), queue.nbytes});
      for (Chunk chunk : queue.chunks) {
        chunk.first_region += num_regions;
        plan->chunks.push_back(chunk);
      }
      num_regions += queue.num_regions;
      plan->wire_nbytes += queue.nbytes;
    }
    return first_region;
  }

 private:
  struct Queue {
    uint64_t nbytes = 0;
    uint64_t num_regions = 0;
    std::vector<Chunk> chunks;  // first_region counts from the queue's own first
  };

  const PlanInput& input_;
  std::vector<uint32_t> processes_;                   // ascending
  std::vector<std::vector<uint32_t>> dense_holders_;  // per source layout, as indices of processes_
  std::vector<Queue> queues_;                         // one per process
};

Status CheckPair(const LeafPair& pair, const std::vector<LayoutIndex>& layouts) {
  if (pair.source_layout >= layouts.size() || pair.sink_layout >= layouts.size()) {
    return Status(Code::kInvalid, "no such layout");
  }
  const LayoutIndex& source = layouts[pair.source_layout];
  if (source.layout().shape != layouts[pair.sink_layout].layout().shape) {
    return Status(Code::kInvalid, "source and sink differ in shape");
  }
  const Op op = pair.op;
  const bool fits = op.is_copy() ? pair.itemsize == pair.wire_itemsize && pair.itemsize > 0
                                 : op.valid() && pair.itemsize == ItemsizeOf(op.from()) &&
                                       pair.wire_itemsize == ItemsizeOf(op.to());
  if (!fits) return Status(Code::kInvalid, "itemsizes and op don't fit together");
  const int64_t itemsize = std::max(pair.itemsize, pair.wire_itemsize);
  if (source.volume() > std::numeric_limits<int64_t>::max() / itemsize) {
    return Status(Code::kInvalid, "too many bytes");
  }
  return Status();
}

Status CheckInput(const PlanInput& input, std::vector<LayoutIndex>* layouts) {
  if (input.chunk_nbytes <= 0 || input.chunk_nbytes > std::numeric_limits<uint32_t>::max()) {
    return Status(Code::kInvalid, "chunk_nbytes is not within 1 and 2**32 - 1");
  }
  layouts->resize(input.layouts.size());
  for (size_t i = 0; i < input.layouts.size(); ++i) {
    const Status status = LayoutIndex::Make(input.layouts[i], &(*layouts)[i]);
    if (!status.ok()) return Within("layout", i, status);
  }
  std::vector<uint32_t> sink_leaves;
  for (size_t i = 0; i < input.pairs.size(); ++i) {
    const Status status = CheckPair(input.pairs[i], *layouts);
    if (!status.ok()) return Within("pair", i, status);
    sink_leaves.push_back(input.pairs[i].sink_leaf);
  }
  std::sort(sink_leaves.begin(), sink_leaves.end());
  const auto repeated = std::adjacent_find(sink_leaves.begin(), sink_leaves.end());
  if (repeated != sink_leaves.end()) {
    return Status(Code::kPlan, "sink leaf " + std::to_string(*repeated) + " is in two pairs");
  }
  return Status();
}

// The pieces of each pair in a table that pairs of the same layouts share.
struct PairPieces {
  size_t first;
  size_t last;
};

Status CutPairs(const PlanInput& input, const std::vector<LayoutIndex>& layouts, PieceTable* table,
                std::vector<PairPieces>* of_pair) {
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, PairPieces> known;
  uint64_t num_regions = 0;
  for (size_t i = 0; i < input.pairs.size(); ++i) {
    const LeafPair& pair = input.pairs[i];
    const auto [it, is_new] =
        known.try_emplace({pair.source_layout, pair.sink_layout, pair.wire_itemsize},
                          PairPieces{table->pieces.size(), table->pieces.size()});
    if (is_new) {
      const Status status =
          AppendPieces(layouts[pair.source_layout], layouts[pair.sink_layout], pair.wire_itemsize,
                       static_cast<uint32_t>(input.chunk_nbytes), table);
      if (!status.ok()) return Within("pair", i, status);
      it->second.last = table->pieces.size();
    }
    of_pair->push_back(it->second);
    num_regions += it->second.last - it->second.first;
    if (num_regions > kMaxRegions) return Status(Code::kInvalid, "plan has too many regions");
  }
  return Status();
}

}  // namespace

Status MakePlan(PlanInput input, Plan* out) {
  Plan plan;
  plan.input = std::move(input);
  const std::vector<LeafPair>& pairs = plan.input.pairs;
  std::vector<LayoutIndex> layouts;
  TSR_RETURN_IF_ERROR(CheckInput(plan.input, &layouts));
  PieceTable table;
  std::vector<PairPieces> of_pair;
  TSR_RETURN_IF_ERROR(CutPairs(plan.input, layouts, &table, &of_pair));

  // A source is read leaf by leaf in its own order, so that it can let go of leaves early.
  std::vector<uint32_t> order(pairs.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return pairs[a].source_leaf < pairs[b].source_leaf;
  });

  // First the source of every region, then, when it is known how many each has, the regions.
  Sources sources(plan.input);
  std::vector<uint32_t> chosen;
  for (const uint32_t p : order) {
    for (size_t i = of_pair[p].first; i < of_pair[p].last; ++i) {
      chosen.push_back(sources.Add(pairs[p], table.pieces[i]));
    }
  }
  std::vector<uint64_t> next_region = sources.Finish(&plan);
  plan.regions.resize(chosen.size());
  plan.regions_per_pair.resize(pairs.size());
  auto source = chosen.begin();
  for (const uint32_t p : order) {
    plan.regions_per_pair[p] = of_pair[p].last - of_pair[p].first;
    for (size_t i = of_pair[p].first; i < of_pair[p].last; ++i, ++source) {
      const Piece& piece = table.pieces[i];
      plan.regions[next_region[*source]++] = {p, piece.source_box, piece.box_offset,
                                              piece.first_placement, piece.num_placements};
    }
    const BoxLayout& sink = layouts[pairs[p].sink_layout].layout();
    for (int64_t b = 0; b < sink.num_boxes(); ++b) {
      plan.nbytes += VolumeOf(sink.box(b)) * pairs[p].wire_itemsize;
    }
  }
  plan.boxes = std::move(table.boxes);
  plan.placements = std::move(table.placements);
  *out = std::move(plan);
  return Status();
}

Status CheckSinkLayouts(const Plan& plan, const ShardLayouts& layouts) {
  for (const auto& [index, layout] : layouts) {
    const std::string name = "pair " + std::to_string(index);
    if (index >= plan.input.pairs.size()) return Status(Code::kInvalid, "there is no " + name);
    const LeafPair& pair = plan.input.pairs[index];
    const BoxLayout& sink = plan.input.layouts[pair.sink_layout];
    for (int64_t b = 0; b < sink.num_boxes(); ++b) {
      if (!layout->Fits(sink.box(b), pair.wire_itemsize)) {
        return Status(Code::kInvalid, name + " has a layout of other sink boxes than its own");
      }
    }
  }
  return Status();
}

}  // namespace tsr

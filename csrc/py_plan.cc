#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chunk_table.h"
#include "plan.h"
#include "py_arrays.h"
#include "py_errors.h"
#include "py_gil.h"
#include "py_module.h"

namespace tsr {
namespace {

namespace py = pybind11;

template <typename T>
std::vector<T> ToVector(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

template <typename T>
Array<T> ToArray(const std::vector<T>& values) {
  return Array<T>(values.size(), values.data());
}

BoxLayout MakeBoxLayout(const Array<int64_t>& shape, const Array<int64_t>& boxes,
                        const Array<uint32_t>& holder_offsets, const Array<uint32_t>& holders) {
  return {ToVector(shape), ToVector(boxes), ToVector(holder_offsets), ToVector(holders)};
}

std::shared_ptr<Plan> MakePlanFromArrays(std::vector<BoxLayout> layouts,
                                         const Array<uint32_t>& pairs, uint32_t sink_process,
                                         int64_t chunk_nbytes) {
  if (pairs.ndim() != 2 || pairs.shape(1) != 7) {
    throw py::value_error("pairs is not of shape [num_pairs, 7]");
  }
  PlanInput input{std::move(layouts), {}, sink_process, chunk_nbytes};
  const auto rows = pairs.unchecked<2>();
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    if (rows(i, 6) > 255) throw py::value_error("pair " + std::to_string(i) + ": bad op");
    input.pairs.push_back({rows(i, 0), rows(i, 1), rows(i, 2), rows(i, 3), rows(i, 4), rows(i, 5),
                           Op(static_cast<uint8_t>(rows(i, 6)))});
  }
  auto plan = std::make_shared<Plan>();
  WithoutGil([&] { return MakePlan(std::move(input), plan.get()); });
  return plan;
}

py::list SourcesOf(const Plan& plan) {
  py::list sources;
  for (const SourceChunks& source : plan.sources) {
    sources.append(py::make_tuple(source.process, source.num_chunks, source.nbytes));
  }
  return sources;
}

// Columns of a plan's regions, in the order of the plan. Ranges and placements lie one after
// another; those of region i are range_offsets[i] .. range_offsets[i + 1], and so on.
struct RegionColumns {
  std::vector<uint32_t> pair, source_box, process, chunk, placements;
  std::vector<int64_t> ranges;
  std::vector<uint64_t> range_offsets = {0}, placement_offsets = {0};
};

RegionColumns ColumnsOf(const Plan& plan) {
  RegionColumns columns;
  for (const SourceChunks& source : plan.sources) {
    for (uint64_t c = 0; c < source.num_chunks; ++c) {
      const Chunk& chunk = plan.chunks[source.first_chunk + c];
      for (uint64_t r = chunk.first_region; r < chunk.first_region + chunk.num_regions; ++r) {
        const Region& region = plan.regions[r];
        const BoxView box = plan.region_box(region);
        const auto placement = plan.placements.begin() + region.first_placement;
        columns.pair.push_back(region.pair);
        columns.source_box.push_back(region.source_box);
        columns.process.push_back(source.process);
        columns.chunk.push_back(static_cast<uint32_t>(c));
        columns.ranges.insert(columns.ranges.end(), box.begin(), box.end());
        columns.range_offsets.push_back(columns.ranges.size());
        columns.placements.insert(columns.placements.end(), placement,
                                  placement + region.num_placements);
        columns.placement_offsets.push_back(columns.placements.size());
      }
    }
  }
  return columns;
}

py::dict RegionsOf(const Plan& plan) {
  RegionColumns columns;
  {
    GilReleased released;
    columns = ColumnsOf(plan);
  }
  py::dict arrays;
  arrays["pair"] = ToArray(columns.pair);
  arrays["source_box"] = ToArray(columns.source_box);
  arrays["process"] = ToArray(columns.process);
  arrays["chunk"] = ToArray(columns.chunk);
  arrays["ranges"] = ToArray(columns.ranges);
  arrays["range_offsets"] = ToArray(columns.range_offsets);
  arrays["placements"] = ToArray(columns.placements);
  arrays["placement_offsets"] = ToArray(columns.placement_offsets);
  return arrays;
}

py::bytes EncodeTable(const Plan& plan, size_t source_index) {
  if (source_index >= plan.sources.size()) throw py::index_error("no such source");
  std::string bytes;
  {
    GilReleased released;
    bytes = EncodeChunkTable(plan, source_index);
  }
  return py::bytes(bytes);
}

std::shared_ptr<ShardDirectory> MakeDirectory(const Array<uint32_t>& leaf,
                                              const Array<uint32_t>& box,
                                              const Array<uint32_t>& itemsize,
                                              const Array<uint8_t>& kind,
                                              const Array<uint32_t>& rank,
                                              const Array<int64_t>& ranges, uint32_t num_leaves) {
  for (const py::ssize_t n : {box.size(), itemsize.size(), kind.size(), rank.size()}) {
    if (n != leaf.size()) throw py::value_error("the columns of the shards differ in length");
  }
  std::vector<ShardDirectory::Shard> shards;
  uint64_t range_offset = 0;
  for (py::ssize_t i = 0; i < leaf.size(); ++i) {
    shards.push_back({leaf.data()[i], box.data()[i], itemsize.data()[i],
                      static_cast<FloatKind>(kind.data()[i]), rank.data()[i], range_offset});
    range_offset += 2 * uint64_t{rank.data()[i]};
  }
  auto directory = std::make_shared<ShardDirectory>();
  ThrowIfError(
      ShardDirectory::Make(std::move(shards), ToVector(ranges), num_leaves, directory.get()));
  return directory;
}

}  // namespace

void BindPlan(py::module_& module) {
  py::class_<BoxLayout>(module, "BoxLayout")
      .def(py::init(&MakeBoxLayout), py::arg("shape"), py::arg("boxes"), py::arg("holder_offsets"),
           py::arg("holders"));
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def_readonly("nbytes", &Plan::nbytes)
      .def_readonly("wire_nbytes", &Plan::wire_nbytes)
      .def_property_readonly("num_regions", [](const Plan& plan) { return plan.regions.size(); })
      .def_property_readonly("num_chunks", [](const Plan& plan) { return plan.chunks.size(); })
      .def("sources", &SourcesOf)
      .def("regions", &RegionsOf)
      .def("encode_table", &EncodeTable, py::arg("source_index"));
  module.def("make_plan", &MakePlanFromArrays, py::arg("layouts"), py::arg("pairs"),
             py::arg("sink_process"), py::arg("chunk_nbytes"));
  py::class_<ShardDirectory, std::shared_ptr<ShardDirectory>>(module, "ShardDirectory")
      .def(py::init(&MakeDirectory), py::arg("leaf"), py::arg("box"), py::arg("itemsize"),
           py::arg("kind"), py::arg("rank"), py::arg("ranges"), py::arg("num_leaves"));
}

}  // namespace tsr

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu.h"
#include "crc32c.h"
#include "digest.h"
#include "host_memory.h"
#include "local_copy.h"
#include "py_arrays.h"
#include "py_errors.h"
#include "py_gil.h"
#include "py_module.h"
#include "shard_layout.h"

namespace tsr {
namespace {

namespace py = pybind11;

std::unique_ptr<HostMemory> Allocate(size_t nbytes, int num_threads,
                                     const std::vector<int>& nodes) {
  if (num_threads < 1) throw py::value_error("num_threads is " + std::to_string(num_threads));
  std::unique_ptr<HostMemory> memory;
  WithoutGil([&] { return HostMemory::Allocate(nbytes, num_threads, nodes, &memory); });
  return memory;
}

std::shared_ptr<ShardLayout> MakeShardLayout(const std::vector<int64_t>& extents, int64_t itemsize,
                                             const std::vector<int64_t>& major_to_minor,
                                             const std::vector<std::vector<int64_t>>& tiles) {
  auto layout = std::make_shared<ShardLayout>();
  ThrowIfError(ShardLayout::Make(extents, itemsize, major_to_minor, tiles, layout.get()));
  return layout;
}

std::unique_ptr<LocalCopy> StartCopy(const Plan& plan, const ShardDirectory& directory,
                                     const Array<uint64_t>& addresses,
                                     const Array<int64_t>& strides,
                                     const Array<uint64_t>& sink_addresses, int num_threads,
                                     const ShardLayouts& sink_layouts) {
  const LocalMemory memory{SpanOf(addresses), SpanOf(strides), SpanOf(sink_addresses),
                           sink_layouts};
  std::unique_ptr<LocalCopy> copy;
  WithoutGil([&] { return LocalCopy::Start(plan, directory, memory, num_threads, &copy); });
  return copy;
}

// The bytes of a contiguous buffer, held for the life of the object. pybind11's own buffer_info
// would refuse formats that are no C types.
class ContiguousBuffer {
 public:
  explicit ContiguousBuffer(const py::object& exporter) {
    if (PyObject_GetBuffer(exporter.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();
    }
  }
  ~ContiguousBuffer() { PyBuffer_Release(&view_); }
  ContiguousBuffer(const ContiguousBuffer&) = delete;
  ContiguousBuffer& operator=(const ContiguousBuffer&) = delete;

  const void* data() const { return view_.buf; }
  size_t nbytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

uint32_t Crc32cOfBuffer(const py::object& exporter, uint32_t crc) {
  const ContiguousBuffer buffer(exporter);
  ThrowIfError(CheckCpuLevel());
  GilReleased released;
  return Crc32c(crc, buffer.data(), buffer.nbytes());
}

Array<uint64_t> DigestsOf(const Array<uint64_t>& addresses, const Array<uint32_t>& itemsizes,
                          const Array<uint32_t>& ranks, const Array<int64_t>& shapes,
                          const Array<int64_t>& ranges, const Array<int64_t>& strides,
                          int num_threads) {
  const BoxColumns boxes{SpanOf(addresses), SpanOf(itemsizes), SpanOf(ranks),
                         SpanOf(shapes),    SpanOf(ranges),    SpanOf(strides)};
  std::vector<uint64_t> digests;
  WithoutGil([&] { return DigestsOfBoxes(boxes, num_threads, &digests); });
  return Array<uint64_t>(static_cast<py::ssize_t>(digests.size()), digests.data());
}

}  // namespace

void BindMemory(py::module_& module) {
  py::class_<HostMemory>(module, "HostMemory", py::buffer_protocol())
      .def(py::init(&Allocate), py::arg("nbytes"), py::arg("num_threads"),
           py::arg("nodes") = std::vector<int>())
      .def_property_readonly(
          "address",
          [](const HostMemory& memory) { return reinterpret_cast<uintptr_t>(memory.data()); })
      .def_property_readonly("nbytes", &HostMemory::nbytes)
      .def_buffer([](HostMemory& memory) {
        return py::buffer_info(memory.data(), static_cast<py::ssize_t>(memory.nbytes()));
      });
  py::class_<ShardLayout, std::shared_ptr<ShardLayout>>(module, "ShardLayout")
      .def(py::init(&MakeShardLayout), py::arg("extents"), py::arg("itemsize"),
           py::arg("major_to_minor"), py::arg("tiles"))
      .def_property_readonly("nbytes", &ShardLayout::nbytes);
  // Reads the arrays while they are filled, hence noconvert.
  py::class_<LocalCopy>(module, "LocalCopy")
      .def(py::init(&StartCopy), py::arg("plan"), py::arg("directory"),
           py::arg("addresses").noconvert(), py::arg("strides").noconvert(),
           py::arg("sink_addresses").noconvert(), py::arg("num_threads"),
           py::arg("sink_layouts") = ShardLayouts(), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(),
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>())
      .def(
          "set_pinned",
          [](LocalCopy& self, size_t num_shards, std::shared_ptr<const ShardLayout> layout) {
            ThrowIfError(self.SetPinned(num_shards, std::move(layout)));
          },
          py::arg("num_shards"), py::arg("layout") = py::none())
      .def("finish", [](LocalCopy& self) { WithoutGil([&] { return self.Finish(); }); })
      .def("close", &LocalCopy::Close, py::call_guard<GilReleased>());
  module.def("digests", &DigestsOf, py::arg("addresses"), py::arg("itemsizes"), py::arg("ranks"),
             py::arg("shapes"), py::arg("ranges"), py::arg("strides"), py::arg("num_threads"));
  module.def("crc32c", &Crc32cOfBuffer, py::arg("buffer"), py::arg("crc") = 0);
  module.def("crc32c_implementation", &Crc32cImplementation);
  module.def("cpu_level", [] {
    ThrowIfError(CheckCpuLevel());
    return NameOf(UsedCpuLevel());
  });
  module.def("cpu_levels", [] {
    std::vector<std::string_view> names;
    for (const CpuLevel level : CpuLevels()) names.push_back(NameOf(level));
    return names;
  });
}

}  // namespace tsr

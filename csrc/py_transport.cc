#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exporter.h"
#include "fetcher.h"
#include "py_arrays.h"
#include "py_errors.h"
#include "py_gil.h"
#include "py_module.h"

namespace tsr {
namespace {

namespace py = pybind11;

// Joins threads, so it must not hold the GIL, also where the last reference goes.
struct ClosesWithoutGil {
  template <typename T>
  void operator()(T* closed) const {
    GilReleased released;
    delete closed;
  }
};
template <typename T>
using Owned = std::unique_ptr<T, ClosesWithoutGil>;

// No object is made under a lock: that may run the garbage collector, and so any Python code, which
// may ask for the same.
py::dict StatsOf(const RailStatsTable& table) {
  std::map<std::string, const RailStats*> stats_of;
  table.ForEach([&](const std::string& rail, const RailStats& stats) { stats_of[rail] = &stats; });
  py::dict rails;
  for (const auto& [rail, stats] : stats_of) {
    py::dict row;
    row["nbytes"] = stats->nbytes.load();
    row["num_chunks"] = stats->num_chunks.load();
    row["num_retries"] = stats->num_retries.load();
    row["num_lost"] = stats->num_lost.load();
    row["copy_s"] = static_cast<double>(stats->copy_ns.load()) * 1e-9;
    row["wire_s"] = static_cast<double>(stats->wire_ns.load()) * 1e-9;
    row["checksum_s"] = static_cast<double>(stats->checksum_ns.load()) * 1e-9;
    row["busy_s"] = std::chrono::duration<double>(stats->busy.total()).count();
    row["num_streams"] = stats->num_streams.load();
    row["window_nbytes"] = stats->window_nbytes.load();
    row["round_trip_s"] = static_cast<double>(stats->rtt_ns.load()) * 1e-9;
    rails[py::str(rail)] = row;
  }
  return rails;
}

// As trace.ChunkEvent has them, and how many were dropped.
py::tuple TakeEvents(ChunkLog* log) {
  uint64_t num_dropped = 0;
  const ChunkLog::Events taken = log == nullptr ? ChunkLog::Events() : log->Take(&num_dropped);
  const auto seconds = [](Clock::time_point at) {
    return std::chrono::duration<double>(at.time_since_epoch()).count();
  };
  py::list events;
  for (const auto& [track, event] : taken) {
    events.append(py::make_tuple(track->rail, track->number, event.peer, event.version, event.chunk,
                                 event.nbytes, event.num_retries, seconds(event.asked),
                                 seconds(event.ended)));
  }
  return py::make_tuple(events, num_dropped);
}

py::dict LostReasons(Fetcher& fetcher) {
  std::map<uint32_t, std::string> reason_of;
  fetcher.ForEachSource([&](SourceLink& source) {
    std::lock_guard lock(source.mutex);
    if (!source.lost_reason.empty()) reason_of[source.process] = source.lost_reason;
  });
  py::dict reasons;
  for (const auto& [process, reason] : reason_of) reasons[py::int_(process)] = TextOf(reason);
  return reasons;
}

// As transport.Trouble has them.
py::list TroublesOf(Fetcher& fetcher) {
  py::list troubles;
  for (const Trouble& trouble : fetcher.Troubles()) {
    troubles.append(py::make_tuple(trouble.process, trouble.rail, trouble.num_stalled,
                                   trouble.stalled_nbytes, trouble.stalled_s, trouble.num_lost,
                                   TextOf(trouble.lost_reason)));
  }
  return troubles;
}

Owned<Exporter> MakeExporter(const ShardDirectory& directory, int num_workers,
                             uint64_t max_chunk_nbytes, double peer_timeout_s, bool traced) {
  std::unique_ptr<Exporter> exporter;
  ThrowIfError(Exporter::Make(&directory, {num_workers, max_chunk_nbytes, peer_timeout_s, traced},
                              &exporter));
  return Owned<Exporter>(exporter.release());
}

Owned<Fetcher> MakeFetcher(const Plan& plan, int num_workers, int window, double peer_timeout_s,
                           uint64_t full_nbytes, bool traced, bool checksums, bool tells_done) {
  const FetcherOptions options{num_workers, window,    peer_timeout_s, full_nbytes,
                               traced,      checksums, tells_done};
  std::unique_ptr<Fetcher> fetcher;
  ThrowIfError(Fetcher::Make(&plan, options, &fetcher));
  return Owned<Fetcher>(fetcher.release());
}

Array<uint64_t> ShardDigestsOf(const ShardDirectory& directory,
                               const std::vector<DigestRequest>& requests,
                               const Array<uint64_t>& addresses, const Array<int64_t>& strides,
                               const ShardLayouts& layouts, int num_threads) {
  std::vector<uint64_t> digests;
  WithoutGil([&] {
    return DigestsOfShards(requests, directory, SpanOf(addresses), SpanOf(strides), layouts,
                           num_threads, &digests);
  });
  return Array<uint64_t>(static_cast<py::ssize_t>(digests.size()), digests.data());
}

bool Wait(const Fetcher& fetcher, double timeout_s) {
  bool done = false;
  WithoutGil([&] { return fetcher.Wait(Deadline::After(timeout_s), &done); });
  return done;
}

void BindExporter(py::module_& module) {
  py::class_<Exporter, Owned<Exporter>>(module, "Exporter")
      .def(py::init(&MakeExporter), py::arg("directory"), py::arg("num_workers"),
           py::arg("max_chunk_nbytes"), py::arg("peer_timeout_s"), py::arg("traced"),
           py::keep_alive<1, 2>())
      .def(
          "publish",
          [](Exporter& self, uint64_t version, const Array<uint64_t>& addresses,
             const Array<int64_t>& strides, bool coming, const ShardLayouts& layouts) {
            WithoutGil([&] {
              return self.Publish(version, SpanOf(addresses), SpanOf(strides), coming, layouts);
            });
          },
          py::arg("version"), py::arg("addresses"), py::arg("strides"), py::arg("coming"),
          py::arg("layouts"))
      .def(
          "add_leaves",
          [](Exporter& self, uint64_t version, const std::vector<uint32_t>& leaves,
             const Array<uint64_t>& addresses, const Array<int64_t>& strides,
             const ShardLayouts& layouts) {
            WithoutGil([&] {
              return self.AddLeaves(version, leaves, SpanOf(addresses), SpanOf(strides), layouts);
            });
          },
          py::arg("version"), py::arg("leaves"), py::arg("addresses"), py::arg("strides"),
          py::arg("layouts"))
      .def(
          "drop_leaves",
          [](Exporter& self, uint64_t version, const std::vector<uint32_t>& leaves) {
            WithoutGil([&] { return self.DropLeaves(version, leaves); });
          },
          py::arg("version"), py::arg("leaves"))
      .def("withdraw", &Exporter::Withdraw, py::arg("version"), py::call_guard<GilReleased>())
      .def(
          "finished_leaves",
          [](const Exporter& self, uint64_t version, const std::vector<uint64_t>& sinks) {
            GilReleased released;
            return self.FinishedLeaves(version, sinks);
          },
          py::arg("version"), py::arg("sinks"))
      .def(
          "add_connection",
          [](Exporter& self, int fd, uint64_t sink, const std::string& rail, int ring_fd) {
            WithoutGil(
                [&] { return self.AddConnection({UniqueFd(fd), UniqueFd(ring_fd)}, sink, rail); });
          },
          py::arg("fd"), py::arg("sink"), py::arg("rail"), py::arg("ring_fd") = -1)
      .def("stats", [](const Exporter& self) { return StatsOf(self.stats()); })
      .def("take_events", [](Exporter& self) { return TakeEvents(self.log()); })
      .def("close", &Exporter::Close, py::call_guard<GilReleased>());
}

void BindFetcher(py::module_& module) {
  py::class_<DigestRequest>(module, "DigestRequest")
      .def(py::init([](uint32_t leaf, uint32_t box, uint8_t op, std::vector<int64_t> shape,
                       std::vector<int64_t> ranges) {
             return DigestRequest{leaf, box, Op(op), std::move(shape), std::move(ranges)};
           }),
           py::arg("leaf"), py::arg("box"), py::arg("op"), py::arg("shape"), py::arg("ranges"));
  module.def("shard_digests", &ShardDigestsOf, py::arg("directory"), py::arg("requests"),
             py::arg("addresses"), py::arg("strides"), py::arg("layouts"), py::arg("num_threads"));
  py::class_<Fetcher, Owned<Fetcher>>(module, "Fetcher")
      .def(py::init(&MakeFetcher), py::arg("plan"), py::arg("num_workers"), py::arg("window"),
           py::arg("peer_timeout_s"), py::arg("full_nbytes"), py::arg("traced"),
           py::arg("checksums"), py::arg("tells_done"), py::keep_alive<1, 2>())
      .def(
          "add_stream",
          [](Fetcher& self, uint32_t process, int fd, const std::string& rail, int ring_fd) {
            WithoutGil(
                [&] { return self.AddStream(process, {UniqueFd(fd), UniqueFd(ring_fd)}, rail); });
          },
          py::arg("source_process"), py::arg("fd"), py::arg("rail"), py::arg("ring_fd") = -1)
      .def("num_streams", &Fetcher::NumStreams, py::arg("source_process"),
           py::arg("rail") = py::none())
      .def("is_full", &Fetcher::IsFull, py::arg("source_process"), py::arg("rail"))
      .def(
          "begin",
          [](Fetcher& self, uint64_t version, const Array<uint64_t>& sink_addresses,
             const ShardLayouts& sink_layouts) {
            WithoutGil([&] { return self.Begin(version, SpanOf(sink_addresses), sink_layouts); });
          },
          py::arg("version"), py::arg("sink_addresses"), py::arg("sink_layouts"))
      .def(
          "begin_digests",
          [](Fetcher& self, uint64_t version, std::vector<std::vector<DigestRequest>> requests) {
            WithoutGil([&] { return self.BeginDigests(version, std::move(requests)); });
          },
          py::arg("version"), py::arg("requests"))
      .def("digests", &Fetcher::Digests)
      .def("wait", &Wait, py::arg("timeout_s"))
      .def(
          "take_finished",
          [](Fetcher& self, double timeout_s) {
            GilReleased released;
            return self.TakeFinished(Deadline::After(timeout_s));
          },
          py::arg("timeout_s"))
      .def("progress_nbytes", &Fetcher::ProgressNbytes)
      .def("fetch_seconds", &Fetcher::fetch_seconds)
      .def("lost_reasons", &LostReasons)
      .def("troubles", &TroublesOf)
      .def("end", &Fetcher::End, py::call_guard<GilReleased>())
      .def("stats", [](const Fetcher& self) { return StatsOf(self.stats()); })
      .def("take_events", [](Fetcher& self) { return TakeEvents(self.log()); })
      .def("close", &Fetcher::Close, py::call_guard<GilReleased>());
}

}  // namespace

void BindTransport(py::module_& module) {
  BindExporter(module);
  BindFetcher(module);
}

}  // namespace tsr

#include "sink_tables.h"

namespace tsr {

void SinkTables::AddStream(uint64_t sink) {
  std::lock_guard lock(mutex_);
  ++sinks_[sink].num_streams;
}

void SinkTables::RemoveStream(uint64_t sink) {
  std::lock_guard lock(mutex_);
  const auto it = sinks_.find(sink);
  if (--it->second.num_streams == 0) sinks_.erase(it);
}

void SinkTables::Set(uint64_t sink, uint32_t id, std::shared_ptr<const ChunkTable> table) {
  std::lock_guard lock(mutex_);
  Sink& known = sinks_[sink];
  if (known.table && *known.table == *table) return;
  known = Sink{known.num_streams, id, std::move(table), {}};
}

std::shared_ptr<const ChunkTable> SinkTables::Find(uint64_t sink, uint32_t id) const {
  std::lock_guard lock(mutex_);
  const auto it = sinks_.find(sink);
  return it == sinks_.end() || it->second.id != id ? nullptr : it->second.table;
}

void SinkTables::MarkDone(uint64_t sink, uint32_t id, uint64_t version, uint64_t chunk) {
  std::lock_guard lock(mutex_);
  const auto it = sinks_.find(sink);
  if (it == sinks_.end() || !it->second.table || it->second.id != id) return;
  const ChunkTable& table = *it->second.table;
  if (chunk >= table.chunks.size()) return;
  Progress& progress = it->second.versions[version];
  if (progress.done.empty()) {
    progress.done.resize(table.chunks.size());
    progress.num_left = table.chunks_per_leaf;
  }
  if (progress.done[chunk]) return;
  progress.done[chunk] = true;
  for (const uint32_t leaf : table.leaves_of(table.chunks[chunk])) --progress.num_left[leaf];
}

void SinkTables::ForgetVersion(uint64_t version) {
  std::lock_guard lock(mutex_);
  for (auto& [id, sink] : sinks_) sink.versions.erase(version);
}

std::vector<uint32_t> SinkTables::FinishedLeaves(uint64_t version, std::span<const uint64_t> sinks,
                                                 std::vector<uint32_t> leaves) const {
  std::lock_guard lock(mutex_);
  for (const uint64_t id : sinks) {
    const auto sink = sinks_.find(id);
    if (sink == sinks_.end() || !sink->second.table) return {};
    const auto progress = sink->second.versions.find(version);
    const std::vector<uint32_t>& num_left = progress == sink->second.versions.end()
                                                ? sink->second.table->chunks_per_leaf
                                                : progress->second.num_left;
    std::erase_if(leaves, [&](uint32_t leaf) { return num_left[leaf] > 0; });
  }
  return leaves;
}

}  // namespace tsr

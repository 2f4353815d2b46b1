// Chunk tables: one that is taken in can be gathered within the memory of the shards it names.
#include <memory>

#include "chunk_gather.h"
#include "chunk_table.h"
#include "fuzz_input.h"
#include "published.h"

namespace tsr {
namespace {

constexpr uint64_t kMaxChunkNbytes = 1 << 16;

// Two leaves: rows 4 to 8 of a float32 (8, 4), and a scalar of 2 bytes. Allocations of their own,
// so that the sanitizer sees a byte beyond them.
struct World {
  World() {
    const Status made =
        ShardDirectory::Make({{9, 0, 2, FloatKind::kNone, 0, 0}, {7, 1, 4, FloatKind::kF32, 2, 0}},
                             {4, 8, 0, 4}, 10, &directory);
    Check(made.ok(), "the directory is right");
    scalar = std::make_unique<uint8_t[]>(2);
    rows = std::make_unique<uint8_t[]>(4 * 4 * 4);
    versions = std::make_unique<PublishedVersions>(&directory);
    const uint64_t addresses[] = {reinterpret_cast<uint64_t>(scalar.get()),
                                  reinterpret_cast<uint64_t>(rows.get())};
    const int64_t strides[] = {16, 4};
    Check(versions->Publish(1, addresses, strides).ok(), "the version is right");
  }

  ShardDirectory directory;
  std::unique_ptr<uint8_t[]> scalar;
  std::unique_ptr<uint8_t[]> rows;
  std::unique_ptr<PublishedVersions> versions;
};

void Gather(const World& world, const std::shared_ptr<const ChunkTable>& table) {
  IovecBlock block;
  for (size_t i = 0; i < table->chunks.size(); ++i) {
    std::shared_ptr<const PublishedVersion> published;
    Check(world.versions->Find(1, table->leaves_of(table->chunks[i]), &published).ok(),
          "a table names leaves that are here");
    ChunkGather gather(world.directory, table, published, i);
    uint64_t nbytes = 0;
    uint32_t sum = 0;
    while (!gather.done()) {
      block.Clear();
      gather.Fill(&block);
      for (const iovec& iov : block.iov()) {
        nbytes += iov.iov_len;
        for (size_t n = 0; n < iov.iov_len; ++n) sum += static_cast<uint8_t*>(iov.iov_base)[n];
      }
    }
    Check(nbytes == table->chunks[i].nbytes, "a chunk has the bytes that its table says");
    Check(sum == 0, "a chunk has the bytes of its shards");
  }
}

}  // namespace
}  // namespace tsr

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  using namespace tsr;
  static const World world;
  const auto table = std::make_shared<ChunkTable>();
  const Status status =
      DecodeChunkTable({data, nbytes}, world.directory, kMaxChunkNbytes, table.get());
  if (status.ok()) Gather(world, table);
  return 0;
}

// Moves a box of elements between the memory of two shards, of which one or both lie in tiles.
#pragma once

#include <array>
#include <cstdint>

#include "box.h"
#include "cast.h"
#include "shard_layout.h"
#include "slab_cursor.h"
#include "stores.h"

namespace tsr {

// Memory of a whole shard: the box that it holds, its first byte, how its elements lie. Owns none.
struct TiledSource {
  BoxView box;
  const uint8_t* base;
  const ShardLayout* layout;
};
struct TiledSink {
  BoxView box;
  uint8_t* base;
  const ShardLayout* layout;
};

// Copies or casts the elements of `box`, not empty, that both sides hold. `itemsize` is that of the
// source; `stores` as for CopyRegion(). Sides don't overlap in memory. In one pass, in the order of
// the source's memory; tiles that both sides cut alike move as they are. Where tiles of one side
// begin within those of the other, elements go through a buffer that stays in cache.
void CopyTiled(Op op, int64_t itemsize, BoxView box, const TiledSource& from, const TiledSink& to,
               Stores stores);

// Moves `box` part by part, in row-major order, into a buffer that stays in cache, and calls
// `visit(part, data)` for each: dense rows there, elements as `op` makes them. Else as CopyTiled().
template <typename Visit>
void ForEachDensePart(Op op, int64_t itemsize, BoxView box, const TiledSource& from,
                      const Visit& visit) {
  constexpr int64_t kBufferNbytes = 64 << 10;
  alignas(64) std::array<uint8_t, kBufferNbytes> buffer;
  const int64_t to_itemsize = SinkItemsize(op, itemsize);
  SlabCursor parts(box, to_itemsize, kBufferNbytes);
  while (!parts.done()) {
    parts.Take(kBufferNbytes);
    const ShardLayout dense = ShardLayout::RowMajor(parts.slab(), to_itemsize);
    CopyTiled(op, itemsize, parts.slab(), from, {parts.slab(), buffer.data(), &dense},
              Stores::kCached);
    visit(parts.slab(), buffer.data());
  }
}

}  // namespace tsr

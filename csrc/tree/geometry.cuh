// The candidates of a query: how many there are follows from the query's position and the shape of the tree alone.
//
// A *parent* stands for 16 sibling nodes, its children, which are one KV block of the packed tree (tree/pack). In the
// entry layer of a query the parents are 0, 1, 2, ...; in selected layers they are the nodes that the query selected in
// the layer above, ascending. In both cases candidate 16 j + c is child c of parent j, so that one kernel can serve
// every layer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::tree {

inline constexpr int kSiblings = 16;     // compression_rate of the kernels
inline constexpr int kLog2Siblings = 4;
inline constexpr int kMaxLayers = 9;      // of a tree: T < 2^31, and the top has 16 * top_k >= 256 nodes
inline constexpr int kMinTopK = 16;
inline constexpr int kMaxTopK = 512;
inline constexpr int kTileBlocks = 4;    // KV blocks that lie together where queries read all of them
inline constexpr int kQueryTile = 12;  // consecutive queries of one (b, h_kv) that share gathered KV blocks

struct Candidates {
  int n;        // candidates of the layer
  int parents;  // ceil(n / 16)
};

// The candidates in `layer` of the query at position t, in a tree of `layers` layers.
__host__ __device__ inline Candidates candidates(std::int64_t t, int layer, int layers, int top_k) {
  int n = static_cast<int>(t >> (kLog2Siblings * (layers - 1))) + 1;
  for (int l = layers - 2; l >= layer; --l) {
    int const parents = n < top_k ? n : top_k;
    n = (parents - 1) * kSiblings + static_cast<int>((t >> (kLog2Siblings * l)) & (kSiblings - 1)) + 1;
  }
  return {n, (n + kSiblings - 1) >> kLog2Siblings};
}

// The entry layer of the query at position t: the highest layer of whose candidates the query does not select all, or
// the bottom. Above it nothing is left out. So its candidates are the nodes 0, 1, 2, ... and their positions are their
// indices, as if it were the top of the tree, and how many layers lie above does not matter.
__host__ __device__ inline int entry_layer(std::int64_t t, int top_k) {
  int layer = 0;
  while (t >> (kLog2Siblings * (layer + 1)) >= top_k) ++layer;
  return layer;
}

// Whether `layer` is the entry layer of the query, and whether it is a selected layer, which lies below the entry
// layer.
__host__ __device__ inline bool is_entry_layer(std::int64_t t, int layer, int top_k) {
  std::int64_t const node = t >> (kLog2Siblings * layer);
  return (layer == 0 || node >= top_k) && node >> kLog2Siblings < top_k;
}
__host__ __device__ inline bool is_selected_layer(std::int64_t t, int layer, int top_k) {
  return t >> (kLog2Siblings * (layer + 1)) >= top_k;
}

// Whether a selected layer is half-selected for the query: there are fewer parents than `half_selected_parents` up to
// the query's own, of which it selected top_k.
__host__ __device__ inline bool is_half_selected(std::int64_t t, int layer, int half_selected_parents) {
  return t >> (kLog2Siblings * (layer + 1)) < half_selected_parents;
}

// How many candidates the query has in its entry layer: all nodes up to the rightmost.
__host__ __device__ inline int candidates_in_entry(std::int64_t t, int layer) {
  return static_cast<int>(t >> (kLog2Siblings * layer)) + 1;
}

// How many candidates the query has in a selected layer: the children of top_k parents up to the rightmost.
__host__ __device__ inline int candidates_in_selected(std::int64_t t, int layer, int top_k) {
  return (top_k - 1) * kSiblings + static_cast<int>((t >> (kLog2Siblings * layer)) & (kSiblings - 1)) + 1;
}

// ---- sequences of different lengths ------------------------------------------------------------------------------
//
// A packed or ragged call has N sequences whose lengths only the device knows (tree/sequences.h). In memory of the call,
// the nodes of layer l of sequence i begin at row (before >> 4 l) + min(i, before >> s), where `before` is the number of
// tokens before the sequence, and likewise its KV blocks. A sequence of 2^s tokens or more, 2^s = top_k * 16^l, has that
// room for itself; a shorter one has no query whose entry layer is l or above, and no room there. So all have
// (total >> 4 l) + min(N, total >> s) rows together, which the total bounds above the bottom, and no sums over lengths are
// needed. A pack of so many sequences that the bottom has no room for all of them is computed in parts
// (host/tree_args.h): `i` and `before` are then counted from the first sequence of the part.

// What a call knows of one sequence.
struct Sequence {
  std::int32_t key;     // tokens before it, in the pack or in the rows of the batch
  std::int32_t before;  // the same, of its part of the pack: where its nodes begin
  std::int32_t keys;
  std::int32_t row;     // of its first query that has a key: in the pack, or in its row of the batch
  std::int32_t count;   // queries that have a key
  std::int32_t t;       // position of the first of them
  std::int32_t tile;    // the first of its query tiles
};

// The sequences of a part of a pack, and what it writes of rows that no sequence has. A call of one part has all of them.
struct PackPart {
  std::int32_t next;     // the first sequence behind the part
  std::int32_t q_begin;  // rows of q
  std::int32_t q_end;
  std::int32_t k_begin;  // tokens
  std::int32_t k_end;
};

// What a query tile of such a call is: up to kQueryTile queries of one sequence. A tile without queries is all zeros.
struct alignas(16) TileEntry {
  std::int32_t t;               // position of the first query
  std::int32_t row;             // its row, as Sequence::row
  std::int32_t before;          // of the sequence
  std::int32_t sequence_count;  // 16 * sequence + queries

  __host__ __device__ std::int32_t sequence() const { return sequence_count >> 4; }
  __host__ __device__ std::int32_t count() const { return sequence_count & 15; }
};

// The logarithm of the tokens from which on a sequence has room in a layer: any where queries may enter the tree at the
// bottom, else as many as bring a query that enters at this layer or above. Of KV blocks that only queries of selected
// layers read, those of the layer above. top_k is a power of two.
__host__ __device__ inline int log2_room_from(int layer, int top_k) {
#ifdef __CUDA_ARCH__
  int const log2_top_k = 31 - __clz(top_k);
#else
  int log2_top_k = 0;
  while (top_k >> (log2_top_k + 1) != 0) ++log2_top_k;
#endif
  return layer == 0 ? 0 : kLog2Siblings * layer + log2_top_k;
}

// How many of the `sequence` sequences before one have such room, at most; the same of all N with the total as `before`.
__host__ __device__ inline std::int64_t sequences_with_room(std::int64_t before, std::int64_t sequence, int log2_from) {
  return sequence < before >> log2_from ? sequence : before >> log2_from;
}
__host__ __device__ inline bool has_room(Sequence const& sequence, int log2_from) { return sequence.keys >> log2_from != 0; }

// Where the nodes of a layer of a sequence begin, and its KV blocks, of which `together` lie in a tile. Sequences have
// room from 2^log2_from tokens on.
__host__ __device__ inline std::int64_t sequence_nodes(std::int64_t before, std::int64_t sequence, int layer, int log2_from) {
  return (before >> (kLog2Siblings * layer)) + sequences_with_room(before, sequence, log2_from);
}
__host__ __device__ inline std::int64_t sequence_blocks(std::int64_t before, std::int64_t sequence, int layer, int together,
                                                        int log2_from) {
  int const shift = kLog2Siblings * (layer + 1) + (together == kTileBlocks ? 2 : 0);
  return ((before >> shift) + sequences_with_room(before, sequence, log2_from)) * together;
}
static_assert(kTileBlocks == 4);

// The last of N >= 1 sequences that begins at or before `place`, where sequence i begins at begin(i), ascending. The
// first one where none does.
template <class Begin>
__device__ __forceinline__ std::int32_t sequence_at(std::int32_t N, std::int64_t place, Begin const& begin) {
  std::int32_t low = 0;
  std::int32_t high = N;
  while (high - low > 1) {
    std::int32_t const middle = low + (high - low) / 2;
    (begin(middle) <= place ? low : high) = middle;
  }
  return low;
}

// The tiles of kQueryTile queries that a launch works on: tile i of the launch is tile begin + i of the call. A call
// whose output fits a GPU has fewer than 2^32 of them.
struct QueryTiles {
  std::uint32_t begin;
  std::uint32_t per_head;  // tiles of one (b, h_kv): ceil(T_q / kQueryTile); with `entries`: of one h_kv
  std::int64_t T_q;        // rows of q in a row of the batch; 0 in a pack
  std::int64_t q_start;
  int H_kv = 0;            // with `entries`
  TileEntry const* entries = nullptr;  // [per_head], or null: sequences of one length

  __device__ __forceinline__ TileEntry entry(int i) const {
    int4 const x = __ldg(reinterpret_cast<int4 const*>(entries) + (begin + i) % per_head);
    return {x.x, x.y, x.z, x.w};
  }
};

struct QueryTile {
  std::int32_t bh;     // b * H_kv + h_kv, where b is a sequence
  std::int32_t first;  // the first query of the tile, a row of q
  std::int32_t count;  // how many queries it has; in a batch the tile may be larger
  std::int64_t t;      // position of the first query

  __device__ QueryTile(QueryTiles const& tiles, int i) {
    bh = static_cast<std::int32_t>((tiles.begin + i) / tiles.per_head);
    if (tiles.entries == nullptr) {
      first = static_cast<std::int32_t>((tiles.begin + i) % tiles.per_head) * kQueryTile;
      count = static_cast<std::int32_t>(tiles.T_q) - first;
      t = tiles.q_start + first;
    } else {
      TileEntry const entry = tiles.entry(i);
      bh += entry.sequence() * tiles.H_kv;
      first = entry.row;
      count = entry.count();
      t = entry.t;
    }
  }

  // Whether query i of the tile exists.
  __device__ __forceinline__ bool has(int i) const { return i < count; }
};

// Query tiles from .. to - 1 of a launch in sets of a few neighbours of one head. Sets are counted from the first tile
// on, and again from the first tile of every head, so that the last set of a head may have fewer tiles.
struct TileSets {
  std::int32_t from;
  std::int32_t to;
  std::int32_t of_first_head;  // how many of them are of the same head as the first
  std::int32_t size;           // tiles of a set, a power of two; 0 where there is no set

  __host__ __device__ static TileSets of(QueryTiles const& tiles, std::int32_t from, std::int32_t count,
                                            std::int32_t size) {
    // The tiles of a sequence come in whole sets, so that its first tile begins one.
    if (tiles.entries != nullptr) return {from, from + count, count, size};
    std::int32_t const in_head = static_cast<std::int32_t>((tiles.begin + static_cast<std::uint32_t>(from)) % tiles.per_head);
    std::int32_t const left = static_cast<std::int32_t>(tiles.per_head) - in_head;
    return {from, from + count, count < left ? count : left, size};
  }

  // The same sets, of a size that the compiler knows.
  __device__ TileSets of_size(int known) const { return {from, to, of_first_head, known}; }

  __host__ __device__ std::int32_t sets_of(std::int32_t tiles) const { return (tiles + size - 1) / size; }

  __host__ __device__ std::int32_t count(QueryTiles const& tiles) const {
    std::int32_t const per_head = static_cast<std::int32_t>(tiles.per_head);
    std::int32_t const others = to - from - of_first_head;
    return sets_of(of_first_head) + others / per_head * sets_of(per_head) + sets_of(others % per_head);
  }

  // The set that a tile is in, and the place of the tile there.
  __host__ __device__ std::int32_t set_of(QueryTiles const& tiles, std::int32_t tile) const {
    std::int32_t const per_head = static_cast<std::int32_t>(tiles.per_head);
    std::int32_t const others = tile - from - of_first_head;
    if (others < 0) return (tile - from) / size;
    return sets_of(of_first_head) + others / per_head * sets_of(per_head) + others % per_head / size;
  }
  __host__ __device__ std::int32_t place_of(QueryTiles const& tiles, std::int32_t tile) const {
    std::int32_t const others = tile - from - of_first_head;
    return (others < 0 ? tile - from : others % static_cast<std::int32_t>(tiles.per_head)) & (size - 1);
  }

  // Tile `which` of a set; -1 where the set has fewer.
  __device__ std::int32_t tile(QueryTiles const& tiles, std::int32_t set, int which) const {
    std::int32_t const per_head = static_cast<std::int32_t>(tiles.per_head);
    std::int32_t first = from;
    std::int32_t count = of_first_head;
    std::int32_t const before = sets_of(count);
    if (set >= before) {
      std::int32_t const sets = sets_of(per_head);
      std::int32_t const heads = (set - before) / sets;
      set -= before + heads * sets;
      first += count + heads * per_head;
      count = min(per_head, to - first);
    }
    return size * set + which < count ? first + size * set + which : -1;
  }
};

}  // namespace htree_cuda::tree

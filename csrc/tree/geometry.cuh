// Who the candidates of a query are: counts follow from its position and the shape of the tree alone.
//
// A *parent* stands for 16 sibling nodes, its children, which lie in one block of the packed tree (tree/pack). In
// the first layer of a query the parents are 0, 1, 2, ..., below they are the nodes selected in the layer above,
// ascending; in both cases candidate 16 j + c is child c of parent j, so one kernel serves every layer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::tree {

inline constexpr int kSiblings = 16;     // compression_rate of the kernels
inline constexpr int kLog2Siblings = 4;
inline constexpr int kMaxLayers = 9;      // of a tree: T < 2^31, and the top has 16 * top_k >= 256 nodes
inline constexpr int kMinTopK = 16;
inline constexpr int kMaxTopK = 512;
inline constexpr int kTileParents = 4;    // parents whose keys lie together where queries walk all of them
inline constexpr int kBlockQueries = 12;  // consecutive queries of one (b, h_kv) that share gathered parents

struct Candidates {
  int n;        // candidates of the layer
  int parents;  // ceil(n / 16)
};

// Of `layer` for the query at position t, in a tree of `layers` layers.
__host__ __device__ inline Candidates candidates(std::int64_t t, int layer, int layers, int top_k) {
  int n = static_cast<int>(t >> (kLog2Siblings * (layers - 1))) + 1;
  for (int l = layers - 2; l >= layer; --l) {
    int const parents = n < top_k ? n : top_k;
    n = (parents - 1) * kSiblings + static_cast<int>((t >> (kLog2Siblings * l)) & (kSiblings - 1)) + 1;
  }
  return {n, (n + kSiblings - 1) >> kLog2Siblings};
}

// The first layer, from above, of whose candidates the query at position t does not select all, or the bottom. Above it
// nothing is left out, so that its candidates are the nodes 0, 1, 2, ... and their positions their indices, as if it were
// the top of the tree; how many layers lie above does not matter.
__host__ __device__ inline int entry_layer(std::int64_t t, int top_k) {
  int layer = 0;
  while (t >> (kLog2Siblings * (layer + 1)) >= top_k) ++layer;
  return layer;
}

// Whether `layer` is that layer, and whether it lies below it.
__host__ __device__ inline bool is_entry_layer(std::int64_t t, int layer, int top_k) {
  std::int64_t const node = t >> (kLog2Siblings * layer);
  return (layer == 0 || node >= top_k) && node >> kLog2Siblings < top_k;
}
__host__ __device__ inline bool is_selected_layer(std::int64_t t, int layer, int top_k) {
  return t >> (kLog2Siblings * (layer + 1)) >= top_k;
}

// Below its first layer, whether there are fewer parents than `half_selected_parents` up to the query's own. It selected top_k of them.
__host__ __device__ inline bool is_half_selected(std::int64_t t, int layer, int half_selected_parents) {
  return t >> (kLog2Siblings * (layer + 1)) < half_selected_parents;
}

// How many candidates there are in the first layer: all nodes up to the rightmost.
__host__ __device__ inline int candidates_in_entry(std::int64_t t, int layer) {
  return static_cast<int>(t >> (kLog2Siblings * layer)) + 1;
}

// How many there are in a layer below it: the children of top_k parents up to the rightmost.
__host__ __device__ inline int candidates_in_selected(std::int64_t t, int layer, int top_k) {
  return (top_k - 1) * kSiblings + static_cast<int>((t >> (kLog2Siblings * layer)) & (kSiblings - 1)) + 1;
}

// The blocks of kBlockQueries queries that a launch works on: block i of the launch is block begin + i of the call. A call
// whose output fits a GPU has fewer than 2^32.
struct QueryBlocks {
  std::uint32_t begin;
  std::uint32_t per_head;  // blocks of one (b, h_kv): ceil(T_q / kBlockQueries)
  std::int64_t T_q;
  std::int64_t q_start;
};

struct QueryBlock {
  std::int64_t bh;     // b * H_kv + h_kv
  std::int64_t first;  // its first query

  __device__ QueryBlock(QueryBlocks const& blocks, int i)
      : bh((blocks.begin + i) / blocks.per_head),
        first(static_cast<std::int64_t>((blocks.begin + i) % blocks.per_head) * kBlockQueries) {}
};

// Blocks from .. to - 1 of a launch by groups of a few neighbours of one head: from the first on, and then from the first of
// every head; the last group of a head may have fewer.
struct BlockGroups {
  std::int32_t from;
  std::int32_t to;
  std::int32_t of_first_head;  // so many of them are of the same head as the first
  std::int32_t size;           // of a group, a power of two; 0: no groups, no blocks

  __host__ __device__ static BlockGroups of(QueryBlocks const& blocks, std::int32_t from, std::int32_t count,
                                            std::int32_t size) {
    std::int32_t const in_head = static_cast<std::int32_t>((blocks.begin + static_cast<std::uint32_t>(from)) % blocks.per_head);
    std::int32_t const left = static_cast<std::int32_t>(blocks.per_head) - in_head;
    return {from, from + count, count < left ? count : left, size};
  }

  // The same, where the compiler knows their size.
  __device__ BlockGroups of_size(int known) const { return {from, to, of_first_head, known}; }

  __host__ __device__ std::int32_t of_blocks(std::int32_t blocks) const { return (blocks + size - 1) / size; }

  __host__ __device__ std::int32_t count(QueryBlocks const& blocks) const {
    std::int32_t const per_head = static_cast<std::int32_t>(blocks.per_head);
    std::int32_t const others = to - from - of_first_head;
    return of_blocks(of_first_head) + others / per_head * of_blocks(per_head) + of_blocks(others % per_head);
  }

  // The group that a block is in, and which one it is there.
  __host__ __device__ std::int32_t group_of(QueryBlocks const& blocks, std::int32_t block) const {
    std::int32_t const per_head = static_cast<std::int32_t>(blocks.per_head);
    std::int32_t const others = block - from - of_first_head;
    if (others < 0) return (block - from) / size;
    return of_blocks(of_first_head) + others / per_head * of_blocks(per_head) + others % per_head / size;
  }
  __host__ __device__ std::int32_t place_of(QueryBlocks const& blocks, std::int32_t block) const {
    std::int32_t const others = block - from - of_first_head;
    return (others < 0 ? block - from : others % static_cast<std::int32_t>(blocks.per_head)) & (size - 1);
  }

  // The blocks of a group; -1 where there is none.
  __device__ std::int32_t block(QueryBlocks const& blocks, std::int32_t group, int which) const {
    std::int32_t const per_head = static_cast<std::int32_t>(blocks.per_head);
    std::int32_t first = from;
    std::int32_t count = of_first_head;
    std::int32_t const before = of_blocks(count);
    if (group >= before) {
      std::int32_t const groups = of_blocks(per_head);
      std::int32_t const heads = (group - before) / groups;
      group -= before + heads * groups;
      first += count + heads * per_head;
      count = min(per_head, to - first);
    }
    return size * group + which < count ? first + size * group + which : -1;
  }
};

}  // namespace htree_cuda::tree

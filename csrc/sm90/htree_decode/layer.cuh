// One layer of a query's descent: its candidates in blocks of 16, and those of a CTA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/ptx.cuh"
#include "tree/cache_view.cuh"
#include "tree/geometry.cuh"
#include "args.cuh"
#include "split.cuh"

namespace htree_cuda::sm90::htree_decode {

// Whom a cluster works for. It lies in shared memory, where it takes no registers.
// The CTA's rank in its cluster.
__device__ __forceinline__ int cta_index() { return static_cast<int>(ptx::cluster_rank()); }

struct Unit {
  int b;
  int j;  // query of the call
  int h;  // KV head
  std::int64_t t;  // the query's position

  // The first query head, of the outputs.
  __device__ __forceinline__ std::int64_t first_head(Args const& args) const {
    return ((static_cast<std::int64_t>(b) * args.T_q + j) * args.cache.H_kv + h) * args.G;
  }
  // The list of a layer's nodes, of the caller's.
  __device__ __forceinline__ std::int32_t* selection(Args const& args, int layer) const {
    return args.selection +
           (((static_cast<std::int64_t>(layer - 1) * args.B + b) * args.T_q + j) * args.cache.H_kv + h) * args.top_k;
  }
};

// It lies in shared memory, too: its fields are read where they are needed.
struct Layer {
  tree::LayerRows rows;
  std::int32_t const* parents;  // of the CTA's blocks, in shared memory; null: the entry layer
  int index;                    // 0: the tokens
  int n;                        // candidates
  int blocks;                   // ceil(n / 16)
  int readable;                 // of the last block: candidates whose rows exist and count
  int first;                    // blocks first .. last - 1 are the CTA's
  int last;
  int middle;                   // the first block of its second part

  Layer() = default;

  // `selecting`: every layer but the tokens'. Its rightmost candidate may be incomplete, is expanded whatever its
  // importance, and is not read.
  template <class Cfg>
  __device__ Layer(tree::CacheView const& cache, Unit const& unit, int layer, int top_k,
                   std::int32_t const* parents_of_cta, Split<Cfg> const& split, int cta)
      : rows(cache, unit.b, unit.h, layer), parents(nullptr), index(layer) {
    std::int64_t const t = unit.t;
    bool const entry = layer == tree::entry_layer(t, top_k);
    if (!entry) parents = parents_of_cta;
    n = entry ? tree::candidates_in_entry(t, layer) : tree::candidates_in_selected(t, layer, top_k);
    blocks = (n + kSiblings - 1) / kSiblings;
    readable = n - kSiblings * (blocks - 1) - (layer > 0 ? 1 : 0);
    int const part = cta * Cfg::kPartsOfCta;
    first = part * blocks >> split.log2_parts;
    last = (part + Cfg::kPartsOfCta) * blocks >> split.log2_parts;
    middle = Cfg::kPartsOfCta == 1 ? last : (part + 1) * blocks >> split.log2_parts;
  }

  // Blocks of the CTA's part `i` (0 or 1): first_of(i) .. last_of(i) - 1.
  template <class Cfg>
  __device__ __forceinline__ int first_of(int i) const {
    return Cfg::kPartsOfCta == 1 || i == 0 ? first : middle;
  }
  template <class Cfg>
  __device__ __forceinline__ int last_of(int i) const {
    return Cfg::kPartsOfCta == 1 || i > 0 ? last : middle;
  }

  __device__ __forceinline__ int first_node(int block) const {
    return (parents == nullptr ? block : parents[block - first]) * kSiblings;
  }
  // The row of a block's first node, counted from row 0 of the cache's tensor; 0 where siblings are not always neighbours.
  __device__ __forceinline__ std::int64_t first_row(tree::CacheView const& cache, int block) const {
    return rows.whole_blocks() ? rows.row(cache, first_node(block)) : 0;
  }

  // Candidates of the CTA that have an importance: the rightmost of all has none.
  __device__ __forceinline__ int candidates_of_cta() const { return min(kSiblings * last, n - 1) - kSiblings * first; }

  // Candidates of a block that have an importance.
  __device__ __forceinline__ int importances_of(int block) const { return min(kSiblings, n - 1 - kSiblings * block); }

  // How many candidates of a block can be read.
  __device__ __forceinline__ int readable_of(int block) const { return block == blocks - 1 ? readable : kSiblings; }
};

// Addresses of the 16 rows of a block, kDim elements of 16 bits each.
template <int kDim>
struct BlockAddress {
  char const* first;  // of the block, where siblings are neighbours; else of row 0
  CacheView const& cache;
  Layer const& layer;
  int block;

  // Addresses of some candidates of the block. One branch for all of them says whether siblings are neighbours.
  template <int kRows>
  __device__ __forceinline__ void rows(int const (&candidates)[kRows], char const* (&address)[kRows]) const {
    if (layer.rows.whole_blocks()) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) address[i] = first + candidates[i] * (2 * kDim);
    } else {
      int const node = layer.first_node(block);
#pragma unroll
      for (int i = 0; i < kRows; ++i) address[i] = first + layer.rows.row(cache, node + candidates[i]) * (2 * kDim);
    }
  }

  // The first `count` rows to L2, a line of 128 bytes a lane.
  __device__ __forceinline__ void prefetch(int count) const {
    constexpr int kLinesOfRow = 2 * kDim / 128;
    int const lane = threadIdx.x % 32;
    int const candidate[1] = {lane / kLinesOfRow};
    char const* address[1];
    rows(candidate, address);
    if (lane < count * kLinesOfRow) ptx::prefetch_l2(address[0] + lane % kLinesOfRow * 128);
  }
};

}  // namespace htree_cuda::sm90::htree_decode

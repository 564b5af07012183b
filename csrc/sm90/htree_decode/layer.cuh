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

// The CTA's rank in its cluster, and the lane's number. Both are read where they are used: registers are scarce.
__device__ __forceinline__ int cta_index() { return static_cast<int>(ptx::cluster_rank()); }
__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(ptx::lane_index()); }
// The thread's number in the CTA, likewise.
__device__ __forceinline__ int thread_of_cta(int warp) { return 32 * warp + lane_of_warp(); }

// Whom a cluster works for. It lies in shared memory, where it takes no registers.

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
  int first_part;               // of all parts, the CTA's first
  int fine;                     // where the first round of a selection counts closely: softmax.cuh, Range
  int rows_begin;               // of the CTA's blocks in Smem::rows, 16 rows a block: 4 elements

  Layer() = default;

  // `selecting`: every layer but the tokens'. Its rightmost candidate may be incomplete, is expanded whatever its
  // importance, and is not read.
  __device__ Layer(tree::CacheView const& cache, Unit const& unit, int layer, int top_k,
                   std::int32_t const* parents_of_cta, int rows_begin_, Split const& split, int cta)
      : rows(cache, unit.b, unit.h, layer), parents(nullptr), index(layer), rows_begin(rows_begin_) {
    std::int64_t const t = unit.t;
    bool const entry = layer == tree::entry_layer(t, top_k);
    if (!entry) parents = parents_of_cta;
    n = entry ? tree::candidates_in_entry(t, layer) : tree::candidates_in_selected(t, layer, top_k);
    blocks = (n + kSiblings - 1) / kSiblings;
    readable = n - kSiblings * (blocks - 1) - (layer > 0 ? 1 : 0);
    first_part = cta << split.log2_parts_of_cta;
    first = first_of(split, 0);
    last = first_of(split, split.parts_of_cta());
  }

  // Blocks of the CTA's part `i`: first_of(split, i) .. first_of(split, i + 1) - 1.
  __device__ __forceinline__ int first_of(Split const& split, int i) const {
    return (first_part + i) * blocks >> split.log2_parts;
  }

  __device__ __forceinline__ int first_node(int block) const {
    return (parents == nullptr ? block : parents[block - first]) * kSiblings;
  }
  // Candidates of the CTA that have an importance: the rightmost of all has none.
  __device__ __forceinline__ int candidates_of_cta() const { return min(kSiblings * last, n - 1) - kSiblings * first; }

  // Candidates of a block that have an importance.
  __device__ __forceinline__ int importances_of(int block) const { return min(kSiblings, n - 1 - kSiblings * block); }

  // How many candidates of a block can be read.
  __device__ __forceinline__ int readable_of(int block) const { return block == blocks - 1 ? readable : kSiblings; }
};

}  // namespace htree_cuda::sm90::htree_decode

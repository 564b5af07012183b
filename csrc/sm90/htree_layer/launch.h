#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"
#include "config.cuh"

namespace htree_cuda::layer {

// Blocks begin .. begin + count - 1 of a launch, some queries of which walk a layer in one of the ways; none: count 0.
struct Some {
  int begin;
  int count;
};

struct Blocks {
  Some below;
  Some dense;
  Some first;
};

// Whether a CTA of Walk::kFirst has two blocks of queries: with few heads two queries share a warp, but where one has all
// warps of its block.
inline bool walks_by_pairs(std::int64_t G, std::int64_t T_q) { return G <= kPairHeads && T_q > 1; }

// And whether those of a layer do that are below their first, where two queries share what a warp reads of a parent.
inline bool walks_by_child_rows(std::int64_t G, std::int64_t T_q, DType dtype, int layer) {
  return walks_by_pairs(G, T_q) && dtype == DType::kBFloat16 && layer == 0;
}

// One pass over the layer of `args`, for all of them.
void run_pass(Pass pass, Args const& args, Blocks const& blocks, DType dtype, int K, int V, cudaStream_t stream);

}  // namespace htree_cuda::layer

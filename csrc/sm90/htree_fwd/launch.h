#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "traits.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Blocks begin .. begin + count - 1 of a launch, some queries of which walk a layer in one of the ways; none: count 0.
struct Some {
  int begin;
  int count;
};

struct Blocks {
  Some selected;
  Some half_selected;
  Some first;
};

// How many queries a warp has in a entry layer, where several may share its 16 rows; one if that has all warps of its block.
inline int queries_of_entry(std::int64_t G, std::int64_t T_q) {
  return T_q == 1 ? 1 : G <= kTwoQueryHeads / 2 ? 4 : G <= kTwoQueryHeads ? 2 : 1;
}

// And below their first, where they share what a warp reads of a parent.
inline int queries_of_selected(std::int64_t G, std::int64_t T_q, DType dtype, int layer) {
  return dtype != DType::kBFloat16 || layer > 0 ? 1 : queries_of_entry(G, T_q);
}

// One pass over the layer of `args`, for all of them.
void run_pass(Pass pass, Args const& args, Blocks const& blocks, DType dtype, int K, int V, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_fwd

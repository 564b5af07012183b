// Launches one instantiation; defined in instantiations/*.cu so that each compiles alone. `pair`: clusters of two CTAs have
// groups of 128 heads, otherwise a CTA has groups of 64.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace htree_cuda::sm90::sparse_attention_bwd {

struct KernelParams;

template <class Element, int kHeadDim>
void launch(KernelParams const& params, CUtensorMap const& q_map, CUtensorMap const& dout_map, bool deterministic,
            bool pair, int grid, cudaStream_t stream);

// From bounds of queries to the factors of key rows; of deterministic sums, between prepare and the products.
void launch_bounds(KernelParams const& params, cudaStream_t stream);

}  // namespace htree_cuda::sm90::sparse_attention_bwd

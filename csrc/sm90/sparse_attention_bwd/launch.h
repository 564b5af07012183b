// Launches one instantiation; defined in instantiations/*.cu so that each compiles alone.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace htree_cuda::sm90::sparse_attention_bwd {

struct KernelParams;

template <class Element, int kHeadDim>
void launch(KernelParams const& params, CUtensorMap const& kv_map, CUtensorMap const& q_map, CUtensorMap const& dout_map,
            bool deterministic, int grid, cudaStream_t stream);

}  // namespace htree_cuda::sm90::sparse_attention_bwd

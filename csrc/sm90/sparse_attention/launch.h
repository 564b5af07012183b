// Launches one instantiation; defined in inst/*.cu so that each compiles alone.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace htree_cuda::sparse {

struct KernelParams;

template <class Element, int kHeadDim>
void launch(KernelParams const& params, CUtensorMap const& q_map, int grid, cudaStream_t stream);

}  // namespace htree_cuda::sparse

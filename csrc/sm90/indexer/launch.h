// Launches one instantiation; defined in instantiations/*.cu so that each compiles alone.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace htree_cuda::sm90::indexer {

struct KernelParams;

enum class Split;

template <class Element, int kDim, int kHeads, bool kPadded, Split kSplit>
void launch(KernelParams const& params, CUtensorMap const& q_map, CUtensorMap const& k_map, int grid, cudaStream_t stream);

}  // namespace htree_cuda::sm90::indexer

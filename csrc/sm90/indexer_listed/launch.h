// Launches one instantiation; defined in instantiations/*.cu so that each compiles alone.
#pragma once

#include <cuda_runtime_api.h>

namespace htree_cuda::sm90::indexer_listed {

struct KernelParams;
enum class Pass;

template <class Element, int kDim, Pass kPass>
void launch(KernelParams const& params, int grid, cudaStream_t stream);

}  // namespace htree_cuda::sm90::indexer_listed

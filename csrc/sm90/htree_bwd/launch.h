// Launches of the matrix kernels, for dispatch.h.
#pragma once

#include <cuda_runtime.h>

#include "args.h"

namespace htree_cuda::sm90::htree_bwd {

enum class Kernel { kDkDvEntry, kDqEntry, kDqSelected, kDkDvSelected, kDqGather };

// Launches a kernel for one dtype and pair of head dimensions. Defined in launch.cuh, instantiated in instantiations/.
template <class Element, int K, int V>
void launch_kernel(Kernel kernel, Args const& args, int ctas, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_bwd

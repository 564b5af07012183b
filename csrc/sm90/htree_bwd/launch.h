// Launches of the matrix kernels, for dispatch.h.
#pragma once

#include <cuda_runtime.h>

#include "args.h"

namespace htree_cuda::sm90::htree_bwd {

enum class Kernel { kDkDvEntry, kDqEntry, kDqSelected, kDkDvSelected, kDqGather };

// Launches a kernel for one dtype and pair of head dimensions. Defined in launch.cuh, instantiated in instantiations/.
// kSequences: of different lengths, whose kernels are kernels of their own.
template <class Element, int K, int V, bool kSequences>
void launch_kernel(Kernel kernel, Args const& args, int ctas, cudaStream_t stream);

// The same of the kernels that groups of at most eight heads have for themselves: all but dq_selected.
template <class Element, int K, int V, bool kSequences>
void launch_small_group(Kernel kernel, Args const& args, int ctas, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_bwd

// Launches one kernel; defined in instantiations/*.cu so that each compiles alone.
#pragma once

#include <cuda_runtime_api.h>

namespace htree_cuda::sm90::topk_indices {

struct KernelParams;

void launch_buffered(KernelParams const& params, cudaStream_t stream);
void launch_divided(KernelParams const& params, int ctas, cudaStream_t stream);
void launch_rescan(KernelParams const& params, cudaStream_t stream);

}  // namespace htree_cuda::sm90::topk_indices

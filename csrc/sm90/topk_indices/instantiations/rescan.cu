#include "host/cuda_check.h"
#include "sm90/topk_indices/launch.h"
#include "sm90/topk_indices/rescan.cuh"

namespace htree_cuda::sm90::topk_indices {

void launch_rescan(KernelParams const& params, cudaStream_t stream) {
  topk_indices_rescan<<<params.rows, Config::kThreads, 0, stream>>>(params);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::sm90::topk_indices

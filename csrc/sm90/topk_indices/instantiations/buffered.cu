#include "host/cuda_check.h"
#include "sm90/topk_indices/buffered.cuh"
#include "sm90/topk_indices/launch.h"

namespace htree_cuda::sm90::topk_indices {

void launch_buffered(KernelParams const& params, cudaStream_t stream) {
  // Per device and cheap: setting it each time keeps nothing process-wide.
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(topk_indices_buffered, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
  topk_indices_buffered<<<params.rows, Config::kThreads, Config::kSharedBytes, stream>>>(params);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::sm90::topk_indices

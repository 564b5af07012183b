#include "host/cuda_check.h"
#include "sm90/topk_indices/divided.cuh"
#include "sm90/topk_indices/launch.h"

namespace htree_cuda::sm90::topk_indices {

void launch_divided(KernelParams const& params, int ctas, cudaStream_t stream) {
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(topk_indices_divided, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = ctas;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = params.rows * ctas;
  config.blockDim = Config::kThreads;
  config.dynamicSmemBytes = Config::kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  HTREE_CUDA_CHECK(cudaLaunchKernelEx(&config, topk_indices_divided, params));
}

}  // namespace htree_cuda::sm90::topk_indices

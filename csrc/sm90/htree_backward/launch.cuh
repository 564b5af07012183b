// Launch of one configuration; the files in inst/ instantiate it.
#pragma once

#include "../../common/cuda_check.h"
#include "kernel.cuh"

namespace htree_cuda::gradient {

template <class Cfg, bool kTogether>
void launch_kernel(Args const& args, int blocks, cudaStream_t stream) {
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(htree_backward_kernel<Cfg, kTogether>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, Cfg::kSharedBytes));
  htree_backward_kernel<Cfg, kTogether><<<blocks, Cfg::kThreads, Cfg::kSharedBytes, stream>>>(args);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

template <class Cfg>
void launch(Args const& args, int blocks, cudaStream_t stream) {
  if constexpr (Cfg::kPass == Pass::kNodes) {
    if (args.common_units > 0) launch_kernel<Cfg, true>(args, blocks, stream);
  }
  launch_kernel<Cfg, false>(args, blocks, stream);
}

}  // namespace htree_cuda::gradient

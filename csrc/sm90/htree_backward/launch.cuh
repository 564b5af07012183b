// Launch of one configuration; the files in inst/ instantiate it.
#pragma once

#include "../../common/cuda_check.h"
#include "kernel.cuh"

namespace htree_cuda::gradient {

template <class Cfg>
void launch(Args const& args, int blocks, cudaStream_t stream) {
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(htree_backward_kernel<Cfg>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        Cfg::kSharedBytes));
  htree_backward_kernel<Cfg><<<blocks, Cfg::kThreads, Cfg::kSharedBytes, stream>>>(args);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::gradient

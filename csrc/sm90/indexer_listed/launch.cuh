// The body of launch.h's template, for the instantiation files.
#pragma once

#include "host/cuda_check.h"
#include "kernel.cuh"
#include "launch.h"

namespace htree_cuda::sm90::indexer_listed {

template <class Element, int kDim, Pass kPass>
void launch(KernelParams const& params, int grid, cudaStream_t stream) {
  using C = Config<Element, kDim, kPass>;
  auto const kernel = indexer_listed_kernel<C>;
  // Per device and cheap: setting it each time keeps nothing process-wide.
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  kernel<<<grid, C::kThreads, C::kSharedBytes, stream>>>(params);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::sm90::indexer_listed

// The body of launch.h's template, for the instantiation files.
#pragma once

#include "host/cuda_check.h"
#include "kernel.cuh"
#include "launch.h"

namespace htree_cuda::sm90::sparse_attention {

template <class Element, int kHeadDim>
void launch(KernelParams const& params, CUtensorMap const& q_map, int grid, cudaStream_t stream) {
  using C = Config<Element, kHeadDim>;
  auto const kernel = sparse_attention_kernel<C>;
  // The attribute is per device and cheap to set; setting it each time keeps no state of the process.
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  kernel<<<grid, C::kThreads, C::kSharedBytes, stream>>>(params, q_map);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::sm90::sparse_attention

// The body of launch.h's template, for the instantiation files.
#pragma once

#include "host/cuda_check.h"
#include "kernel.cuh"
#include "launch.h"

namespace htree_cuda::sm90::sparse_attention {

template <class C>
void launch_attend(KernelParams const& params, CUtensorMap const& q_map, int grid, cudaStream_t stream) {
  auto const kernel = sparse_attention_kernel<C>;
  // The attribute is per device and cheap to set; setting it each time keeps no state of the process.
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  kernel<<<grid, C::kThreads, C::kSharedBytes, stream>>>(params, q_map);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

template <class Element, int kHeadDim>
void launch(KernelParams const& params, CUtensorMap const& q_map, int grid, cudaStream_t stream) {
  if (params.parts == 1) return launch_attend<Config<Element, kHeadDim, false>>(params, q_map, grid, stream);
  launch_attend<Config<Element, kHeadDim, true>>(params, q_map, grid, stream);
}

}  // namespace htree_cuda::sm90::sparse_attention

// The body of launch.h's template, for the instantiation files.
#pragma once

#include "host/cuda_check.h"
#include "kernel.cuh"
#include "launch.h"

namespace htree_cuda::sm90::indexer {

template <class Element, int kDim, int kHeads, bool kPadded, Split kSplit>
void launch(KernelParams const& params, CUtensorMap const& q_map, CUtensorMap const& k_map, int grid, cudaStream_t stream) {
  using C = Config<Element, kDim, kHeads, kPadded, kSplit>;
  auto const kernel = indexer_logits_kernel<C>;
  // Per device and cheap: setting it each time keeps nothing process-wide.
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  kernel<<<grid, C::kThreads, C::kSharedBytes, stream>>>(params, q_map, k_map);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::sm90::indexer

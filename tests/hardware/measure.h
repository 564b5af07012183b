// What the programs of this folder share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "host/cuda_check.h"

namespace htree_cuda::hardware {

// Best of so many launches, ms.
template <class Launch>
double best_ms(int launches, Launch const& launch) {
  cudaEvent_t begin, end;
  HTREE_CUDA_CHECK(cudaEventCreate(&begin));
  HTREE_CUDA_CHECK(cudaEventCreate(&end));
  float best = 1e9f;
  for (int i = 0; i < launches; ++i) {
    HTREE_CUDA_CHECK(cudaEventRecord(begin));
    launch();
    HTREE_CUDA_CHECK(cudaGetLastError());
    HTREE_CUDA_CHECK(cudaEventRecord(end));
    HTREE_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    HTREE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    best = std::min(best, ms);
  }
  HTREE_CUDA_CHECK(cudaEventDestroy(begin));
  HTREE_CUDA_CHECK(cudaEventDestroy(end));
  return best;
}

template <class T>
T* on_device(std::vector<T> const& host) {
  T* device = nullptr;
  HTREE_CUDA_CHECK(cudaMalloc(&device, host.size() * sizeof(T)));
  HTREE_CUDA_CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

}  // namespace htree_cuda::hardware

// A grid that comes onto the SMs while the one before it in the stream ends: both halves of it, so that no
// kernel has one without the other.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "cuda_check.h"

namespace htree_cuda::host {

// On the host. `kernel` calls wait_for_previous_grid.
template <class... Params, class... Args>
void launch_overlapped(void (*kernel)(Params...), unsigned blocks, unsigned threads, std::size_t shared_bytes,
                       cudaStream_t stream, Args&&... args) {
  if (shared_bytes > 48 * 1024) {
    HTREE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  HTREE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// On the device, by every thread before its first access to global memory: what grids before this one wrote is there,
// and what they read may be overwritten. Only then may the next grid begin, so that two at most are under way: when it
// waits for this one, those before are complete.
__device__ __forceinline__ void wait_for_previous_grid() {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
}

}  // namespace htree_cuda::host

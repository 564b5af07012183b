// The launch of a kernel that calls wait_for_previous_grid into a stream that may be one of two.
#pragma once

#include "launch_lane.h"
#include "launch_overlapped.cuh"

namespace htree_cuda::host {

template <class... Params, class... Args>
void launch_in_lane(void (*kernel)(Params...), unsigned blocks, unsigned threads, std::size_t shared_bytes,
                    LaneStream lane, Args&&... args) {
  if (lane.alone) {
    return launch_overlapped(kernel, blocks, threads, shared_bytes, lane.stream, std::forward<Args>(args)...);
  }
  allow_shared_bytes(reinterpret_cast<void const*>(kernel), shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = lane.stream;
  HTREE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

}  // namespace htree_cuda::host

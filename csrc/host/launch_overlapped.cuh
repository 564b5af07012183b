// A grid that comes onto the SMs while the grid before it in the stream ends. The host's half and the device's half are
// both here, so that no kernel has one without the other.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda_check.h"
#include "math.h"
#include "shared_memory.h"

namespace htree_cuda::host {

// Thread blocks for `items`, of which a block has `per_block`. Throws where a grid cannot have that many.
inline unsigned grid_blocks(char const* op, std::int64_t items, int per_block = 1) {
  std::int64_t const blocks = ceil_div(items, std::int64_t(per_block));
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::invalid_argument(std::string(op) +
                                ": B * H_kv * T is too large for one launch (more than 2^31 thread blocks)");
  }
  return static_cast<unsigned>(blocks);
}

// Launches a kernel that calls wait_for_previous_grid, in clusters of `cluster` thread blocks.
template <class... Params, class... Args>
void launch_overlapped_clusters(void (*kernel)(Params...), unsigned cluster, unsigned blocks, unsigned threads,
                                std::size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  allow_shared_bytes(reinterpret_cast<void const*>(kernel), shared_bytes);
  if (cluster > 8) {  // more than every GPU with clusters promises
    HTREE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel),
                                          cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  HTREE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// The same without clusters.
template <class... Params, class... Args>
void launch_overlapped(void (*kernel)(Params...), unsigned blocks, unsigned threads, std::size_t shared_bytes,
                       cudaStream_t stream, Args&&... args) {
  launch_overlapped_clusters(kernel, 1, blocks, threads, shared_bytes, stream, std::forward<Args>(args)...);
}

// Every thread of the kernel calls this before its first access to global memory. Afterwards, what the grids before
// this one wrote is visible, and what they read may be overwritten. Only then may the next grid begin, so that two
// grids at most are under way: when the next grid waits for this one, all grids before are complete.
__device__ __forceinline__ void wait_for_previous_grid() {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
}

}  // namespace htree_cuda::host

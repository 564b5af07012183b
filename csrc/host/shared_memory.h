// How much dynamic shared memory a kernel may take.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "cuda_check.h"

namespace htree_cuda::host {

// Lets a kernel take so many bytes on the current device. Never fewer than before: between a thread's call and its launch
// another thread may launch the same kernel with fewer.
inline void allow_shared_bytes(void const* kernel, std::size_t bytes) {
  if (bytes <= 48 * 1024) return;
  static std::mutex mutex;
  static std::map<std::pair<void const*, int>, std::size_t> allowed;
  int device = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  std::lock_guard<std::mutex> const lock(mutex);
  std::size_t& known = allowed[{kernel, device}];
  if (known >= bytes) return;
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  known = bytes;
}

}  // namespace htree_cuda::host

// Driver API functions by name. The library links neither libcuda nor a shared CUDA runtime: it must load on a
// machine without a driver, where only a call fails.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "cuda_check.h"

namespace htree_cuda::host {

// `version` is the CUDA version whose signature of the function `Fn` is: 12000 for CUDA 12.0.
template <class Fn>
Fn driver_entry_point(char const* name, unsigned int version = 12000) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  HTREE_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(std::string("htree_cuda: the NVIDIA driver has no ") + name + " of CUDA " +
                             std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10));
  }
  return reinterpret_cast<Fn>(function);
}

inline void check_driver(CUresult result, char const* name) {
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string("htree_cuda: ") + name + " failed with CUresult " +
                             std::to_string(static_cast<int>(result)));
  }
}

}  // namespace htree_cuda::host

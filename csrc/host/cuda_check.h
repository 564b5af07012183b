// A CUDA call that fails throws std::runtime_error, which names the call, the place and the driver's words.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace htree_cuda::host {

[[noreturn]] inline void throw_cuda_error(cudaError_t error, char const* call, char const* file, int line) {
  std::string const path(file);
  std::string const name = path.substr(path.find_last_of('/') + 1);
  throw std::runtime_error("htree_cuda: " + std::string(call) + " failed at " + name + ":" + std::to_string(line) +
                           ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

}  // namespace htree_cuda::host

#define HTREE_CUDA_CHECK(call)                                                        \
  do {                                                                                \
    cudaError_t const htree_cuda_error = (call);                                      \
    if (htree_cuda_error != cudaSuccess) {                                            \
      (void)cudaGetLastError(); /* clear it, so that the next call is not blamed */   \
      ::htree_cuda::host::throw_cuda_error(htree_cuda_error, #call, __FILE__, __LINE__); \
    }                                                                                 \
  } while (0)

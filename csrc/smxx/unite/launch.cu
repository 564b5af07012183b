#include "../../common/cuda_check.h"
#include "kernel.cuh"

namespace htree_cuda::uniting {

void unite(Args const& args, int blocks, cudaStream_t stream) {
  unite_kernel<<<blocks, kThreads, 0, stream>>>(args);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::uniting

#include "../../common/cuda_check.h"
#include "kernel.cuh"

namespace htree_cuda::selecting {

void select(Args const& args, int rows, cudaStream_t stream) {
  if (args.width <= 8 * kChunk) {
    select_kernel<8><<<rows, kThreads, 0, stream>>>(args);
  } else {
    select_kernel<16><<<rows, kThreads, 0, stream>>>(args);
  }
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::selecting

#include "kernel.cuh"

namespace htree_cuda::selecting {

void select(Args const& args, int rows, cudaStream_t stream) {
  if (args.width <= 8 * kChunk) {
    launch_overlapped(select_kernel<8>, rows, kThreads, 0, stream, args);
  } else {
    launch_overlapped(select_kernel<16>, rows, kThreads, 0, stream, args);
  }
}

}  // namespace htree_cuda::selecting

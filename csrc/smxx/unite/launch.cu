#include "kernel.cuh"

namespace htree_cuda::uniting {

void unite(Args const& args, int blocks, cudaStream_t stream) {
  launch_overlapped(unite_kernel, blocks, kThreads, 0, stream, args);
}

}  // namespace htree_cuda::uniting

#include "kernel.cuh"

namespace htree_cuda::tree::replay {

void replay(Args const& args, int rows, cudaStream_t stream) {
  launch_overlapped(replay_kernel, (rows + kWarps - 1) / kWarps, kWarps * 32, 0, stream, args, rows);
}

}  // namespace htree_cuda::tree::replay

#include "host/launch_overlapped.cuh"
#include "kernel.cuh"

namespace htree_cuda::sm90::htree_bwd::reverse_index {

void build(BuildArgs const& args, cudaStream_t stream) {
  std::int64_t const lists = std::int64_t(args.layers) * args.chunk.heads * args.chunk.rows;
  launch_overlapped(reverse_index_kernel, grid_blocks("backward", lists, kWarps), kThreads, 0, stream, args);
}

}  // namespace htree_cuda::sm90::htree_bwd::reverse_index

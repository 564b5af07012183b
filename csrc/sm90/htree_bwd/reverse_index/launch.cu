#include "host/launch_overlapped.cuh"
#include "kernel.cuh"
#include "visit_lists.cuh"

namespace htree_cuda::sm90::htree_bwd::reverse_index {

void build(BuildArgs const& args, cudaStream_t stream) {
  std::int64_t const lists = std::int64_t(args.layers) * args.chunk.heads * args.chunk.rows;
  launch_overlapped(reverse_index_kernel, grid_blocks("backward", lists, kWarps), kThreads, 0, stream, args);
}

void list_visits(Args const& args, cudaStream_t stream) {
  auto const launch = [&](void (*kernel)(Args)) {
    launch_overlapped(kernel, args.list_ctas, kListWarps * 32, 0, stream, args);
  };
  switch (unit_heads(args.G)) {
    case 4: return launch(visit_lists_kernel<4>);
    case 8: return launch(visit_lists_kernel<2>);
    default: return launch(visit_lists_kernel<1>);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd::reverse_index

#include "kernel.cuh"

namespace htree_cuda::tree::sequences {

void describe(Args const& args, cudaStream_t stream) {
  launch_overlapped(sequences_kernel, 1, kThreads, 0, stream, args);
  unsigned const tile_ctas = grid_blocks("forward_varlen", args.tile_count + args.bottom_count, kFillThreads);
  unsigned const row_ctas = args.out == nullptr ? 0 : grid_blocks("forward_varlen", args.lengths.total_q, kFillThreads / 32);
  if (tile_ctas + row_ctas == 0) return;
  launch_overlapped(fill_kernel, tile_ctas + row_ctas, kFillThreads, 0, stream, args, tile_ctas);
}

}  // namespace htree_cuda::tree::sequences

#include "kernel.cuh"

namespace htree_cuda::sm90::htree_bwd::sequences {

void fill_row_tiles(TilesArgs const& args, cudaStream_t stream) {
  unsigned const ctas = grid_blocks("backward_varlen", args.tile_count, kFillThreads);
  launch_overlapped(row_tiles_kernel, ctas, kFillThreads, 0, stream, args);
}

void describe_chunk(ChunkArgs const& args, cudaStream_t stream) {
  launch_overlapped(count_kernel, 1, kScanThreads, 0, stream, args);
  std::int64_t const places = args.gather_ctas + args.entry_room + args.list_room;
  launch_overlapped(fill_kernel, grid_blocks("backward_varlen", places, kFillThreads), kFillThreads, 0, stream, args);
}

}  // namespace htree_cuda::sm90::htree_bwd::sequences

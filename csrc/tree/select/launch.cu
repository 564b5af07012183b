#include "host/launch_lane.cuh"
#include "kernel.cuh"

namespace htree_cuda::tree::select {
namespace {

template <int kThreads, int kChunks>
bool launch(Args const& args, int rows, LaneStream stream) {
  if (args.max_candidates > 4 * kThreads * kChunks) return false;
  launch_in_lane(select_kernel<kThreads, kChunks>, rows, kThreads, 0, stream, args);
  return true;
}

}  // namespace

void select(Args const& args, int rows, LaneStream stream) {
  // A warp bounds a row by 256 bins, which says little where most of them are wanted.
  bool const one_warp = args.top_k <= 128;
  launch<32, 8>(args, rows, stream) || (one_warp && launch<32, 16>(args, rows, stream)) ||
      launch<64, 8>(args, rows, stream) || launch<128, 8>(args, rows, stream) || launch<128, 16>(args, rows, stream);
}

}  // namespace htree_cuda::tree::select

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
  launch<32, 8>(args, rows, stream) || launch<64, 8>(args, rows, stream) || launch<128, 8>(args, rows, stream) ||
      launch<128, 16>(args, rows, stream);
}

}  // namespace htree_cuda::tree::select

#include "host/launch_lane.cuh"
#include "kernel.cuh"

namespace htree_cuda::tree::replay {

void replay(Args const& args, int rows, LaneStream stream) {
  launch_in_lane(replay_kernel, (rows + kWarps - 1) / kWarps, kWarps * 32, 0, stream, args, rows);
}

}  // namespace htree_cuda::tree::replay

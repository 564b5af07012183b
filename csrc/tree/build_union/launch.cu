#include "host/launch_lane.cuh"
#include "kernel.cuh"

namespace htree_cuda::tree::build_union {
namespace {

template <int kBlocks>
void launch(Args const& args, LaneStream stream) {
  using Cfg = Config<kBlocks>;
  launch_in_lane(build_union_kernel<kBlocks>, args.sets.count(args.tiles), Cfg::kThreads,
                 Cfg::shared_bytes(args.parents, args.top_k), stream, args);
}

}  // namespace

void build_union(Args const& args, LaneStream stream) {
  switch (args.sets.size) {
    case 1: return launch<1>(args, stream);
    case 2: return launch<2>(args, stream);
    case 4: return launch<4>(args, stream);
  }
}

}  // namespace htree_cuda::tree::build_union

#include "sm90/htree_fwd/launch.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Score passes read no values: their configuration names no dtype, and its value dimension is nominal.
template void launch<Config<void, 128, 64, Pass::kScore, LayerKind::kSelected>,
                     Config<void, 128, 64, Pass::kScore, LayerKind::kHalfSelected>,
                     Config<void, 128, 64, Pass::kScore, LayerKind::kEntry>>(Args const&, Blocks const&, cudaStream_t);

}  // namespace htree_cuda::sm90::htree_fwd

#include "sm90/htree_fwd/launch.cuh"

namespace htree_cuda::sm90::htree_fwd {

template void launch<Config<__nv_bfloat16, 64, 128, Pass::kAttend, LayerKind::kSelected>,
                     Config<__nv_bfloat16, 64, 128, Pass::kAttend, LayerKind::kHalfSelected>,
                     Config<__nv_bfloat16, 64, 128, Pass::kAttend, LayerKind::kEntry>>(Args const&, Blocks const&, cudaStream_t);

}  // namespace htree_cuda::sm90::htree_fwd

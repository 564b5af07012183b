#include "sm90/htree_fwd/launch.cuh"

namespace htree_cuda::sm90::htree_fwd {

template void launch<Config<__half, 64, 64, Pass::kAttend, LayerKind::kSelected>,
                     void,
                     Config<__half, 64, 64, Pass::kAttend, LayerKind::kEntry>>(Args const&, Blocks const&, cudaStream_t);

}  // namespace htree_cuda::sm90::htree_fwd

#include "host/mixed_dims.h"
#if HTREE_CUDA_MIXED_DIMS
#include "sm90/htree_fwd/kernel.cuh"

namespace htree_cuda::sm90::htree_fwd {

template void launch<__nv_bfloat16, 128, 64, Pass::kAttend, 1, 1>(Args const&, Grid const&, LaneStream);
template void launch<__nv_bfloat16, 128, 64, Pass::kAttend, 2, 2>(Args const&, Grid const&, LaneStream);
template void launch<__nv_bfloat16, 128, 64, Pass::kAttend, 4, 4>(Args const&, Grid const&, LaneStream);

}  // namespace htree_cuda::sm90::htree_fwd
#endif

#include "host/mixed_dims.h"
#include "sm90/htree_bwd/launch.cuh"
#include "sm90/htree_bwd/launch_small_group.cuh"

namespace htree_cuda::sm90::htree_bwd {

template void launch_kernel<__nv_bfloat16, 64, 64, true>(Kernel, Args const&, int, cudaStream_t);
#if HTREE_CUDA_MIXED_DIMS
template void launch_kernel<__nv_bfloat16, 64, 128, true>(Kernel, Args const&, int, cudaStream_t);
#endif

template void launch_small_group<__nv_bfloat16, 64, 64, true>(Kernel, Args const&, int, cudaStream_t);
#if HTREE_CUDA_MIXED_DIMS
template void launch_small_group<__nv_bfloat16, 64, 128, true>(Kernel, Args const&, int, cudaStream_t);
#endif

}  // namespace htree_cuda::sm90::htree_bwd

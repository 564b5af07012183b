#include "host/mixed_dims.h"
#include "sm90/htree_bwd/launch.cuh"

namespace htree_cuda::sm90::htree_bwd {

template void launch_kernel<__half, 128, 128>(Kernel, Args const&, int, cudaStream_t);
#if HTREE_CUDA_MIXED_DIMS
template void launch_kernel<__half, 128, 64>(Kernel, Args const&, int, cudaStream_t);
#endif

}  // namespace htree_cuda::sm90::htree_bwd

#include "sm90/sparse_attention/launch.cuh"

namespace htree_cuda::sm90::sparse_attention {

template void launch<cutlass::half_t, 576>(KernelParams const&, CUtensorMap const&, int, cudaStream_t);

}  // namespace htree_cuda::sm90::sparse_attention

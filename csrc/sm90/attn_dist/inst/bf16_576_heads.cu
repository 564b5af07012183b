#include "../launch.cuh"

namespace htree_cuda::distribution {

template void launch<cutlass::bfloat16_t, 576, Split::kHeads>(KernelParams const&, CUtensorMap const&, int, cudaStream_t);

}  // namespace htree_cuda::distribution

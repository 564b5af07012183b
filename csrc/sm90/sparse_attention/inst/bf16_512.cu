#include "../launch.cuh"

namespace htree_cuda::sparse {

template void launch<cutlass::bfloat16_t, 512>(KernelParams const&, CUtensorMap const&, int, cudaStream_t);

}  // namespace htree_cuda::sparse

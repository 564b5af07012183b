#include "../launch.cuh"

namespace htree_cuda::sparse {

template void launch<cutlass::half_t, 576>(KernelParams const&, CUtensorMap const&, int, cudaStream_t);

}  // namespace htree_cuda::sparse

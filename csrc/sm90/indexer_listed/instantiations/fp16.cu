#include "sm90/indexer_listed/launch.cuh"

namespace htree_cuda::sm90::indexer_listed {

template void launch<cutlass::half_t, 64, Pass::kForward>(KernelParams const&, int, cudaStream_t);
template void launch<cutlass::half_t, 64, Pass::kBackward>(KernelParams const&, int, cudaStream_t);
template void launch<cutlass::half_t, 128, Pass::kForward>(KernelParams const&, int, cudaStream_t);
template void launch<cutlass::half_t, 128, Pass::kBackward>(KernelParams const&, int, cudaStream_t);

}  // namespace htree_cuda::sm90::indexer_listed

#include "sm90/indexer/launch.cuh"

namespace htree_cuda::sm90::indexer {

template void launch<cutlass::bfloat16_t, 128, 32, false, Split::kQueries>(KernelParams const&, CUtensorMap const&, CUtensorMap const&, int, cudaStream_t);
template void launch<cutlass::bfloat16_t, 128, 32, true, Split::kQueries>(KernelParams const&, CUtensorMap const&, CUtensorMap const&, int, cudaStream_t);
template void launch<cutlass::bfloat16_t, 128, 64, false, Split::kQueries>(KernelParams const&, CUtensorMap const&, CUtensorMap const&, int, cudaStream_t);
template void launch<cutlass::bfloat16_t, 128, 64, true, Split::kQueries>(KernelParams const&, CUtensorMap const&, CUtensorMap const&, int, cudaStream_t);
template void launch<cutlass::bfloat16_t, 128, 64, true, Split::kKeys>(KernelParams const&, CUtensorMap const&, CUtensorMap const&, int, cudaStream_t);

}  // namespace htree_cuda::sm90::indexer

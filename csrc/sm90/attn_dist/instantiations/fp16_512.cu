#include "sm90/attn_dist/launch.cuh"

namespace htree_cuda::sm90::attn_dist {

template void launch<cutlass::half_t, 512, Split::kHeads>(KernelParams const&, CUtensorMap const&, int, cudaStream_t);
template void launch<cutlass::half_t, 512, Split::kKeys>(KernelParams const&, CUtensorMap const&, int, cudaStream_t);

}  // namespace htree_cuda::sm90::attn_dist

#include "sm90/sparse_attention_bwd/launch.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template void launch<cutlass::half_t, 512>(KernelParams const&, CUtensorMap const&, CUtensorMap const&,
                                            bool, bool, int, cudaStream_t);

}  // namespace htree_cuda::sm90::sparse_attention_bwd

#include "sm90/sparse_attention_bwd/launch.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template void launch<cutlass::bfloat16_t, 576>(KernelParams const&, CUtensorMap const&, CUtensorMap const&,
                                            bool, bool, int, cudaStream_t);

}  // namespace htree_cuda::sm90::sparse_attention_bwd

#include "../launch.cuh"

namespace htree_cuda::layer {

template void launch<Config<__nv_bfloat16, 64, 64, Pass::kValues, Walk::kBelow>,
                     Config<__nv_bfloat16, 64, 64, Pass::kValues, Walk::kDense>,
                     Config<__nv_bfloat16, 64, 64, Pass::kValues, Walk::kFirst>>(Args const&, Blocks const&, cudaStream_t);

}  // namespace htree_cuda::layer

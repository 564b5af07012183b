#include "../launch.cuh"

namespace htree_cuda::layer {

template void launch<Config<__nv_bfloat16, 64, 64, Pass::kValues, Walk::kFirst>>(Args const&, int, cudaStream_t);
template void launch<Config<__nv_bfloat16, 64, 64, Pass::kValues, Walk::kBelow>>(Args const&, int, cudaStream_t);

}  // namespace htree_cuda::layer

#include "../launch.cuh"

namespace htree_cuda::layer {

template void launch<Config<__half, 128, 128, Pass::kValues, Walk::kFirst>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 128, 128, Pass::kValues, Walk::kBelow>>(Args const&, int, cudaStream_t);

}  // namespace htree_cuda::layer

#include "../launch.cuh"

namespace htree_cuda::layer {

template void launch<Config<__half, 128, 128, Pass::kValues, Walk::kBelow>,
                     void,
                     Config<__half, 128, 128, Pass::kValues, Walk::kFirst>>(Args const&, Blocks const&, cudaStream_t);

}  // namespace htree_cuda::layer

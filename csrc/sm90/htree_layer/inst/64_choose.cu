#include "../launch.cuh"

namespace htree_cuda::layer {

// Choices read no values: their configuration names no dtype, and its value dimension is nominal.
template void launch<Config<void, 64, 64, Pass::kChoice, Walk::kBelow>,
                     Config<void, 64, 64, Pass::kChoice, Walk::kDense>,
                     Config<void, 64, 64, Pass::kChoice, Walk::kFirst>>(Args const&, Blocks const&, cudaStream_t);

}  // namespace htree_cuda::layer

#include "../launch.cuh"

namespace htree_cuda::layer {

// These passes read no values: their configuration names no dtype, and its value dimension is nominal.
template void launch<Config<void, 64, 64, Pass::kNormaliser, Walk::kFirst>>(Args const&, int, cudaStream_t);
template void launch<Config<void, 64, 64, Pass::kNormaliser, Walk::kBelow>>(Args const&, int, cudaStream_t);
template void launch<Config<void, 64, 64, Pass::kImportance, Walk::kFirst>>(Args const&, int, cudaStream_t);
template void launch<Config<void, 64, 64, Pass::kImportance, Walk::kBelow>>(Args const&, int, cudaStream_t);

}  // namespace htree_cuda::layer

#include "../launch.cuh"

namespace htree_cuda::layer {

// These passes read no values: the value dimension of their configuration is nominal.
template void launch<Config<__half, 64, 64, Pass::kNormaliser>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 64, 64, Pass::kImportance>>(Args const&, int, cudaStream_t);

}  // namespace htree_cuda::layer

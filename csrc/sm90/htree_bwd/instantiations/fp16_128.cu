#include "sm90/htree_bwd/launch.cuh"

namespace htree_cuda::sm90::htree_bwd {

template void launch<Config<__half, 128, 64, Pass::kQueries>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 128, 64, Pass::kFirstQueries>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 128, 64, Pass::kNodes>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 128, 64, Pass::kFirstNodes>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 128, 128, Pass::kQueries>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 128, 128, Pass::kFirstQueries>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 128, 128, Pass::kNodes>>(Args const&, int, cudaStream_t);
template void launch<Config<__half, 128, 128, Pass::kFirstNodes>>(Args const&, int, cudaStream_t);

}  // namespace htree_cuda::sm90::htree_bwd

#include "../launch.cuh"

namespace htree_cuda::gradient {

template void launch<Config<__nv_bfloat16, 128, 64, Pass::kQueries>>(Args const&, int, cudaStream_t);
template void launch<Config<__nv_bfloat16, 128, 64, Pass::kTopQueries>>(Args const&, int, cudaStream_t);
template void launch<Config<__nv_bfloat16, 128, 64, Pass::kNodes>>(Args const&, int, cudaStream_t);
template void launch<Config<__nv_bfloat16, 128, 64, Pass::kTopNodes>>(Args const&, int, cudaStream_t);
template void launch<Config<__nv_bfloat16, 128, 128, Pass::kQueries>>(Args const&, int, cudaStream_t);
template void launch<Config<__nv_bfloat16, 128, 128, Pass::kTopQueries>>(Args const&, int, cudaStream_t);
template void launch<Config<__nv_bfloat16, 128, 128, Pass::kNodes>>(Args const&, int, cudaStream_t);
template void launch<Config<__nv_bfloat16, 128, 128, Pass::kTopNodes>>(Args const&, int, cudaStream_t);

}  // namespace htree_cuda::gradient

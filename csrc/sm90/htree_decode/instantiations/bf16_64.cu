#include "../launch.cuh"

namespace htree_cuda::sm90::htree_decode {

template void launch<__nv_bfloat16, 64, 64>(Args const& args, unsigned units, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_decode

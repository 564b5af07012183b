#include "../launch.cuh"

namespace htree_cuda::sm90::htree_decode {

template void launch<__half, 128, 128>(Args const& args, unsigned units, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_decode

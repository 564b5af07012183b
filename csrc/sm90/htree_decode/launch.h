// What instantiations/ define and the launcher calls.
#pragma once

#include <cuda_runtime_api.h>

#include "args.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::htree_decode {

// One explicit instantiation a file of instantiations/: the kernels of a dtype and head dimensions.
template <class Element, int kK, int kV>
void launch(Args const& args, unsigned units, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_decode

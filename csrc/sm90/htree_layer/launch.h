#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"
#include "config.cuh"

namespace htree_cuda::layer {

// One pass over the layer of `args` for those of `blocks` blocks of 12 queries that walk it in the given way.
void run_pass(Pass pass, Walk walk, Args const& args, DType dtype, int K, int V, int blocks, cudaStream_t stream);

}  // namespace htree_cuda::layer

// Launch of one configuration; the files in inst/ instantiate it.
#pragma once

#include "kernel.cuh"

namespace htree_cuda::layer {

template <class Cfg>
void launch(Args const& args, int blocks, cudaStream_t stream) {
  launch_overlapped(htree_layer_kernel<Cfg>, blocks, Cfg::kThreads, Cfg::kSharedBytes, stream, args);
}

}  // namespace htree_cuda::layer

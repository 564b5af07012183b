// Launch of one configuration; the files in instantiations/ instantiate it.
#pragma once

#include "kernel.cuh"

namespace htree_cuda::sm90::htree_bwd {

template <class Cfg>
void launch(Args const& args, int blocks, cudaStream_t stream) {
  launch_overlapped(htree_bwd_kernel<Cfg>, blocks, Cfg::kThreads, Cfg::kSharedBytes, stream, args);
}

}  // namespace htree_cuda::sm90::htree_bwd

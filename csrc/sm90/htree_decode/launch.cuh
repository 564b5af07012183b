// The launch of a decode kernel, for the files of instantiations/.
#pragma once

#include "launch.h"
#include "kernel.cuh"

namespace htree_cuda::sm90::htree_decode {

template <class Cfg>
void launch_kernel(Args const& args, unsigned units, cudaStream_t stream) {
  int const parts = parts_of(args.top_k, args.G);
  launch_overlapped_clusters(htree_decode_kernel<Cfg>, parts, units * parts, Cfg::kThreads, shared_bytes<Cfg>(args.top_k, args.G), stream, args);
}

template <class Element, int kK, int kV>
void launch(Args const& args, unsigned units, cudaStream_t stream) {
  args.G <= 8 ? launch_kernel<Config<Element, kK, kV, 1>>(args, units, stream)
              : launch_kernel<Config<Element, kK, kV, 2>>(args, units, stream);
}

}  // namespace htree_cuda::sm90::htree_decode

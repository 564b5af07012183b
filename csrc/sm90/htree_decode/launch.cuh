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

template <class Element, int kK, int kV, bool kHalves>
void launch_group(Args const& args, unsigned units, cudaStream_t stream) {
  args.G <= 8 ? launch_kernel<Config<Element, kK, kV, 1, kHalves>>(args, units, stream)
              : launch_kernel<Config<Element, kK, kV, 2, kHalves>>(args, units, stream);
}

template <class Element, int kK, int kV>
void launch(Args const& args, unsigned units, cudaStream_t stream) {
  bool const halves = !args.pairing.interleaved && args.pairing.halves == kK / 16;
  halves ? launch_group<Element, kK, kV, true>(args, units, stream)
         : launch_group<Element, kK, kV, false>(args, units, stream);
}

}  // namespace htree_cuda::sm90::htree_decode

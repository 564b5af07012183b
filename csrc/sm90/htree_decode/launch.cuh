// The launch of a decode kernel, for the files of instantiations/.
#pragma once

#include "host/cuda_check.h"
#include "launch.h"
#include "kernel.cuh"

namespace htree_cuda::sm90::htree_decode {

template <class Cfg>
void launch_kernel(Args const& args, unsigned units, cudaStream_t stream) {
  static_assert(fits<Cfg>());
  unsigned const ctas = parts_of(args.top_k, args.G) / Cfg::kPartsOfCta;
  launch_overlapped_clusters(htree_decode_kernel<Cfg>, ctas, units * ctas, Cfg::kThreads,
                             shared_bytes<Cfg>(args.top_k, args.G), stream, args);
}

// Two parts a CTA where CTAs of one part would fill the GPU more than once; where top_k is large, and clusters with it, of
// which fewer are resident, where they would fill it eight times (H100, 2026-11-25: 8 x 128K and 16 x 32K tokens in 5 and 10
// waves of one part or 3 and 5 of two, which take twice as long each). No bit depends on it.
inline int parts_of_cta(Args const& args, unsigned units) {
  if (args.G > kCompactHeads) return 1;
  int device = 0;
  int processors = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  HTREE_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  int const fillings = args.top_k > 128 ? 8 : 1;
  return static_cast<std::int64_t>(units) * parts_of(args.top_k, args.G) > 2 * fillings * processors ? 2 : 1;
}

template <class Element, int kK, int kV, bool kHalves>
void launch_group(Args const& args, unsigned units, cudaStream_t stream) {
  if constexpr (kHalves) {
    if (parts_of_cta(args, units) == 2) return launch_kernel<Config<Element, kK, kV, 1, true, 2>>(args, units, stream);
  }
  args.G <= 8 ? launch_kernel<Config<Element, kK, kV, 1, kHalves, 1>>(args, units, stream)
              : launch_kernel<Config<Element, kK, kV, 2, kHalves, 1>>(args, units, stream);
}

template <class Element, int kK, int kV>
void launch(Args const& args, unsigned units, cudaStream_t stream) {
  bool const halves = !args.pairing.interleaved && args.pairing.halves == kK / 16;
  halves ? launch_group<Element, kK, kV, true>(args, units, stream)
         : launch_group<Element, kK, kV, false>(args, units, stream);
}

}  // namespace htree_cuda::sm90::htree_decode

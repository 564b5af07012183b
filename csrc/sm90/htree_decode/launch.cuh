// The launch of a decode kernel, for the files of instantiations/.
#pragma once

#include <atomic>

#include "host/cuda_check.h"
#include "launch.h"
#include "kernel.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr int kDevices = 64;  // that `resident` remembers

// How many clusters of the kernel the device holds at once, with as much shared memory as the largest call of the kind takes.
template <class Cfg>
int resident(Args const& args, int log2_parts_of_cta) {
  int device = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  static std::atomic<int> known[kDevices][kMaxParts][4];  // 0: not asked yet
  std::atomic<int>& answer = known[device % kDevices][args.log2_parts][log2_parts_of_cta];
  if (answer != 0) return answer;
  int const bytes = shared_bytes<Cfg>(args.top_k, args.G, 1 << log2_parts_of_cta);
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<void const*>(htree_decode_kernel<Cfg>),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<void const*>(htree_decode_kernel<Cfg>),
                                        cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 1u << (args.log2_parts - log2_parts_of_cta);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = attribute.val.clusterDim.x;
  config.blockDim = Cfg::kThreads;
  config.dynamicSmemBytes = bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  HTREE_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, htree_decode_kernel<Cfg>, &config));
  answer = clusters > 0 ? clusters : 1;
  return answer;
}

template <class Cfg>
void launch_kernel(Args args, int log2_parts_of_cta, unsigned units, cudaStream_t stream) {
  args.log2_parts_of_cta = log2_parts_of_cta;
  unsigned const ctas = 1u << (args.log2_parts - log2_parts_of_cta);
  launch_overlapped_clusters(htree_decode_kernel<Cfg>, ctas, units * ctas, Cfg::kThreads,
                             shared_bytes<Cfg>(args.top_k, args.G, 1 << log2_parts_of_cta), stream, args);
}

// From one part a CTA on, in CTAs of `Cfg`, the first number of parts of which all queries are resident at once; else the
// largest that fits. What a layer costs whatever its size is then paid as seldom as can be.
template <class Cfg>
int log2_parts_of_cta(Args const& args, unsigned units, int first) {
  int log2 = first;
  while (log2 < kLog2MaxPartsOfCta && log2 < args.log2_parts - 1 && fits<Cfg>(args.top_k, args.G, 2 << log2) &&
         units > static_cast<unsigned>(resident<Cfg>(args, log2))) {
    ++log2;
  }
  return log2;
}

// No bit depends on what is chosen here.
template <class Element, int kK, int kV, bool kHalves>
void launch_group(Args const& args, unsigned units, cudaStream_t stream) {
  static_assert(kMaxSharedBytes > 0);
  using Small = Config<Element, kK, kV, 1, kHalves, false>;
  using Large = Config<Element, kK, kV, 1, kHalves, true>;
  using Wide = Config<Element, kK, kV, 2, kHalves, false>;
  static_assert(fits<Small>(tree::kMaxTopK, 8, 1) && fits<Small>(128, 8, 2) && fits<Wide>(tree::kMaxTopK, 16, 1));
  if (args.G > 8) return launch_kernel<Wide>(args, log2_parts_of_cta<Wide>(args, units, 0), units, stream);
  if (args.top_k <= 128) {
    // Two parts where CTAs of one would fill the GPU more than once.
    int const two = units > static_cast<unsigned>(resident<Small>(args, 0));
    return launch_kernel<Small>(args, two, units, stream);
  }
  if (units <= static_cast<unsigned>(resident<Small>(args, 0))) return launch_kernel<Small>(args, 0, units, stream);
  launch_kernel<Large>(args, log2_parts_of_cta<Large>(args, units, 1), units, stream);
}

template <class Element, int kK, int kV>
void launch(Args const& args, unsigned units, cudaStream_t stream) {
  bool const halves = !args.pairing.interleaved && args.pairing.halves == kK / 16;
  halves ? launch_group<Element, kK, kV, true>(args, units, stream)
         : launch_group<Element, kK, kV, false>(args, units, stream);
}

}  // namespace htree_cuda::sm90::htree_decode

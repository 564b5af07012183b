// The launch of a decode kernel, for the files of instantiations/: which CTAs serve a call. No bit depends on it.
#pragma once

#include <atomic>
#include <cstdlib>
#include <string>

#include "host/cuda_check.h"
#include "host/recording.h"
#include "host/shared_memory.h"
#include "launch.h"
#include "kernel.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr int kDevices = 64;  // that `resident` remembers

// How many clusters of the kernel a GPU with so many SMs holds at once, as an H100 does (132 SMs, 2026-11-25: 7 of 16 CTAs
// alone on their SMs, 15 of 8, 31 of 4, 66 of 2): for calls that are told of. A launch looks at its device.
template <class Cfg>
int resident_of(int processors, int log2_ctas) {
  constexpr int kLost[] = {0, 0, 2, 1, 1};  // clusters that do not fit into a group of SMs
  int const clusters = Cfg::kBlocksPerSM * ((processors >> log2_ctas) - kLost[log2_ctas]);
  return clusters > 0 ? clusters : 1;
}

// How many clusters of the kernel the device holds at once, with as much shared memory as the largest call of the kind takes.
template <class Cfg>
int resident(Args const& args, int log2_parts_of_cta) {
  int const log2_ctas = args.log2_parts - log2_parts_of_cta;
  if (host::Recording const* const told = host::recording()) return resident_of<Cfg>(told->processors, log2_ctas);
  int device = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  static std::atomic<int> known[kDevices][kLog2MaxParts + 1][kLog2MaxPartsOfCta + 1];  // 0: not known yet
  std::atomic<int>& answer = known[device % kDevices][args.log2_parts][log2_parts_of_cta];
  if (answer != 0) return answer;
  void const* const kernel = reinterpret_cast<void const*>(htree_decode_kernel<Cfg>);
  int const bytes = shared_bytes<Cfg>(args.top_k, args.G, 1 << log2_parts_of_cta);
  host::allow_shared_bytes(kernel, bytes);
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 1u << log2_ctas;
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
  if (host::Recording* const told = host::recording()) {
    auto const number = [](unsigned x) { return std::to_string(x); };
    std::string const name = std::is_same_v<typename Cfg::Element, __half> ? "fp16" : "bf16";
    told->add("decode", "htree_decode_kernel<" + name + ", " + number(Cfg::kK) + ">",
              number(1u << log2_parts_of_cta) + " of " + number(1u << args.log2_parts) + " parts, " + number(Cfg::kWarps) +
                  " warps",
              log2_parts_of_cta == 0 ? "a CTA takes one part: clusters of all queries are resident at once"
                                     : "a CTA takes several parts, so that fewer queries wait for others to end",
              static_cast<std::int64_t>(units) * ctas);
    return;
  }
  launch_overlapped_clusters(htree_decode_kernel<Cfg>, ctas, units * ctas, Cfg::kThreads,
                             shared_bytes<Cfg>(args.top_k, args.G, 1 << log2_parts_of_cta), stream, args);
}

// From one part a CTA on the first number of parts of which all queries are resident at once, `most` at most; else the largest
// that fits. What a layer costs whatever its size is then paid as seldom as can be.
template <class Cfg>
int log2_parts_of_cta(Args const& args, unsigned units, int most = kLog2MaxPartsOfCta) {
  int log2 = 0;
  while (log2 < most && log2 < args.log2_parts - 1 && fits<Cfg>(args.top_k, args.G, 2 << log2) &&
         units > static_cast<unsigned>(resident<Cfg>(args, log2))) {
    ++log2;
  }
  return log2;
}

template <class Cfg>
void launch_parts(Args const& args, unsigned units, cudaStream_t stream, int most = kLog2MaxPartsOfCta) {
  launch_kernel<Cfg>(args, log2_parts_of_cta<Cfg>(args, units, most), units, stream);
}

// Large top_k: CTAs alone on their SMs. Small top_k: two an SM, whose layers are short, and at most two parts each.
template <class Element, int kK, int kV, bool kHalves>
void launch_group(Args const& args, unsigned units, cudaStream_t stream) {
  using Small = Config<Element, kK, kV, 1, kHalves, false>;
  using Large = Config<Element, kK, kV, 1, kHalves, true>;
  using Wide = Config<Element, kK, kV, 2, kHalves, false>;
  static_assert(fits<Small>(128, 8, 2) && fits<Large>(tree::kMaxTopK, 8, 1) && fits<Wide>(tree::kMaxTopK, 16, 1));
  if (args.G > 8) return launch_parts<Wide>(args, units, stream);
  args.top_k > 128 ? launch_parts<Large>(args, units, stream) : launch_parts<Small>(args, units, stream, 1);
}

template <class Element, int kK, int kV>
void launch(Args const& args, unsigned units, cudaStream_t stream) {
  bool const halves = !args.pairing.interleaved && args.pairing.halves == kK / 16;
  halves ? launch_group<Element, kK, kV, true>(args, units, stream)
         : launch_group<Element, kK, kV, false>(args, units, stream);
}

}  // namespace htree_cuda::sm90::htree_decode

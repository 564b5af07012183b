// How the work of a call is divided: parts, which decide the bits, and CTAs, which take whole parts.
#pragma once

#include <cuda_runtime.h>

#include "args.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr int kMaxParts = 16;

// Parts of a layer. With 4, a warp has two blocks of a layer where top_k is 64: fewer CTAs spend their time on what every
// CTA does, which costs a call of one sequence little where two CTAs share an SM.
__host__ __device__ constexpr int log2_parts_of(int top_k, int G) { return top_k > 128 ? 4 : top_k > 64 || G > 8 ? 3 : 2; }
__host__ __device__ constexpr int parts_of(int top_k, int G) { return 1 << log2_parts_of(top_k, G); }

// Two parts a CTA are for groups of so few heads that two CTAs still share an SM: the states of the parts, between their attend
// passes, hold outputs of these heads alone.
inline constexpr int kMaxPartsOfCta = 2;
inline constexpr int kCompactHeads = 4;

// How a call is divided, as a CTA of Cfg sees it.
template <class Cfg>
struct Split {
  static constexpr int kLog2PartsOfCta = Cfg::kPartsOfCta - 1;
  static_assert(1 << kLog2PartsOfCta == Cfg::kPartsOfCta);
  int log2_parts;

  __device__ __forceinline__ explicit Split(Args const& args) : log2_parts(args.log2_parts) {}
  __device__ __forceinline__ int parts() const { return 1 << log2_parts; }
  __device__ __forceinline__ int ctas() const { return 1 << (log2_parts - kLog2PartsOfCta); }  // of the cluster
};

}  // namespace htree_cuda::sm90::htree_decode

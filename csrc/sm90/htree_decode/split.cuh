// How the work of a call is divided: parts and streams, which decide the bits, and CTAs and warps, which take whole ones.
#pragma once

#include <cuda_runtime.h>

#include "args.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr int kLog2MaxParts = 4;
inline constexpr int kMaxParts = 1 << kLog2MaxParts;
inline constexpr int kLog2Streams = 3;
inline constexpr int kStreams = 1 << kLog2Streams;  // of a part: stream w scores its blocks w, w + 8, ...
inline constexpr int kSlots = 2;     // of a part: slot s attends its blocks s, s + 2, ...
inline constexpr int kSides = 2;     // of the dimensions of a value
inline constexpr int kPartners = 2;  // warps that take a slot's blocks alternately, a side each
static_assert(kSlots * kSides * kPartners == kStreams);

// Parts of a layer. With 4, a warp has two blocks of a layer where top_k is 64: fewer CTAs spend their time on what every
// CTA does, which costs a call of one sequence little where two CTAs share an SM.
__host__ __device__ constexpr int log2_parts_of(int top_k, int G) { return top_k > 128 ? 4 : top_k > 64 || G > 8 ? 3 : 2; }
__host__ __device__ constexpr int parts_of(int top_k, int G) { return 1 << log2_parts_of(top_k, G); }

inline constexpr int kLog2MaxPartsOfCta = 3;
inline constexpr int kMaxPartsOfCta = 1 << kLog2MaxPartsOfCta;

// How a call is divided.
struct Split {
  int log2_parts;
  int log2_parts_of_cta;

  __device__ __forceinline__ explicit Split(Args const& args)
      : log2_parts(args.log2_parts), log2_parts_of_cta(args.log2_parts_of_cta) {}
  __device__ __forceinline__ int parts() const { return 1 << log2_parts; }
  __device__ __forceinline__ int parts_of_cta() const { return 1 << log2_parts_of_cta; }
  __device__ __forceinline__ int streams_of_cta() const { return kStreams << log2_parts_of_cta; }
  __device__ __forceinline__ int ctas() const { return 1 << (log2_parts - log2_parts_of_cta); }  // of the cluster
};

}  // namespace htree_cuda::sm90::htree_decode

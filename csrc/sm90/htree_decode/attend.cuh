// The attend pass of a layer: values of the candidates that are not expanded, onto the warp's running softmax.
#pragma once

#include <cuda_runtime.h>

#include "score.cuh"
#include "select.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

// The State of a warp for one of the CTA's parts.
template <class Cfg>
__device__ __forceinline__ float4* warp_outputs(Smem<Cfg>& smem, int part, int warp) {
  return smem.tail + Cfg::kOutputVectors + (part * Cfg::kWarps + warp) * Cfg::kStateVectors;
}

// Bit c: candidate c of a block is attended. `selects`: candidates of smem.expanded are left out.
template <class Cfg>
__device__ __forceinline__ uint32_t attended_of(Smem<Cfg> const& smem, Layer const& layer, bool selects, int block) {
  int const place = block - layer.first;
  uint32_t const expanded = selects ? smem.expanded[place / 2] >> place % 2 * kSiblings : 0u;
  return ((1u << layer.readable_of(block)) - 1u) & ~expanded;
}

// P of a block, from the scores that the lane stored.
template <class Cfg>
__device__ __forceinline__ void exponentiate_block(Args const& args, Layer const& layer, Smem<Cfg>& smem, uint32_t attended,
                                                   int block, State<Cfg>& state, uint32_t (&p)[2][4]) {
  int const lane = lane_of<Cfg>();
  bool const stored = lane < score_lanes(args.G);
  float4 const* const from = stored_scores<Cfg>(args, smem, block - layer.first);
  float s[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float4 const x = i < Cfg::kHeadTiles && stored ? from[i < Cfg::kHeadTiles ? i : 0] : float4{};
    s[0][2 * i] = x.x, s[0][2 * i + 1] = x.y, s[1][2 * i] = x.z, s[1][2 * i + 1] = x.w;
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int const candidate = 8 * tile + 2 * (lane % 4) + e % 2;
      if (!(attended >> candidate & 1u)) s[tile][e] = kMasked;
    }
  }
  state.exponentiate(s, p);
}

// A warp's blocks of one part. A block of which nothing is attended is passed over.
template <class Cfg>
__device__ __forceinline__ void attend_part(Args const& args, Layer const& layer, Smem<Cfg>& smem, bool selects, int part,
                                            int warp, State<Cfg>& state) {
#pragma unroll 1
  for (int block = layer.first_of<Cfg>(part) + warp; block < layer.last_of<Cfg>(part); block += Cfg::kWarps) {
    uint32_t const attended = attended_of(smem, layer, selects, block);
    if (attended == 0) continue;
    Values<Cfg> values;
    values.load(attended, value_address<Cfg>(args, smem, layer, block));
    uint32_t p[2][4];
    exponentiate_block(args, layer, smem, attended, block, state, p);
    values.add(p, state.o);
  }
}

template <class Cfg>
__device__ __forceinline__ void attend(Args const& args, Layer const& layer, Smem<Cfg>& smem, bool selects, int warp) {
#pragma unroll 1
  for (int part = 0; part < Cfg::kPartsOfCta; ++part) {
    float4* const outputs = warp_outputs(smem, part, warp);
    State<Cfg> state;
    state.load(outputs);
    attend_part(args, layer, smem, selects, part, warp, state);
    state.store(outputs);
  }
}

}  // namespace htree_cuda::sm90::htree_decode

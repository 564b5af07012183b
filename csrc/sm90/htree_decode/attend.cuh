// The attend pass of a layer: values of the candidates that are not expanded, onto the warp's running softmax.
#pragma once

#include <cuda_runtime.h>

#include "score.cuh"
#include "select.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

template <class Cfg>
__device__ __forceinline__ float4* lane_outputs(Smem<Cfg>& smem, int warp) {
  return smem.outputs + warp * State<Cfg>::place(Cfg::kHeadTiles, 0) + threadIdx.x % 32;
}

// Scores are those that the lane stored. `selects`: candidates of smem.expanded are left out.
template <class Cfg>
__device__ __forceinline__ void attend_part(Args const& args, Layer const& layer, Smem<Cfg>& smem, bool selects, int warp) {
  bool const stored = static_cast<int>(threadIdx.x % 32) < score_lanes(args.G);
  float4* const outputs = lane_outputs<Cfg>(smem, warp);
  State<Cfg> state;
  state.load(outputs);
#pragma unroll 1
  for (int block = layer.first + warp; block < layer.last; block += Cfg::kWarps) {
    int const place = block - layer.first;
    uint32_t const expanded = selects ? smem.expanded[place / 2] >> place % 2 * kSiblings : 0u;
    uint32_t const attended = ((1u << layer.readable_of(block)) - 1u) & ~expanded;
    if (attended == 0) continue;
    Values<Cfg> values;
    values.load(attended, value_address<Cfg>(args, layer, block));
    float4 const* const from = stored_scores<Cfg>(smem, args.G, block - layer.first);
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
        int const candidate = 8 * tile + 2 * (threadIdx.x % 4) + e % 2;
        if (!(attended >> candidate & 1u)) s[tile][e] = kMasked;
      }
    }
    uint32_t p[2][4];
    state.exponentiate(s, p);
    values.add(p, state.o);
  }
  state.store(outputs);
}

}  // namespace htree_cuda::sm90::htree_decode

// The attend pass of a layer: values of the candidates that are not expanded, onto what was attended in the layers above.
#pragma once

#include <cuda_runtime.h>

#include "fragments.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

// Bit c: candidate c of a block is attended. `selects`: candidates of smem.expanded are left out.
template <class Cfg>
__device__ __forceinline__ uint32_t attended_of(Smem<Cfg> const& smem, Layer const& layer, bool selects, int block) {
  int const place = block - layer.first;
  uint32_t const expanded = selects ? smem.expanded[place / 2] >> place % 2 * kSiblings : 0u;
  return ((1u << layer.readable_of(block)) - 1u) & ~expanded;
}

// A quarter of the values of a slot's blocks begin, begin + kSlots, ... below `end`, in O^T, relative to the part's maxima; `sum`
// is what P adds up to in this lane.
template <class Cfg>
struct Quarter {
  static constexpr int kAhead = 4;  // blocks whose values are on their way while those of one are multiplied

  Args const& args;
  Smem<Cfg>& smem;
  Layer const& layer;
  bool selects;
  int end;
  int quarter;
  float o[Cfg::kHeadTiles][Cfg::kQuarterTiles][4] = {};
  float sum[Cfg::kHeadTiles] = {};

  __device__ __forceinline__ void load(Values<Cfg>& values, int block) const {
    bool const exists = block < end;
    int const known = min(block, end - 1);
    int const row_quad = lane_of_warp() % 4;
    uint32_t const attended = exists ? attended_of(smem, layer, selects, known) >> row_quad * 4 : 0u;
    values.load(attended, values_of<Cfg>(args, layer), smem.rows[(known - layer.first) * (kSiblings / 4) + row_quad], quarter);
  }

  __device__ __forceinline__ void add(Values<Cfg> const& values, int block) {
    int const lane = lane_of_warp();
    float4 const* const scores = reinterpret_cast<float4 const*>(smem.scores(args));
    uint32_t const attended = attended_of(smem, layer, selects, block) >> lane % 4 * 4;
    uint32_t p[Cfg::kHeadTiles][4];
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      int const head = lane / 4 + 8 * i;
      float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
      if (head < args.G) x = scores[score_place(args, block - layer.first, head, lane % 4)];
      x.x = attended & 1u ? x.x : 0.0f;
      x.y = attended & 2u ? x.y : 0.0f;
      x.z = attended & 4u ? x.z : 0.0f;
      x.w = attended & 8u ? x.w : 0.0f;
      sum[i] += (x.x + x.y) + (x.z + x.w);
      p[i][0] = ptx::round_tf32(x.x), p[i][1] = ptx::round_tf32(x.y);
      p[i][2] = ptx::round_tf32(x.z), p[i][3] = ptx::round_tf32(x.w);
    }
    values.add(p, o);
  }

  __device__ __forceinline__ void attend(int begin) {
    Values<Cfg> values[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(values[n], begin + n * kSlots);
#pragma unroll 1
    for (int first = begin; first < end; first += kAhead * kSlots) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        int const block = first + n * kSlots;
        if (block >= end) break;
        add(values[n], block);
        load(values[n], block + kAhead * kSlots);
      }
    }
  }

  // Adds what was attended in this layer to the slot's state.
  __device__ __forceinline__ void store(int part, int slot) const {
    constexpr int kDims = 2 * Cfg::kQuarterTiles;  // of a lane
    int const lane = lane_of_warp();
    float* const state = smem.states(args) + (part * kSlots + slot) * args.G * Cfg::kOutputStride;
    int const dim = quarter * (Cfg::kV / kQuarters) + lane / 4 * kDims;
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const head = 8 * i + lane % 4 * 2 + e;
        if (head >= args.G) continue;
        float2 const factors = smem.factors[part * kHeads + head];
        float* const to = state + head * Cfg::kOutputStride + dim;
#pragma unroll
        for (int d = 0; d < kDims; ++d) to[d] = fmaf(to[d], factors.x, __fmul_rn(o[i][d / 2][d % 2 * 2 + e], factors.y));
      }
      float whole = sum[i] + __shfl_xor_sync(0xffffffffu, sum[i], 1);
      whole += __shfl_xor_sync(0xffffffffu, whole, 2);
      int const head = lane / 4 + 8 * i;
      if (quarter == 0 && lane % 4 == 0 && head < args.G) {
        float2 const factors = smem.factors[part * kHeads + head];
        float& to = smem.slot_sums[(part * kSlots + slot) * kHeads + head];
        to = fmaf(to, factors.x, __fmul_rn(whole, factors.y));
      }
    }
  }
};

template <class Cfg>
__device__ __forceinline__ void attend(Args const& args, Layer const& layer, Smem<Cfg>& smem, bool selects, int warp) {
  Split const split(args);
  // Number 8 part + 4 slot + quarter.
#pragma unroll 1
  for (int i = warp; i < split.streams_of_cta(); i += Cfg::kWarps) {
    int const part = i / kStreams;
    int const slot = i / kQuarters % kSlots;
    Quarter<Cfg> quarter{args, smem, layer, selects, layer.first_of(split, part + 1), i % kQuarters};
    int const begin = layer.first_of(split, part) + slot;
    if (begin < quarter.end) quarter.attend(begin);
    quarter.store(part, slot);
  }
}

}  // namespace htree_cuda::sm90::htree_decode

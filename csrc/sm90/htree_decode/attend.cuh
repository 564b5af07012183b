// The attend pass of a layer: values of the candidates that are not expanded, onto what was attended in the layers above.
#pragma once

#include <cuda_runtime.h>

#include "fragments.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

// A quarter of the values of a slot's blocks, in O^T, relative to the part's maxima; `sum` is what P adds up to in this lane.
// Blocks are counted from the CTA's first.
template <class Cfg>
struct Quarter {
  // Blocks whose values are loaded before the first of them are multiplied. Loads while others are multiplied gain nothing:
  // they share a scoreboard, so that whoever waits for the first ones waits for all.
  static constexpr int kAtOnce = 8;

  Args const& args;
  Smem<Cfg>& smem;
  int quarter;
  float o[Cfg::kHeadTiles][Cfg::kQuarterTiles][4] = {};
  float sum[Cfg::kHeadTiles] = {};

  // Blocks begin, begin + kSlots, ... below `end`. `values`: row 0 of the cache's tensor.
  __device__ __forceinline__ void attend(char const* values, int begin, int end) {
    int const lane = lane_of_warp();
    int const row_quad = lane % 4;
    values += (quarter * 8 + lane / 4) * (4 * Cfg::kQuarterTiles);
    uint4 const* rows = smem.rows + begin * (kSiblings / 4) + row_quad;
    std::uint16_t const* attended = smem.attended + begin;
    // Columns of heads that do not exist are computed from those of the last one, and never read.
    float4 const* p[Cfg::kHeadTiles];
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      p[i] = reinterpret_cast<float4 const*>(smem.scores(args)) +
             score_place(args, begin, min(lane / 4 + 8 * i, args.G - 1), row_quad);
    }
    int const step = kSlots * args.G * (kSiblings / 4);
#pragma unroll 1
    for (int first = begin; first < end; first += kAtOnce * kSlots) {
      Values<Cfg> values_of[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * kSlots < end) {
          values_of[n].load(attended[n * kSlots] >> row_quad * 4, values, rows[n * kSlots * (kSiblings / 4)]);
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * kSlots >= end) break;
        float4 x[Cfg::kHeadTiles];
#pragma unroll
        for (int i = 0; i < Cfg::kHeadTiles; ++i) {
          x[i] = *p[i];
          p[i] += step;
          if (quarter == 0) sum[i] += (x[i].x + x[i].y) + (x[i].z + x[i].w);
        }
        values_of[n].add(x, o);
      }
      rows += kAtOnce * kSlots * (kSiblings / 4);
      attended += kAtOnce * kSlots;
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
      float whole = sum[i] + __shfl_xor_sync(kFullWarp, sum[i], 1);
      whole += __shfl_xor_sync(kFullWarp, whole, 2);
      int const head = lane / 4 + 8 * i;
      if (quarter == 0 && lane % 4 == 0 && head < args.G) {
        float2 const factors = smem.factors[part * kHeads + head];
        float& to = smem.slot_sums[(part * kSlots + slot) * kHeads + head];
        to = fmaf(to, factors.x, __fmul_rn(__fmul_rn(whole, 1.0f / kCut), factors.y));
      }
    }
  }
};

template <class Cfg>
__device__ __forceinline__ void attend(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  Split const split(args);
  // Number 8 part + 4 slot + quarter.
#pragma unroll 1
  for (int i = warp; i < split.streams_of_cta(); i += Cfg::kWarps) {
    int const part = i / kStreams;
    int const slot = i / kQuarters % kSlots;
    Quarter<Cfg> quarter{args, smem, i % kQuarters};
    int const begin = layer.first_of(split, part) + slot - layer.first;
    int const end = layer.first_of(split, part + 1) - layer.first;
    if (begin < end) quarter.attend(values_of<Cfg>(args, layer), begin, end);
    quarter.store(part, slot);
  }
}

}  // namespace htree_cuda::sm90::htree_decode

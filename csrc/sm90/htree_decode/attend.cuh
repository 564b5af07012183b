// The attend pass of a layer: values of the candidates that are not expanded, onto what was attended in the layers above.
#pragma once

#include <cuda_runtime.h>

#include "device/barriers.cuh"
#include "fragments.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

// One side of the values of every second of a slot's blocks, in O^T, relative to the part's maxima; `sum` is what P adds up to in
// this lane. Blocks are counted from the CTA's first.
template <class Cfg>
struct Side {
  // Blocks whose values are loaded before the first of them are multiplied. Loads while others are multiplied gain nothing:
  // they share a scoreboard, so that whoever waits for the first ones waits for all.
  static constexpr int kAtOnce = 4;
  static constexpr int kStep = kSlots * kPartners;

  Args const& args;
  Smem<Cfg>& smem;
  int side;
  float o[Cfg::kHeadTiles][Cfg::kSideTiles][4] = {};
  float sum[Cfg::kHeadTiles] = {};

  // Blocks begin, begin + kStep, ... below `end`. `values`: row 0 of the cache's tensor, `of_layer`: where the CTA's
  // candidates lie.
  __device__ __forceinline__ void attend(char const* values, uint4 const* of_layer, int begin, int end) {
    int const lane = lane_of_warp();
    values += side * Cfg::kV + lane % 4 * 16;
    uint32_t const* rows = reinterpret_cast<uint32_t const*>(of_layer) + begin * kSiblings + lane / 4;
    std::uint16_t const* attended = smem.attended + begin;
    // Columns of heads that do not exist are computed from those of the last one, and never read.
    float const* p[Cfg::kHeadTiles];
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      p[i] = smem.scores(args) + 4 * score_place(args, begin, min(lane / 4 + 8 * i, args.G - 1), lane % 4 / 2) + lane % 2 * 2;
    }
    int const step = kStep * args.G * kSiblings;
#pragma unroll 1
    for (int first = begin; first < end; first += kAtOnce * kStep) {
      Values<Cfg> values_of[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * kStep < end) values_of[n].load(attended[n * kStep], values, rows + n * kStep * kSiblings);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n * kStep >= end) break;
        float4 x[Cfg::kHeadTiles];
#pragma unroll
        for (int i = 0; i < Cfg::kHeadTiles; ++i) {
          // The second half of the row lies before the first one where heads 2 and 3 of four have theirs shifted.
          float2 const low = reinterpret_cast<float2 const&>(p[i][0]);
          float2 const high = reinterpret_cast<float2 const&>(p[i][min(lane / 4 + 8 * i, args.G - 1) / 2 % 2 ? -8 : 8]);
          x[i] = {low.x, low.y, high.x, high.y};
          p[i] += step;
          if (side == 0) sum[i] += (x[i].x + x[i].y) + (x[i].z + x[i].w);
        }
        values_of[n].add(x, o);
      }
      rows += kAtOnce * kStep * kSiblings;
      attended += kAtOnce * kStep;
    }
  }

  // Adds what was attended in this layer to the slot's state: the first partner to what was attended before, the second to that.
  __device__ __forceinline__ void store(int part, int slot, int partner) const {
    int const lane = lane_of_warp();
    float* const state = smem.states(args) + (part * kSlots + slot) * args.G * Cfg::kOutputStride;
    int const dim = side * (Cfg::kV / kSides) + lane / 8 * 8 + lane / 4 % 2;
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const head = 8 * i + lane % 4 * 2 + e;
        if (head >= args.G) continue;
        float2 const factors = smem.factors[part * kHeads + head];
        float const before = partner == 0 ? factors.x : 1.0f;
        float* const to = state + head * Cfg::kOutputStride + dim;
#pragma unroll
        for (int tile = 0; tile < Cfg::kSideTiles; ++tile) {
#pragma unroll
          for (int word = 0; word < 2; ++word) {
            float& x = to[tile / 2 * 32 + tile % 2 * 4 + 2 * word];
            x = fmaf(x, before, __fmul_rn(o[i][tile][2 * word + e], factors.y));
          }
        }
      }
      float whole = sum[i] + __shfl_xor_sync(kFullWarp, sum[i], 1);
      whole += __shfl_xor_sync(kFullWarp, whole, 2);
      int const head = lane / 4 + 8 * i;
      if (side == 0 && lane % 4 == 0 && head < args.G) {
        float2 const factors = smem.factors[part * kHeads + head];
        float& to = smem.slot_sums[(part * kSlots + slot) * kHeads + head];
        to = fmaf(to, partner == 0 ? factors.x : 1.0f, __fmul_rn(__fmul_rn(whole, 1.0f / kCut), factors.y));
      }
    }
  }
};

// Two neighbouring warps take a slot's side alternately, a block each, and add what they have one after the other.
template <class Cfg>
__device__ __forceinline__ void attend(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp) {
  Split const split(args);
  // Number 8 part + 4 slot + 2 side + partner.
#pragma unroll 1
  for (int i = warp; i < split.streams_of_cta(); i += Cfg::kWarps) {
    int const part = i / kStreams;
    int const slot = i / (kSides * kPartners) % kSlots;
    Side<Cfg> side{args, smem, i / kPartners % kSides};
    int const begin = layer.first_of(split, part) + slot + i % kPartners * kSlots - layer.first;
    int const end = layer.first_of(split, part + 1) - layer.first;
    if (begin < end) side.attend(values_of<Cfg>(args, layer), smem.rows + layer.rows_begin, begin, end);
    // Both wait: a warp that only arrived could do so again, for its next blocks, before the other one has.
#pragma unroll 1
    for (int partner = 0; partner < kPartners; ++partner) {
      if (partner == i % kPartners) side.store(part, slot, partner);
      if (partner + 1 < kPartners) meet_partner(smem, warp);
    }
  }
}

}  // namespace htree_cuda::sm90::htree_decode

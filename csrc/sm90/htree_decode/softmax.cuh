// Sums of exponentials in base 2, and the running state of the output.
#pragma once

#include <cuda_runtime.h>

#include "device/ptx.cuh"
#include "config.cuh"

namespace htree_cuda::sm90::htree_decode {

// The maximum before the first candidate: any score exceeds it, and what was summed up to then is zero.
inline constexpr float kNoScore = -3.402823466e38f;

// (maximum m, sum s) stands for s * 2^m. The order of the operands decides the rounding.
__device__ __forceinline__ float2 combine(float2 x, float2 y) {
  float const most = fmaxf(x.x, y.x);
  return {most, x.y * ptx::exp2_movable(x.x - most) + y.y * ptx::exp2_movable(y.x - most)};
}

// Over the four lanes of a head, the same in all of them.
__device__ __forceinline__ float2 combine_quad(float2 x) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    float2 const y = {__shfl_xor_sync(0xffffffffu, x.x, d), __shfl_xor_sync(0xffffffffu, x.y, d)};
    x = threadIdx.x & d ? combine(y, x) : combine(x, y);
  }
  return x;
}

// The softmax of a warp over what it has attended, in all layers. Sums are a lane's own until the end. Between attend passes all
// of it lies in shared memory, where every lane keeps its own: score passes need the registers.
template <class Cfg>
struct State {
  // A maximum rises when a score exceeds it by more than this: rescaling is rare.
  static constexpr float kSlack = 8.0f;

  float max[Cfg::kHeadTiles];  // of head g + 8 i, the same in its four lanes
  float sum[Cfg::kHeadTiles];
  float o[Cfg::kHeadTiles][Cfg::kDimTiles][4];  // O^T: rows are dimensions, columns heads 2 t and 2 t + 1

  // Where a lane keeps a tile of O^T, and behind the tiles maxima and sums, among the warp's `outputs`. Where they are compact,
  // only lanes that have outputs, or sums, of kCompactHeads heads keep any; what the others load are zeros.
  struct Place {
    int of_tile;
    int of_sums;
    bool has_tile = true;
    bool has_sums = true;

    __device__ __forceinline__ Place() {
      int const lane = static_cast<int>(ptx::lane_index());
      of_tile = of_sums = lane;
      if constexpr (Cfg::kCompact) {
        of_tile = lane / 4 * 2 + lane % 2;
        has_tile = lane % 4 < 2;
        has_sums = lane < 16;
      }
    }
    __device__ __forceinline__ int tile(int i, int tile) const { return (i * (Cfg::kDimTiles + 1) + tile) * Cfg::kStateLanes + of_tile; }
    __device__ __forceinline__ int sums(int i) const { return (i * (Cfg::kDimTiles + 1) + Cfg::kDimTiles) * Cfg::kStateLanes + of_sums; }
  };

  __device__ __forceinline__ void load(float4 const* outputs) {
    Place const place;
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
#pragma unroll
      for (int tile = 0; tile < Cfg::kDimTiles; ++tile) {
        float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
        if (place.has_tile) x = outputs[place.tile(i, tile)];
        o[i][tile][0] = x.x, o[i][tile][1] = x.y, o[i][tile][2] = x.z, o[i][tile][3] = x.w;
      }
      float2 running = {0.0f, 0.0f};
      if (place.has_sums) running = reinterpret_cast<float2 const&>(outputs[place.sums(i)]);
      max[i] = running.x, sum[i] = running.y;
    }
  }

  __device__ __forceinline__ void store(float4* outputs) const {
    Place const place;
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
#pragma unroll
      for (int tile = 0; tile < Cfg::kDimTiles; ++tile) {
        if (place.has_tile) outputs[place.tile(i, tile)] = {o[i][tile][0], o[i][tile][1], o[i][tile][2], o[i][tile][3]};
      }
      if (place.has_sums) reinterpret_cast<float2&>(outputs[place.sums(i)]) = {max[i], sum[i]};
    }
  }

  __device__ __forceinline__ State() {
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      max[i] = kNoScore;
      sum[i] = 0.0f;
#pragma unroll
      for (int tile = 0; tile < Cfg::kDimTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][tile][e] = 0.0f;
      }
    }
  }

  // Scores of a block become probabilities relative to the maxima, which rise first where they must. What decides is the
  // scores of this query alone.
  __device__ __forceinline__ void exponentiate(float const (&s)[2][4], uint32_t (&p)[2][4]) {
    float largest[Cfg::kHeadTiles];
    bool rises = false;
#pragma unroll
    for (int i = 0; i < Cfg::kHeadTiles; ++i) {
      float x = fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      largest[i] = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      rises |= largest[i] > max[i] + kSlack;
    }
    if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
      for (int i = 0; i < Cfg::kHeadTiles; ++i) {
        float const before = max[i];
        if (largest[i] > before + kSlack) max[i] = largest[i];
        float const factor = ptx::exp2_movable(before - max[i]);
        sum[i] *= factor;
        int const lane = static_cast<int>(ptx::lane_index() % 4 * 8);
        float const even = __shfl_sync(0xffffffffu, factor, lane);
        float const odd = __shfl_sync(0xffffffffu, factor, lane + 4);
#pragma unroll
        for (int tile = 0; tile < Cfg::kDimTiles; ++tile) {
          o[i][tile][0] *= even;
          o[i][tile][1] *= odd;
          o[i][tile][2] *= even;
          o[i][tile][3] *= odd;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const i = e / 2;
        if (i >= Cfg::kHeadTiles) {
          p[tile][e] = 0;
          continue;
        }
        float const x = ptx::exp2_movable(s[tile][e] - max[i < Cfg::kHeadTiles ? i : 0]);
        sum[i < Cfg::kHeadTiles ? i : 0] += x;
        p[tile][e] = ptx::round_tf32(x);
      }
    }
  }
};

}  // namespace htree_cuda::sm90::htree_decode

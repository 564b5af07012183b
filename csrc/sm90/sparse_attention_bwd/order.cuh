// In which order a row of the sums of dkv keeps its columns: the one in which a warp's accumulators of a product fill
// whole lines of 128 bytes after an exchange between neighbouring rows. Lane l has columns 2 (l % 4) + 0..1 of
// every eight.
//   float    sixteen columns 16 b + 8 j + 2 l + i lie at 16 b + 4 l + 2 j + i: a lane adds four neighbours at once
//   int64_t  eight columns 8 j + 2 l + i lie at 8 j + 4 i + l: sixteen lanes, which swap what they have of four rows, add
//            sixteen neighbours, or 32 lanes of eight rows 32
#pragma once

#include <cstdint>

#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template <Sums kSums>
struct Order;

template <>
struct Order<Sums::kAtomic> {
  using Sum = float;
  // Reads the columns 8 block .. 8 block + 7 of a row.
  static __device__ __forceinline__ void load(float const* row, int block, float (&x)[8]) {
    float const* const first = row + 16 * (block / 2) + 2 * (block % 2);
#pragma unroll
    for (int l = 0; l < 4; ++l) {
      float2 const pair = *reinterpret_cast<float2 const*>(first + 4 * l);
      x[2 * l] = pair.x;
      x[2 * l + 1] = pair.y;
    }
  }
};

template <>
struct Order<Sums::kDeterministic> {
  using Sum = long long;
  static __device__ __forceinline__ void load(long long const* row, int block, long long (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      longlong2 const pair = *reinterpret_cast<longlong2 const*>(row + 8 * block + 2 * i);
      // Places 2 i and 2 i + 1.
      x[2 * (2 * i % 4) + i / 2] = pair.x;
      x[2 * (2 * i % 4 + 1) + i / 2] = pair.y;
    }
  }
};

}  // namespace htree_cuda::sm90::sparse_attention_bwd

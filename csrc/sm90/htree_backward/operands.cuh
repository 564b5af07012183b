// Scores of one query and one parent, and normalised fp16 rows as operands of products in the dtype.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../device/pairs.cuh"
#include "../device/ptx.cuh"
#include "stream.cuh"

namespace htree_cuda::gradient {

inline constexpr float kHeadroomFactor = 1.0f / (1 << kHeadroom);

// Where a lane's row lies for ldmatrix.x4 of 16 rows and 16 columns; the k-th 16 columns are at the address ^ (k << 5).
//   kRowsFirst   rows 0..7 and 8..15 of the first eight columns, then of the others: an A fragment, or two B fragments,
//                {0, 2} and {1, 3}, by columns, or, transposed, two B fragments, {0, 1} and {2, 3}, by rows
//   otherwise    rows 0..7 of both halves of the columns, then rows 8..15: two B fragments, {0, 1} and {2, 3}, by columns
template <bool kRowsFirst>
__device__ __forceinline__ uint32_t matrix_lane(int lane, int row_bytes) {
  int const id = lane / 8;
  int const row = lane % 8 + (kRowsFirst ? id % 2 : id / 2) * 8;
  int const chunk = kRowsFirst ? id / 2 : id % 2;
  return row * row_bytes + ((chunk ^ (row % 8)) << 4);
}

// A product that adds up in two chains, because the latency of one is what a warp waits for; `total` joins them.
struct Chains {
  float x[2][2][4];  // [chain][tile]

  __device__ __forceinline__ void total(float (&sum)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[tile][e] = x[0][tile][e] + x[1][tile][e];
    }
  }
};

// The turns of one position: this lane's entries of the table of fragments.
template <int kK>
struct PositionTurns {
  uint4 words[kK / 32];

  __device__ __forceinline__ PositionTurns(rope::Turns const* table, int position, int tq) {
    rope::Turns const* const row = table + position * (kK / 8) + tq;
#pragma unroll
    for (int kk = 0; kk < kK / 32; ++kk) words[kk] = __ldg(reinterpret_cast<uint4 const*>(row + kk * 4));
  }

  __device__ __forceinline__ rope::Turns const& operator[](int kk) const {
    return reinterpret_cast<rope::Turns const&>(words[kk]);
  }
};

// A row was divided by `inverse`. Rows come back to their size on the way to a product: in bf16 wholly by what they are
// multiplied with, `rest`; in fp16, whose range that might leave, by `own` as far as fp16 holds it.
template <class Element>
struct Restore;

template <>
struct Restore<__nv_bfloat16> {
  static __device__ __forceinline__ float own(float) { return 1.0f; }
  static __device__ __forceinline__ float rest(float inverse) { return inverse; }
  static __device__ __forceinline__ uint32_t pair(uint32_t x, half2) {
    float2 const y = Pairs<__half>::unpack(x);
    return Pairs<__nv_bfloat16>::pack(y.x, y.y);
  }
};

template <>
struct Restore<__half> {
  static constexpr float kLeast = 1.0f / (1 << 14);  // the smallest normal fp16
  static __device__ __forceinline__ float own(float inverse) { return fmaxf(inverse, kLeast); }
  static __device__ __forceinline__ float rest(float inverse) { return fminf(inverse / kLeast, 1.0f); }
  static __device__ __forceinline__ uint32_t pair(uint32_t x, half2 own) {
    half2 const y = __hmul2(*reinterpret_cast<half2 const*>(&x), own);
    return *reinterpret_cast<uint32_t const*>(&y);
  }
};

// dS = P (dP - delta) for one query head and child; what takes no part is zero whatever it holds.
struct Weights {
  float p;
  float ds;
};

__device__ __forceinline__ Weights weights(bool open, float raw, float inverse, float unit, float lse2, float dp,
                                           float delta) {
  float const p = ptx::exp2_movable(fmaf(raw * (inverse * kHeadroomFactor), unit, -lse2));
  return {open ? p : 0.0f, open ? p * (dp - delta) : 0.0f};
}

}  // namespace htree_cuda::gradient

// What the matrix kernels do with one query and one parent.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/pairs.cuh"
#include "device/ptx.cuh"
#include "stream.cuh"

namespace htree_cuda::sm90::htree_bwd {

inline constexpr float kHeadroomFactor = 1.0f / (1 << kHeadroom);
// A unit without its headroom holds scale * log2(e) times what the row of q was divided by; dk wants it without log2(e).
inline constexpr float kUnitScale = 0.69314718055994531f;

// Where a lane's row lies for ldmatrix.x4 of 16 rows and 16 columns, the first of a matrix.
//   kRowsFirst   rows 0..7 and 8..15 of the first eight columns, then of the others: an A fragment, or two B fragments,
//                {0, 2} and {1, 3}, by columns, or, transposed, two B fragments, {0, 1} and {2, 3}, by rows
//   otherwise    rows 0..7 of both halves of the columns, then rows 8..15: two B fragments by columns, {0, 1}, {2, 3}
template <bool kRowsFirst>
__device__ __forceinline__ uint32_t matrix_lane(int lane, int row_bytes) {
  int const id = lane / 8;
  int const row = lane % 8 + (kRowsFirst ? id % 2 : id / 2) * 8;
  int const chunk = kRowsFirst ? id / 2 : id % 2;
  return row * row_bytes + ((chunk ^ (row % 8)) << 4);
}

// The addresses of all columns of a matrix that begins at a multiple of 256 bytes, 16 a step: the swizzle exchanges 16
// bytes within 128, so that four addresses serve a whole operand and every other one at a constant distance.
struct Steps {
  uint32_t at[4];

  __device__ __forceinline__ explicit Steps(uint32_t lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] = lane ^ (i << 5);
  }
  __device__ __forceinline__ uint32_t operator[](int step) const { return at[step % 4] + step / 4 * 128; }
};

// FragmentRotations two B fragments by columns, {0, 1} and {2, 3}, of the low half against those of the high half; `back`: by the
// negative angle.
template <bool kBack>
__device__ __forceinline__ void rotation_columns(uint32_t (&lo)[4], uint32_t (&hi)[4], rope::FragmentRotations const& rotations) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    half2& x = reinterpret_cast<half2&>(kBack ? hi[i] : lo[i]);  // back is forth with the halves exchanged
    half2& y = reinterpret_cast<half2&>(kBack ? lo[i] : hi[i]);
    half2 const cosine = rotations.cos[i % 2];
    half2 const sine = rotations.sin[i % 2];
    half2 const before = x;
    x = __hfma2(y, __hneg2(sine), __hmul2(x, cosine));
    y = __hfma2(before, sine, __hmul2(y, cosine));
  }
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&x)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[tile][e] = 0.0f;
  }
}

// dS multiplies rows of fp16, so it becomes fp16 too, whatever the dtype: a row of weights is multiplied by a power of
// two that only ever falls, when a weight would leave the range, and then the row's sums fall with it. Weights down to
// 2^-24 of the largest so far keep all bits, and nothing is lost that matters beside it. A row's own data steer it.
inline constexpr float kFirstScale = 0x1p124f;
// The same where the scale is part of the exponent of a probability, which must be finite with it. Logits of thousands are off by
// more than one, those that the forward summed by others, and probabilities exceed one: up to 2^37 here, logits 25 apart. Weights
// of a row that are all below 2^-114 vanish.
inline constexpr float kFirstScaleOfProbability = 0x1p90f;
inline constexpr float kMaxWeight = 0x1p15f;
inline constexpr int kScaledExponent = 10;  // of the weight that made the scale fall: room for larger ones

// Of a power of two within 2^-126 .. 2^126.
__device__ __forceinline__ float inverse_of(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

__device__ __forceinline__ float exponent_of(float power) {
  return static_cast<float>(static_cast<int>(__float_as_uint(power) >> 23) - 127);
}

// largest: of the weights of rows g and g + 8 in this thread, |x|.
// multiply(factors): of those rows' sums; not called where no scale of the warp falls.
template <class Multiply>
__device__ __forceinline__ void fit_scale(float (&scale)[2], float const (&largest)[2], Multiply&& multiply) {
  bool const leaves = largest[0] * scale[0] > kMaxWeight || largest[1] * scale[1] > kMaxWeight;
  if (!__any_sync(kFullWarp, leaves)) return;
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const row = quad_max(largest[i]);
    int const exponent = static_cast<int>(__float_as_uint(row) >> 23) - 127;
    bool const falls = row * scale[i] > kMaxWeight && exponent < 128;  // an infinite weight spoils its sums anyhow
    float const next = __uint_as_float(static_cast<uint32_t>(127 + kScaledExponent - exponent) << 23);
    factor[i] = falls ? next * inverse_of(scale[i]) : 1.0f;
    if (falls) scale[i] = next;
  }
  multiply(factor);
}

// Whether one of eight weights that were rounded to fp16, two a word, leaves the range; of NaN it may say either.
__device__ __forceinline__ bool leave(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  auto const size = [](uint32_t const& weights) { return __habs2(reinterpret_cast<half2 const&>(weights)); };
  half2 const largest = __hmax2(__hmax2(size(a), size(b)), __hmax2(size(c), size(d)));
  // More than kMaxWeight, the bits 0x7800: the sign of what is added to as much as makes that 0x7fff.
  return ((reinterpret_cast<uint32_t const&>(largest) + 0x07ff07ffu) & 0x80008000u) != 0;
}

// P and dS = P (dP - delta) for one query head and child, dS times `size`, what the row that it multiplies was divided
// by.
struct Weights {
  float p;
  float ds;
};

__device__ __forceinline__ float probability(float raw, float inverse, float unit, float lse2) {
  return ptx::exp2_movable(fmaf(raw * (inverse * kHeadroomFactor), unit, -lse2));
}

// What takes no part is zero whatever it holds.
__device__ __forceinline__ float weight(bool open, float p, float dp, float delta, float size) {
  return open ? p * (dp - delta) * size : 0.0f;
}

__device__ __forceinline__ Weights weights(float raw, float inverse, float unit, float lse2, float dp, float delta,
                                           float size) {
  float const p = probability(raw, inverse, unit, lse2);
  return {p, weight(true, p, dp, delta, size)};
}

}  // namespace htree_cuda::sm90::htree_bwd

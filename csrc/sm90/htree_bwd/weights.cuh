// P and dS of the backward, and the scale at which dS becomes an fp16 operand.
//
// dS multiplies rows of fp16, so it is rounded to fp16 whatever the dtype. A row of weights is multiplied by a power of
// two that only ever falls: when a weight would leave fp16's range, the scale falls and the sums of the row are
// multiplied by the same factor. Weights down to 2^-24 of the largest one so far keep all their bits, and what is
// smaller does not matter beside that one. The scale of a row follows from the row's own data alone.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "device/pairs.cuh"
#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "host/math.h"
#include "layout.h"

namespace htree_cuda::sm90::htree_bwd {

inline constexpr float kHeadroomFactor = 1.0f / (1 << kHeadroom);
// A unit without its headroom holds scale * log2(e) / (row scale of q). dk needs it without log2(e), hence ln(2).
inline constexpr float kUnitScale = static_cast<float>(kLn2);

// ---- the scale of a row of weights -------------------------------------------------------------------------------

inline constexpr float kInitialScale = 0x1p124f;
// The initial scale where it is part of the exponent of a probability, which must be finite with it. Logits of
// thousands are off by more than one from those that the forward summed, so that probabilities exceed one: there is
// room for 2^37, which is logits 25 apart. Weights of a row that are all below 2^-114 vanish.
inline constexpr float kInitialProbabilityScale = 0x1p90f;
// The largest scaled weight.
inline constexpr float kMaxWeight = 0x1p15f;
// The exponent that the largest weight has after the scale fell, which leaves room for larger weights to come.
inline constexpr int kRescaledExponent = 10;

// 1 / power of a power of two within 2^-126 .. 2^126.
__device__ __forceinline__ float inverse_of(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

__device__ __forceinline__ float exponent_of(float power) {
  return static_cast<float>(static_cast<int>(__float_as_uint(power) >> 23) - 127);
}

// Lowers the scales of rows g and g + 8 where a weight would overflow. `largest` is max |weight| of these rows in this
// thread. multiply(factors) multiplies the sums of the rows; it is not called where no scale of the warp falls.
template <class Multiply>
__device__ __forceinline__ void lower_scale(float (&scale)[2], float const (&largest)[2], Multiply&& multiply) {
  bool const overflow = largest[0] * scale[0] > kMaxWeight || largest[1] * scale[1] > kMaxWeight;
  if (!__any_sync(kFullWarp, overflow)) return;
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const row = quad_max(largest[i]);
    int const exponent = static_cast<int>(__float_as_uint(row) >> 23) - 127;
    // No scale helps an infinite weight: its sums become NaN in any case.
    bool const falls = row * scale[i] > kMaxWeight && exponent < 128;
    float const next = __uint_as_float(static_cast<uint32_t>(127 + kRescaledExponent - exponent) << 23);
    factor[i] = falls ? next * inverse_of(scale[i]) : 1.0f;
    if (falls) scale[i] = next;
  }
  multiply(factor);
}

// Whether one of eight weights in fp16, two in a word, exceeds kMaxWeight. For NaN either answer serves.
__device__ __forceinline__ bool overflows(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  auto const size = [](uint32_t const& weights) { return __habs2(reinterpret_cast<half2 const&>(weights)); };
  half2 const largest = __hmax2(__hmax2(size(a), size(b)), __hmax2(size(c), size(d)));
  // kMaxWeight has the bits 0x7800. Adding 0x07ff makes that 0x7fff, and sets the sign bit of whatever is larger.
  return ((reinterpret_cast<uint32_t const&>(largest) + 0x07ff07ffu) & 0x80008000u) != 0;
}

// ---- one query head and one child --------------------------------------------------------------------------------

// P from the raw product of two scaled rows.
__device__ __forceinline__ float probability(float raw, float inverse, float unit, float lse2) {
  return ptx::exp2_movable(fmaf(raw * (inverse * kHeadroomFactor), unit, -lse2));
}

// dS = P (dP - delta), times `size`, the inverse row scale of the row that dS multiplies. A pair that does not attend
// has weight zero whatever its other numbers are, NaN among them.
__device__ __forceinline__ float weight(bool attends, float p, float dp, float delta, float size) {
  return attends ? p * (dp - delta) * size : 0.0f;
}

struct Weights {
  float p;
  float ds;
};

__device__ __forceinline__ Weights weights(float raw, float inverse, float unit, float lse2, float dp, float delta,
                                           float size) {
  float const p = probability(raw, inverse, unit, lse2);
  return {p, weight(true, p, dp, delta, size)};
}

}  // namespace htree_cuda::sm90::htree_bwd

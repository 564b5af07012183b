// RoPE as the htree kernels apply it.
//
// Scores need <R(q, n-1), R(k, 16 j + c)> = <R(q, n-1-16 j), R(k, c)>: keys turn once by their place c among their
// siblings, when the tree is packed, and a query turns once per parent j. Both turned operands are fp16, whatever the
// dtype of the inputs: each row is first scaled by an exact power of two (`normaliser`) that the score takes back. fp16
// has three bits more than bf16, and queries turn in packed arithmetic without conversions.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::rope {

// The largest element of a normalised row lies in [2^kExponent, 2^(kExponent+1)): turning adds up to sqrt(2), far from
// the largest fp16, and elements down to 2^-18 of the largest keep full precision.
inline constexpr int kExponent = 4;
inline constexpr int kLeastExponent = -120;  // smaller rows lose bits rather than overflow their factor

struct Normaliser {
  float factor;   // of the row's elements
  float inverse;  // of its scores
};

// largest: max |x| of a row, >= 0; zero and non-finite rows are left as they are.
__device__ inline Normaliser normaliser(float largest) {
  uint32_t const bits = __float_as_uint(largest);
  int exponent = static_cast<int>(bits >> 23) - 127;  // -127 for subnormal numbers: clamped
  if (bits == 0 || exponent == 128) return {1.0f, 1.0f};
  exponent = max(exponent, kLeastExponent) - kExponent;
  return {__uint_as_float(static_cast<uint32_t>(127 - exponent) << 23),
          __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23)};
}

// cos and sin of position * base^(-2 m / K), by float64 angles.
__device__ inline double2 turn(std::int64_t position, int m, int K, double base) {
  double sine, cosine;
  sincos(static_cast<double>(position) * pow(base, -2.0 * m / K), &sine, &cosine);
  return {cosine, sine};
}

// Table of the queries' turns, in the order of m16n8k16's A fragment: entry [position][kk][tq] (kk < K / 32, tq < 4)
// holds the pairs 16 kk + 2 tq + {0, 1, 8, 9}, which turn lo fragment kk against hi fragment kk + K / 32.
struct alignas(16) Turns {
  half2 cos[2];
  half2 sin[2];
};

// lo and hi of four packed pairs each, [a0, a1 | a2, a3] of the two fragments.
__device__ __forceinline__ void turn_fragments(half2 (&lo)[4], half2 (&hi)[4], half2 const (&q_lo)[4],
                                               half2 const (&q_hi)[4], Turns const& turns) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    half2 const c = turns.cos[i / 2];
    half2 const s = turns.sin[i / 2];
    lo[i] = __hfma2(q_hi[i], __hneg2(s), __hmul2(q_lo[i], c));  // negating q would be hoisted into registers
    hi[i] = __hfma2(q_lo[i], s, __hmul2(q_hi[i], c));
  }
}

}  // namespace htree_cuda::rope

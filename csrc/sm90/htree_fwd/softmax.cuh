// The running softmax of a consumer: maxima, exponents and sums of the rows of a thread.
//
// Whatever is decided or computed for a row follows from its own query. Scores and maxima are raw (tree/rope.cuh): the
// difference of a raw maximum and itself is exactly zero, however large it is, while that of two products rounded apart
// is not. Up to |max * unit| = kNear, rounding costs at most 2^-13, and one FMA makes an exponent of a product,
// relative to `reference`. Past kNear the reference is NaN, and so is the scale of a block whose keys do not share one.
// Exponents that are NaN, or exceed the reference by too much, are computed again from raw scores: first relative to
// the reference, which gives keys with scales of their own the bits that they would have with a shared scale (later
// tokens may be the siblings that made the scales differ), and where that overflows, too, from differences of raw
// scores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/pairs.cuh"
#include "row_map.cuh"

namespace htree_cuda::sm90::htree_fwd {

// A running maximum is updated when an exponential would exceed 2^kSlack: rescaling is rare.
inline constexpr float kSlack = 8.0f;
inline constexpr float kNear = 4096.0f;
inline constexpr float kLargest = 3.402823466e38f;
// The maximum before the first leaf: whatever score comes exceeds it, and what is summed up to then is zero.
inline constexpr float kNoLeaf = -kLargest;
inline constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// Sets the reference of row i to its maximum plus a logarithm of a sum.
template <class Cfg>
__device__ __forceinline__ void update_reference(State<Cfg>& s, int i, float log_sum = 0.0f) {
  float const exponent = fmaf(s.max[i], s.unit[i], log_sum);
  s.reference[i] = fabsf(exponent) <= kNear ? exponent : not_a_number();
}

// Sets the maximum of row i and returns the factor by which its sums are rescaled.
template <class Cfg>
__device__ __forceinline__ float update_max(State<Cfg>& s, int i, float largest) {
  float const factor = ptx::exp2_movable((s.max[i] - largest) * s.unit[i]);
  s.max[i] = largest;
  update_reference(s, i);
  return factor;
}

// The factors from products to exponents for the two rows, where the keys of a block share a scale.
struct Factors {
  float row[2];
};

template <class Cfg>
__device__ __forceinline__ Factors factors(State<Cfg> const& s, float scale) {
  return {{fabsf(scale) * s.unit[0], fabsf(scale) * s.unit[1]}};
}

// The factors of the importance sweep, where nothing overflows: finite, so that a product of zero stays zero.
template <class Cfg>
__device__ __forceinline__ Factors finite_factors(State<Cfg> const& s, float scale) {
  return {{fminf(fabsf(scale) * s.unit[0], kLargest), fminf(fabsf(scale) * s.unit[1], kLargest)}};
}

template <class Cfg>
__device__ __forceinline__ float exponent_of_product(State<Cfg> const& s, int i, float product,
                                                     Factors const& factors) {
  return fmaf(product, factors.row[i], -s.reference[i]);
}

// The exponent of a raw score: the same bits as exponent_of_product.
template <class Cfg>
__device__ __forceinline__ float near_exponent(State<Cfg> const& s, int i, float raw) {
  return fmaf(raw, s.unit[i], -s.reference[i]);
}

template <class Cfg>
__device__ __forceinline__ float exponent(State<Cfg> const& s, int i, float raw) {
  return (raw - s.max[i]) * s.unit[i];
}

// Multiplies products by the scales that the 16 keys of a block have of their own, which gives raw scores. raw[tile][e]
// is column 8 tile + 2 tq + e % 2 of row e / 2.
template <class Cfg>
__device__ __forceinline__ void apply_own_scales(State<Cfg> const& s, uint32_t scales, float (&raw)[2][4]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    float2 const scale = ptx::load_shared_8B(scales + tile * 32 + s.tq * 8);
    float const own[2] = {row_scale::own_scale(scale.x), row_scale::own_scale(scale.y)};
#pragma unroll
    for (int e = 0; e < 4; ++e) raw[tile][e] *= own[e % 2];
  }
}

// Multiplies products by the scale that the keys of a block share.
__device__ __forceinline__ void apply_shared_scale(float scale, float (&raw)[2][4]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) raw[tile][e] *= fabsf(scale);
  }
}

// Where the keys of a block share no scale, multiplies products by their own, as long as the stage holds them.
template <class Cfg>
__device__ __forceinline__ void apply_uneven_scales(State<Cfg> const& s, float& scale, uint32_t scales,
                                                    float (&products)[2][4]) {
  if (!isnan(scale)) return;
  apply_own_scales(s, scales, products);
  scale = 1.0f;
}

// Takes the children whose bits are set in `masked` out of scores or exponents.
template <class Cfg>
__device__ __forceinline__ void mask_children(State<Cfg> const& s, float (&raw)[2][4], uint32_t masked) {
  uint32_t const own = masked >> (2 * s.tq);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (own >> (8 * tile + e % 2) & 1u) raw[tile][e] = -kInfinity;
    }
  }
}

template <class Cfg, int kBlocks>
__device__ __forceinline__ float row_max(float const (&raw)[2 * kBlocks][4], int i) {
  float largest = fmaxf(raw[0][2 * i], raw[0][2 * i + 1]);
#pragma unroll
  for (int tile = 1; tile < 2 * kBlocks; ++tile) {
    largest = fmaxf(largest, fmaxf(raw[tile][2 * i], raw[tile][2 * i + 1]));
  }
  return largest;
}

// The children past the rightmost candidate, in the last block.
__device__ __forceinline__ uint32_t causal_mask(int rightmost) { return 0xffffu & ~((2u << rightmost) - 1u); }

// Updates the maxima of a score pass, which are those of this thread's columns alone until finish_lse merges them.
template <int kBlocks, class Cfg>
__device__ __forceinline__ void update_own_max(State<Cfg>& s, float const (&raw)[2 * kBlocks][4]) {
  float const largest[2] = {row_max<Cfg, kBlocks>(raw, 0), row_max<Cfg, kBlocks>(raw, 1)};
  bool const overflow[2] = {exponent(s, 0, largest[0]) > kSlack, exponent(s, 1, largest[1]) > kSlack};
  if (overflow[0] || overflow[1]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (overflow[i]) s.sum[i] *= update_max(s, i, largest[i]);
    }
  }
}

template <int kBlocks, class Cfg>
__device__ __forceinline__ void add_scores_to_lse(State<Cfg>& s, float const (&raw)[2 * kBlocks][4]) {
  update_own_max<kBlocks>(s, raw);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int tile = 0; tile < 2 * kBlocks; ++tile) {
      s.sum[i] += ptx::exp2_movable(exponent(s, i, raw[tile][2 * i])) +
                 ptx::exp2_movable(exponent(s, i, raw[tile][2 * i + 1]));
    }
  }
}

// Adds a block's scores to the lse. The last block holds the rightmost candidate, which the lse leaves out.
template <class Cfg>
__device__ __forceinline__ void add_block_to_lse(State<Cfg>& s, float (&raw)[2][4], bool last) {
  if (last) {
    int const child = rightmost(s);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // One lane of the quad holds the rightmost candidate, and the others keep 0.
      float const x = child < 8 ? (child % 2 ? raw[0][2 * i + 1] : raw[0][2 * i])
                                : (child % 2 ? raw[1][2 * i + 1] : raw[1][2 * i]);
      s.right[i] = child % 8 / 2 == s.tq ? x : 0.0f;
    }
    mask_children(s, raw, 0xffffu & ~((1u << child) - 1u));
  }
  add_scores_to_lse<1>(s, raw);
}

// Adds a block's scores of row i to the row's lse.
template <class Cfg>
__device__ __forceinline__ void add_row_to_lse(State<Cfg>& s, float const (&raw)[2][4], int i, bool last) {
  float x[4] = {raw[0][2 * i], raw[0][2 * i + 1], raw[1][2 * i], raw[1][2 * i + 1]};
  if (last) {
    int const child = rightmost(s, i);
    float const right = child < 8 ? (child % 2 ? x[1] : x[0]) : (child % 2 ? x[3] : x[2]);
    s.right[i] = child % 8 / 2 == s.tq ? right : 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * (e / 2) + 2 * s.tq + e % 2 >= child) x[e] = -kInfinity;
    }
  }
  float const largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  if (exponent(s, i, largest) > kSlack) s.sum[i] *= update_max(s, i, largest);
  s.sum[i] += ptx::exp2_movable(exponent(s, i, x[0])) + ptx::exp2_movable(exponent(s, i, x[1]));
  s.sum[i] += ptx::exp2_movable(exponent(s, i, x[2])) + ptx::exp2_movable(exponent(s, i, x[3]));
}

// P of some blocks, rounded to the dtype, as fragments of operand A, and its sums. exponent(i, raw) gives the exponent
// of a raw score of row i.
template <int kBlocks, class Exponent, class Cfg>
__device__ __forceinline__ void exponentiate_scores(State<Cfg> const& s, float const (&raw)[2 * kBlocks][4],
                                                    uint32_t (&p)[kBlocks][4], float (&sum)[2],
                                                    Exponent const& exponent) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = ptx::exp2_movable(exponent(i, raw[2 * block + e / 2][2 * i + e % 2]));
      }
      sum[i] += (x[0] + x[1]) + (x[2] + x[3]);
      p[block][i] = Pairs<typename Cfg::Element>::pack(x[0], x[1]);
      p[block][2 + i] = Pairs<typename Cfg::Element>::pack(x[2], x[3]);
    }
  }
}

}  // namespace htree_cuda::sm90::htree_fwd

// RoPE as the htree kernels apply it.
//
// In the first layer of a query a candidate's position is its node's index: its keys rotate by that when the tree is
// packed, and the query rotates once, by n-1. Below it, scores need <R(q, n-1), R(k, 16 j + c)> = <R(q, n-1-16 j), R(k, c)>:
// keys rotate by their place c among their siblings, and a query rotates once per parent j. Both rotated operands are fp16,
// whatever the dtype of the inputs: each row is first scaled by an exact power of two that the score takes back. fp16 has
// three bits more than bf16, and queries rotate by products of the tensor cores, whose sums are operands as they come. Keys of
// the bottom, where scores select nothing, keep the precision of the inputs.
//
// A score may be kept `raw`: the product of the normalised rows times the key's `scale`, s * log2(e) = raw * unit with the
// unit of the query's head. Products with powers of two are exact, so raw scores are as exact as the matrix product, and
// neither they nor the unit leave float32's range unless the score does.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::tree::rope {

// The largest element of a normalised row lies in [2^kExponent, 2^(kExponent+1)) when it is rounded: rotating adds up to
// sqrt(2), far from the largest fp16, and elements down to 2^-18 of the largest keep full precision.
inline constexpr int kExponent = 4;
inline constexpr int kMinExponent = -109;  // smaller rows keep their exponent, and lose what bits fp16 has not
// Products of normalised rows are below 2^17: K <= 128 elements below 2^5 on either side. What a key's scale takes back
// is divided by 2^kHeadroom, so that raw scores stay below 2^128 for the largest keys; the unit makes up for it.
inline constexpr int kHeadroom = 13;
// Exponents of a unit. Where the head and the scale ask for less or more, its row of q is scaled instead: far below
// every score vanishes against 2^127 anyhow; far above fp16 has room for a factor of 2^kRoom.
inline constexpr int kMinUnit = -120;
inline constexpr int kMaxUnit = 126;
inline constexpr int kRoom = 10;

// 2^exponent; zero and infinity outside the normal numbers of float32.
__device__ inline float power_of_two(int exponent) {
  if (exponent > 127) return __uint_as_float(0x7f800000u);
  return exponent < -126 ? 0.0f : __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// The e for which a row is normalised by 2^-e. largest: max |x| of the row, >= 0; zero and non-finite rows have 0.
__device__ inline int row_exponent(float largest) {
  uint32_t const bits = __float_as_uint(largest);
  int const exponent = static_cast<int>(bits >> 23) - 127;  // -127 for subnormal numbers: clamped
  return bits == 0 || exponent == 128 ? 0 : max(exponent, kMinExponent) - kExponent;
}

struct KeyScale {
  float factor;  // of the row's elements
  float scale;   // of its products
};

__device__ inline KeyScale key_scale(int exponent) {
  return {power_of_two(-exponent), power_of_two(exponent - kHeadroom)};
}

// The keys of a parent share a scale: once rounded, each is multiplied by the power of two, 2^kEven at most, that makes up for
// it. That is exact, so a score has the same bits whatever the siblings hold; later tokens may be among them. Where some
// row's exponent is below the largest by more than kEven they are uneven: each row keeps its own scale, and the first of
// them is a NaN that holds it, so that what is computed from a scale for all shows.
inline constexpr int kEven = 8;
inline constexpr int kMinShared = -126 + kHeadroom + kEven;  // scales are normal numbers

// Of a row that takes part in it; zero and non-finite rows do not.
inline constexpr int kNoExponent = -1000;

__device__ inline float uneven_scale(float first) {
  return __uint_as_float(__float_as_uint(first) & 0x80000000u | 0x7fc00000u | __float_as_uint(first) >> 23 & 0xffu);
}

// |scale| of one key, from where it is.
__device__ __forceinline__ float own_scale(float scale) {
  uint32_t const bits = __float_as_uint(scale) & 0x7fffffffu;
  return __uint_as_float(bits > 0x7f800000u ? (bits & 0xffu) << 23 : bits);
}

// |scale| * log2(e) = mantissa * 2^exponent, the mantissa in [1, 2) with the sign of the scale.
struct ScoreScale {
  float mantissa;
  int exponent;
};

struct QueryScale {
  float factor;  // of the row's elements; negative where the scale is, so that units are positive
  float unit;    // of its raw scores; infinite (the scores are NaN) where |q| * |scale| is 2^128 or more
};

__device__ inline QueryScale query_scale(float largest, ScoreScale const& scale) {
  int const exponent = row_exponent(largest);
  int const wanted = exponent + kHeadroom + scale.exponent;
  int const given = wanted > kMaxUnit ? max(wanted - kRoom, kMaxUnit) : max(wanted, kMinUnit);
  float const factor = power_of_two(wanted - given - exponent);
  return {scale.mantissa < 0.0f ? -factor : factor, fabsf(scale.mantissa) * power_of_two(given)};
}

// Angle of pair m a position, in float64.
__device__ inline double frequency(int m, int K, double base) { return pow(base, -2.0 * m / K); }

// cos and sin of a position.
__device__ inline double2 rotation(std::int64_t position, double frequency) {
  double sine, cosine;
  sincos(static_cast<double>(position) * frequency, &sine, &cosine);
  return {cosine, sine};
}

// Table of rotations in the order of m16n8k16's fragments: entry [position][kk][tq] (kk < K / 32, tq < 4)
// holds the pairs 16 kk + 2 tq + {0, 1, 8, 9}, which rotate lo fragment kk against hi fragment kk + K / 32.
struct alignas(16) FragmentRotations {
  half2 cos[2];
  half2 sin[2];
};

// FragmentRotations as matrices. Where the two elements of a pair are neighbours, eight columns, four pairs, are a tile, which rotations by
// one product with an 8 x 8 matrix that has the pairs' rotations on its diagonal: m16n8k8, whose sums in fp16 are operands
// as they come. Lane 4 g + t of that matrix has column g of rows 2 t and 2 t + 1, zeros but for t = g / 2. Entry
// [position][g][i] (i < K / 32) holds it for the tiles 4 i .. 4 i + 3.
//
// Where a query rotates in place, by -16 positions from rank to rank or by 16 over a parent left out, the rounding of that
// matrix itself adds up: what it multiplies a pair by, seen as a complex number, is off by a factor near 1, once a rotation. FragmentRotations
// by which a query restarts take back what half a period of rotations adds (`compensated`), so that it is half as much at either
// end.
struct alignas(16) RotationColumns {
  half2 tile[4];
};

// FragmentRotations for packed arithmetic, of heads that are columns (htree_fwd/attend_selected_swapab.cuh): of the first elements of two pairs in
// one register, and of their second elements in another. Entry [position][t][step] (t < 4, step < K / 16) holds those of pairs
// 8 step + 2 t + {0, 1}.
struct alignas(8) PackedRotations {
  half2 cos;
  half2 sin;
};

// Of the eight pairs whose first elements lie in one chunk of 16 bytes, the even ones make one tile and the odd ones
// another: so a thread that holds fragments of a row as it lies in memory holds both elements of the pairs in its
// fragments of tiles.
__host__ __device__ constexpr int tile_of(int chunk, int odd) { return chunk / 2 * 4 + 2 * odd + chunk % 2; }

// Column g of a rotation by a position, of a pair: g even (x cos - y sin) and odd (x sin + y cos).
__device__ __forceinline__ half2 rotation_column(double2 rotation, int g) {
  half const c = __double2half(rotation.x);
  return g % 2 ? half2(__double2half(rotation.y), c) : half2(c, __double2half(-rotation.y));
}

// The other way round.
__device__ __forceinline__ uint32_t inverse_column(uint32_t column, int g) {
  return column ^ (g % 2 ? 0x8000u : 0x80000000u);
}

}  // namespace htree_cuda::tree::rope

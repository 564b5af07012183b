// Row scales: exact powers of two by which rows of q and k are multiplied before they are rounded to fp16.
//
// Operands of score products are fp16 whatever the dtype of the inputs, because fp16 has three bits of precision more
// than bf16. A row scale brings a row into fp16's range, and the score takes the power of two back. Products with
// powers of two are exact, so a scaled score is as exact as the matrix product.
//
// A score may stay *raw*: the product of two scaled rows times the key's scale. Then s * log2(e) = raw * unit with the
// unit of the query's head, and neither raw scores nor units leave the range of float32 unless the score itself does.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::tree::row_scale {

// The largest element of a scaled row lies in [2^kExponent, 2^(kExponent + 1)) before rounding. A rotation multiplies
// it by sqrt(2) at most, which is far from the largest fp16, and elements down to 2^-18 of the largest keep full
// precision.
inline constexpr int kExponent = 4;
// Rows below 2^kMinExponent are scaled as if they were as large, and lose the bits that fp16 does not have.
inline constexpr int kMinExponent = -109;
// Products of scaled rows are below 2^17, since K <= 128 and elements are below 2^5. A key's scale is divided by
// 2^kHeadroom, so that raw scores stay below 2^128 for the largest keys, and the unit is multiplied by it.
inline constexpr int kHeadroom = 13;
// Exponents of a unit. Where head and softmax scale need a smaller or a larger one, the row of q is scaled instead: far
// below kMinUnit every score vanishes against 2^127, and above kMaxUnit fp16 has room for a factor of 2^kRoom.
inline constexpr int kMinUnit = -120;
inline constexpr int kMaxUnit = 126;
inline constexpr int kRoom = 10;

// 2^exponent; zero and infinity outside the normal numbers of float32.
__device__ inline float power_of_two(int exponent) {
  if (exponent > 127) return __uint_as_float(0x7f800000u);
  return exponent < -126 ? 0.0f : __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// 2^exponent for exponents of -126 .. 127, without the comparisons.
__device__ __forceinline__ float normal_power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
}

// What `largest`, max |x| of a row, says of it.
struct RowSize {
  bool is_scaled;  // zero and non-finite rows are left as they are
  int exponent;    // of a row that is scaled: 2^-exponent multiplies it

  __device__ explicit RowSize(float largest) {
    uint32_t const bits = __float_as_uint(largest);
    int const log2 = static_cast<int>(bits >> 23) - 127;  // -127 for subnormal numbers, which kMinExponent clamps
    is_scaled = !(bits == 0 || log2 == 128);
    exponent = max(log2, kMinExponent) - kExponent;
  }
};

// The e for which a row is multiplied by 2^-e.
__device__ inline int row_exponent(float largest) {
  RowSize const row(largest);
  return row.is_scaled ? row.exponent : 0;
}

// The scale of one row whose inverse is kept as it is (the backward).
struct RowScale {
  float factor;   // multiplies the row's elements
  float inverse;  // multiplies the row's products
};

__device__ __forceinline__ RowScale row_scale(float largest) {
  RowSize const row(largest);
  if (!row.is_scaled) return {1.0f, 1.0f};
  return {normal_power_of_two(-row.exponent), normal_power_of_two(row.exponent)};
}

// The scale of a key whose products are raw scores (the forward).
struct KeyScale {
  float factor;  // multiplies the row's elements
  float scale;   // multiplies the row's products, 2^kHeadroom left out
};

__device__ inline KeyScale key_scale(int exponent) {
  return {power_of_two(-exponent), power_of_two(exponent - kHeadroom)};
}

// The 16 keys of a KV block share a scale: each rounded key is multiplied by the power of two, 2^kEven at most, that
// makes up for it. That is exact, so a score has the same bits whatever the siblings hold, which may be later tokens.
// Where the exponent of a row is below the largest by more than kEven, the block is uneven: each row keeps a scale of
// its own, and the first scale is a NaN that holds its exponent, so that a score computed with a shared scale becomes
// NaN as well.
inline constexpr int kEven = 8;
// The least exponent of a shared scale, so that scales are normal numbers.
inline constexpr int kMinShared = -126 + kHeadroom + kEven;

// The exponent of a row that takes no part in a shared scale: a zero or non-finite row.
inline constexpr int kNoExponent = -1000;

__device__ inline float uneven_scale(float first) {
  return __uint_as_float(__float_as_uint(first) & 0x80000000u | 0x7fc00000u | __float_as_uint(first) >> 23 & 0xffu);
}

// |scale| of one key as the block's list of scales holds it, uneven_scale undone.
__device__ __forceinline__ float own_scale(float scale) {
  uint32_t const bits = __float_as_uint(scale) & 0x7fffffffu;
  return __uint_as_float(bits > 0x7f800000u ? (bits & 0xffu) << 23 : bits);
}

// The softmax scale times log2(e): mantissa * 2^exponent, |mantissa| in [1, 2).
struct ScoreScale {
  float mantissa;
  int exponent;
};

// The scale of one head of a query.
struct QueryScale {
  float factor;  // multiplies the row's elements; negative where the softmax scale is, so that units are positive
  float unit;    // multiplies raw scores; infinite (scores are NaN) where |q| * |scale| is 2^128 or more
};

__device__ inline QueryScale query_scale(float largest, ScoreScale const& scale) {
  int const exponent = row_exponent(largest);
  int const wanted = exponent + kHeadroom + scale.exponent;
  int const given = wanted > kMaxUnit ? max(wanted - kRoom, kMaxUnit) : max(wanted, kMinUnit);
  float const factor = power_of_two(wanted - given - exponent);
  return {scale.mantissa < 0.0f ? -factor : factor, fabsf(scale.mantissa) * power_of_two(given)};
}

}  // namespace htree_cuda::tree::row_scale

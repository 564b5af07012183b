// What comes before the products: the terms of each query's head, one block a query. And, for integers as sums of dkv,
// how large a contribution of each query can be, and |v| of each key row. bounds.cuh makes factors of them.
//
// With dS = S (slope dP + offset), S <= 1 and |dP| <= |dO| |v|, a slot of a query adds to a column of dkv at most
//   sum over heads of  max|q| (|slope| |dO| |v| + |offset|) + |weight| max|dO|  =  x |v| + y.
// A row's bound is the largest of its slots' times their number. All of it is in maxima and counts of integers, whose
// order does not matter.
#pragma once

#include <cstdint>

#include "device/pairs.cuh"
#include "device/query_groups.cuh"
#include "host/math.h"
#include "config.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

inline constexpr int kPrepareThreads = 256;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kFullWarp, x, d);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = ptx::max_or_nan(x, __shfl_xor_sync(kFullWarp, x, d));
  return x;
}

// Sum of squares and largest magnitude of 8 elements, added to what is there.
template <class Element>
__device__ __forceinline__ void measure(uint4 x, float& squares, float& most) {
  uint32_t const words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const pair = Pairs<Element>::unpack(words[i]);
    squares = fmaf(pair.x, pair.x, fmaf(pair.y, pair.y, squares));
    most = ptx::max_or_nan(most, ptx::max_or_nan(fabsf(pair.x), fabsf(pair.y)));
  }
}

template <class Element>
__device__ __forceinline__ float product(uint4 x, uint4 y) {
  uint32_t const xs[4] = {x.x, x.y, x.z, x.w};
  uint32_t const ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const a = Pairs<Element>::unpack(xs[i]);
    float2 const b = Pairs<Element>::unpack(ys[i]);
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
  }
  return sum;
}

__device__ __forceinline__ uint4 load_16B(char const* at) { return __ldg(reinterpret_cast<uint4 const*>(at)); }

// A warp a head, one after the other.
template <class Element, int kHeadDim, bool kBounds>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(__grid_constant__ KernelParams const p) {
  constexpr int kWarps = kPrepareThreads / 32;
  constexpr float kLog2E = static_cast<float>(host::kLog2E);
  int const lane = threadIdx.x % 32;
  int const row = blockIdx.x;
  int const b = row / p.s_q;
  int const s = row - b * p.s_q;
  double bound_x = 0.0;
  double bound_y = 0.0;
  for (int head = threadIdx.x / 32; head < p.h_q; head += kWarps) {
    int64_t const at = static_cast<int64_t>(row) * p.h_q + head;
    char const* const dout = p.dout + b * p.dout_stride_b + s * p.dout_stride_s + head * p.dout_stride_h;
    char const* const out = p.out + 2 * 512 * at;
    float delta = 0.f;
    float squares = 0.f;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 const gradient = load_16B(dout + 16 * (lane + 32 * i));
      delta += product<Element>(gradient, load_16B(out + 16 * (lane + 32 * i)));
      if (kBounds) measure<Element>(gradient, squares, most);
    }
    delta = warp_sum(delta);
    float const lse = p.lse[at];
    // A query without a valid slot gives nothing, whatever dout and dlse hold.
    bool const counts = lse != -INFINITY;
    float const dlse =
        p.dlse[b * p.dlse_stride_b + s * p.dlse_stride_s + head * p.dlse_stride_h] * p.dlse_scale;
    float const lse2 = lse * p.lse_scale;
    float weight = 1.f;
    if (p.sink != nullptr) {
      float const sink2 = p.sink[head * p.sink_stride] * kLog2E;
      weight = 1.f / (1.f + exp2f(sink2 - lse2));
      if (lane == 0) p.to_sink[at] = counts ? -delta / (1.f + exp2f(lse2 - sink2)) : 0.f;
    }
    HeadTerms const terms = counts ? HeadTerms{lse2, weight, weight * p.scale, (dlse - weight * delta) * p.scale}
                                   : HeadTerms{INFINITY, 0.f, 0.f, 0.f};
    if (lane == 0) *reinterpret_cast<float4*>(p.terms + at) = {terms.lse2, terms.weight, terms.slope, terms.offset};
    if (kBounds && counts) {
      char const* const q = p.q + b * p.q_stride_b + s * p.q_stride_s + head * p.q_stride_h;
      float most_q = 0.f;
      float unused = 0.f;
      for (int chunk = lane; chunk < kHeadDim / 8; chunk += 32) measure<Element>(load_16B(q + 16 * chunk), unused, most_q);
      double const q_max = warp_max(most_q);
      double const norm = sqrt(static_cast<double>(warp_sum(squares)));
      bound_x += q_max * fabs(static_cast<double>(terms.slope)) * norm;
      bound_y += q_max * fabs(static_cast<double>(terms.offset)) +
                 fabs(static_cast<double>(terms.weight)) * static_cast<double>(warp_max(most));
      if (isnan(lse)) bound_y = NAN;
    }
  }
  if constexpr (kBounds) {
    __shared__ double2 parts[kWarps];
    if (lane == 0) parts[threadIdx.x / 32] = {bound_x, bound_y};
    __syncthreads();
    if (threadIdx.x == 0) {
      double2 sum = parts[0];
      for (int w = 1; w < kWarps; ++w) sum = {sum.x + parts[w].x, sum.y + parts[w].y};
      p.query_bounds[row] = sum;
    }
  }
}

// |v| of each key row, a warp a row; NaN or infinity where a key is not finite.
template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kPrepareThreads) norms_kernel(__grid_constant__ KernelParams const p) {
  int const lane = threadIdx.x % 32;
  int64_t const row = static_cast<int64_t>(blockIdx.x) * (kPrepareThreads / 32) + threadIdx.x / 32;
  if (row >= static_cast<int64_t>(p.B) * p.s_kv) return;
  int64_t const b = row / p.s_kv;
  char const* const kv = p.kv + b * p.kv_stride_b + (row - b * p.s_kv) * p.kv_stride_s;
  float squares = 0.f;
  float most = 0.f;
  float unused = 0.f;
  for (int chunk = lane; chunk < kHeadDim / 8; chunk += 32) {
    measure<Element>(load_16B(kv + 16 * chunk), chunk < 64 ? squares : unused, most);
  }
  squares = warp_sum(squares);
  most = warp_max(most);
  if (lane == 0) p.norms[row] = most < INFINITY ? sqrtf(squares) : NAN;
}

}  // namespace htree_cuda::sm90::sparse_attention_bwd

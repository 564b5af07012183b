// The second sweep of a score pass: from lse to importance, a sum over the heads of a query.
#pragma once

#include "epilogue.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Between the sweeps: merges the maxima and sums of the threads that share a row, and takes the logarithm.
template <class Cfg>
__device__ __forceinline__ void finish_lse(State<Cfg>& s, Ring<Cfg> const& ring) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.sum[i] *= update_max(s, i, quad_max(s.max[i]));
    s.sum[i] = quad_sum(s.sum[i]);
    s.right[i] = quad_sum(s.right[i]);
  }
  if (split(s)) merge_heads(s, ring);
  float excess[2];
  float shift[2] = {kLargest, kLargest};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    s.log_sum[i] = log2f(s.sum[i]);
    excess[i] = 0.0f;
    if (!s.args.strict_causal) {
      // The rightmost candidate adds log2(1 + 2^right) to the lse, with `right` relative to the lse of the others.
      float const right = fmaf(s.right[i] - s.max[i], s.unit[i], -s.log_sum[i]);
      float const added = fmaxf(right, 0.0f) + log2f(1.0f + ptx::exp2_approx(-fabsf(right)));
      excess[i] = added > kLargest ? kLargest : added;  // infinity - infinity is NaN
      if (head_of_row(s, i) < s.args.G) shift[i] = excess[i];
    }
  }
  // With the rightmost candidate in the lse all other importance may vanish. One power of two for all heads of a query
  // keeps the largest above 2^-13, and does not change the order.
  if constexpr (!Cfg::kSharesWarp) shift[0] = shift[1] = fminf(shift[0], shift[1]);
#pragma unroll
  for (int i = 0; i < (Cfg::kSharesWarp ? 2 : 1); ++i) {
#pragma unroll
    for (int lanes = 4; lanes < 32 / Cfg::kPerUnit; lanes *= 2) {
      shift[i] = fminf(shift[i], __shfl_xor_sync(kFullWarp, shift[i], lanes));
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!s.args.strict_causal) s.log_sum[i] += excess[i] - shift[Cfg::kSharesWarp ? i : 0];
    update_reference(s, i, s.log_sum[i]);
    if (head_of_row(s, i) >= s.args.G) s.reference[i] = s.log_sum[i] = kInfinity;
  }
  if constexpr (Cfg::kSharesWarp) {
    unsigned const far[2] = {__ballot_sync(kFullWarp, isnan(s.reference[0])),
                             __ballot_sync(kFullWarp, isnan(s.reference[1]))};
    s.each_far = {(far[0] & own_lanes(s)) != 0, (far[1] & own_lanes(s)) != 0};
    s.far = (far[0] | far[1]) != 0;
  } else {
    s.far = __any_sync(kFullWarp, isnan(s.reference[0]) || isnan(s.reference[1]));
  }
}

// The binary logarithm of exp(s - lse_g), from a raw score.
template <class Cfg>
__device__ __forceinline__ float importance_exponent(State<Cfg> const& s, int i, float raw) {
  return fmaf(raw - s.max[i], s.unit[i], -s.log_sum[i]);
}

// The child whose importance store_importance leaves in this thread.
template <class Cfg>
__device__ __forceinline__ int importance_column(State<Cfg> const& s) {
  return (s.lane & 16) / 2 + 2 * s.tq + (s.lane & 8) / 8;
}

// The importance of a block's children: column sums over the heads, by a butterfly that halves what a lane sends, first
// two of its four columns, then one of two.
template <class Cfg>
__device__ __forceinline__ void store_importance(State<Cfg>& s, float const (&weights)[2][4], int cursor,
                                                 int column_summed) {
  float column[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) column[c] = weights[c / 2][c % 2] + weights[c / 2][2 + c % 2];
  bool const second = s.lane & 16;
  float a = second ? column[2] : column[0];
  float b = second ? column[3] : column[1];
  a += __shfl_xor_sync(kFullWarp, second ? column[0] : column[2], 16);
  b += __shfl_xor_sync(kFullWarp, second ? column[1] : column[3], 16);
  bool const odd = s.lane & 8;
  float sum = odd ? b : a;
  sum += __shfl_xor_sync(kFullWarp, odd ? a : b, 8);
  sum += __shfl_xor_sync(kFullWarp, sum, 4);
  ptx::store_global_if((s.lane & 4) == 0,
                       s.args.importance + static_cast<std::int64_t>(cursor) * kSiblings + column_summed, sum);
}

// The importance of two blocks by one butterfly, which leaves the 32 children in the lanes of a warp: lane / 16 names
// the block, the next bit the tile of its columns.
template <class Cfg>
__device__ __forceinline__ void store_importance_of_two(State<Cfg>& s, float const (&weights)[2][2][4], int cursor,
                                                        bool store = true) {
  float column[2][4];
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int c = 0; c < 4; ++c) column[block][c] = weights[block][c / 2][c % 2] + weights[block][c / 2][2 + c % 2];
  }
  bool const second = s.lane & 16;
  float own[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    own[c] = second ? column[1][c] : column[0][c];
    own[c] += __shfl_xor_sync(kFullWarp, second ? column[0][c] : column[1][c], 16);
  }
  bool const high = s.lane & 8;
  float pair[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    pair[e] = high ? own[2 + e] : own[e];
    pair[e] += __shfl_xor_sync(kFullWarp, high ? own[e] : own[2 + e], 8);
  }
  bool const odd = s.lane & 4;
  float sum = odd ? pair[1] : pair[0];
  sum += __shfl_xor_sync(kFullWarp, odd ? pair[0] : pair[1], 4);
  int const child = (s.lane & 24) + 2 * s.tq + (s.lane & 4) / 4;
  ptx::store_global_if(store, s.args.importance + static_cast<std::int64_t>(cursor) * kSiblings + child, sum);
}

}  // namespace htree_cuda::sm90::htree_fwd

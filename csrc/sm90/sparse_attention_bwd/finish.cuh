// What comes after the products: sums of dkv to its dtype, and the gradient of the sinks.
#pragma once

#include <cstdint>

#include "device/pairs.cuh"
#include "config.cuh"
#include "order.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

inline constexpr int kFinishThreads = 256;

// A thread rounds eight columns.
template <class Element, int kHeadDim, Sums kSums>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(__grid_constant__ KernelParams const p) {
  constexpr int kBlocks = kHeadDim / 8;
  int64_t const at = static_cast<int64_t>(blockIdx.x) * kFinishThreads + threadIdx.x;
  int64_t const row = at / kBlocks;
  if (row >= static_cast<int64_t>(p.B) * p.s_kv) return;
  int const block = static_cast<int>(at - row * kBlocks);
  using Sum = typename Order<kSums>::Sum;
  Sum sums[8];
  Order<kSums>::load(static_cast<Sum const*>(p.sums) + row * kHeadDim, block, sums);
  float x[8];
  if constexpr (kSums == Sums::kAtomic) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = sums[i];
  } else {
    // Factors are powers of two, so that the inverse is exact; 2^127 has one that is subnormal, in double it is not.
    double const unit = p.broken[row] != 0 ? NAN : 1.0 / static_cast<double>(p.factors[row]);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(static_cast<double>(sums[i]) * unit);
  }
  uint4 words;
  words.x = Pairs<Element>::pack(x[0], x[1]);
  words.y = Pairs<Element>::pack(x[2], x[3]);
  words.z = Pairs<Element>::pack(x[4], x[5]);
  words.w = Pairs<Element>::pack(x[6], x[7]);
  reinterpret_cast<uint4*>(p.dkv)[at] = words;
}

// dsink[head] is the sum of to_sink over all queries, in a fixed order: a block has 32 heads, a warp every 32nd query.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sink_kernel(float const* to_sink, float* dsink, int64_t rows, int h_q) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double parts[kWarps][32];
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  int const head = blockIdx.x * 32 + lane;
  double sum = 0.0;
  if (head < h_q) {
#pragma unroll 4
    for (int64_t row = warp; row < rows; row += kWarps) sum += to_sink[row * h_q + head];
  }
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && head < h_q) {
    for (int w = 1; w < kWarps; ++w) sum += parts[w][lane];
    dsink[head] = static_cast<float>(sum);
  }
}

}  // namespace htree_cuda::sm90::sparse_attention_bwd

// The body of launch.h's template, for the instantiation files.
#pragma once

#include "host/cuda_check.h"
#include "host/math.h"
#include "finish.cuh"
#include "kernel.cuh"
#include "launch.h"
#include "pair_kernel.cuh"
#include "prepare.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

template <class C>
void launch_sums(KernelParams const& p, CUtensorMap const& q_map, CUtensorMap const& dout_map, int grid,
                 cudaStream_t stream) {
  constexpr bool kBounds = C::kSums == Sums::kDeterministic;
  std::int64_t const keys = std::int64_t{p.B} * p.s_kv;
  auto const blocks = [](std::int64_t items, int each) { return static_cast<unsigned>(ceil_div(items, each)); };
  // Without bounds it reads no queries, and one kernel serves every head dimension.
  constexpr int kQueryDim = kBounds ? C::kHeadDim : 512;
  prepare_kernel<typename C::Element, kQueryDim, kBounds><<<p.rows, kPrepareThreads, 0, stream>>>(p);
  HTREE_CUDA_CHECK(cudaGetLastError());
  if (keys > 0) {
    HTREE_CUDA_CHECK(cudaMemsetAsync(p.sums, 0, sizeof(typename Order<C::kSums>::Sum) * keys * C::kHeadDim, stream));
    if constexpr (kBounds) {
      // The bytes 0x80 make a number below every exponent.
      HTREE_CUDA_CHECK(cudaMemsetAsync(p.exponents, 0x80, 4 * keys, stream));
      HTREE_CUDA_CHECK(cudaMemsetAsync(p.counts, 0, 4 * keys, stream));
      norms_kernel<typename C::Element, C::kHeadDim>
          <<<blocks(keys, kPrepareThreads / 32), kPrepareThreads, 0, stream>>>(p);
      HTREE_CUDA_CHECK(cudaGetLastError());
      launch_bounds(p, stream);
    }
  }
  if (p.begun != nullptr) HTREE_CUDA_CHECK(cudaMemsetAsync(p.begun, 0, sizeof(int), stream));
  auto const kernel = [] {
    if constexpr (C::kCtas > 1) {
      return sparse_attention_bwd_pair_kernel<C>;
    } else {
      return sparse_attention_bwd_kernel<C>;
    }
  }();
  // The attribute is per device and cheap to set; setting it each time keeps no state of the process.
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSharedBytes));
  kernel<<<grid, C::kThreads, C::kSharedBytes, stream>>>(p, q_map, dout_map);
  HTREE_CUDA_CHECK(cudaGetLastError());
  if (keys > 0) {
    finish_kernel<typename C::Element, C::kHeadDim, C::kSums>
        <<<blocks(keys * (C::kHeadDim / 8), kFinishThreads), kFinishThreads, 0, stream>>>(p);
    HTREE_CUDA_CHECK(cudaGetLastError());
  }
}

template <class Element, int kHeadDim, Sums kSums>
void launch_ctas(KernelParams const& params, CUtensorMap const& q_map, CUtensorMap const& dout_map, bool pair, int grid,
                 cudaStream_t stream) {
  auto const run =
      pair ? launch_sums<PairConfig<Element, kHeadDim, kSums>> : launch_sums<Config<Element, kHeadDim, kSums>>;
  run(params, q_map, dout_map, grid, stream);
}

template <class Element, int kHeadDim>
void launch(KernelParams const& params, CUtensorMap const& q_map, CUtensorMap const& dout_map, bool deterministic,
            bool pair, int grid, cudaStream_t stream) {
  auto const run = deterministic ? launch_ctas<Element, kHeadDim, Sums::kDeterministic>
                                 : launch_ctas<Element, kHeadDim, Sums::kAtomic>;
  run(params, q_map, dout_map, pair, grid, stream);
}

}  // namespace htree_cuda::sm90::sparse_attention_bwd

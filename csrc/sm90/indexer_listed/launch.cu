// Host side of the listed indexer: checks the request, picks the instantiation, a CTA a query.
#include "launch.h"

#include <cstdint>
#include <string>

#include "host/cuda_check.h"
#include "host/math.h"
#include "host/recording.h"
#include "host/window_args.h"
#include "params.h"
#include "config.cuh"

namespace htree_cuda::sm90::indexer_listed {

namespace {

using host::window_args::require;

void check(char const* op, IndexerListedParams const& params) {
  IndexerLogitsParams const& p = params.indexer;
  host::window_args::check(op, p.window, p.B, p.s_q, p.s_kv);
  require(op, p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16, "q must be bfloat16 or float16");
  require(op, p.h_i >= 1 && p.h_i <= 64, "h_i must lie in 1 .. 64, got " + std::to_string(p.h_i));
  require(op, p.d_i == 64 || p.d_i == 128, "d_i must be 64 or 128, got " + std::to_string(p.d_i));
  require(op, params.topk >= 0 && params.topk <= (1 << 30), "topk must be at most 2^30, got " + std::to_string(params.topk));
  require(op, host::misalignment(p.q, 16) == 0 && host::misalignment(p.k, 16) == 0, "q and k must be 16-byte aligned");
  for (std::int64_t stride : {p.q_stride_b, p.q_stride_s, p.q_stride_h, p.k_stride_b, p.k_stride_s}) {
    require(op, stride % 8 == 0, "strides of q and k must be multiples of 16 bytes, got " + std::to_string(2 * stride));
  }
}

template <class Element, Pass kPass>
void dispatch_dim(std::int64_t d_i, KernelParams const& kernel, int grid, cudaStream_t stream) {
  d_i == 64 ? launch<Element, 64, kPass>(kernel, grid, stream) : launch<Element, 128, kPass>(kernel, grid, stream);
}

template <Pass kPass>
void run(IndexerListedParams const& params, cudaStream_t stream) {
  IndexerLogitsParams const& p = params.indexer;
  host::window_args::for_each_chunk(p.window, p.B, p.s_q, [&](std::int64_t b, std::int64_t batches) {
    KernelParams kernel{};
    kernel.q = static_cast<char const*>(p.q) + 2 * b * p.q_stride_b;
    kernel.q_stride_b = p.q_stride_b;
    kernel.q_stride_s = p.q_stride_s;
    kernel.q_stride_h = p.q_stride_h;
    kernel.k = static_cast<char const*>(p.k) + 2 * b * p.k_stride_b;
    kernel.k_stride_b = p.k_stride_b;
    kernel.k_stride_s = p.k_stride_s;
    kernel.weights = p.weights + b * p.weights_stride_b;
    kernel.weights_stride_b = p.weights_stride_b;
    kernel.weights_stride_s = p.weights_stride_s;
    kernel.weights_stride_h = p.weights_stride_h;
    kernel.window = host::window_args::at(p.window, p.B, b, batches);
    kernel.indices = params.indices + b * params.indices_stride_b;
    kernel.indices_stride_b = params.indices_stride_b;
    kernel.indices_stride_s = params.indices_stride_s;
    kernel.indices_stride_t = params.indices_stride_t;
    if (params.topk_length != nullptr) kernel.topk_length = params.topk_length + b * params.topk_length_stride_b;
    kernel.topk_length_stride_b = params.topk_length_stride_b;
    kernel.topk_length_stride_s = params.topk_length_stride_s;
    if constexpr (kPass == Pass::kForward) {
      kernel.out = p.out + b * p.out_stride_b;
      kernel.out_stride_b = p.out_stride_b;
      kernel.out_stride_s = p.out_stride_s;
    } else {
      kernel.dlogits = params.dlogits + b * params.dlogits_stride_b;
      kernel.dlogits_stride_b = params.dlogits_stride_b;
      kernel.dlogits_stride_s = params.dlogits_stride_s;
      kernel.dlogits_stride_t = params.dlogits_stride_t;
      kernel.dq = static_cast<char*>(params.dq) + 2 * b * p.s_q * p.h_i * p.d_i;
      kernel.dk = params.dk + b * p.s_kv * p.d_i;
      kernel.dweights = params.dweights + b * p.s_q * p.h_i;
    }
    kernel.s_q = static_cast<int>(p.s_q);
    kernel.s_kv = static_cast<int>(p.s_kv);
    kernel.h_i = static_cast<int>(p.h_i);
    kernel.topk = static_cast<int>(params.topk);
    int const grid = static_cast<int>(batches * p.s_q);
    if (host::Recording* const told = host::recording()) {
      bool const forward = kPass == Pass::kForward;
      told->add(forward ? "logits" : "gradients",
                std::string("indexer_listed_kernel<") + host::dtype_name(p.dtype) + ", " + std::to_string(p.d_i) +
                    (forward ? ", forward>" : ", backward>"),
                "a query and its list, 64 slots at a time", "only the rows that the list names are read", grid);
      return;
    }
    if (p.dtype == DType::kBFloat16) {
      dispatch_dim<cutlass::bfloat16_t, kPass>(p.d_i, kernel, grid, stream);
    } else {
      dispatch_dim<cutlass::half_t, kPass>(p.d_i, kernel, grid, stream);
    }
  });
}

}  // namespace

}  // namespace htree_cuda::sm90::indexer_listed

namespace htree_cuda {

void indexer_logits_listed(IndexerListedParams const& params, void* stream) {
  using namespace sm90::indexer_listed;
  check("indexer_logits", params);
  if (params.indexer.B == 0 || params.indexer.s_q == 0 || params.topk == 0) return;
  run<Pass::kForward>(params, static_cast<cudaStream_t>(stream));
}

void indexer_logits_backward(IndexerListedParams const& params, void* stream) {
  using namespace sm90::indexer_listed;
  check("indexer_logits_backward", params);
  if (params.indexer.B == 0 || params.indexer.s_q == 0) return;
  run<Pass::kBackward>(params, static_cast<cudaStream_t>(stream));
}

}  // namespace htree_cuda

// The launcher of tree_append: one kernel for a step of decoding, two for more tokens.
#include <limits>

#include "host/cache_args.h"
#include "kernel.cuh"

namespace htree_cuda::tree::append {
namespace {

Input input(void const* x, std::int64_t stride_b, std::int64_t stride_t, std::int64_t stride_h, std::int64_t dim) {
  bool const vectors = host::cache_args::aligned(x, 16) && stride_b % 8 == 0 && stride_t % 8 == 0 && stride_h % 8 == 0;
  return {static_cast<char const*>(x), stride_b, stride_t, stride_h, static_cast<int>(dim), vectors};
}

template <class Element>
void launch(Args const& args, std::int64_t B, cudaStream_t stream) {
  if (args.T_new <= kStepTokens) {
    host::launch_overlapped(append_step_kernel<Element>, static_cast<unsigned>(B), kThreads, 0, stream, args);
    return;
  }
  std::int64_t const segments = host::ceil_div(args.T_new, kSegmentTokens) + 1;
  std::int64_t const blocks = B * args.cache.H_kv * segments;
  if (blocks > std::numeric_limits<int>::max()) host::cache_args::reject("tree_append", "too many sequences, heads and tokens for a launch");
  host::launch_overlapped(append_segments_kernel<Element>, static_cast<unsigned>(blocks), kThreads, 0, stream, args);
  host::launch_overlapped(append_finish_kernel<Element>, static_cast<unsigned>(B), kThreads, 0, stream, args);
}


}  // namespace
}  // namespace htree_cuda::tree::append

namespace htree_cuda {

void tree_append(TreeAppendParams const& params, void* stream) {
  using namespace tree::append;
  TreeCacheParams const& cache = params.cache;
  host::cache_args::check("tree_append", cache);
  if (params.T_new < 0 || params.T_new > std::numeric_limits<int>::max()) {
    host::cache_args::reject("tree_append", "T_new must be in 0 .. 2^31 - 1, got " + std::to_string(params.T_new));
  }
  if (params.T_new == 0 || cache.B == 0) return;
  Args args{};
  args.cache = host::cache_args::view(cache);
  args.k = input(params.k, params.k_stride_b, params.k_stride_t, params.k_stride_h, cache.K);
  args.v = input(params.v, params.v_stride_b, params.v_stride_t, params.v_stride_h, cache.V);
  args.seqused = params.seqused;
  args.T_new = static_cast<int>(params.T_new);
  auto* const to = static_cast<cudaStream_t>(stream);
  cache.dtype == DType::kFloat16 ? launch<__half>(args, cache.B, to) : launch<__nv_bfloat16>(args, cache.B, to);
}

}  // namespace htree_cuda

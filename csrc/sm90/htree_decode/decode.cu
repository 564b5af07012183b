// The launcher of tree_decode: checks, and the kernel for the dtype, head dimensions and group.
#include <cmath>
#include <limits>

#include "launch.h"
#include "host/cache_args.h"
#include "host/math.h"

namespace htree_cuda::sm90::htree_decode {
namespace {

// Which kernel runs for which call: by dtype and head dimensions here, and in launch.cuh by heads of a group, by whether rotated
// pairs are the halves of K, and by how many queries there are.
template <class Element>
void dispatch_dim(Args const& args, int K, unsigned units, cudaStream_t stream) {
  if (K == 128) return launch<Element, 128, 128>(args, units, stream);
  return launch<Element, 64, 64>(args, units, stream);
}

void dispatch(Args const& args, DType dtype, int K, unsigned units, cudaStream_t stream) {
  dtype == DType::kFloat16 ? dispatch_dim<__half>(args, K, units, stream)
                           : dispatch_dim<__nv_bfloat16>(args, K, units, stream);
}

}  // namespace
}  // namespace htree_cuda::sm90::htree_decode

namespace htree_cuda {

void tree_decode(TreeDecodeParams const& params, void* stream) {
  using namespace sm90::htree_decode;
  constexpr char const* kOp = "tree_decode";
  using host::cache_args::reject;
  TreeCacheParams const& cache = params.cache;
  host::cache_args::check(kOp, cache);
  if (cache.K != cache.V) reject(kOp, "K and V must be equal, got " + std::to_string(cache.K) + " and " + std::to_string(cache.V));
  auto const number = [](std::int64_t x) { return std::to_string(x); };
  if (params.G < 1 || params.G > kHeads) reject(kOp, "G must be 1 .. 16, got " + number(params.G));
  if (!host::is_power_of_two(params.top_k) || params.top_k < tree::kMinTopK || params.top_k > tree::kMaxTopK) {
    reject(kOp, "top_k must be a power of two in 16 .. 512, got " + number(params.top_k));
  }
  if (params.T_q < 0 || params.T_q > (1 << 20)) reject(kOp, "T_q must be in 0 .. 2^20, got " + number(params.T_q));
  if (cache.max_tokens > (params.top_k << (4 * cache.num_layers))) {
    reject(kOp, number(cache.num_layers) + " layers of " + number(cache.max_tokens) +
                    " tokens end above max_top_nodes = " + number(16 * params.top_k) + " nodes");
  }
  if (!host::cache_args::aligned(params.rotations, 16)) reject(kOp, "rotations must be 16-byte aligned");
  if (params.rope_dim <= 0 || params.rope_dim > cache.K || params.rope_dim % 16 != 0) {
    reject(kOp, "rope_dim must be a multiple of 16 in 16 .. K, got " + number(params.rope_dim));
  }
  if (cache.B == 0 || params.T_q == 0) return;
  std::int64_t const units = cache.B * params.T_q * cache.H_kv;
  if (units > std::numeric_limits<int>::max() / kMaxParts) reject(kOp, "B * T_q * H_kv must be below 2^27, got " + number(units));

  Args args{};
  args.cache = host::cache_args::view(cache);
  args.q = params.q;
  args.q_stride_b = params.q_stride_b;
  args.q_stride_t = params.q_stride_t;
  args.q_stride_h = params.q_stride_h;
  args.seqused_q = params.seqused_q;
  args.q_vectors = host::cache_args::aligned(params.q, 16) && params.q_stride_b % 8 == 0 && params.q_stride_t % 8 == 0 &&
                   params.q_stride_h % 8 == 0;
  args.out = params.out;
  args.lse = params.lse;
  args.selection = params.selection;
  args.selection_layers = params.selection == nullptr ? 0 : static_cast<int>(params.selection_layers);
  args.rotations = reinterpret_cast<float2 const*>(params.rotations);
  args.attn_sink = params.attn_sink;
  args.pairing = {static_cast<int>(params.rope_dim / 16), params.interleaved};
  args.scale_log2 = static_cast<float>(params.scale * host::kLog2E);
  args.B = static_cast<int>(cache.B);
  args.T_q = static_cast<int>(params.T_q);
  args.G = static_cast<int>(params.G);
  args.top_k = static_cast<int>(params.top_k);
  args.log2_parts = log2_parts_of(args.top_k, args.G);
  dispatch(args, cache.dtype, static_cast<int>(cache.K), static_cast<unsigned>(units),
           static_cast<cudaStream_t>(stream));
}

}  // namespace htree_cuda

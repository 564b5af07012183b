// Host side of the backward of sparse_attention: checks the request, lays out the workspace, picks the instantiation.
#include "launch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "host/cuda_check.h"
#include "host/list_args.h"
#include "host/math.h"
#include "host/recording.h"
#include "params.h"
#include "bounds.cuh"
#include "config.cuh"
#include "finish.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

namespace {

using host::list_args::kGroupHeads;

constexpr char const* kOp = "sparse_attention_backward";
constexpr int kValueDim = 512;
// Sums of dkv up to this size stay in L2 (50 MB) whatever the pace of CTAs: 64 heads take 10.5 ms at 38 MB, paced 10.1; at
// 151 MB 18.6 and 11.6 (H100, 2026-11-25).
constexpr std::int64_t kSumsInL2 = std::int64_t{40} << 20;

// What lies where in the workspace; without memory it counts the bytes.
struct Workspace {
  char* base;
  std::int64_t bytes = 0;

  template <class T>
  T* take(std::int64_t count) {
    T* const at = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += ceil_div(count * static_cast<std::int64_t>(sizeof(T)), 256) * 256;
    return at;
  }
};

std::int64_t lay_out(SparseAttentionBackwardParams const& p, char* base, KernelParams& kernel) {
  Workspace workspace{base};
  std::int64_t const rows = p.forward.B * p.forward.s_q;
  std::int64_t const keys = p.forward.B * p.forward.s_kv;
  kernel.begun = workspace.take<int>(1);
  kernel.terms = workspace.take<HeadTerms>(rows * p.forward.h_q);
  if (p.forward.attn_sink != nullptr) kernel.to_sink = workspace.take<float>(rows * p.forward.h_q);
  if (p.deterministic) {
    kernel.sums = workspace.take<std::int64_t>(keys * p.forward.d_qk);
    kernel.query_bounds = workspace.take<double2>(rows);
    kernel.norms = workspace.take<float>(keys);
    kernel.exponents = workspace.take<int>(keys);
    kernel.counts = workspace.take<int>(keys);
    kernel.factors = workspace.take<float>(keys);
    kernel.broken = workspace.take<int>(keys);
  } else {
    kernel.sums = workspace.take<float>(keys * p.forward.d_qk);
  }
  return workspace.bytes;
}

void check(SparseAttentionBackwardParams const& p) {
  SparseAttentionParams const& f = p.forward;
  using host::list_args::require;
  host::list_args::check(kOp, f);
  require(kOp, f.d_qk == 576 || f.d_qk == 512, "d_qk must be 576 or 512, got " + std::to_string(f.d_qk));
  require(kOp, f.d_v == kValueDim, "d_v must be 512, got " + std::to_string(f.d_v));
  host::list_args::require_aligned(kOp, "kv", f.kv);
  host::list_args::require_aligned(kOp, "out", f.out);
  host::list_args::require_aligned(kOp, "dout", p.dout);
  host::list_args::require_aligned(kOp, "dq", p.dq);
  host::list_args::require_aligned(kOp, "dkv", p.dkv);
  host::list_args::require_strides(kOp, {{"kv's batch", f.B, f.kv_stride_b},
                                         {"kv's row", f.s_kv, f.kv_stride_s},
                                         {"dout's batch", f.B, p.dout_stride_b},
                                         {"dout's query", f.s_q, p.dout_stride_s},
                                         {"dout's head", f.h_q, p.dout_stride_h}});
  require(kOp, f.h_q == 1 || p.dout_stride_h > 0, "dout's head stride must not be 0 (heads expanded from one)");
  KernelParams unused{};
  std::int64_t const needed = lay_out(p, nullptr, unused);
  host::list_args::require_aligned(kOp, "the workspace", p.workspace);
  require(kOp, p.workspace_bytes >= needed,
          "the workspace must have " + std::to_string(needed) + " bytes, it has " + std::to_string(p.workspace_bytes));
}

template <class T>
void advance(T*& pointer, std::int64_t elements) {
  if (pointer != nullptr) pointer += elements;
}

// What launch.cuh's launch_sums launches, in its order.
void record(host::Recording& told, SparseAttentionParams const& p, bool deterministic, bool paced, bool pair, int grid) {
  std::string const kind = std::string("<") + host::dtype_name(p.dtype) + ", " + std::to_string(p.d_qk);
  std::string const sums = kind + (deterministic ? ", deterministic>" : ", atomic>");
  std::int64_t const rows = p.B * p.s_q;
  std::int64_t const keys = p.B * p.s_kv;
  told.add("prepare", "prepare_kernel" + sums, "a query", "terms of each head: lse, out times dout, the sink", rows);
  if (keys > 0 && deterministic) {
    char const* const reason = "sums are integers: how large a key row's contributions are decides their unit";
    told.add("bounds", "norms_kernel" + kind + ">", "8 keys", reason, ceil_div(keys, 8));
    told.add("bounds", "bounds_kernel", "a query", reason, rows);
    told.add("bounds", "factors_kernel", "256 keys", reason, ceil_div(keys, 256));
  }
  told.add("gradients", (pair ? "sparse_attention_bwd_pair_kernel" : "sparse_attention_bwd_kernel") + sums,
           pair ? "half of the columns of 128 heads of a query x 64 keys at a time" : "64 heads of a query x 64 keys at a time",
           paced ? "sums of dkv exceed L2: CTAs begin their queries together" : "sums of dkv stay in L2, or lists have lengths", grid);
  if (keys > 0) {
    told.add("finish", "finish_kernel" + sums, "256 times 8 columns", "sums of dkv rounded to the dtype",
             ceil_div(keys * (p.d_qk / 8), kFinishThreads));
  }
}

// Batches b .. b + batches - 1, few enough for one launch. `kernel` has the workspace.
void launch_chunk(SparseAttentionBackwardParams const& params, KernelParams kernel, std::int64_t b, std::int64_t batches,
                  bool one_start, int processors, cudaStream_t stream) {
  SparseAttentionParams p = params.forward;
  std::int64_t const heads = b * p.s_q * p.h_q;
  std::int64_t const keys = b * p.s_kv;
  p.B = batches;
  p.q = static_cast<char const*>(p.q) + 2 * b * p.q_stride_b;
  host::list_args::skip_slots(p, b);
  host::list_args::set_slots(p, one_start, kernel);
  kernel.q = static_cast<char const*>(p.q);
  kernel.q_stride_b = 2 * p.q_stride_b;
  kernel.q_stride_s = 2 * p.q_stride_s;
  kernel.q_stride_h = 2 * p.q_stride_h;
  kernel.kv = static_cast<char const*>(p.kv) + 2 * b * p.kv_stride_b;
  kernel.kv_stride_b = 2 * p.kv_stride_b;
  kernel.kv_stride_s = 2 * p.kv_stride_s;
  kernel.dout = static_cast<char const*>(params.dout) + 2 * b * params.dout_stride_b;
  kernel.dout_stride_b = 2 * params.dout_stride_b;
  kernel.dout_stride_s = 2 * params.dout_stride_s;
  kernel.dout_stride_h = 2 * params.dout_stride_h;
  kernel.out = static_cast<char const*>(p.out) + 2 * heads * kValueDim;
  kernel.lse = p.lse + heads;
  kernel.dlse = params.dlse + b * params.dlse_stride_b;
  kernel.dlse_stride_b = params.dlse_stride_b;
  kernel.dlse_stride_s = params.dlse_stride_s;
  kernel.dlse_stride_h = params.dlse_stride_h;
  kernel.sink = p.attn_sink;
  kernel.sink_stride = p.attn_sink_stride;
  kernel.dq = static_cast<char*>(params.dq) + 2 * heads * p.d_qk;
  kernel.dkv = static_cast<char*>(params.dkv) + 2 * keys * p.d_qk;
  advance(kernel.terms, heads);
  advance(kernel.to_sink, heads);
  kernel.sums = static_cast<char*>(kernel.sums) + (params.deterministic ? 8 : 4) * keys * p.d_qk;
  advance(kernel.query_bounds, b * p.s_q);
  advance(kernel.norms, keys);
  advance(kernel.exponents, keys);
  advance(kernel.counts, keys);
  advance(kernel.factors, keys);
  advance(kernel.broken, keys);
  kernel.B = static_cast<int>(batches);
  kernel.h_q = static_cast<int>(p.h_q);
  // Where the last group of 128 has more than 64 heads.
  bool const pair = ceil_div(p.h_q, kGroupHeads) % 2 == 0;
  int const ctas = pair ? 2 : 1;
  kernel.groups = static_cast<int>(ceil_div(p.h_q, kGroupHeads * ctas));
  kernel.rows = static_cast<int>(batches * p.s_q);
  kernel.scale = static_cast<float>(p.sm_scale);
  kernel.scale_log2 = static_cast<float>(p.sm_scale * host::kLog2E);
  kernel.lse_scale = static_cast<float>(std::log2(p.lse_base));
  kernel.dlse_scale = static_cast<float>(1.0 / std::log(p.lse_base));
  CUtensorMap const q_map = host::list_args::encode_q(p, kernel);
  CUtensorMap const dout_map = host::list_args::encode_heads(
      {kernel.dout, kValueDim, p.B, p.s_q, p.h_q, params.dout_stride_b, params.dout_stride_s, params.dout_stride_h, p.dtype},
      kernel.dout_coord_h, kernel.dout_coord_s, kernel.dout_coord_b);
  // Lists with lengths make units of unequal time, which would only wait for each other.
  std::int64_t const sums_bytes = batches * p.s_kv * p.d_qk * (params.deterministic ? 8 : 4);
  bool const paced = sums_bytes > kSumsInL2 && p.topk_length == nullptr &&
                     batches * p.s_q * kernel.groups * ctas <= std::numeric_limits<int>::max() - processors;
  if (!paced) kernel.begun = nullptr;
  int const grid = ctas * static_cast<int>(std::min<std::int64_t>(processors / ctas, batches * p.s_q * kernel.groups));
  if (host::Recording* const told = host::recording()) {
    return record(*told, p, params.deterministic, kernel.begun != nullptr, pair, grid);
  }
  bool const bf16 = p.dtype == DType::kBFloat16;
  auto const run = p.d_qk == 576 ? (bf16 ? launch<cutlass::bfloat16_t, 576> : launch<cutlass::half_t, 576>)
                                 : (bf16 ? launch<cutlass::bfloat16_t, 512> : launch<cutlass::half_t, 512>);
  run(kernel, q_map, dout_map, params.deterministic, pair, grid, stream);
}

}  // namespace

void launch_bounds(KernelParams const& p, cudaStream_t stream) {
  auto const key_blocks = static_cast<unsigned>(ceil_div(std::int64_t{p.B} * p.s_kv, kBoundsThreads));
  bounds_kernel<kBoundsThreads><<<p.rows, kBoundsThreads, 0, stream>>>(p);
  HTREE_CUDA_CHECK(cudaGetLastError());
  factors_kernel<kBoundsThreads><<<key_blocks, kBoundsThreads, 0, stream>>>(p);
  HTREE_CUDA_CHECK(cudaGetLastError());
}

}  // namespace htree_cuda::sm90::sparse_attention_bwd

namespace htree_cuda {

std::int64_t sparse_attention_backward_workspace(SparseAttentionBackwardParams const& params) {
  using namespace sm90::sparse_attention_bwd;
  KernelParams unused{};
  return lay_out(params, nullptr, unused);
}

void sparse_attention_backward(SparseAttentionBackwardParams const& params, void* stream) {
  using namespace sm90::sparse_attention_bwd;
  check(params);
  SparseAttentionParams const& f = params.forward;
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  KernelParams kernel{};
  lay_out(params, static_cast<char*>(params.workspace), kernel);
  if (f.B > 0 && f.s_q > 0) {
    int const processors = host::sm_count();
    host::list_args::for_each_chunk(f, [&](std::int64_t b, std::int64_t batches, bool one_start) {
      launch_chunk(params, kernel, b, batches, one_start, processors, cuda_stream);
    });
  } else if (f.B > 0 && f.s_kv > 0 && host::recording() == nullptr) {
    HTREE_CUDA_CHECK(cudaMemsetAsync(params.dkv, 0, 2 * f.B * f.s_kv * f.d_qk, cuda_stream));
  }
  if (host::Recording* const told = host::recording()) {
    if (f.attn_sink != nullptr) told->add("sink", "sink_kernel", "32 heads", "sums over queries, in a fixed order", ceil_div(f.h_q, 32));
    return;
  }
  if (f.attn_sink != nullptr) {
    sink_kernel<1024><<<static_cast<unsigned>(ceil_div(f.h_q, 32)), 1024, 0, cuda_stream>>>(
        kernel.to_sink, params.dsink, f.B * f.s_q, static_cast<int>(f.h_q));
    HTREE_CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace htree_cuda

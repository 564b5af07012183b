// Host side of sparse_attention: checks the request, picks the instantiation and the grid.
#include "launch.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "host/cuda_check.h"
#include "host/dispatch_dtype.h"
#include "host/math.h"
#include "host/recording.h"
#include "params.h"
#include "host/list_args.h"
#include "config.cuh"
#include "join.cuh"

namespace htree_cuda::sm90::sparse_attention {

namespace {

constexpr char const* kOp = "sparse_attention";
constexpr std::int64_t kTileKeys = 64;
// Tiles of a part at least: what putting two parts together takes longer than.
constexpr std::int64_t kPartTiles = 2;

// CTAs of a call whose lists are cut, at most: the SMs of an H100 and of an H200, whatever GPU it is, since parts decide bits.
constexpr std::int64_t kPartCtas = 132;
static_assert(kPartCtas <= kMaxParts);

// CTAs that share a list where there are few queries, each with one part; a rule of shapes alone.
std::int64_t parts_of(SparseAttentionParams const& p) {
  std::int64_t const units = p.B * p.s_q * ceil_div(p.h_q, std::int64_t{kGroupHeads});
  if (units == 0) return 1;
  return std::max<std::int64_t>(std::min(kPartCtas / units, ceil_div(p.topk, kTileKeys) / kPartTiles), 1);
}

// What lies in the workspace: sums of parts, then their terms.
std::int64_t part_heads(SparseAttentionParams const& p, std::int64_t parts) {
  return parts == 1 ? 0 : p.B * p.s_q * ceil_div(p.h_q, std::int64_t{kGroupHeads}) * parts * kGroupHeads;
}

std::int64_t workspace_bytes(SparseAttentionParams const& p) {
  return part_heads(p, parts_of(p)) * static_cast<std::int64_t>(kValueDim * sizeof(float) + sizeof(PartTerms));
}

void check(SparseAttentionParams const& p) {
  host::list_args::check(kOp, p);
  host::list_args::require(kOp, p.d_qk == 576 || p.d_qk == 512, "d_qk must be 576 or 512, got " + std::to_string(p.d_qk));
  host::list_args::require(kOp, p.d_v == kValueDim, "d_v must be 512, got " + std::to_string(p.d_v));
  host::list_args::require_aligned(kOp, "kv", p.kv);
  host::list_args::require_aligned(kOp, "out", p.out);
  host::list_args::require_strides(kOp, {{"kv's batch", p.B, p.kv_stride_b}, {"kv's row", p.s_kv, p.kv_stride_s}});
}

// Batches small enough for one launch.
void launch_chunk(SparseAttentionParams const& p, bool one_start, std::int64_t parts, int processors, cudaStream_t stream) {
  KernelParams kernel{};
  host::list_args::set_slots(p, one_start, kernel);
  kernel.q = static_cast<char const*>(p.q);
  kernel.q_stride_b = 2 * p.q_stride_b;
  kernel.q_stride_s = 2 * p.q_stride_s;
  kernel.q_stride_h = 2 * p.q_stride_h;
  kernel.kv = static_cast<char const*>(p.kv);
  kernel.kv_stride_b = 2 * p.kv_stride_b;
  kernel.kv_stride_s = 2 * p.kv_stride_s;
  kernel.sink = p.attn_sink;
  kernel.sink_stride = p.attn_sink_stride;
  kernel.out = static_cast<char*>(p.out);
  kernel.lse = p.lse;
  kernel.h_q = static_cast<int>(p.h_q);
  kernel.parts = static_cast<int>(parts);
  if (parts > 1) {
    kernel.part_out = static_cast<float*>(p.workspace);
    kernel.part_terms = reinterpret_cast<PartTerms*>(kernel.part_out + part_heads(p, parts) * kValueDim);
  }
  kernel.groups = static_cast<int>(ceil_div(p.h_q, std::int64_t{kGroupHeads}) * parts);
  kernel.rows = static_cast<int>(p.B * p.s_q);
  kernel.scale_log2 = static_cast<float>(p.sm_scale * host::kLog2E);
  kernel.lse_scale = static_cast<float>(1.0 / std::log2(p.lse_base));
  CUtensorMap const map = host::list_args::encode_q(p, kernel);
  std::int64_t const units = p.B * p.s_q * kernel.groups;
  int const grid = static_cast<int>(parts > 1 ? units : std::min<std::int64_t>(processors, units));
  if (host::Recording* const told = host::recording()) {
    told->add("attend",
              std::string("sparse_attention_kernel<") + host::dtype_name(p.dtype) + ", " + std::to_string(p.d_qk) +
                  (parts > 1 ? ", parts>" : ">"),
              "64 heads of a query x 64 keys at a time",
              parts > 1 ? "few queries: several CTAs share a list" : "a list is gathered once for 64 heads; a CTA takes query after query",
              grid);
    if (parts > 1) {
      told->add("join", std::string("join_kernel<") + host::dtype_name(p.dtype) + ">", "a query's head",
                "sums of the parts of a list, normalised", p.B * p.s_q * p.h_q);
    }
    return;
  }
  bool const bf16 = p.dtype == DType::kBFloat16;
  auto const run = p.d_qk == 576 ? (bf16 ? launch<cutlass::bfloat16_t, 576> : launch<cutlass::half_t, 576>)
                                    : (bf16 ? launch<cutlass::bfloat16_t, 512> : launch<cutlass::half_t, 512>);
  run(kernel, map, grid, stream);
  if (parts > 1) {
    auto const join = bf16 ? join_kernel<cutlass::bfloat16_t> : join_kernel<cutlass::half_t>;
    join<<<kernel.rows * kernel.h_q, kJoinThreads, 0, stream>>>(kernel);
    HTREE_CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace

}  // namespace htree_cuda::sm90::sparse_attention

namespace htree_cuda {

std::int64_t sparse_attention_workspace(SparseAttentionParams const& params) {
  return sm90::sparse_attention::workspace_bytes(params);
}

void sparse_attention(SparseAttentionParams const& params, void* stream) {
  using namespace sm90::sparse_attention;
  check(params);
  if (params.B == 0 || params.s_q == 0) return;
  int const processors = host::sm_count();
  std::int64_t const parts = parts_of(params);
  std::int64_t const needed = workspace_bytes(params);
  host::list_args::require(kOp, params.workspace_bytes >= needed,
                           "the workspace must have " + std::to_string(needed) + " bytes, it has " +
                               std::to_string(params.workspace_bytes));
  if (needed > 0) host::list_args::require_aligned(kOp, "the workspace", params.workspace);
  host::list_args::for_each_chunk(params, [&](std::int64_t b, std::int64_t batches, bool one_start) {
    SparseAttentionParams part = params;
    part.B = batches;
    part.q = static_cast<char const*>(params.q) + 2 * b * params.q_stride_b;
    part.kv = static_cast<char const*>(params.kv) + 2 * b * params.kv_stride_b;
    part.out = static_cast<char*>(params.out) + 2 * b * params.s_q * params.h_q * kValueDim;
    part.lse = params.lse + b * params.s_q * params.h_q;
    host::list_args::skip_slots(part, b);
    launch_chunk(part, one_start, parts, processors, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace htree_cuda

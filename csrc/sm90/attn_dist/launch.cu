// Host side of attn_dist: checks the request, chooses the instantiation and the grid.
#include "launch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "host/cuda_check.h"
#include "host/dispatch_dtype.h"
#include "host/math.h"
#include "host/recording.h"
#include "params.h"
#include "host/list_args.h"
#include "config.cuh"

namespace htree_cuda::sm90::attn_dist {

namespace {

using host::list_args::kGroupHeads;

constexpr char const* kOp = "attn_dist";
constexpr int kPassHeads = 128;

void check(AttnDistParams const& p) {
  host::list_args::check(kOp, p);
  host::list_args::require_aligned(kOp, "k", p.k);
  host::list_args::require_aligned(kOp, "out", p.out);
  host::list_args::require_strides(kOp, {{"k's batch", p.B, p.k_stride_b}, {"k's row", p.s_kv, p.k_stride_s}});
}

template <class Element, Split kSplit>
void dispatch_head_dim(std::int64_t d_qk, KernelParams const& kernel, CUtensorMap const& map, int grid,
                       cudaStream_t stream) {
  switch (d_qk) {
    case 576: return launch<Element, 576, kSplit>(kernel, map, grid, stream);
    case 512: return launch<Element, 512, kSplit>(kernel, map, grid, stream);
    case 192: return launch<Element, 192, kSplit>(kernel, map, grid, stream);
    case 128: return launch<Element, 128, kSplit>(kernel, map, grid, stream);
  }
  throw std::invalid_argument("attn_dist: d_qk must be 576, 512, 192 or 128, got " + std::to_string(d_qk));
}

// `passes` over the heads from `first_group` on.
template <Split kSplit>
void launch_passes(AttnDistParams const& p, KernelParams kernel, CUtensorMap const& map, std::int64_t first_group,
                   std::int64_t passes, int processors, cudaStream_t stream) {
  if (passes == 0) return;
  kernel.first_group = static_cast<int>(first_group);
  kernel.passes = static_cast<int>(passes);
  kernel.units = p.B * p.s_q * passes * kernel.tiles;
  int const grid = static_cast<int>(std::min<std::int64_t>(processors, kernel.units));
  host::list_args::require(kOp, kernel.units / grid < std::numeric_limits<int>::max(), "too much work for one launch");
  if (host::Recording* const told = host::recording()) {
    bool const wide = kSplit == Split::kHeads;
    told->add("attn_dist",
              std::string("attn_dist_kernel<") + host::dtype_name(p.dtype) + ", " + std::to_string(p.d_qk) + ", " +
                  (wide ? "heads" : "keys") + ">",
              std::string(wide ? "128" : "64") + " heads of a query x 64 keys at a time",
              wide ? "the two consumers have 64 heads each and share what is gathered"
                   : "64 heads or fewer are left: the consumers take every other tile of keys",
              grid);
    return;
  }
  if (p.dtype == DType::kBFloat16) {
    dispatch_head_dim<cutlass::bfloat16_t, kSplit>(p.d_qk, kernel, map, grid, stream);
  } else {
    dispatch_head_dim<cutlass::half_t, kSplit>(p.d_qk, kernel, map, grid, stream);
  }
}

// Batches small enough for one launch.
void launch_chunk(AttnDistParams const& p, bool one_start, int processors, cudaStream_t stream) {
  KernelParams kernel{};
  host::list_args::set_slots(p, one_start, kernel);
  kernel.k = static_cast<char const*>(p.k);
  kernel.k_stride_b = 2 * p.k_stride_b;
  kernel.k_stride_s = 2 * p.k_stride_s;
  kernel.lse = p.lse;
  kernel.lse_stride_b = p.lse_stride_b;
  kernel.lse_stride_s = p.lse_stride_s;
  kernel.lse_stride_h = p.lse_stride_h;
  kernel.out = p.out;
  kernel.h_q = static_cast<int>(p.h_q);
  kernel.groups = static_cast<int>(ceil_div(p.h_q, kGroupHeads));
  kernel.tiles = static_cast<int>(ceil_div(p.topk, host::list_args::kTileKeys));
  kernel.scale_log2 = static_cast<float>(p.sm_scale * host::kLog2E);
  kernel.lse_scale = static_cast<float>(std::log2(p.lse_base));
  kernel.bulk_store = p.topk % 4 == 0;
  CUtensorMap const map = host::list_args::encode_q(p, kernel);
  // Passes of 128 heads share each gather between the consumers; a remainder of at most 64 heads has nothing to share.
  std::int64_t const remainder = p.h_q % kPassHeads;
  std::int64_t const wide = p.h_q / kPassHeads + (remainder > kGroupHeads);
  std::int64_t const narrow = remainder > 0 && remainder <= kGroupHeads;
  launch_passes<Split::kHeads>(p, kernel, map, 0, wide, processors, stream);
  launch_passes<Split::kKeys>(p, kernel, map, 2 * wide, narrow, processors, stream);
}

}  // namespace

}  // namespace htree_cuda::sm90::attn_dist

namespace htree_cuda {

void attn_dist(AttnDistParams const& params, void* stream) {
  using namespace sm90::attn_dist;
  check(params);
  if (params.B == 0 || params.s_q == 0 || params.topk == 0) return;
  int const processors = host::sm_count();
  std::int64_t const groups = ceil_div(params.h_q, kGroupHeads);
  host::list_args::for_each_chunk(params, [&](std::int64_t b, std::int64_t batches, bool one_start) {
    AttnDistParams part = params;
    part.B = batches;
    part.q = static_cast<char const*>(params.q) + 2 * b * params.q_stride_b;
    part.k = static_cast<char const*>(params.k) + 2 * b * params.k_stride_b;
    part.lse = params.lse + b * params.lse_stride_b;
    part.out = params.out + b * groups * params.s_q * params.topk;
    host::list_args::skip_slots(part, b);
    launch_chunk(part, one_start, processors, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace htree_cuda

// Which matrix kernels a backward call runs, in which order, and for which dtypes and head dimensions: data. schedule.h
// steps through it, backward.cu launches by it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "host/mixed_dims.h"
#include "launch.h"
#include "params.h"

namespace htree_cuda::sm90::htree_bwd {

// How many CTAs a kernel has: as many as the device has SMs, or one for every kCtaQueries queries, or for as many as the
// warps of one hold.
enum class Ctas { kPersistent, kQueries, kGather };

// Which calls a kernel serves: where dkdv_selected hands dS over, the others, or all.
enum class Calls { kAll, kHandingOver, kOthers };

// When a kernel runs: after the one before and before the next one; likewise, but only where some query of the chunk has
// selected layers; or beside that one.
enum class Order { kSequential, kOnlySelected, kBesideSelected };

struct Rule {
  Kernel kernel;
  char const* name;
  Ctas ctas;
  Order order;
  Calls calls;
  char const* tile;
  char const* reason;

  constexpr bool runs_for(bool hands_over_ds) const {
    return calls == Calls::kAll || (calls == Calls::kHandingOver) == hands_over_ds;
  }
};

// The matrix kernels of a chunk in their order. dkdv_entry comes before dkdv_selected, which adds to the same sums, and before
// dq_entry, which overwrites the panels of the query tiles with dq; dq_selected or dq_gather comes after it, adds that dq
// and writes the result. dq_gather reads dS that dkdv_selected has left. What is beside dkdv_selected needs nothing of it and
// runs at the same time, on a second stream: each fills the SMs that the end of the other leaves idle.
inline constexpr Rule kRules[] = {
    {Kernel::kDkDvEntry, "dkdv_entry", Ctas::kPersistent, Order::kSequential, Calls::kAll, "2 x 64 nodes by 64 heads of 4, 8 or 16 queries, WGMMA 64 x 64",
     "in their entry layer all queries visit the same KV blocks"},
    {Kernel::kDkDvSelected, "dkdv_selected", Ctas::kPersistent, Order::kOnlySelected, Calls::kAll,
     "8 KV blocks, a warp each, by one query, two or four of groups of 8 and 4 heads, m16n8k16",
     "a KV block is visited by queries of its own, which the reverse index lists"},
    {Kernel::kDqEntry, "dq_entry", Ctas::kQueries, Order::kBesideSelected, Calls::kAll, "2 x 64 heads of 4, 8 or 16 queries by 64 nodes, WGMMA 64 x 64",
     "in their entry layer all queries visit the same KV blocks"},
    {Kernel::kDqSelected, "dq_selected", Ctas::kQueries, Order::kBesideSelected, Calls::kOthers,
     "8 queries, a warp each, by one KV block, m16n8k16",
     "every query visits KV blocks of its own; writes dq of both layer kinds"},
    {Kernel::kDqGather, "dq_gather", Ctas::kGather, Order::kSequential, Calls::kHandingOver,
     "14 warps of 2 or 15 of 4 queries by one KV block, m16n8k16",
     "groups of at most 8 heads, bf16: dS comes from dkdv_selected; writes dq of both layer kinds"},
};

struct Variant {
  DType dtype;
  int K;
  int V;
  using Launch = void (*)(Kernel kernel, Args const& args, int ctas, cudaStream_t stream);
  Launch launch;
};

inline constexpr Variant kVariants[] = {
    {DType::kBFloat16, 128, 128, launch_kernel<__nv_bfloat16, 128, 128>},
    {DType::kBFloat16, 64, 64, launch_kernel<__nv_bfloat16, 64, 64>},
    {DType::kFloat16, 128, 128, launch_kernel<__half, 128, 128>},
    {DType::kFloat16, 64, 64, launch_kernel<__half, 64, 64>},
#if HTREE_CUDA_MIXED_DIMS
    {DType::kBFloat16, 128, 64, launch_kernel<__nv_bfloat16, 128, 64>},
    {DType::kBFloat16, 64, 128, launch_kernel<__nv_bfloat16, 64, 128>},
    {DType::kFloat16, 128, 64, launch_kernel<__half, 128, 64>},
    {DType::kFloat16, 64, 128, launch_kernel<__half, 64, 128>},
#endif
};

// The variant of a call; host/tree_args.h has refused calls that have none.
inline Variant const& variant_of(ForwardParams const& p) {
  Variant const* variant = kVariants;
  while (variant->dtype != p.dtype || variant->K != p.K || variant->V != p.V) ++variant;
  return *variant;
}

}  // namespace htree_cuda::sm90::htree_bwd

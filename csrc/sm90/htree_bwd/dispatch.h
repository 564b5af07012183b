// Which matrix kernels a backward call runs, in which order, and for which dtypes and head dimensions: data. schedule.h
// steps through it, backward.cu launches by it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "host/mixed_dims.h"
#include "launch.h"
#include "params.h"

namespace htree_cuda::sm90::htree_bwd {

// How many CTAs a kernel has: as many as the device has SMs, or one for every kCtaQueries queries.
enum class Ctas { kPersistent, kQueries };

struct Rule {
  Kernel kernel;
  char const* name;
  Ctas ctas;
  bool only_selected;  // runs only where some query of the chunk has selected layers
  char const* tile;
  char const* reason;
};

// The matrix kernels of a chunk in their order. dkdv_entry comes before dq_entry, which overwrites the panels of the
// query tiles with dq; dq_selected comes after it, adds that dq and writes the result.
inline constexpr Rule kRules[] = {
    {Kernel::kDkDvEntry, "dkdv_entry", Ctas::kPersistent, false, "2 x 64 nodes by 4 queries, WGMMA 64 x 64",
     "in their entry layer all queries visit the same KV blocks"},
    {Kernel::kDqEntry, "dq_entry", Ctas::kQueries, false, "2 x 4 queries by 64 nodes, WGMMA 64 x 64",
     "in their entry layer all queries visit the same KV blocks"},
    {Kernel::kDqSelected, "dq_selected", Ctas::kQueries, false, "8 queries, a warp each, by one KV block, m16n8k16",
     "every query visits KV blocks of its own; writes dq of both layer kinds"},
    {Kernel::kDkDvSelected, "dkdv_selected", Ctas::kPersistent, true, "8 KV blocks, a warp each, by one query, m16n8k16",
     "a KV block is visited by queries of its own, which the reverse index lists"},
};

struct Variant {
  DType dtype;
  int K;
  int V;
  void (*launch)(Kernel kernel, Args const& args, int ctas, cudaStream_t stream);
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

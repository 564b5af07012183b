// What the launchers over a cached tree have in common on the host: checks, and the view that kernels take.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "host/math.h"
#include "host/tree_args.h"
#include "params.h"
#include "tree/cache_view.cuh"

namespace htree_cuda::host::cache_args {

using tree_args::aligned;
using tree_args::reject;

inline void check(char const* op, TreeCacheParams const& p) {
  auto const number = [](std::int64_t x) { return std::to_string(x); };
  constexpr std::int64_t kIntMax = std::numeric_limits<std::int32_t>::max();
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) reject(op, "dtype must be bf16 or fp16");
  if ((p.K != 64 && p.K != 128) || (p.V != 64 && p.V != 128)) {
    reject(op, "K and V must be 64 or 128, got " + number(p.K) + " and " + number(p.V));
  }
  if (p.B < 0 || p.H_kv < 1 || p.B > kIntMax || p.H_kv > kIntMax) {
    reject(op, "B >= 0 and H_kv >= 1 are required, got " + number(p.B) + " and " + number(p.H_kv));
  }
  if (p.max_tokens < 1 || p.max_tokens >= kIntMax - 16) reject(op, "max_tokens must be in 1 .. 2^31 - 18, got " + number(p.max_tokens));
  if (p.num_layers < 1 || p.num_layers > kMaxCacheLayers) {
    reject(op, "num_layers must be in 1 .. " + number(kMaxCacheLayers) + ", got " + number(p.num_layers));
  }
  for (void const* pointer : {p.k, p.v, p.k_upper, p.v_upper}) {
    if (!aligned(pointer, 16)) reject(op, "k and v of the cache must be 16-byte aligned");
  }
  if (p.block_table == nullptr) return;
  if (p.page_size < 256 || p.page_size % 256 != 0 || p.page_size > kIntMax) {
    reject(op, "page_size must be a multiple of 256, got " + number(p.page_size));
  }
  if (p.num_pages < 1 || p.max_pages < 1 || p.num_pages > kIntMax || p.max_pages > kIntMax) {
    reject(op, "num_pages and max_pages must be at least 1, got " + number(p.num_pages) + " and " + number(p.max_pages));
  }
  if (p.paged_layers < 1 || p.paged_layers > p.num_layers || p.page_size % (std::int64_t{1} << (4 * (p.paged_layers - 1))) != 0) {
    reject(op, "paged_layers must count layers whose nodes a page of " + number(p.page_size) + " tokens holds whole, got " +
                   number(p.paged_layers));
  }
}

inline tree::CacheView view(TreeCacheParams const& p) {
  tree::CacheView view{};
  view.k = static_cast<char*>(p.k);
  view.v = static_cast<char*>(p.v);
  view.k_upper = static_cast<char*>(p.k_upper);
  view.v_upper = static_cast<char*>(p.v_upper);
  view.lengths = p.lengths;
  view.overflowed = p.overflowed;
  view.reserved = p.reserved;
  view.block_table = p.block_table;
  view.rows = p.rows;
  view.upper_rows = p.upper_rows;
  for (int l = 0; l < kMaxCacheLayers; ++l) view.layer_begin[l] = p.layer_begin[l];
  view.page_size = static_cast<std::int32_t>(p.page_size);
  view.paged_layers = static_cast<std::int32_t>(p.paged_layers);
  view.num_pages = static_cast<std::int32_t>(p.num_pages);
  view.max_pages = static_cast<std::int32_t>(p.max_pages);
  view.max_tokens = static_cast<std::int32_t>(p.max_tokens);
  view.num_layers = static_cast<std::int32_t>(p.num_layers);
  view.H_kv = static_cast<std::int32_t>(p.H_kv);
  return view;
}

}  // namespace htree_cuda::host::cache_args

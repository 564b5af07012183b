// Rows of a cached tree: keys and values of the tokens and of the complete nodes above them, contiguous or in pages. The
// append kernel (tree/append) writes them, the decode kernel (sm90/htree_decode) reads them.
//
// Contiguous: [B, H_kv, rows, dim], layer l from row layer_begin[l] on. Paged: a page is [H_kv, rows, dim] and holds
// page_size tokens and their nodes of the layers below paged_layers; the layers above lie in [B, H_kv, upper_rows, dim].
// The 16 children of a node are neighbours in every layer that does not lie in pages, and in a page wherever a page holds
// a multiple of 16 nodes of the layer.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"
#include "geometry.cuh"

namespace htree_cuda::tree {

struct CacheView {
  char* k;
  char* v;
  char* k_upper;  // paged
  char* v_upper;
  std::int32_t* lengths;             // [B]
  std::int32_t* overflowed;          // [B], 0 or 1
  std::int32_t const* reserved;      // [B] tokens that a sequence has pages for; null: max_tokens
  std::int32_t const* block_table;   // [B, max_pages]; null: contiguous
  std::int64_t rows;                 // of a sequence and head, paged: of a page and head
  std::int64_t upper_rows;           // of a sequence and head; paged
  std::int64_t layer_begin[kMaxCacheLayers];  // a row of `rows`, or of `upper_rows` from paged_layers on
  std::int32_t page_size;
  std::int32_t paged_layers;
  std::int32_t num_pages;
  std::int32_t max_pages;
  std::int32_t max_tokens;
  std::int32_t num_layers;  // stored, tokens included
  std::int32_t H_kv;

  // Tokens that sequence b may hold. A value that no cache writes counts as none.
  __device__ int capacity(int b) const {
    int const tokens = reserved == nullptr ? max_tokens : min(reserved[b], max_tokens);
    return max(tokens, 0);
  }
};

// One layer of one sequence and KV head.
struct LayerRows {
  std::int64_t first;         // row 0 of the layer; paged: of the layer in page 0
  std::int32_t const* table;  // of the sequence; null: the layer does not lie in pages
  std::int32_t per_page;      // nodes of the layer in a page
  bool upper;                 // which of the cache's tensors holds it

  LayerRows() = default;

  __device__ LayerRows(CacheView const& cache, int b, int h, int layer) {
    bool const paged = cache.block_table != nullptr && layer < cache.paged_layers;
    upper = cache.block_table != nullptr && !paged;
    std::int64_t const sequence = paged ? 0 : static_cast<std::int64_t>(b) * cache.H_kv;
    first = (sequence + h) * (upper ? cache.upper_rows : cache.rows) + cache.layer_begin[layer];
    table = paged ? cache.block_table + static_cast<std::int64_t>(b) * cache.max_pages : nullptr;
    per_page = paged ? cache.page_size >> (kLog2Siblings * layer) : kSiblings;
  }

  // Whether 16 siblings are always neighbours.
  __device__ __forceinline__ bool whole_blocks() const { return per_page % kSiblings == 0; }

  // The row of a node. A page number that no cache writes is brought into range, so that every access stays in bounds.
  __device__ __forceinline__ std::int64_t row(CacheView const& cache, std::int32_t node) const {
    if (table == nullptr) return first + node;
    std::int32_t const page = min(node / per_page, cache.max_pages - 1);
    std::int32_t const at = min(max(__ldg(table + page), 0), cache.num_pages - 1);
    return first + at * (cache.rows * cache.H_kv) + node % per_page;
  }
};

}  // namespace htree_cuda::tree

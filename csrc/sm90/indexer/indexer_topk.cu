// indexer_topk: indexer_logits and topk_indices in chunks of queries, on a workspace of logits.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/math.h"
#include "host/window_args.h"
#include "params.h"

namespace htree_cuda::sm90::indexer {

namespace {

constexpr char const* kTopkOp = "indexer_topk";
constexpr std::int64_t kMaxWorkspace = std::int64_t{256} << 20;
// Queries that share the products of one CTA, at least; a chunk of fewer leaves tensor cores idle.
constexpr std::int64_t kQueryStep = 16;

// A row of the workspace: the keys that the queries up to `end` see by the causal rule, in whole 16 bytes.
std::int64_t row_columns(IndexerLogitsParams const& p, std::int64_t end) {
  std::int64_t columns = p.s_kv;
  if (p.window.q_start != nullptr) {
    std::int64_t const last = *std::max_element(p.window.q_start, p.window.q_start + p.B);
    columns = std::min(columns, (last + end) / p.window.k_stride);
  }
  return std::max<std::int64_t>(host::ceil_div(columns, 4) * 4, 4);
}

struct Chunk {
  std::int64_t b, batches, s, queries, columns;
};

// The largest chunk that begins at query s of batch b and fits: whole batches, or queries of one.
Chunk chunk_at(IndexerLogitsParams const& p, std::int64_t b, std::int64_t s, std::int64_t bytes) {
  std::int64_t const floats = bytes / 4;
  if (s == 0 && p.s_q * row_columns(p, p.s_q) <= floats) {
    std::int64_t const columns = row_columns(p, p.s_q);
    return {b, std::min(p.B - b, floats / (p.s_q * columns)), 0, p.s_q, columns};
  }
  // Later queries may see more keys, so a row grows with the chunk: what fits with the longest rows, and what the rows
  // of that chunk then leave room for.
  std::int64_t queries = std::min(p.s_q - s, floats / row_columns(p, p.s_q));
  std::int64_t const more = std::min(p.s_q - s, floats / row_columns(p, std::min(p.s_q, s + 2 * queries)));
  queries = std::max(queries, std::min(more, 2 * queries));
  if (queries > kQueryStep && s + queries < p.s_q) queries = queries / kQueryStep * kQueryStep;
  return {b, 1, s, queries, row_columns(p, s + queries)};
}

void run_chunk(IndexerTopkParams const& params, Chunk const& chunk, void* stream) {
  IndexerLogitsParams part = params.logits;
  std::int64_t const bytes = part.dtype == DType::kFloat8E4M3 ? 1 : 2;
  std::vector<std::int64_t> starts;
  if (part.window.q_start != nullptr) {
    for (std::int64_t i = 0; i < chunk.batches; ++i) starts.push_back(part.window.q_start[chunk.b + i] + chunk.s);
    part.window.q_start = starts.data();
  }
  auto const advance = [&](auto const*& pointer, std::int64_t stride_b, std::int64_t stride_s) {
    if (pointer != nullptr) pointer += chunk.b * stride_b + chunk.s * stride_s;
  };
  advance(part.window.k_start, part.window.k_start_stride_b, part.window.k_start_stride_s);
  advance(part.window.k_end, part.window.k_end_stride_b, part.window.k_end_stride_s);
  advance(part.weights, part.weights_stride_b, part.weights_stride_s);
  advance(part.q_scale, part.q_scale_stride_b, part.q_scale_stride_s);
  advance(part.k_scale, part.k_scale_stride_b, 0);
  part.q = static_cast<char const*>(part.q) + (chunk.b * part.q_stride_b + chunk.s * part.q_stride_s) * bytes;
  part.k = static_cast<char const*>(part.k) + chunk.b * part.k_stride_b * bytes;
  part.B = chunk.batches;
  part.s_q = chunk.queries;
  part.s_kv = std::min(part.s_kv, chunk.columns);
  part.out = static_cast<float*>(params.workspace);
  part.out_stride_s = chunk.columns;
  part.out_stride_b = chunk.columns * chunk.queries;
  part.fill = false;  // topk_indices reads what is visible
  indexer_logits(part, stream);

  TopkIndicesParams select{};
  select.logits = part.out;
  select.stride_b = part.out_stride_b;
  select.stride_s = part.out_stride_s;
  select.window = part.window;
  std::int64_t const first = (chunk.b * params.logits.s_q + chunk.s) * params.topk;
  select.indices = params.indices + first;
  select.values = params.values == nullptr ? nullptr : params.values + first;
  select.B = part.B;
  select.s_q = part.s_q;
  select.n = part.s_kv;
  select.topk = params.topk;
  topk_indices(select, stream);
}

}  // namespace

}  // namespace htree_cuda::sm90::indexer

namespace htree_cuda {

std::int64_t indexer_topk_workspace(IndexerTopkParams const& params) {
  using namespace sm90::indexer;
  IndexerLogitsParams const& p = params.logits;
  host::window_args::check(kTopkOp, p.window, p.B, p.s_q, p.s_kv);
  std::int64_t const row = 4 * row_columns(p, p.s_q);
  host::window_args::require(kTopkOp, row <= kMaxWorkspace, "a row of logits must fit in 256 MiB, it takes " + std::to_string(row) + " bytes");
  return std::min(kMaxWorkspace, row * std::max<std::int64_t>(p.s_q, 1) * std::max<std::int64_t>(p.B, 1));
}

void indexer_topk(IndexerTopkParams const& params, void* stream) {
  using namespace sm90::indexer;
  IndexerLogitsParams const& p = params.logits;
  std::int64_t const needed = indexer_topk_workspace(params);
  host::window_args::require(kTopkOp, params.workspace_bytes >= needed,
                             "workspace of " + std::to_string(params.workspace_bytes) + " bytes, needs " + std::to_string(needed));
  std::int64_t b = 0;
  while (b < p.B && p.s_q > 0) {
    Chunk chunk{b, 1, 0, 0, 0};
    for (std::int64_t s = 0; s < p.s_q; s += chunk.queries) {
      chunk = chunk_at(p, b, s, needed);
      run_chunk(params, chunk, stream);
    }
    b += chunk.batches;
  }
}

}  // namespace htree_cuda

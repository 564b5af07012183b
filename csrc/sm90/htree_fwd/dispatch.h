// Which forward kernel serves which queries, by group size, dtype and layer kind: data. forward.cu launches by it, explain.cu
// prints it, docs/architecture.md shows it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "args.h"
#include "host/tree_args.h"
#include "params.h"

namespace htree_cuda::sm90::htree_fwd {

// A forward kernel of a pass, a dtype and head dimensions: its CTAs serve tiles of queries in a selected layer, so many
// queries a warp, and tiles in their entry layer. With one query a warp the kernel serves half-selected layers, too.
struct Variant {
  int selected_queries;  // with more than one, scores are K q^T instead of q K^T (swap A/B)
  int entry_queries;

  friend constexpr bool operator==(Variant a, Variant b) {
    return a.selected_queries == b.selected_queries && a.entry_queries == b.entry_queries;
  }
};

struct Rule {
  Pass pass;
  DType dtype;    // of the call
  int max_group;  // query heads of a KV head
  Variant variant;
  char const* reason;
};

// The first rule that matches holds. Groups of 8 and 4 heads leave half and three quarters of a product's 16 rows
// empty, unless two or four neighbouring queries share a warp. In their entry layer all queries read the same blocks.
// In a selected layer what a warp reads serves those of its queries that selected the block. Both passes over a layer
// read the same blocks, so that they have the same kind of kernel.
inline constexpr Rule kRules[] = {
    {Pass::kScore, DType::kBFloat16, 4, {4, 4}, "4 queries share what a warp reads of a block"},
    {Pass::kScore, DType::kBFloat16, 8, {2, 2}, "2 queries share what a warp reads of a block"},
    {Pass::kScore, DType::kBFloat16, 16, {1, 1}, "one query fills the rows"},
    {Pass::kScore, DType::kFloat16, 4, {4, 4}, "4 queries share what a warp reads of a block"},
    {Pass::kScore, DType::kFloat16, 8, {2, 2}, "2 queries share what a warp reads of a block"},
    {Pass::kScore, DType::kFloat16, 16, {1, 1}, "one query fills the rows"},
    {Pass::kAttend, DType::kBFloat16, 4, {4, 4}, "4 queries share what a warp reads of a block"},
    {Pass::kAttend, DType::kBFloat16, 8, {2, 2}, "2 queries share what a warp reads of a block"},
    {Pass::kAttend, DType::kBFloat16, 16, {1, 1}, "one query fills the rows"},
    {Pass::kAttend, DType::kFloat16, 4, {4, 4}, "4 queries share what a warp reads of a block"},
    {Pass::kAttend, DType::kFloat16, 8, {2, 2}, "2 queries share what a warp reads of a block"},
    {Pass::kAttend, DType::kFloat16, 16, {1, 1}, "one query fills the rows"},
};

// The variants that kernels are built for. Score passes read no values, so that their kernels serve both dtypes.
inline constexpr Variant kVariants[] = {{1, 1}, {2, 2}, {4, 4}};

inline constexpr Rule const& rule_of(Pass pass, DType dtype, std::int64_t G, std::int64_t T_q) {
  std::int64_t const group = T_q == 1 ? 16 : G;  // the one query of a call has all warps of its CTA
  Rule const* rule = kRules;
  while (rule->pass != pass || rule->dtype != dtype || group > rule->max_group) ++rule;
  return *rule;
}

// Sequences of different lengths never have a query split over a CTA, so that its bits are those of a call of several.
inline std::int64_t queries_of_call(ForwardParams const& p) {
  return has_sequences(p) ? std::max<std::int64_t>(p.T_q, 2) : p.T_q;
}

// Positions that queries of the call may have.
inline std::int64_t first_position(ForwardParams const& p) { return has_sequences(p) ? 0 : p.q_start; }
inline std::int64_t end_position(ForwardParams const& p) { return has_sequences(p) ? p.T : p.q_start + p.T_q; }

// Rows of q, of all sequences.
inline std::int64_t rows_of_call(ForwardParams const& p) {
  return has_sequences(p) ? p.sequences.total_q : p.B * p.T_q;
}

// Queries a warp in a selected layer, and so the tiles of a CTA, which have one union.
inline int queries_of_selected(ForwardParams const& p) {
  return rule_of(Pass::kAttend, p.dtype, p.G, queries_of_call(p)).variant.selected_queries;
}
inline int queries_of_entry(ForwardParams const& p) {
  return rule_of(Pass::kAttend, p.dtype, p.G, queries_of_call(p)).variant.entry_queries;
}

// Ranks that a query rotates through, or blocks that it leaves out, before it restarts from its unrotated self.
// Rounding adds up to 0.53 of the error that rounding bf16 operands makes, 0.83 where keys are rounded to bf16 too (the
// bottom), or 0.87 with packed rotations, and of that of fp16 operands 1.22, or 1.30 with packed rotations
// (tests/unit/test_rotation.py).
constexpr int kRestartPeriod = 16;
constexpr int kRestartPeriodFp16 = 1;
static_assert(kMinTopK % kRestartPeriod == 0, "swapab.cuh counts on whole periods in top_k ranks");

inline int restart_period(ForwardParams const& p) {
  return p.dtype == DType::kFloat16 ? kRestartPeriodFp16 : kRestartPeriod;
}

// A selected layer is half-selected where a query has fewer blocks than this up to its own. With 2 top_k blocks it
// leaves out as many as it takes, and rotates as often as if it rotated at each. fp16 queries would restart at most of
// them without knowing where. At the bottom keys are rounded to bf16 and the backward's are rotated by place: with
// logits in the thousands its weights are only good if they are those that the forward has summed. Queries that share a
// warp (swap A/B) have no half-selected layers: each leaves out other blocks.
inline int half_selected_parents(ForwardParams const& p, Pass pass, int layer) {
  if (p.dtype == DType::kFloat16 || layer == 0 || queries_of_selected(p) > 1) return 0;
  return static_cast<int>(pass == Pass::kScore ? p.top_k * 3 / 2 : p.top_k * 2);
}

// The most of any pass.
inline std::int64_t max_half_selected_parents(ForwardParams const& p) { return 2 * p.top_k; }

// Positions begin .. end - 1 of the queries for which layer l is of a kind, in a pass.
struct Positions {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  Positions(ForwardParams const& p, Pass pass, LayerKind kind, int l) {
    auto const of_parents = [&](std::int64_t parents, int layer) { return parents << (kLog2Siblings * (layer + 1)); };
    std::int64_t const selected = of_parents(p.top_k, l);
    std::int64_t const sparse = of_parents(std::max<std::int64_t>(p.top_k, half_selected_parents(p, pass, l)), l);
    switch (kind) {
      case LayerKind::kEntry: begin = l == 0 ? 0 : of_parents(p.top_k, l - 1), end = selected; break;
      case LayerKind::kHalfSelected: begin = selected, end = sparse; break;
      case LayerKind::kSelected: begin = sparse, end = std::numeric_limits<std::int64_t>::max(); break;
    }
  }

  bool meet(std::int64_t from, std::int64_t to) const { return std::max(begin, from) < std::min(end, to); }
};

// Whether layer l is of a kind for some query of the call, in some pass.
inline bool has_kind(ForwardParams const& p, LayerKind kind, int l) {
  auto const meet = [&](Pass pass) { return Positions(p, pass, kind, l).meet(first_position(p), end_position(p)); };
  return meet(Pass::kAttend) || (l > 0 && meet(Pass::kScore));
}
inline bool has_kind(Runs<ForwardParams> const& runs, LayerKind kind, int l) {
  return std::any_of(runs.begin(), runs.end(), [&](ForwardParams const& run) { return has_kind(run, kind, l); });
}

}  // namespace htree_cuda::sm90::htree_fwd

// Attend passes of a selected layer, by mma.sync, one query a warp.
//
// A block stays for two rounds of the loop: in the first its keys are multiplied, in the second its scores become
// exponentials and its values are added. So a round works on two blocks, and what one waits for, chains of products or
// exponentials, runs beside instructions of the other and beside the rotation of the query. Exponentials are taken as
// if no maximum had to be updated, beside the vote that finds out, and again where one has: so they are one stretch of
// straight-line code with the products.
#pragma once

#include "epilogue.cuh"
#include "fragments.cuh"

namespace htree_cuda::sm90::htree_fwd {

// The block that waits in an attend pass.
struct Waiting {
  float products[2][4];
  float scale;
  uint32_t slot;
};

inline constexpr uint32_t kNoSlot = ~0u;  // no address is this

__device__ __forceinline__ void clear_waiting(Waiting& waiting) {
  fill(waiting.products, -kInfinity);
  waiting.scale = 1.0f;
  waiting.slot = kNoSlot;
}

template <class Cfg>
__device__ __forceinline__ void load_values(State<Cfg> const& s, uint32_t (&b)[4], uint32_t slot, int i) {
  load_fragment(b, slot + s.rope.fragment_lane + Cfg::kValueOffset + i * kFragmentBytes);
}

template <class Cfg>
__device__ __forceinline__ void multiply_values(State<Cfg>& s, uint32_t const (&p)[4], uint32_t const (&b)[4], int i) {
  Pairs<typename Cfg::Element>::mma(s.o[2 * i], p, b[0], b[1]);
  Pairs<typename Cfg::Element>::mma(s.o[2 * i + 1], p, b[2], b[3]);
}

// P of a block, rounded to the dtype, as fragments of operand A, and its sums.
template <class Cfg>
__device__ __forceinline__ void exponentiate(float const (&x)[2][4], uint32_t (&p)[4], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = ptx::exp2_movable(x[e / 2][2 * i + e % 2]);
    sum[i] = (y[0] + y[1]) + (y[2] + y[3]);
    p[i] = Pairs<typename Cfg::Element>::pack(y[0], y[1]);
    p[2 + i] = Pairs<typename Cfg::Element>::pack(y[2], y[3]);
  }
}

// Computes exponents again, from raw scores. A vote among the heads of one query leads here, so the decision follows
// from this query's data. Where a score exceeds a maximum by more than kSlack, updates the maximum and rescales what
// was summed up to then.
template <bool kMasked, class Cfg>
__device__ __forceinline__ void recompute(State<Cfg>& s, Waiting& waiting, uint32_t masked, float (&x)[2][4]) {
  auto& raw = waiting.products;
  apply_own_scales(s, scales_of<Cfg>(waiting.slot), raw);
  if constexpr (kMasked) mask_children(s, raw, masked);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[tile][e] = near_exponent(s, e / 2, raw[tile][e]);
  }
  if (!__any_sync(kFullWarp, overflows(x))) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const largest = quad_max(row_max<Cfg, 1>(raw, i));
    float const factor = exponent(s, i, largest) > kSlack ? update_max(s, i, largest) : 1.0f;
    s.sum[i] *= factor;
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
      s.o[tile][2 * i] *= factor;
      s.o[tile][2 * i + 1] *= factor;
    }
  }
  exponents_of_scores(s, raw, x);
}

// P of the block that waits; with kMasked without the children of `masked`. Exponentials pass while the warp votes on
// its maxima.
template <bool kMasked, class Cfg>
__device__ __forceinline__ void probabilities(State<Cfg>& s, Waiting& waiting, uint32_t masked, uint32_t (&p)[4]) {
  float x[2][4];
  float sum[2];
  exponents_of_products(s, factors(s, waiting.scale), waiting.products, x);
  if constexpr (kMasked) mask_children(s, x, masked);
  bool const again = overflows(x);
  exponentiate<Cfg>(x, p, sum);
  if (__any_sync(kFullWarp, again)) {
    recompute<kMasked>(s, waiting, masked, x);
    exponentiate<Cfg>(x, p, sum);
  }
  s.sum[0] += sum[0];
  s.sum[1] += sum[1];
}

// A round of the loop: adds the values of the block that waits to O, multiplies the query with the keys of the block in
// `slot`, which waits then, and rotates the query to its next rank. With `wanted`, loads `next_query_mask` from `mask`:
// the latency passes beside the products.
template <bool kBottom, class Cfg>
__device__ __forceinline__ void attend_block(State<Cfg>& s, Waiting& waiting, uint32_t slot, bool wanted,
                                              uint32_t mask, uint32_t& next_query_mask) {
  auto& products = waiting.products;
  uint32_t const expanded = s.rope.expanded;
  if constexpr (!kBottom) s.rope.expanded = s.args.expanded[s.cursor];
  uint32_t keys[2][4];
  load_keys(s, keys[0], slot, 0);
  uint32_t p[4];
  probabilities<!kBottom>(s, waiting, expanded, p);
  // What follows is one stretch of code, in which the compiler interleaves products of either block and rotations.
  constexpr int kValueSteps = Cfg::kValueTiles / 2;
  ptx::load_shared_4B_if(wanted, next_query_mask, mask);
  fill(products, 0.0f);
  uint32_t values[2][4];
  load_values(s, values[0], waiting.slot, 0);
#pragma unroll
  for (int i = 0; i < (Cfg::kSteps > kValueSteps ? Cfg::kSteps : kValueSteps); ++i) {
    if (i + 1 < kValueSteps) load_values(s, values[(i + 1) % 2], waiting.slot, i + 1);
    if (i + 1 < Cfg::kSteps) load_keys(s, keys[(i + 1) % 2], slot, i + 1);
    if (i < Cfg::kSteps) multiply_keys(s, products, keys[i % 2], i);
    if (i < kValueSteps) multiply_values(s, p, values[i % 2], i);
    if (!Cfg::kHalfSelected && i < Cfg::kSteps) rotate_step(s, i);
  }
  waiting.scale = ptx::load_shared_float(scales_of<Cfg>(slot));
  waiting.slot = slot;
  advance_rank(s);
}

// Adds the values of the block that waits, without a block behind it. The bits are those of attend_block, because
// neighbours decide where this happens. Only the last block of all has children past the query.
template <bool kBottom, class Cfg>
__device__ __forceinline__ void attend_last(State<Cfg>& s, Waiting& waiting) {
  uint32_t p[4];
  if constexpr (kBottom) {
    probabilities<true>(s, waiting, was_last(s) ? causal_mask(rightmost(s)) : 0u, p);
  } else {
    probabilities<true>(s, waiting, s.rope.expanded, p);
  }
#pragma unroll
  for (int i = 0; i < Cfg::kValueTiles / 2; ++i) {
    uint32_t values[4];
    load_values(s, values, waiting.slot, i);
    multiply_values(s, p, values, i);
  }
}

// The consumer's loop over the stages.
template <bool kBottom, class Cfg>
__device__ __forceinline__ void attend_stream(State<Cfg>& s, Ring<Cfg> const& ring) {
  RingPosition<Cfg::kStages> at;
  Ring<Cfg> const own(ptx::opaque(ring.stages));
  Waiting waiting;
  clear_waiting(waiting);
  uint32_t kept = kNoSlot;  // the stage of the block that waits, once other stages have followed
  int patience = Cfg::kPatience;
  uint32_t next_query_mask = 0;  // of the stage behind the one at hand, which holds it, too
  if (s.stages > 0 && s.active) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    next_query_mask = ptx::load_shared_4B(own.mask(own.stage(at.slot), s.warp));
  }
#pragma unroll 1
  for (int stages = s.stages; stages > 0; --stages) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    uint32_t const stage = own.stage(at.slot);
    uint32_t query_mask = next_query_mask;
    at = at.ahead(1);
    if (query_mask == 0) {
      if (s.active) next_query_mask = ptx::load_shared_4B(own.next_mask(stage, s.warp));
      release_stage(s, stage);
      patience -= 1;
      if (kept != kNoSlot && patience == 0) {
        attend_last<kBottom>(s, waiting);
        release_stage(s, kept);
        clear_waiting(waiting);
        kept = kNoSlot;
      }
      continue;
    }
    uint32_t slot = slot_of<Cfg>(stage, query_mask);
#pragma unroll 1
    do {
      rotate_to(s, stage, query_mask);
      query_mask = rest_of<Cfg>(query_mask);
      uint32_t const next = slot_of<Cfg>(stage, query_mask);
      // Where no block waits, the scores are -infinity, so that the values of any slot have no weight.
      if (waiting.slot == kNoSlot) waiting.slot = slot;
      attend_block<kBottom>(s, waiting, slot, query_mask == 0, own.next_mask(stage, s.warp), next_query_mask);
      if (kept != kNoSlot) release_stage(s, kept);
      kept = kNoSlot;
      slot = next;
    } while (query_mask != 0);
    kept = stage;
    patience = Cfg::kPatience;
  }
  if (kept != kNoSlot) {
    attend_last<kBottom>(s, waiting);
    release_stage(s, kept);
  }
}

// Looks up the blocks that hold values which are not finite (epilogue.cuh).
template <class Cfg>
__device__ __forceinline__ void propagate_nan_selected(State<Cfg>& s) {
  std::int64_t const list = static_cast<std::int64_t>(tile_index<Cfg>(s.args)) * kQueryTile * s.args.top_k;
  int const count = s.args.union_count[tile_index<Cfg>(s.args)];
  int rank = 0;
#pragma unroll 1
  for (int entry = 0; entry < count; ++entry) {
    bool const taken = split(s) ? takes_rank(s, entry)
                                : mask_of_entry<Cfg>(s.args, static_cast<uint32_t>(list) + entry) >> s.warp & 1u;
    char const* const block = packed_blocks(s) + own<Cfg>(s.args).union_nodes[list + entry] * s.args.block_bytes;
    if (taken && *reinterpret_cast<int const*>(block) < 0) {
      propagate_nan_of_block(s, s.args.parents[launch_row(s) * s.args.top_k + rank], rank);
    }
    rank += split(s) || taken;
  }
}

template <class Cfg>
__device__ __forceinline__ void attend_selected(State<Cfg>& s, Ring<Cfg> const& ring) {
  begin_rotation(s, ring);
  if (s.args.layer == 0) {
    attend_stream<true>(s, ring);
  } else {
    attend_stream<false>(s, ring);
  }
  if (s.active && *s.args.has_nonfinite_v != 0) propagate_nan_selected(s);
  finish_attend(s, ring);
}

}  // namespace htree_cuda::sm90::htree_fwd

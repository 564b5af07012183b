// Score passes of a selected layer, by mma.sync, a block after the other. Products with a block's keys run beside the
// exponentials of the block before it. In half-selected layers, where queries seldom rotate, up to four blocks are
// taken together and finished before others are.
#pragma once

#include "fragments.cuh"
#include "importance.cuh"

namespace htree_cuda::sm90::htree_fwd {

// The block that waits in a score pass.
struct Scored {
  float scores[2][4];  // lse sweep: products without their scale; importance sweep: exponents
  float scale;
  int cursor;
};

__device__ __forceinline__ void sum_exponentials(float const (&x)[2][4], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] = (ptx::exp2_movable(x[0][2 * i]) + ptx::exp2_movable(x[0][2 * i + 1])) +
             (ptx::exp2_movable(x[1][2 * i]) + ptx::exp2_movable(x[1][2 * i + 1]));
  }
}

template <class Cfg>
__device__ __forceinline__ void importance_exponents(State<Cfg> const& s, float scale, float (&products)[2][4],
                                                     float (&x)[2][4]) {
  if (!s.far) {
    exponents_of_products(s, finite_factors(s, scale), products, x);
  } else {
    apply_shared_scale(scale, products);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i / 4][i % 4] = importance_exponent(s, i % 4 / 2, products[i / 4][i % 4]);
    }
  }
}

// Adds blocks to the lse, in their order.
template <int kBlocks, class Cfg>
__device__ __forceinline__ void add_to_lse(State<Cfg>& s, float const (&scale)[kBlocks],
                                           float (&products)[kBlocks][2][4]) {
  float x[kBlocks][2][4];
  float sum[kBlocks][2];
  bool again = false;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    exponents_of_products(s, factors(s, scale[block]), products[block], x[block]);
    again |= overflows(x[block]);
    sum_exponentials(x[block], sum[block]);  // the sums pass while the warp votes
  }
  if (__any_sync(kFullWarp, again)) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (kBlocks > 1) {  // after the update of the block before, this maximum may do
        exponents_of_products(s, factors(s, scale[block]), products[block], x[block]);
        sum_exponentials(x[block], sum[block]);
      }
      if (kBlocks == 1 || __any_sync(kFullWarp, overflows(x[block]))) {
        apply_shared_scale(scale[block], products[block]);
        update_own_max<1>(s, products[block]);
        exponents_of_scores(s, products[block], x[block]);
        sum_exponentials(x[block], sum[block]);
      }
      s.sum[0] += sum[block][0];
      s.sum[1] += sum[block][1];
    }
    return;
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    s.sum[0] += sum[block][0];
    s.sum[1] += sum[block][1];
  }
}

template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void account(State<Cfg>& s, Scored& scored) {
  if constexpr (kSweep == Sweep::kLse) {
    add_to_lse<1>(s, {scored.scale}, reinterpret_cast<float(&)[1][2][4]>(scored.scores));
  } else {
    float x[2][4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = ptx::exp2_movable(scored.scores[tile][e]);
    }
    store_importance(s, x, scored.cursor, s.rope.column);
  }
}

template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void account_last(State<Cfg>& s, Scored& scored) {
  if constexpr (kSweep == Sweep::kLse) {
    apply_shared_scale(scored.scale, scored.scores);
    add_block_to_lse(s, scored.scores, was_last(s));
  } else {
    account<kSweep>(s, scored);
  }
}

// A round of the loop: accounts for the block that waits, and multiplies the keys of the one in `slot`, which waits
// then.
template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void score(State<Cfg>& s, uint32_t slot, Scored& scored) {
  account<kSweep>(s, scored);
  float scale = ptx::load_shared_float(scales_of<Cfg>(slot));
  float products[2][4];
  fill(products, 0.0f);
#pragma unroll
  for (int i = 0; i < Cfg::kSteps; ++i) {
    uint32_t keys[4];
    load_keys(s, keys, slot, i);
    multiply_keys(s, products, keys, i);
    if constexpr (!Cfg::kHalfSelected) rotate_step(s, i);
  }
  apply_uneven_scales(s, scale, scales_of<Cfg>(slot), products);
  if constexpr (kSweep == Sweep::kImportance) {
    importance_exponents(s, scale, products, scored.scores);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) scored.scores[i / 4][i % 4] = products[i / 4][i % 4];
  }
  scored.scale = scale;
  scored.cursor = s.cursor;
  advance_rank(s);
}

template <Sweep kSweep, int kBlocks, class Cfg>
__device__ __forceinline__ void score_together(State<Cfg>& s, uint32_t const (&slots)[kBlocks]) {
  float scale[kBlocks];
  float products[kBlocks][2][4];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    scale[block] = ptx::load_shared_float(scales_of<Cfg>(slots[block]));
    fill(products[block], 0.0f);
  }
#pragma unroll
  for (int i = 0; i < Cfg::kSteps; ++i) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t keys[4];
      load_keys(s, keys, slots[block], i);
      multiply_keys(s, products[block], keys, i);
    }
  }
  if (isnan(kBlocks == 1 ? scale[0] : scale[0] + scale[kBlocks - 1])) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      apply_uneven_scales(s, scale[block], scales_of<Cfg>(slots[block]), products[block]);
    }
  }
  if constexpr (kSweep == Sweep::kLse) {
    if (kBlocks == 1 && s.position < kSiblings) {
      apply_shared_scale(scale[0], products[0]);
      add_block_to_lse(s, products[0], true);
    } else {
      add_to_lse(s, scale, products);
    }
  } else {
    float x[kBlocks][2][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      importance_exponents(s, scale[block], products[block], x[block]);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[block][e / 4][e % 4] = ptx::exp2_movable(x[block][e / 4][e % 4]);
    }
    if constexpr (kBlocks == 1) {
      store_importance(s, x[0], s.cursor, s.rope.column);
    } else {
      store_importance_of_two(s, x, s.cursor);
    }
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) advance_rank(s);
}

// Half-selected: scores all blocks of a stage in straight line, exponentials of two beside products of the others.
// Where a maximum has to be updated, or keys have scales of their own, it does nothing and returns false: the blocks
// are then taken two by two, with the same bits.
template <Sweep kSweep, class Cfg>
__device__ __forceinline__ bool score_whole(State<Cfg>& s, uint32_t stage) {
  constexpr int kBlocks = Cfg::kStageSlots;
  if (kSweep == Sweep::kLse ? s.position < kBlocks * kSiblings : s.far) return false;
  float scale[kBlocks];
  float x[kBlocks][2][4];  // products, then their exponents
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    scale[block] = ptx::load_shared_float(scales_of<Cfg>(stage + block * Cfg::kSlotBytes));
    fill(x[block], 0.0f);
  }
#pragma unroll
  for (int first = 0; first < kBlocks; first += 2) {
#pragma unroll
    for (int i = 0; i < Cfg::kSteps; ++i) {
#pragma unroll
      for (int block = first; block < first + 2; ++block) {
        uint32_t keys[4];
        load_keys(s, keys, stage + block * Cfg::kSlotBytes, i);
        multiply_keys(s, x[block], keys, i);
      }
    }
  }
  if constexpr (kSweep == Sweep::kLse) {
    float sum[kBlocks][2];
    bool overflow = false;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      exponents_of_products(s, factors(s, scale[block]), x[block], x[block]);
      overflow |= overflows(x[block]);
      sum_exponentials(x[block], sum[block]);
    }
    if (__any_sync(kFullWarp, overflow)) return false;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      s.sum[0] += sum[block][0];
      s.sum[1] += sum[block][1];
    }
  } else {
    bool const shared = !isnan((scale[0] + scale[1]) + (scale[2] + scale[3]));
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      exponents_of_products(s, finite_factors(s, scale[block]), x[block], x[block]);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[block][e / 4][e % 4] = ptx::exp2_movable(x[block][e / 4][e % 4]);
    }
#pragma unroll
    for (int first = 0; first < kBlocks; first += 2) {
      store_importance_of_two(s, reinterpret_cast<float const(&)[2][2][4]>(x[first]), s.cursor + first, shared);
    }
    if (!shared) return false;
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) advance_rank(s);
  return true;
}

// Half-selected: scores the blocks of a query mask. Two are taken together where the query leaves none out between
// them, so that products and exponentials of one run beside those of the other. The result is bitwise identical to
// taking them one by one, because the neighbours decide which blocks share a stage.
template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void score_stage(State<Cfg>& s, uint32_t stage, uint32_t query_mask) {
  constexpr uint32_t kNext = 8;
#pragma unroll 1
  while (query_mask != 0) {
    rotate_to(s, stage, query_mask);
    if ((query_mask & ~Cfg::kGapMask) == Cfg::kWholeStage && score_whole<kSweep>(s, stage)) return;
    // The lse sweep takes the last block alone, because it leaves children out there.
    bool const inner = kSweep == Sweep::kImportance || s.position >= 2 * kSiblings;
    if ((query_mask >> kNext & (Cfg::kTaken | Cfg::kGapMask)) == Cfg::kTaken && inner) {
      score_together<kSweep, 2>(s, {slot_of<Cfg>(stage, query_mask), slot_of<Cfg>(stage, query_mask >> kNext)});
      query_mask >>= 2 * kNext;
    } else {
      score_together<kSweep, 1>(s, {slot_of<Cfg>(stage, query_mask)});
      query_mask >>= kNext;
    }
  }
}

template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void score_sweep(State<Cfg>& s, Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) {
  Ring<Cfg> const own(ptx::opaque(ring.stages));
  Scored scored;
  fill(scored.scores, -kInfinity);
  scored.scale = 1.0f;
  scored.cursor = s.cursor;  // what is stored before the first block is stored again
  uint32_t next_query_mask = 0;   // half-selected: of the stage behind the one at hand
  if (Cfg::kHalfSelected && s.stages > 0 && s.active) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    next_query_mask = ptx::load_shared_4B(own.mask(own.stage(at.slot), s.warp));
  }
#pragma unroll 1
  for (int stages = s.stages; stages > 0; --stages) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    uint32_t const stage = own.stage(at.slot);
    if constexpr (Cfg::kHalfSelected) {
      uint32_t const query_mask = next_query_mask;
      if (s.active) next_query_mask = ptx::load_shared_4B(own.next_mask(stage, s.warp));
      score_stage<kSweep>(s, stage, query_mask);
    } else {
      uint32_t query_mask = s.active ? ptx::load_shared_4B(own.mask(stage, s.warp)) : 0u;
      uint32_t slot = slot_of<Cfg>(stage, query_mask);
#pragma unroll 1
      while (query_mask != 0) {
        rotate_to(s, stage, query_mask);
        query_mask = rest_of<Cfg>(query_mask);
        uint32_t const next = slot_of<Cfg>(stage, query_mask);
        score<kSweep>(s, slot, scored);
        slot = next;
      }
    }
    release_stage(s, stage);
    at = at.ahead(1);
  }
  if (!Cfg::kHalfSelected && s.rope.left >= 0) account_last<kSweep>(s, scored);  // unless the query took no block
}

// The consumer's loop: the blocks pass by twice, for the lse and then for the importance relative to it.
template <class Cfg>
__device__ __forceinline__ void score_selected(State<Cfg>& s, Ring<Cfg> const& ring) {
  begin_rotation(s, ring);
  s.rope.column = static_cast<int>(ptx::opaque(importance_column(s)));
  RingPosition<Cfg::kStages> at;
  score_sweep<Sweep::kLse>(s, ring, at);
  if (s.active) {
    finish_lse(s, ring);
    repeat_sweep(s);
    if constexpr (Cfg::kHalfSelected) keep_restart(s, s.position);
    if (split(s)) skip_periods(s, s.warp);
    s.rope.left = -1;
    ptx::copy_async_wait<0>();  // rotations of a rank past the last may be on their way
    __syncwarp();
    fetch_rotation(s, 0);
    if constexpr (Cfg::kHalfSelected) restart_rotation(s);
  }
  score_sweep<Sweep::kImportance>(s, ring, at);
}

}  // namespace htree_cuda::sm90::htree_fwd

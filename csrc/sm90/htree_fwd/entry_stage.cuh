// A stage of an entry layer holds four KV blocks: what a warpgroup multiplies of a stage, and which of its blocks a query
// takes.
#pragma once

#include <type_traits>

#include "device/barriers.cuh"
#include "device/wgmma.cuh"
#include "fragments.cuh"
#include "load_query.cuh"
#include "smem.cuh"

namespace htree_cuda::sm90::htree_fwd {

// The scores of a stage, 64 keys by the 16 rows of a warp.
struct StageScores {
  float raw[2 * kTileBlocks][4];
  uint32_t stage;
};

static_assert(kTileBlocks * kSiblings == 64 && wgmma::kAccumulators == 8 * kTileBlocks && wgmma::kDepth == kSiblings);

template <class Cfg>
__device__ __forceinline__ auto& output(State<Cfg>& s) { return reinterpret_cast<float(&)[4 * Cfg::kValueTiles]>(s.o); }

template <class Cfg>
__device__ __forceinline__ auto& products(float (&raw)[2 * Cfg::kStageSlots][4]) {
  return reinterpret_cast<float(&)[wgmma::kAccumulators]>(raw);
}

template <class Cfg>
__device__ __forceinline__ auto& of_block(float (&raw)[2 * Cfg::kStageSlots][4], int slot) {
  return reinterpret_cast<float(&)[2][4]>(raw[2 * slot]);
}

template <class Cfg>
__device__ __forceinline__ uint32_t stage_scales(uint32_t stage, int slot) {
  return stage + Cfg::kScaleOffset + slot * Cfg::kScaleBytes;
}

template <class Cfg>
__device__ __forceinline__ void load_scales(float (&scales)[Cfg::kStageSlots], uint32_t stage) {
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
    scales[slot] = ptx::load_shared_float(stage_scales<Cfg>(stage, slot));
  }
}

// Waits for the next stage.
template <class Cfg>
__device__ __forceinline__ void wait_for_stage(State<Cfg> const& s, StageScores& scores, Ring<Cfg> const& ring,
                                               RingPosition<Cfg::kStages>& at) {
  ring.barriers.wait_full(at, "htree_fwd consumer: full");
  // A shuffle tells the compiler that the stage is uniform: descriptors live in uniform registers.
  scores.stage = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
  at = at.ahead(1);
}

// Whether the query of row i takes a block of the stage at hand: it takes all blocks up to its own, unless it is split.
template <class Cfg>
__device__ __forceinline__ bool takes_block(State<Cfg> const& s, uint32_t stage, int slot, int i = 0) {
  if (!Cfg::kSharesWarp && split(s)) return ptx::load_shared_4B(Ring<Cfg>::mask(stage, s.warp)) >> slot & 1u;
  return row_position(s, i) >= slot * kSiblings;
}

// Whether the query takes all of the stage and has blocks behind it.
template <class Cfg>
__device__ __forceinline__ bool takes_whole_stage(State<Cfg> const& s, int i = 0) {
  return (Cfg::kSharesWarp || !split(s)) && row_position(s, i) >= Cfg::kStageSlots * kSiblings;
}

// A vote of the lanes that have rows of the same query.
template <class Cfg>
__device__ __forceinline__ bool any_own(State<Cfg> const& s, bool says) {
  return Cfg::kPerUnit == 1 ? __any_sync(kFullWarp, says) : (__ballot_sync(kFullWarp, says) & own_lanes(s)) != 0;
}

// Whether all queries of the warp take all of the stage and have blocks behind it.
template <class Cfg>
__device__ __forceinline__ bool all_take_whole_stage(State<Cfg> const& s) {
  bool const both = takes_whole_stage(s, 0) && takes_whole_stage(s, 1);
  return Cfg::kPerUnit == 1 ? both : __all_sync(kFullWarp, both);
}

// Reads the expanded candidates of kStagesFetched stages, from the block so many further on up to the own block of row
// i's query; past it they are not written. The n-th of the query's lanes gets those of blocks 2 n and 2 n + 1.
template <class Cfg>
__device__ __forceinline__ uint32_t fetch_expanded(State<Cfg> const& s, int i, int blocks) {
  if ((!Cfg::kSharesWarp && !s.active) || s.args.layer == 0) return 0;
  int const block = blocks + 2 * (s.lane % Cfg::kOwnLanes);
  int const position = row_position(s, i);
  std::uint16_t const* const expanded = s.args.expanded + row_cursor(s, i) + block;
  if (position >= (block + 1) * kSiblings) return *reinterpret_cast<uint32_t const*>(expanded);
  return position >= block * kSiblings ? *expanded : 0u;
}

// From the expanded candidates of row i's query to all candidates that take no part in P, in the order of this thread's
// columns: bit 16 (slot % 2) + 8 tile + e of word slot / 2.
template <class Cfg>
__device__ __forceinline__ void find_masked(State<Cfg> const& s, int i, uint32_t stage,
                                            uint32_t (&masked)[Cfg::kMaskWords]) {
  if (!takes_whole_stage(s, i)) {
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      bool const last = s.args.layer == 0 && row_position(s, i) < (slot + 1) * kSiblings;
      uint32_t const more = !takes_block(s, stage, slot, i) ? 0xffffu : last ? causal_mask(rightmost(s, i)) : 0u;
      masked[slot / 2] |= more << (slot % 2 * kSiblings);
    }
  }
#pragma unroll
  for (auto& word : masked) word >>= 2 * s.tq;
}

// Takes the columns whose bits are set in `masked` (bit 8 tile + e) out of scores or exponents.
__device__ __forceinline__ void mask_columns(float (&raw)[2][4], uint32_t masked) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (masked >> (8 * tile + e % 2) & 1u) raw[tile][e] = -kInfinity;
    }
  }
}

// Takes the columns whose bits are set in `masked` (bit 8 tile + e) out of the scores of row i.
__device__ __forceinline__ void mask_row(int i, float (&raw)[2][4], uint32_t masked) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (masked >> (8 * tile + e) & 1u) raw[tile][2 * i + e] = -kInfinity;
    }
  }
}

// Starts the products of a stage's keys with the queries of the warpgroup in shared memory.
template <class Cfg>
__device__ __forceinline__ void multiply_stage_keys(State<Cfg> const& s, StageScores& scores,
                                                    wgmma::Descriptor const& queries) {
  wgmma::Descriptor const keys(scores.stage + Cfg::kKeyOffset);
  wgmma::fence();
#pragma unroll
  for (int kk = 0; kk < Cfg::kSteps; ++kk) {
    wgmma::mma_ss<cutlass::half_t>(products<Cfg>(scores.raw), queries.at(kk / 4 * Cfg::kQueryPanelBytes + kk % 4 * 32),
                                   keys.at(kk / 4 * Cfg::kPanelBytes + kk % 4 * 32), kk > 0);
  }
  wgmma::commit();
}

// Starts the products of a stage's keys with the queries of this warp in registers.
template <class Cfg>
__device__ __forceinline__ void multiply_stage_keys(State<Cfg> const& s, StageScores& scores) {
  wgmma::Descriptor const keys(scores.stage + Cfg::kKeyOffset);
  wgmma::fence();
#pragma unroll
  for (int kk = 0; kk < Cfg::kSteps; ++kk) {
    wgmma::mma_rs<cutlass::half_t>(products<Cfg>(scores.raw), reinterpret_cast<uint32_t const(&)[4]>(s.q[kk]),
                                   keys.at(kk / 4 * Cfg::kPanelBytes + kk % 4 * 32), kk > 0);
  }
  wgmma::commit();
}

// Starts O += P V.
template <class Cfg>
__device__ __forceinline__ void multiply_stage_values(State<Cfg>& s, uint32_t const (&p)[Cfg::kStageSlots][4],
                                                      uint32_t stage) {
  using Element =
      std::conditional_t<std::is_same_v<typename Cfg::Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  wgmma::Descriptor const values(stage + Cfg::kValueOffset, Cfg::kPanelBytes);
  wgmma::pin(output(s));
  wgmma::fence();
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
    wgmma::mma_rs<Element, wgmma::Major::MN>(output(s), p[slot], values.at(slot * kSiblings * 128), true);
  }
  wgmma::commit();
}

// Multiplies the products of row i by the scales that the keys of a block have of their own.
template <class Cfg>
__device__ __forceinline__ void apply_own_row_scales(State<Cfg> const& s, int i, uint32_t scales, float (&raw)[2][4]) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    float2 const scale = ptx::load_shared_8B(scales + tile * 32 + s.tq * 8);
    raw[tile][2 * i] *= row_scale::own_scale(scale.x);
    raw[tile][2 * i + 1] *= row_scale::own_scale(scale.y);
  }
}

// Exponentials of a block's children, zero for those that are `masked`.
template <class Cfg>
__device__ __forceinline__ void exponentials(State<Cfg> const& s, float const (&raw)[2][4], float scale,
                                             uint32_t masked, float (&x)[2][4]) {
  Factors const by_scale = factors(s, scale);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[tile][e] = exponent_of_product(s, e / 2, raw[tile][e], by_scale);
  }
  mask_columns(x, masked);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[tile][e] = ptx::exp2_movable(x[tile][e]);
  }
}

// The sum that the exponentials of a stage may have in a thread, 2^kSlack, before the maximum is updated: then no
// exponential is larger. A NaN overflows, too.
inline constexpr float kMaxStageSum = 256.0f;

__device__ __forceinline__ bool sum_overflows(float const (&sum)[2]) {
  return !(sum[0] <= kMaxStageSum && sum[1] <= kMaxStageSum);
}

__device__ __forceinline__ bool sum_overflows(float sum) { return !(sum <= kMaxStageSum); }

template <class Cfg, class Exponent>
__device__ __forceinline__ float sum_stage_row(float const (&raw)[2 * Cfg::kStageSlots][4], int i,
                                               Exponent const& exponent) {
  float sum = 0.0f;
#pragma unroll
  for (int tile = 0; tile < 2 * Cfg::kStageSlots; ++tile) {
    sum += ptx::exp2_movable(exponent(raw[tile][2 * i])) + ptx::exp2_movable(exponent(raw[tile][2 * i + 1]));
  }
  return sum;
}

// Sums of exponentials with exponents exponent(row, raw score).
template <class Cfg, class Exponent>
__device__ __forceinline__ void sum_stage(float const (&raw)[2 * Cfg::kStageSlots][4], float (&sum)[2],
                                                Exponent const& exponent) {
#pragma unroll
  for (int i = 0; i < 2; ++i) sum[i] = sum_stage_row<Cfg>(raw, i, [&](float x) { return exponent(i, x); });
}

}  // namespace htree_cuda::sm90::htree_fwd

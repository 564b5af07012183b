// Score passes of an entry layer, by WGMMA (attend_entry.cuh says how rows are shared).
#pragma once

#include "entry_stage.cuh"
#include "importance.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Adds the scores of a whole stage to the lse. Maxima and sums are those of this thread's columns alone until
// finish_lse merges them.
template <class Cfg>
__device__ __forceinline__ void add_stage_to_lse(State<Cfg>& s, StageScores& scores,
                                                 float const (&scales)[Cfg::kStageSlots]) {
  auto& raw = scores.raw;
  float sum[2] = {};
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
    float x[2][4];
    exponentials(s, of_block<Cfg>(raw, slot), scales[slot], 0, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
  }
  if (sum_overflows(sum)) {
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      apply_own_scales(s, stage_scales<Cfg>(scores.stage, slot), of_block<Cfg>(raw, slot));
    }
    sum_stage<Cfg>(raw, sum, [&](int i, float x) { return near_exponent(s, i, x); });
    if (sum_overflows(sum)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) s.sum[i] *= update_max(s, i, fmaxf(s.max[i], row_max<Cfg, Cfg::kStageSlots>(raw, i)));
      sum_stage<Cfg>(raw, sum, [&](int i, float x) { return exponent(s, i, x); });
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) s.sum[i] += sum[i];
}

// Adds the scores of a whole stage to the lse of either row or both, where rows are of different queries.
template <bool kFirstRow, bool kSecondRow, class Cfg>
__device__ __forceinline__ void add_stage_rows_to_lse(State<Cfg>& s, StageScores& scores,
                                                      float const (&scales)[Cfg::kStageSlots]) {
  auto& raw = scores.raw;
  float sum[2] = {};
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
    float x[2][4];
    exponentials(s, of_block<Cfg>(raw, slot), scales[slot], 0, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i == 0 ? !kFirstRow : !kSecondRow) continue;
    if (sum_overflows(sum[i])) {
#pragma unroll
      for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
        apply_own_row_scales(s, i, stage_scales<Cfg>(scores.stage, slot), of_block<Cfg>(raw, slot));
      }
      sum[i] = sum_stage_row<Cfg>(raw, i, [&](float x) { return near_exponent(s, i, x); });
      if (sum_overflows(sum[i])) {
        s.sum[i] *= update_max(s, i, fmaxf(s.max[i], row_max<Cfg, Cfg::kStageSlots>(raw, i)));
        sum[i] = sum_stage_row<Cfg>(raw, i, [&](float x) { return exponent(s, i, x); });
      }
    }
    s.sum[i] += sum[i];
  }
}

// Adds to row i's lse those blocks of a stage that its query takes.
template <class Cfg>
__device__ __forceinline__ void add_end_to_lse(State<Cfg>& s, int i, StageScores& scores) {
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
    auto& raw = of_block<Cfg>(scores.raw, slot);
    apply_own_row_scales(s, i, stage_scales<Cfg>(scores.stage, slot), raw);
    if (takes_block(s, scores.stage, slot, i)) add_row_to_lse(s, raw, i, row_position(s, i) < (slot + 1) * kSiblings);
  }
}

// Adds a stage to the lse where some query of the warp does not take all of it, or has its last block in it.
template <class Cfg>
__device__ __forceinline__ void add_stage_ends_to_lse(State<Cfg>& s, StageScores& scores,
                                                      float const (&scales)[Cfg::kStageSlots]) {
  if (takes_whole_stage(s, 0)) add_stage_rows_to_lse<true, false>(s, scores, scales);
  if (takes_whole_stage(s, 1)) add_stage_rows_to_lse<false, true>(s, scores, scales);
  if (!takes_whole_stage(s, 0)) add_end_to_lse(s, 0, scores);
  if (!takes_whole_stage(s, 1)) add_end_to_lse(s, 1, scores);
}

// This is one step of a butterfly: of 2 kTiles tiles a lane keeps half, the upper ones where bit `lanes` of its number
// is set, summed with those of the lane that keeps the other half.
template <int kTiles, class Cfg>
__device__ __forceinline__ void halve(State<Cfg> const& s, float (&sums)[2 * Cfg::kStageSlots][2], int lanes) {
  bool const upper = s.lane & lanes;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float const low = sums[tile][e];
      float const high = sums[tile + kTiles][e];
      sums[tile][e] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, lanes);
    }
  }
}

// Sums of exponentials over the two heads of this thread, of a block whose tiles are `first` and the next one.
template <class Cfg, class Exponent>
__device__ __forceinline__ void sum_columns(float const (&raw)[2][4], int first, float (&sums)[2 * Cfg::kStageSlots][2],
                                                     Exponent const& exponent) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums[first + tile][e] =
          ptx::exp2_movable(exponent(0, raw[tile][e])) + ptx::exp2_movable(exponent(1, raw[tile][2 + e]));
    }
  }
}

// The importance of a stage: column sums over the heads, by a butterfly that halves what a lane sends. In the end a
// lane holds columns 2 lane and 2 lane + 1 of the 64, and stores them if they are of a block that the query takes.
template <class Cfg>
__device__ __forceinline__ void importance_of_stage(State<Cfg> const& s, float (&raw)[2 * Cfg::kStageSlots][4],
                                                    float const (&scales)[Cfg::kStageSlots], bool taken) {
  float sums[2 * Cfg::kStageSlots][2];
  if (!s.far) {
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      Factors const by_scale = finite_factors(s, scales[slot]);
      sum_columns<Cfg>(of_block<Cfg>(raw, slot), 2 * slot, sums,
                  [&](int i, float product) { return exponent_of_product(s, i, product, by_scale); });
    }
  } else {
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      apply_shared_scale(scales[slot], of_block<Cfg>(raw, slot));
      sum_columns<Cfg>(of_block<Cfg>(raw, slot), 2 * slot, sums,
                  [&](int i, float score) { return importance_exponent(s, i, score); });
    }
  }
  halve<4>(s, sums, 16);
  halve<2>(s, sums, 8);
  halve<1>(s, sums, 4);
  ptx::store_global_8B_if(taken, s.args.importance + static_cast<std::int64_t>(s.cursor) * kSiblings + 2 * s.lane,
                          {sums[0][0], sums[0][1]});
}

// The importance of a stage, for the query of either row.
template <class Cfg>
__device__ __forceinline__ void importance_of_stage_rows(State<Cfg>& s, StageScores& scores,
                                                         float const (&scales)[Cfg::kStageSlots]) {
  auto& raw = scores.raw;
  float shared[Cfg::kStageSlots];
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) shared[slot] = scales[slot];
  if (isnan(scales[0] + scales[1] + scales[2] + scales[3])) {
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      apply_uneven_scales(s, shared[slot], stage_scales<Cfg>(scores.stage, slot), of_block<Cfg>(raw, slot));
    }
  }
  release_stage(s, scores.stage);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sums[2 * Cfg::kStageSlots][2];
#pragma unroll
    for (int tile = 0; tile < 2 * Cfg::kStageSlots; ++tile) {
      float const scale = shared[tile / 2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float const product = raw[tile][2 * i + e];
        sums[tile][e] = ptx::exp2_movable(
            row_far(s, i) ? importance_exponent(s, i, product * fabsf(scale))
                         : exponent_of_product(s, i, product, finite_factors(s, scale)));
      }
    }
    float* const importance = s.args.importance + static_cast<std::int64_t>(row_cursor(s, i)) * kSiblings;
    if constexpr (Cfg::kPerUnit == 1) {
      halve<4>(s, sums, 16);
      halve<2>(s, sums, 8);
      halve<1>(s, sums, 4);
      ptx::store_global_8B_if(row_position(s, i) >= s.lane / 8 * kSiblings, importance + 2 * s.lane,
                              {sums[0][0], sums[0][1]});
    } else {  // a lane has both tiles of a block in the end
      halve<4>(s, sums, 8);
      halve<2>(s, sums, 4);
      int const slot = s.lane % Cfg::kOwnLanes / 4;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        ptx::store_global_8B_if(row_position(s, i) >= slot * kSiblings,
                                importance + slot * kSiblings + 8 * tile + 2 * s.tq, {sums[tile][0], sums[tile][1]});
      }
    }
  }
}

// Accounts for the scores of a stage, and gives its stage back as soon as nothing of it is needed.
template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void score_entry_stage(State<Cfg>& s, StageScores& scores, float (&scales)[Cfg::kStageSlots]) {
  auto& raw = scores.raw;
  if (kSweep == Sweep::kLse && takes_whole_stage(s)) {
    add_stage_to_lse(s, scores, scales);
    release_stage(s, scores.stage);
    return;
  }
  if (isnan(scales[0] + scales[1] + scales[2] + scales[3])) {
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      apply_uneven_scales(s, scales[slot], stage_scales<Cfg>(scores.stage, slot), of_block<Cfg>(raw, slot));
    }
  }
  if constexpr (kSweep == Sweep::kImportance) {
    bool const taken = takes_block(s, scores.stage, s.lane / 8);
    release_stage(s, scores.stage);
    importance_of_stage(s, raw, scales, taken);
  } else {
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      apply_shared_scale(scales[slot], of_block<Cfg>(raw, slot));
      if (takes_block(s, scores.stage, slot)) {
        add_block_to_lse(s, of_block<Cfg>(raw, slot), s.position < (slot + 1) * kSiblings);
      }
    }
    release_stage(s, scores.stage);
  }
}

// Accounts for the scores of a stage where rows are of different queries.
template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void score_stage_rows(State<Cfg>& s, StageScores& scores,
                                                 float const (&scales)[Cfg::kStageSlots]) {
  if constexpr (kSweep == Sweep::kImportance) {
    importance_of_stage_rows(s, scores, scales);
  } else if (all_take_whole_stage(s)) {
    add_stage_rows_to_lse<true, true>(s, scores, scales);
    release_stage(s, scores.stage);
  } else {
    add_stage_ends_to_lse(s, scores, scales);
    release_stage(s, scores.stage);
  }
}

template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void score_stages(State<Cfg>& s, Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) {
  Ring<Cfg> const own(
      ptx::opaque(ring.stages));  // opaque, or the compiler computes the start of shared memory each time
#pragma unroll 1
  for (int n = 0; n < s.stages; ++n) {
    StageScores scores;
    wait_for_stage(s, scores, own, at);
    multiply_stage_keys(s, scores);
    float scales[Cfg::kStageSlots];
    load_scales<Cfg>(scales, scores.stage);
    wgmma::wait<0>();
    wgmma::pin(products<Cfg>(scores.raw));
    if constexpr (Cfg::kSharesWarp) {
      score_stage_rows<kSweep>(s, scores, scales);
    } else {
      score_entry_stage<kSweep>(s, scores, scales);
    }
    advance_blocks(s, Cfg::kStageSlots);
  }
}

// The consumer's loop: the blocks pass by twice, for the lse and then for the importance relative to it.
template <class Cfg>
__device__ __forceinline__ void score_entry(State<Cfg>& s, Ring<Cfg> const& ring) {
  RingPosition<Cfg::kStages> at;
  score_stages<Sweep::kLse>(s, ring, at);
  if (s.active) finish_lse(s, ring);
  begin_sweep(s, own_tile(s));
  score_stages<Sweep::kImportance>(s, ring, at);
}

}  // namespace htree_cuda::sm90::htree_fwd

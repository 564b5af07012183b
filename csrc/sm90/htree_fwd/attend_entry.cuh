// Attend passes of an entry layer, by WGMMA.
//
// A warpgroup computes the scores of its queries, 64 rows, against the 64 keys of four blocks, and adds P V likewise,
// 64 rows by V columns; keys and values lie where the bulk copy put them. All queries see the same blocks, so nothing
// is read twice. What lies between the two products belongs to a warp and its queries alone, and runs beside the
// products of the other warpgroups. P of blocks that a query does not take is zero. The queries wait in shared memory,
// because beside O and the scores there are no registers for them.
//
// Where queries share a warp, a row belongs to one query, and so do the votes, masks and sums: the bits of a query do
// not depend on which others share its warp. With four queries a warp, lanes 0 to 15 have rows of the first and the
// third, the other lanes of the second and the fourth.
#pragma once

#include "entry_stage.cuh"
#include "epilogue.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
__device__ __forceinline__ uint32_t kept_words(State<Cfg> const& s, Ring<Cfg> const& ring) {
  return ring.stages - Cfg::kRingOffset + Cfg::kRotationOffset + s.warp * Cfg::kKeptBytes;
}

// With Cfg::kKeeps shared memory holds what fetch_expanded found for row 0 and, 128 bytes behind it, for row 1, a word
// for each lane; the cursor of a query; and the maximum of a row.
template <class Cfg>
__device__ __forceinline__ uint32_t kept_expanded(State<Cfg> const& s, Ring<Cfg> const& ring) {
  return kept_words(s, ring) + ptx::lane_index() * 4;
}

template <class Cfg>
__device__ __forceinline__ uint32_t kept_cursor(State<Cfg> const& s, Ring<Cfg> const& ring) {
  return kept_words(s, ring) + 256 + ptx::lane_index() / 16 * 4;
}

template <class Cfg>
__device__ __forceinline__ uint32_t kept_maximum(State<Cfg> const& s, Ring<Cfg> const& ring, int i) {
  return kept_words(s, ring) + 320 + 32 * i + ptx::lane_index() / 4 * 4;
}

template <class Cfg>
__device__ __forceinline__ void keep_maximum(State<Cfg> const& s, Ring<Cfg> const& ring, int i) {
  if (s.tq == 0) ptx::store_shared_4B(kept_maximum(s, ring, i), __float_as_uint(s.max[i]));
}

template <class Cfg>
__device__ __forceinline__ void fetch_maximum(State<Cfg>& s, Ring<Cfg> const& ring, int i) {
  s.max[i] = __uint_as_float(ptx::load_shared_4B(kept_maximum(s, ring, i)));
}

// The queries of this warpgroup in shared memory.
template <class Cfg>
__device__ __forceinline__ uint32_t queries_of(State<Cfg> const& s, Ring<Cfg> const& ring) {
  return __shfl_sync(kFullWarp, ring.stages - Cfg::kRingOffset + s.warp / 4 * Cfg::kQueryBytes, 0);
}

// Stores them in the order of WGMMA's operands. A lane points stmatrix at row lane % 16 of its warp and at chunk lane /
// 16 of two.
template <class Cfg>
__device__ __forceinline__ void store_queries(State<Cfg> const& s, uint32_t queries) {
  int const row = s.warp % 4 * 16 + s.lane % 16;
#pragma unroll
  for (int kk = 0; kk < Cfg::kSteps; ++kk) {
    int const chunk = kk % 4 * 2 + s.lane / 16;
    ptx::store_matrix_x4(queries + kk / 4 * Cfg::kQueryPanelBytes + row * 128 + ((chunk ^ row % 8) << 4),
                         reinterpret_cast<uint32_t const(&)[4]>(s.q[kk]));
  }
  ptx::fence_proxy_async_shared();
  barriers::named_sync(Cfg::kQueryBarrier + s.warp / 4, 128);
}

template <class Cfg>
__device__ __forceinline__ void rescale_stage(State<Cfg>& s, float const (&raw)[2 * Cfg::kStageSlots][4],
                                              uint32_t (&p)[Cfg::kStageSlots][4], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float const largest = quad_max(row_max<Cfg, Cfg::kStageSlots>(raw, i));
    float const factor = update_max(s, i, fmaxf(s.max[i], largest));
    s.sum[i] *= factor;
    sum[i] = 0.0f;
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
      s.o[tile][2 * i] *= factor;
      s.o[tile][2 * i + 1] *= factor;
    }
  }
  exponentiate_scores<Cfg::kStageSlots>(s, raw, p, sum, [&](int i, float x) { return exponent(s, i, x); });
}

// P of a stage, rounded to the dtype, as fragments of operand A, and its sums. Exponentials are taken as if no maximum
// had to be updated, which is rare. Their sums show where one has: then P is computed again, and sums and O are
// rescaled.
template <class Cfg>
__device__ __forceinline__ void exponentiate_stage(State<Cfg>& s, StageScores& scores,
                                                   float const (&scales)[Cfg::kStageSlots],
                                                   uint32_t (&masked)[Cfg::kMaskWords],
                                                   uint32_t (&p)[Cfg::kStageSlots][4]) {
  auto& raw = scores.raw;
  float sum[2] = {};
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
    float x[2][4];
    exponentials(s, of_block<Cfg>(raw, slot), scales[slot], masked[slot / 2] >> slot % 2 * kSiblings, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
      p[slot][i] = Pairs<typename Cfg::Element>::pack(x[0][2 * i], x[0][2 * i + 1]);
      p[slot][2 + i] = Pairs<typename Cfg::Element>::pack(x[1][2 * i], x[1][2 * i + 1]);
    }
  }
  // The heads of one query vote, so the decision follows from this query's data.
  if (__any_sync(kFullWarp, sum_overflows(sum))) {
    // A shuffle hides where the words come from: otherwise the compiler would keep the outcome of every test above
    // until here.
#pragma unroll
    for (auto& word : masked) word = __shfl_sync(kFullWarp, word, s.lane);
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      apply_own_scales(s, stage_scales<Cfg>(scores.stage, slot), of_block<Cfg>(raw, slot));
      mask_columns(of_block<Cfg>(raw, slot), masked[slot / 2] >> slot % 2 * kSiblings);
    }
    sum[0] = sum[1] = 0.0f;
    exponentiate_scores<Cfg::kStageSlots>(s, raw, p, sum, [&](int i, float x) { return near_exponent(s, i, x); });
    if (__any_sync(kFullWarp, sum_overflows(sum))) rescale_stage(s, raw, p, sum);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) s.sum[i] += sum[i];
}

// P of row i and its sum, from raw scores.
template <class Exponent, class Cfg>
__device__ __forceinline__ float exponentiate_row(State<Cfg> const& s, float const (&raw)[2 * Cfg::kStageSlots][4],
                                                  int i, uint32_t (&p)[Cfg::kStageSlots][4], Exponent const& exponent) {
  float sum = 0.0f;
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = ptx::exp2_movable(exponent(raw[2 * slot + e / 2][2 * i + e % 2]));
    sum += (x[0] + x[1]) + (x[2] + x[3]);
    p[slot][i] = Pairs<typename Cfg::Element>::pack(x[0], x[1]);
    p[slot][2 + i] = Pairs<typename Cfg::Element>::pack(x[2], x[3]);
  }
  return sum;
}

// exponentiate_stage where rows are of different queries: each row has its own votes and masks.
template <class Cfg>
__device__ __forceinline__ void exponentiate_stage_rows(State<Cfg>& s, Ring<Cfg> const& ring, StageScores& scores,
                                                        float const (&scales)[Cfg::kStageSlots],
                                                        uint32_t (&masked)[2][Cfg::kMaskWords],
                                                        uint32_t (&p)[Cfg::kStageSlots][4]) {
  auto& raw = scores.raw;
  float sum[2] = {};
#pragma unroll
  for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
    Factors const by_scale = factors(s, scales[slot]);
    float x[2][4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = exponent_of_product(s, e / 2, raw[2 * slot + tile][e], by_scale);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mask_row(i, x, masked[i][slot / 2] >> slot % 2 * kSiblings);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e / 2][2 * i + e % 2] = ptx::exp2_movable(x[e / 2][2 * i + e % 2]);
      sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
      p[slot][i] = Pairs<typename Cfg::Element>::pack(x[0][2 * i], x[0][2 * i + 1]);
      p[slot][2 + i] = Pairs<typename Cfg::Element>::pack(x[1][2 * i], x[1][2 * i + 1]);
    }
  }
  if (__any_sync(kFullWarp, sum_overflows(sum))) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool const again = any_own(s, sum_overflows(sum[i]));
      if (Cfg::kPerUnit == 1 ? !again : !__any_sync(kFullWarp, again)) continue;
#pragma unroll
      for (auto& word : masked[i]) word = __shfl_sync(kFullWarp, word, s.lane);
      if (Cfg::kPerUnit == 1 || again) {
#pragma unroll
        for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
          apply_own_row_scales(s, i, stage_scales<Cfg>(scores.stage, slot), of_block<Cfg>(raw, slot));
          mask_row(i, of_block<Cfg>(raw, slot), masked[i][slot / 2] >> slot % 2 * kSiblings);
        }
        sum[i] = exponentiate_row(s, raw, i, p, [&](float x) { return near_exponent(s, i, x); });
      }
      bool const rises = any_own(s, (Cfg::kPerUnit == 1 || again) && sum_overflows(sum[i]));
      if (Cfg::kPerUnit == 1 && !rises) continue;
      float const largest = quad_max(row_max<Cfg, Cfg::kStageSlots>(raw, i));
      if constexpr (Cfg::kKeeps) {
        fetch_maximum(s, ring, i);
        __syncwarp();  // all lanes have read it before it is written again
      }
      if (Cfg::kPerUnit > 1 && !rises) continue;
      float const factor = update_max(s, i, fmaxf(s.max[i], largest));
      if constexpr (Cfg::kKeeps) keep_maximum(s, ring, i);
      s.sum[i] *= factor;
#pragma unroll
      for (int tile = 0; tile < Cfg::kValueTiles; ++tile) {
        s.o[tile][2 * i] *= factor;
        s.o[tile][2 * i + 1] *= factor;
      }
      sum[i] = exponentiate_row(s, raw, i, p, [&](float x) { return exponent(s, i, x); });
    }
    if (Cfg::kPerUnit > 1) __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) s.sum[i] += sum[i];
}

// The consumer's loop. The scores of a stage and P V of the stage before are multiplied together, then this stage's P
// is formed: what a warpgroup does between its products runs beside the products of the others.
template <class Cfg>
__device__ __forceinline__ void attend_stages(State<Cfg>& s, Ring<Cfg> const& ring, wgmma::Descriptor const& queries) {
  if (s.stages == 0) return;
  RingPosition<Cfg::kStages> at;
  // The stage whose values are multiplied next. Before there are scores, the values of the first stage meet a P of
  // zeros.
  uint32_t held = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
  uint32_t p[Cfg::kStageSlots][4] = {};
  uint32_t expanded[Cfg::kRows];  // of the stages at hand, as fetch_expanded says
  uint32_t next_expanded = 0;  // where queries share a warp there are no registers for it
  if constexpr (!Cfg::kSharesWarp) next_expanded = fetch_expanded(s, 0, 0);
  if constexpr (Cfg::kKeeps) {
    if (s.lane % Cfg::kOwnLanes == 0) ptx::store_shared_4B(kept_cursor(s, ring), static_cast<uint32_t>(s.cursor));
    keep_maximum(s, ring, 0);
    keep_maximum(s, ring, 1);
  }
#pragma unroll 1
  for (int n = 0; n < s.stages; ++n) {
    if (n % Cfg::kStagesFetched == 0) {
      if constexpr (Cfg::kKeeps) {
        __syncwarp();
        s.cursor = static_cast<int>(ptx::load_shared_4B(kept_cursor(s, ring)));
#pragma unroll
        for (int i = 0; i < Cfg::kRows; ++i) {
          ptx::store_shared_4B(kept_expanded(s, ring) + 128 * i, fetch_expanded(s, i, 0));
        }
        __syncwarp();
      } else {
#pragma unroll
        for (int i = 0; i < Cfg::kRows; ++i) expanded[i] = Cfg::kSharesWarp ? fetch_expanded(s, i, 0) : next_expanded;
        if constexpr (!Cfg::kSharesWarp) next_expanded = fetch_expanded(s, 0, Cfg::kStagesFetched * Cfg::kStageSlots);
      }
    }
    StageScores scores;
    wait_for_stage(s, scores, ring, at);
    multiply_stage_keys(s, scores, queries);
    multiply_stage_values(s, p, held);
    float scales[Cfg::kStageSlots];
    load_scales<Cfg>(scales, scores.stage);
    uint32_t masked[Cfg::kRows][Cfg::kMaskWords];
#pragma unroll
    for (int i = 0; i < Cfg::kRows; ++i) {
      int const first = n % Cfg::kStagesFetched * Cfg::kMaskWords;
      if constexpr (Cfg::kKeeps) {
        static_assert(Cfg::kMaskWords == 2);
        float2 const words = ptx::load_shared_8B(kept_expanded(s, ring) / 64 * 64 + 128 * i + 4 * first);
        masked[i][0] = __float_as_uint(words.x), masked[i][1] = __float_as_uint(words.y);
      } else {
#pragma unroll
        for (int word = 0; word < Cfg::kMaskWords; ++word) {
          masked[i][word] = __shfl_sync(kFullWarp, expanded[i], first + word);
        }
      }
      find_masked(s, i, scores.stage, masked[i]);
    }
    if (Cfg::kPerUnit > 1) __syncwarp();  // halves of the warp may part above, and wait for the products together
    advance_blocks(s, Cfg::kStageSlots);
    wgmma::wait<0>();
    wgmma::pin(products<Cfg>(scores.raw));
    wgmma::pin(output(s));
    wgmma::pin(reinterpret_cast<uint32_t(&)[4 * Cfg::kStageSlots]>(p));
    if (n > 0) release_stage(s, held);
    held = scores.stage;
    if constexpr (Cfg::kSharesWarp) {
      exponentiate_stage_rows(s, ring, scores, scales, masked, p);
    } else {
      exponentiate_stage(s, scores, scales, masked[0], p);
    }
  }
  multiply_stage_values(s, p, held);
  wgmma::wait<0>();
  wgmma::pin(output(s));
  release_stage(s, held);
  if constexpr (Cfg::kKeeps) {
    fetch_maximum(s, ring, 0);
    fetch_maximum(s, ring, 1);
  }
}

// Looks up the blocks that hold values which are not finite (epilogue.cuh).
template <class Cfg>
__device__ __forceinline__ void propagate_nan_entry(State<Cfg>& s) {
  QueryTile const tile = own_tile(s);
#pragma unroll
  for (int i = 0; i < Cfg::kRows; ++i) {
    if (Cfg::kSharesWarp && !row_active(s, i)) continue;
    int const count = blocks_of<Cfg>(s.args, tile, query_of_row(s, i));
#pragma unroll 1
    for (int block = 0; block < count; ++block) {
      if (!Cfg::kSharesWarp && split(s) && !takes_rank(s, block)) continue;
      char const* const kv_tile = packed_blocks(s) + block / Cfg::kStageSlots * Cfg::kStageSlots * s.args.block_bytes;
      if (reinterpret_cast<int const*>(kv_tile)[block % Cfg::kStageSlots * kSiblings] < 0) {
        propagate_nan_of_block(s, block, block, i);
      }
    }
  }
  __syncwarp();
}

template <class Cfg>
__device__ __forceinline__ void attend_entry(State<Cfg>& s, Ring<Cfg> const& ring) {
  store_queries(s, queries_of(s, ring));
  attend_stages(s, ring, wgmma::Descriptor(queries_of(s, ring)));
  if (*s.args.has_nonfinite_v != 0) propagate_nan_entry(s);
  finish_attend(s, ring);
}

}  // namespace htree_cuda::sm90::htree_fwd

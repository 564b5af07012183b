// Score passes of selected layers for groups of 8 heads or fewer: two or four neighbouring queries share a warp
// (swapab.cuh). Scores are S^T = K q^T. Heads are columns, so a thread has two children of two heads in a fragment of
// products: sums over children stay in the thread until the end of the sweep, and importance, a sum over the heads of a
// query, takes one or two shuffles.
#pragma once

#include "swapab.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Exponents of the lse, from raw scores, of this thread's children and columns of a unit. Where a score exceeds a
// maximum by more than kSlack, or is not near, updates the maximum of the column, which is this thread's alone until
// finish_columns merges it. The rightmost candidate is left out, and its score kept.
template <class Cfg>
__device__ __forceinline__ void recompute_lse(State<Cfg>& s, int i, float (&raw)[4], float (&x)[4]) {
  Columns& columns = s.columns[i];
  int const position = column_position(s, i);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int const child = s.g + e / 2 * 8;
    if (child == position) columns.right[e % 2] = raw[e];
    if (child >= position) raw[e] = -kInfinity;
    x[e] = fmaf(raw[e], columns.unit[e % 2], -columns.reference[e % 2]);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (ptx::max_or_nan(x[e], x[2 + e]) <= kSlack) continue;
    float const largest = fmaxf(raw[e], raw[2 + e]);
    if ((largest - columns.max[e]) * columns.unit[e] > kSlack) {
      columns.sum[e] *= ptx::exp2_movable((columns.max[e] - largest) * columns.unit[e]);
      columns.max[e] = largest;
      update_column_reference(columns, e);
    }
    x[e] = (raw[e] - columns.max[e]) * columns.unit[e];
    x[2 + e] = (raw[2 + e] - columns.max[e]) * columns.unit[e];
  }
}

template <int kUnits, bool kAll, class Cfg>
__device__ __forceinline__ void add_units_to_lse(State<Cfg>& s, float scale, float (&products)[2][4],
                                                 uint32_t const (&query_masks)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!has_unit(kUnits, i)) continue;
    Columns& columns = s.columns[i];
    bool const taken = unit_takes<Cfg, kAll>(query_masks[i], of_columns(s));
    float const factor[2] = {scale * columns.unit[0], scale * columns.unit[1]};
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = fmaf(products[i][e], factor[e % 2], -columns.reference[e % 2]);
    if (taken & (column_overflows(x) | (column_position(s, i) < kSiblings))) {
#pragma unroll
      for (int e = 0; e < 4; ++e) products[i][e] *= scale;
      recompute_lse(s, i, products[i], x);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float const sum = ptx::exp2_movable(x[e]) + ptx::exp2_movable(x[2 + e]);
      if (taken) columns.sum[e] += sum;
    }
  }
}

template <int kUnits, bool kAll, class Cfg>
__device__ __forceinline__ void store_importance_of_units(State<Cfg>& s, float scale, float (&products)[2][4],
                                                          uint32_t const (&query_masks)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!has_unit(kUnits, i)) continue;
    Columns const& columns = s.columns[i];
    bool const taken = unit_takes<Cfg, kAll>(query_masks[i], of_columns(s));
    float x[4];
    // The factor is finite, so that a product of zero stays zero.
    float const factor[2] = {fminf(scale * columns.unit[0], kLargest), fminf(scale * columns.unit[1], kLargest)};
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = fmaf(products[i][e], factor[e % 2], -columns.reference[e % 2]);
    if (s.far) {  // the binary logarithm of exp(s - lse), from raw scores
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!isnan(columns.reference[e % 2])) continue;
        x[e] = fmaf(products[i][e] * scale - columns.max[e % 2], columns.unit[e % 2], -columns.log_sum[e % 2]);
      }
    }
    float child[2];  // g and g + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      child[half] = ptx::exp2_movable(x[2 * half]) + ptx::exp2_movable(x[2 * half + 1]);
    }
    bool const odd = s.tq & 1;
    float sum = odd ? child[1] : child[0];
    sum += __shfl_xor_sync(kFullWarp, odd ? child[0] : child[1], 1);
    if constexpr (Cfg::kPerUnit == 1) sum += __shfl_xor_sync(kFullWarp, sum, 2);
    ptx::store_global_if(taken & (Cfg::kPerUnit > 1 || s.tq < 2),
                         s.args.importance + static_cast<std::int64_t>(block_of_columns(s, i)) * kSiblings + s.g +
                             (odd ? 8 : 0),
                         sum);
  }
}

// Multiplies the units of kUnits with the keys in `slot`, and rotates the queries that took it.
template <Sweep kSweep, int kUnits, bool kAll, class Cfg>
__device__ __forceinline__ void score_units(State<Cfg>& s, uint32_t slot, uint32_t const (&query_masks)[2]) {
  float scale = fabsf(ptx::load_shared_float(slot + Cfg::kScaleOffset));
  float products[2][4] = {};
  multiply_units<kUnits>(s, slot, products);
  rotate_on<kUnits, kAll>(s, query_masks);
  if (isnan(scale)) {  // the keys have scales of their own
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float const own =
          row_scale::own_scale(ptx::load_shared_float(slot + Cfg::kScaleOffset + (s.g + e / 2 * 8) * 4));
      products[0][e] *= own;
      products[1][e] *= own;
    }
    scale = 1.0f;
  }
  if constexpr (kSweep == Sweep::kLse) {
    add_units_to_lse<kUnits, kAll>(s, scale, products, query_masks);
    __syncwarp();
  } else {
    store_importance_of_units<kUnits, kAll>(s, scale, products, query_masks);
  }
  advance_units<kUnits, kAll>(s, query_masks);
}

template <Sweep kSweep, class Cfg>
__device__ __forceinline__ void score_units_sweep(State<Cfg>& s, Ring<Cfg> const& ring,
                                                  RingPosition<Cfg::kStages>& at) {
  Ring<Cfg> const own(ptx::opaque(ring.stages));
#pragma unroll 1
  for (int stages = s.stages; stages > 0; --stages) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    uint32_t const stage = own.stage(at.slot);
    uint32_t const query_mask = s.active ? ptx::load_shared_4B(own.mask(stage, s.warp)) : 0u;
    each_block(s, stage, query_mask, [&](auto units, auto all, uint32_t slot, uint32_t const (&query_masks)[2]) {
      score_units<kSweep, decltype(units)::value, decltype(all)::value>(s, slot, query_masks);
    });
    release_stage(s, stage);
    at = at.ahead(1);
  }
}

// Between the sweeps, as finish_lse: merges maxima and sums over the children, and takes the logarithm.
template <class Cfg>
__device__ __forceinline__ void finish_columns(State<Cfg>& s) {
  bool far = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Columns& columns = s.columns[i];
    float excess[2] = {};
    float shift = kLargest;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float const largest = column_max(columns.max[e]);
      columns.sum[e] *= ptx::exp2_movable((columns.max[e] - largest) * columns.unit[e]);
      columns.max[e] = largest;
      columns.sum[e] = column_sum(columns.sum[e]);
      columns.log_sum[e] = log2f(columns.sum[e]);
      columns.right[e] = column_sum(columns.right[e]);
      if (!s.args.strict_causal) {
        // The rightmost candidate adds log2(1 + 2^right) to the lse, with `right` relative to the lse of the others.
        float const right = fmaf(columns.right[e] - largest, columns.unit[e], -columns.log_sum[e]);
        float const added = fmaxf(right, 0.0f) + log2f(1.0f + ptx::exp2_approx(-fabsf(right)));
        excess[e] = added > kLargest ? kLargest : added;  // infinity - infinity is NaN
        if (head_of_column(s, e) < s.args.G) shift = fminf(shift, excess[e]);
      }
    }
    // One power of two for all heads of a query keeps its largest importance above 2^-13.
    shift = fminf(shift, __shfl_xor_sync(kFullWarp, shift, 1));
    if constexpr (Cfg::kPerUnit == 1) shift = fminf(shift, __shfl_xor_sync(kFullWarp, shift, 2));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!s.args.strict_causal) columns.log_sum[e] += excess[e] - shift;
      float const exponent = fmaf(columns.max[e], columns.unit[e], columns.log_sum[e]);
      columns.reference[e] = fabsf(exponent) <= kNear ? exponent : not_a_number();
      if (head_of_column(s, e) >= s.args.G) columns.reference[e] = columns.log_sum[e] = kInfinity;
      far |= isnan(columns.reference[e]);
    }
  }
  s.far = __any_sync(kFullWarp, far);
}

// The consumer's loop: the blocks pass by twice, for the lse and then for the importance relative to it.
template <class Cfg>
__device__ __forceinline__ void score_selected_swapab(State<Cfg>& s, Ring<Cfg> const& ring) {
  save_units(s, ring);
  if (s.active) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      begin_columns(s, i);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s.columns[i].max[e] = kNoLeaf;
        s.columns[i].sum[e] = s.columns[i].right[e] = 0.0f;
        update_column_reference(s.columns[i], e);
      }
    }
  }
  RingPosition<Cfg::kStages> at;
  score_units_sweep<Sweep::kLse>(s, ring, at);
  if (s.active) {
    finish_columns(s);
    begin_sweep(s, own_tile(s));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      begin_columns(s, i);
      fetch_unit_rotation(s, i, 0, true);
    }
  }
  score_units_sweep<Sweep::kImportance>(s, ring, at);
}

}  // namespace htree_cuda::sm90::htree_fwd

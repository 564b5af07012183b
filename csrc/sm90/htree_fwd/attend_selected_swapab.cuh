// Attend passes of selected layers for groups of 8 heads or fewer: two or four neighbouring queries share a
// warp (swapab.cuh). Scores are S^T = K q^T, and O^T = V^T P^T, both m16n8k16; movmatrix brings P into operand order. P
// of a query that does not take a block is zero.
//
// A vote for another query leads to the same bits.
#pragma once

#include "epilogue.cuh"
#include "swapab.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Reads the state of a unit that the layer above left.
template <class Cfg>
__device__ __forceinline__ void read_unit_state(State<Cfg>& s, int i) {
  Columns& columns = s.columns[i];
  bool const works = begin_columns(s, i);
  std::int64_t const row = row_of_columns(s, i);
  // One address serves all loads with constant offsets.
  float const* const o = ptx::opaque(state_of_row<Cfg>(s.args, row) + 8 * head_of_column(s, 0) + s.g);
  float2 const* const sums = ptx::opaque(s.args.state_sum + row * 16 + head_of_column(s, 0));
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float2 const state = works ? sums[e] : float2{kNoLeaf, 0.0f};
    columns.max[e] = state.x;
    columns.sum[e] = s.g == 0 ? state.y : 0.0f;
    update_column_reference(columns, e);
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTileRows; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        out_tile(s, i, tile)[2 * half + e] = works ? o[(2 * tile + half) * 8 * Cfg::kUnitHeads + 8 * e] : 0.0f;
      }
    }
  }
}

// P of a block, rounded to the dtype, as operand B, and its sums.
template <class Cfg>
__device__ __forceinline__ void exponentiate_columns(float const (&x)[4], uint32_t (&p)[2], float (&sum)[2]) {
  float y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) y[e] = ptx::exp2_movable(x[e]);
  sum[0] = y[0] + y[2];
  sum[1] = y[1] + y[3];
  p[0] = ptx::transpose_matrix(Pairs<typename Cfg::Element>::pack(y[0], y[1]));
  p[1] = ptx::transpose_matrix(Pairs<typename Cfg::Element>::pack(y[2], y[3]));
}

// Whether the child of element e of a fragment of products is expanded. `masked` is shifted to the thread's first child.
__device__ __forceinline__ bool is_masked(uint32_t masked, int e) { return masked >> e / 2 * 8 & 1u; }

// Computes exponents again, from raw scores, in which keys may have scales of their own. The bits are the same unless a
// score of the query exceeds a maximum by more than kSlack; then the maximum is updated, and what was summed up to then
// is rescaled. Children past the rightmost candidate take no part, nor do expanded ones, nor queries that do not take
// the block.
template <bool kBottom, class Cfg>
__device__ __forceinline__ void recompute_unit(State<Cfg>& s, int i, bool taken, uint32_t masked, uint32_t scales,
                                               float (&raw)[4], uint32_t (&p)[2], float (&sum)[2]) {
  Columns& columns = s.columns[i];
  float x[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int const child = s.g + e / 2 * 8;
    raw[e] *= row_scale::own_scale(ptx::load_shared_float(scales + child * 4));
    bool const left_out = kBottom ? child > column_position(s, i) : is_masked(masked, e);
    if (!taken || left_out) raw[e] = -kInfinity;
    x[e] = taken ? fmaf(raw[e], columns.unit[e % 2], -columns.reference[e % 2]) : -kInfinity;
  }
  // The lanes that have columns of the first query of the unit.
  constexpr uint32_t kLanes = Cfg::kPerUnit == 1 ? kFullWarp : 0x33333333u;
  uint32_t const overflowing = __ballot_sync(kFullWarp, column_overflows(x));
  if (overflowing != 0) {
    bool const own = (overflowing & kLanes << 2 * of_columns(s)) != 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float const largest = column_max(fmaxf(raw[e], raw[2 + e]));
      if (own && (largest - columns.max[e]) * columns.unit[e] > kSlack) {
        float const factor = ptx::exp2_movable((columns.max[e] - largest) * columns.unit[e]);
        columns.max[e] = largest;
        update_column_reference(columns, e);
        columns.sum[e] *= factor;
#pragma unroll
        for (int tile = 0; tile < Cfg::kValueTileRows; ++tile) {
          out_tile(s, i, tile)[e] *= factor;
          out_tile(s, i, tile)[2 + e] *= factor;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (own) x[e] = (raw[e] - columns.max[e % 2]) * columns.unit[e % 2];
    }
  }
  __syncwarp();
  exponentiate_columns<Cfg>(x, p, sum);
}

// Multiplies the units of kUnits with the block in `slot`, adds its values, and rotates the queries that took it.
template <bool kBottom, int kUnits, bool kAll, class Cfg>
__device__ __forceinline__ void attend_units(State<Cfg>& s, uint32_t slot, uint32_t const (&query_masks)[2]) {
  uint32_t masked[2] = {};
  if constexpr (!kBottom) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has_unit(kUnits, i) || !unit_takes<Cfg, kAll>(query_masks[i], of_columns(s))) continue;
      masked[i] = static_cast<uint32_t>(s.args.expanded[block_of_columns(s, i)]) >> s.g;
    }
  }
  float const scale = fabsf(ptx::load_shared_float(slot + Cfg::kScaleOffset));
  float products[2][4] = {};
  multiply_units<kUnits>(s, slot, products);
  uint32_t p[2][2];
  float sum[2][2];
  bool again = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!has_unit(kUnits, i)) continue;
    Columns const& columns = s.columns[i];
    bool const taken = unit_takes<Cfg, kAll>(query_masks[i], of_columns(s));
    float const factor[2] = {scale * columns.unit[0], scale * columns.unit[1]};
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = fmaf(products[i][e], factor[e % 2], -columns.reference[e % 2]);
      if (!taken || (!kBottom && is_masked(masked[i], e))) x[e] = -kInfinity;
    }
    again = again | column_overflows(x) | (kBottom & taken & (column_position(s, i) < kSiblings));
    exponentiate_columns<Cfg>(x, p[i], sum[i]);
  }
  rotate_on<kUnits, kAll>(s, query_masks);
  if (__any_sync(kFullWarp, again)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (has_unit(kUnits, i)) {
        recompute_unit<kBottom>(s, i, unit_takes<Cfg, kAll>(query_masks[i], of_columns(s)), masked[i],
                                slot + Cfg::kScaleOffset, products[i], p[i], sum[i]);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < Cfg::kValueTileRows; ++tile) {
    uint32_t values[4];
    load_fragment(values, slot + s.rope.fragment_lane + Cfg::kValueOffset + tile * kFragmentBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (has_unit(kUnits, i)) Pairs<typename Cfg::Element>::mma(out_tile(s, i, tile), values, p[i][0], p[i][1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!has_unit(kUnits, i)) continue;
    s.columns[i].sum[0] += sum[i][0];
    s.columns[i].sum[1] += sum[i][1];
  }
  advance_units<kUnits, kAll>(s, query_masks);
}

// The state of a unit for the layer below. No branches, as in write_unit.
template <class Cfg>
__device__ __forceinline__ void write_unit_state(State<Cfg>& s, int i) {
  Columns& columns = s.columns[i];
  bool const works = query_works(s, ptx::opaque(query_of_columns(s, i)));
  std::int64_t const row = row_of_columns(s, i);
  float* const o = state_of_row<Cfg>(s.args, row) + 8 * head_of_column(s, 0) + s.g;
  float* const sums = reinterpret_cast<float*>(s.args.state_sum + row * 16 + head_of_column(s, 0));
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    columns.sum[e] = column_sum(columns.sum[e]);
    ptx::store_global_if(works & (s.g == 0), sums + 2 * e, columns.max[e]);
    ptx::store_global_if(works & (s.g == 0), sums + 2 * e + 1, columns.sum[e]);
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTileRows; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store_global_if(works, o + (2 * tile + half) * 8 * Cfg::kUnitHeads + 8 * e, out_tile(s, i, tile)[2 * half + e]);
      }
    }
  }
}

// Writes the results of a unit. There are no branches, not even by &&, because lanes meet to sum and to transpose.
template <class Cfg>
__device__ __forceinline__ void write_unit(State<Cfg>& s, int i) {
  constexpr float kLn2 = static_cast<float>(host::kLn2);
  Columns& columns = s.columns[i];
  // The tile is looked up again, because it would occupy registers throughout the loop.
  uint32_t const query = ptx::opaque(query_of_columns(s, i));
  bool const works = query_works(s, query);
  std::int64_t const first = first_head_of(s, query);
  float inverse[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    columns.sum[e] = column_sum(columns.sum[e]);
    int const head = head_of_column(s, e);
    inverse[e] = 1.0f / (columns.sum[e] + sink_weight(s, head, columns.max[e], columns.unit[e]));
    ptx::store_global_if(
        works & (s.g == e) & (head < s.args.G), s.args.lse + first + head,
        infinite_to_nan(fmaf(columns.max[e], columns.unit[e] * kLn2, log2f(columns.sum[e]) * kLn2)));
  }
  int const g = static_cast<int>(ptx::lane_index()) / 4;
  int const head = g % Cfg::kUnitHeads;
  uint32_t const query_of_row = first_query(s) + i * Cfg::kPerUnit + g / Cfg::kUnitHeads;
  bool const row_works = query_works(s, query_of_row);
  std::int64_t const out = first_head_of(s, query_of_row) + head;
  uint32_t* const row =
      reinterpret_cast<uint32_t*>(static_cast<typename Cfg::Element*>(s.args.out) + out * Cfg::kV) + s.tq;
#pragma unroll
  for (int tile = 0; tile < Cfg::kValueTileRows; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float const(&o)[4] = out_tile(s, i, tile);
      uint32_t const word = ptx::transpose_matrix(Pairs<typename Cfg::Element>::pack(
          infinite_to_nan(o[2 * half] * inverse[0]), infinite_to_nan(o[2 * half + 1] * inverse[1])));
      ptx::store_global_4B_if(row_works & (head < s.args.G), row + 8 * tile + 4 * half, word);
    }
  }
}

// The block of rank `rank` of a query of the warp holds values that are not finite: O becomes NaN where the query
// attended one.
template <class Cfg>
__device__ __forceinline__ void propagate_nan_swapab(State<Cfg>& s, int query, int rank) {
  QueryTile const tile = own_tile(s);
  std::int64_t const in_block = first_query(s) + query;
  std::int64_t const parent = s.args.parents[(tile_of_warp(s) * kQueryTile + in_block) * s.args.top_k + rank];
  int const last = candidates_of<Cfg>(s.args, tile.t + in_block) - 1;
  uint32_t masked = rank == last / kSiblings ? causal_mask(last % kSiblings) : 0u;
  if (s.args.layer > 0) {
    masked = s.args.expanded[(tile_of_warp(s) * kQueryTile + in_block) * (s.args.width / kSiblings) + rank];
  }
  tree::pack::Source const& values = s.args.values;
  typename Cfg::Element const* const rows =
      static_cast<typename Cfg::Element const*>(values.in) + tile.bh / s.args.H_kv * values.stride_b +
      (first_row(s) + parent * kSiblings) * values.stride_n + tile.bh % s.args.H_kv * values.stride_h + s.g;
  bool const own = of_columns(s) == query % Cfg::kPerUnit;
#pragma unroll 1
  for (uint32_t open = 0xffffu & ~masked; open != 0; open &= open - 1) {
    typename Cfg::Element const* const row = rows + (__ffs(open) - 1) * values.stride_n;
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTileRows; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!own || isfinite(static_cast<float>(row[16 * tile + 8 * half]))) continue;
        if (query / Cfg::kPerUnit == 0) {
          out_tile(s, 0, tile)[2 * half] = out_tile(s, 0, tile)[2 * half + 1] = not_a_number();
        }
        if (query / Cfg::kPerUnit == 1) {
          out_tile(s, 1, tile)[2 * half] = out_tile(s, 1, tile)[2 * half + 1] = not_a_number();
        }
      }
    }
  }
}

// Looks up the blocks that hold values which are not finite (epilogue.cuh).
template <class Cfg>
__device__ __forceinline__ void propagate_nan_swapab(State<Cfg>& s) {
  std::int64_t const list = static_cast<std::int64_t>(tile_of_warp<Cfg>(s.args, 0)) * kQueryTile * s.args.top_k;
  int const count = s.args.union_count[tile_of_warp<Cfg>(s.args, 0)];
  int rank[Cfg::kQueriesPerWarp] = {};
#pragma unroll 1
  for (int entry = 0; entry < count; ++entry) {
    uint32_t const query_masks = static_cast<uint32_t>(
        mask_of_entry<Cfg>(s.args, static_cast<uint32_t>(list) + entry) >> Cfg::kQueriesPerWarp * s.warp);
    char const* const block = packed_blocks(s) + own<Cfg>(s.args).union_nodes[list + entry] * s.args.block_bytes;
    bool const negative = *reinterpret_cast<int const*>(block) < 0;
#pragma unroll
    for (int query = 0; query < Cfg::kQueriesPerWarp; ++query) {
      if ((query_masks >> query & 1u) == 0) continue;
      if (negative) propagate_nan_swapab(s, query, rank[query]);
      rank[query] += 1;
    }
  }
}

template <bool kBottom, class Cfg>
__device__ __forceinline__ void attend_units_stream(State<Cfg>& s, Ring<Cfg> const& ring) {
  RingPosition<Cfg::kStages> at;
  Ring<Cfg> const own(ptx::opaque(ring.stages));
  uint32_t next_query_mask = 0;  // of the stage behind the one at hand, which holds it, too
  if (s.stages > 0 && s.active) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    next_query_mask = ptx::load_shared_4B(own.mask(own.stage(at.slot), s.warp));
  }
#pragma unroll 1
  for (int stages = s.stages; stages > 0; --stages) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    uint32_t const stage = own.stage(at.slot);
    uint32_t const query_mask = next_query_mask;
    if (s.active) next_query_mask = ptx::load_shared_4B(own.next_mask(stage, s.warp));
    each_block(s, stage, query_mask, [&](auto units, auto all, uint32_t slot, uint32_t const (&query_masks)[2]) {
      attend_units<kBottom, decltype(units)::value, decltype(all)::value>(s, slot, query_masks);
    });
    release_stage(s, stage);
    at = at.ahead(1);
  }
  if (!s.active) return;
  if (*s.args.has_nonfinite_v != 0) propagate_nan_swapab(s);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (kBottom) {
      write_unit(s, i);
    } else {
      write_unit_state(s, i);
    }
  }
}

// The consumer's loop.
template <class Cfg>
__device__ __forceinline__ void attend_selected_swapab(State<Cfg>& s, Ring<Cfg> const& ring) {
  save_units(s, ring);
  if (s.active) {
    read_unit_state(s, 0);
    read_unit_state(s, 1);
  }
  if (s.args.layer == 0) {
    attend_units_stream<true>(s, ring);
  } else {
    attend_units_stream<false>(s, ring);
  }
}

}  // namespace htree_cuda::sm90::htree_fwd

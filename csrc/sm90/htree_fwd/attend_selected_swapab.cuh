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

// How the exponents of a block come about.
enum class Scores {
  kExact,    // products of its keys
  kRounded,  // the same, as they would be kept
  kKept,     // by the score pass
};

// Kept scores on their way to shared memory, which holds no queries then: the records of the next ranks of each query of
// the warp, and behind them the candidates that are expanded. A lane copies 16 bytes of a record of one query.
template <class Cfg>
struct KeptScores {
  static constexpr int kRecords = Cfg::kK / 32;  // of a query
  static constexpr int kRecordBytes = kSiblings * 2 * Cfg::kUnitHeads;
  static constexpr int kQueryBytes = kRecords * kRecordBytes;
  static constexpr int kLanes = kRecordBytes / 16;  // that copy for a query
  static constexpr int kExpandedOffset = Cfg::kQueriesPerWarp * kQueryBytes;
  static constexpr int kExpandedBytes = 2 * kMaxKeptTopK;  // of a query
  static constexpr int kWarpBytes = Cfg::kSteps * 512;
  static_assert(kLanes * Cfg::kQueriesPerWarp == 32 && (kRecords & (kRecords - 1)) == 0);
  static_assert(kExpandedOffset + Cfg::kQueriesPerWarp * kExpandedBytes <= kWarpBytes);

  char const* from = nullptr;  // what this lane copies next
  int rank = 0;                // of that

  static __device__ __forceinline__ int query() { return static_cast<int>(ptx::lane_index()) / kLanes; }
  static __device__ __forceinline__ int lane_bytes() { return static_cast<int>(ptx::lane_index()) % kLanes * 16; }

  static __device__ __forceinline__ uint32_t shared(State<Cfg> const& s) { return s.rope.shared + s.warp * kWarpBytes; }

  __device__ __forceinline__ void begin(State<Cfg> const& s) {
    std::int64_t const block =
        (tile_of_warp(s) * kQueryTile + first_query(s) + query()) * (s.args.width / kSiblings);
    from = reinterpret_cast<char const*>(s.args.kept_scores) + block * kRecordBytes + lane_bytes();
    bool const works = query_works(s, first_query(s) + query());
    rank = works ? 0 : s.args.top_k;
    for (int at = works ? lane_bytes() : 2 * s.args.top_k; at < 2 * s.args.top_k; at += kRecordBytes) {
      ptx::copy_async_16B(shared(s) + kExpandedOffset + query() * kExpandedBytes + at,
                          reinterpret_cast<char const*>(s.args.expanded + block) + at, 0);
    }
#pragma unroll
    for (int i = 0; i < kRecords; ++i) copy_next(s, true);
  }

  // Copies the next record where `wanted`, and there is one.
  __device__ __forceinline__ void copy_next(State<Cfg> const& s, bool wanted) {
    if (wanted && rank < s.args.top_k) {
      ptx::copy_async_16B(shared(s) + query() * kQueryBytes + rank % kRecords * kRecordBytes + lane_bytes(), from, 0);
      from += kRecordBytes;
      rank += 1;
    }
    ptx::copy_async_commit();
  }

  // Until the records of the block at hand have come, of all queries that take it.
  static __device__ __forceinline__ void wait() {
    ptx::copy_async_wait<kRecords - 1>();
    __syncwarp();
  }

  // The scores of this thread's children and columns of a unit, and the expanded candidates from its first child on.
  static __device__ __forceinline__ uint32_t load(State<Cfg> const& s, int i, float (&x)[4]) {
    int const rank = ~(column_position(s, i) >> kLog2Siblings) & (kMaxKeptTopK - 1);  // less a multiple of kRecords
    int const query = i * Cfg::kPerUnit + of_columns(s);
    int const lane = s.g * (Cfg::kUnitHeads / 2) + s.tq % (Cfg::kUnitHeads / 2);
    float2 const words =
        ptx::load_shared_8B(shared(s) + query * kQueryBytes + rank % kRecords * kRecordBytes + lane * 8);
    unpack_scores({__float_as_uint(words.x), __float_as_uint(words.y)}, x);
    int const at = (rank & (s.args.top_k - 1)) * 2;
    uint32_t const two = ptx::load_shared_4B(shared(s) + kExpandedOffset + query * kExpandedBytes + (at & ~3));
    return two >> ((at & 2) * 8 + s.g);
  }
};

// Whether the child of element e of a fragment of products is expanded. `masked` is shifted to the thread's first child.
__device__ __forceinline__ bool is_masked(uint32_t masked, int e) { return masked >> e / 2 * 8 & 1u; }

// Computes exponents again, from products, in which keys may have scales of their own, or from rounded scores. The bits are the same unless a
// score of the query exceeds a maximum by more than kSlack; then the maximum is updated, and what was summed up to then
// is rescaled. Children past the rightmost candidate take no part, nor do expanded ones, nor queries that do not take
// the block.
template <bool kBottom, Scores kScores, class Cfg>
__device__ __forceinline__ void recompute_unit(State<Cfg>& s, int i, bool taken, uint32_t masked, uint32_t scales,
                                               float (&raw)[4], uint32_t (&p)[2], float (&sum)[2]) {
  Columns& columns = s.columns[i];
  constexpr bool kRounds = kScores != Scores::kExact;
  if constexpr (!kRounds) {
#pragma unroll
    for (int e = 0; e < 4; ++e) raw[e] *= row_scale::own_scale(ptx::load_shared_float(scales + (s.g + e / 2 * 8) * 4));
  }
  float x[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    bool const left_out = kBottom ? s.g + e / 2 * 8 > column_position(s, i) : is_masked(masked, e);
    if (!taken || left_out) raw[e] = -kInfinity;
    if constexpr (kRounds) {
      x[e] = taken ? raw[e] - columns.reference[e % 2] : -kInfinity;
      raw[e] /= columns.unit[e % 2];
    } else {
      x[e] = taken ? fmaf(raw[e], columns.unit[e % 2], -columns.reference[e % 2]) : -kInfinity;
    }
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

// Multiplies the units of kUnits with the block in `slot`, or takes their kept scores, adds its values, and rotates the
// queries that took it.
template <bool kBottom, Scores kScores, int kUnits, bool kAll, class Cfg>
__device__ __forceinline__ void attend_units(State<Cfg>& s, uint32_t slot, uint32_t const (&query_masks)[2],
                                             KeptScores<Cfg>& kept) {
  constexpr bool kKept = kScores == Scores::kKept;
  uint32_t masked[2] = {};
  float scale = 0.0f;
  float products[2][4] = {};
  if constexpr (kKept) {
    kept.wait();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (has_unit(kUnits, i)) masked[i] = kept.load(s, i, products[i]);
    }
  } else {
    if constexpr (!kBottom) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!has_unit(kUnits, i) || !unit_takes<Cfg, kAll>(query_masks[i], of_columns(s))) continue;
        masked[i] = static_cast<uint32_t>(s.args.expanded[block_of_columns(s, i)]) >> s.g;
      }
    }
    scale = fabsf(ptx::load_shared_float(slot + Cfg::kScaleOffset));
    multiply_units<kUnits>(s, slot, products);
  }
  if constexpr (kScores == Scores::kRounded) {
    apply_uneven_scales_to_columns(s, scale, slot + Cfg::kScaleOffset, products);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has_unit(kUnits, i)) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) products[i][e] *= scale * s.columns[i].unit[e % 2];
      round_as_kept(products[i]);
    }
  }
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
    if constexpr (kScores != Scores::kExact) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = products[i][e] - columns.reference[e % 2];
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = fmaf(products[i][e], factor[e % 2], -columns.reference[e % 2]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!taken || (!kBottom && is_masked(masked[i], e))) x[e] = -kInfinity;
    }
    again = again | column_overflows(x) | (kBottom & taken & (column_position(s, i) < kSiblings));
    exponentiate_columns<Cfg>(x, p[i], sum[i]);
  }
  if constexpr (!kKept) rotate_on<kUnits, kAll>(s, query_masks);
  if (__any_sync(kFullWarp, again)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (has_unit(kUnits, i)) {
        recompute_unit<kBottom, kScores>(s, i, unit_takes<Cfg, kAll>(query_masks[i], of_columns(s)), masked[i],
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
  if constexpr (kKept) {
    int const query = kept.query();
    uint32_t const unit = query < Cfg::kPerUnit ? query_masks[0] : query_masks[1];
    __syncwarp();  // every lane has read the records that are overwritten
    kept.copy_next(s, kAll || (unit >> query % Cfg::kPerUnit * Cfg::kQueryBits & 1u) != 0);
  }
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

template <bool kBottom, Scores kScores, class Cfg>
__device__ __forceinline__ void attend_units_stream(State<Cfg>& s, Ring<Cfg> const& ring) {
  RingPosition<Cfg::kStages> at;
  KeptScores<Cfg> kept;
  if (kScores == Scores::kKept && s.active) kept.begin(s);
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
    each_block<kScores != Scores::kKept>(
        s, stage, query_mask, [&](auto units, auto all, uint32_t slot, uint32_t const (&query_masks)[2]) {
          attend_units<kBottom, kScores, decltype(units)::value, decltype(all)::value>(s, slot, query_masks, kept);
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
  bool const kept = uses_kept_scores<Cfg>(s.args);
  if (kept) {
    s.rope.shared = ring.stages - Cfg::kRingOffset;
    s.rope.fragment_lane = ptx::opaque(s.lane * 16);
  } else {
    save_units(s, ring);
  }
  if (s.active) {
    read_unit_state(s, 0);
    read_unit_state(s, 1);
  }
  if (s.args.layer == 0) return attend_units_stream<true, Scores::kExact>(s, ring);
  if constexpr (!Cfg::kRestartsAlways) {
    if (kept) return attend_units_stream<false, Scores::kKept>(s, ring);
    if (s.args.rounds_scores) return attend_units_stream<false, Scores::kRounded>(s, ring);
  }
  attend_units_stream<false, Scores::kExact>(s, ring);
}

}  // namespace htree_cuda::sm90::htree_fwd

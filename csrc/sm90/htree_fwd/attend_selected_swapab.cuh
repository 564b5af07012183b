// Attend passes at the bottom for groups of 8 heads or fewer, in bf16: two or four neighbouring queries share a warp
// (swap A/B).
//
// The children of a block are the rows of its products and heads are columns: scores are S^T = K q^T, and O^T = V^T
// P^T, both m16n8k16. The 8 columns of a product are a unit, of one query or of two with 4 heads or fewer; a warp has
// two units, which share what the warp reads of shared memory. A unit multiplies where one of its queries takes the
// block; P of a query that does not take it is zero, and that query does not rotate. In fragments of products lane 4 g
// + t has children g and g + 8 of columns 2 t and 2 t + 1, and movmatrix brings P into operand order. In fragments of
// queries the lane has column g, so a lane may hold one query of a unit there and the other one here. At the bottom no
// candidate is expanded.
//
// A query rotates from rank to rank by packed fp16 arithmetic, two pairs of elements at a time, with a rotation in
// shared memory that all queries read. It restarts from its unrotated self every `restart_period` ranks, as in
// rope_inplace.cuh.
//
// Whatever is decided for a query follows from its own data: a vote for another query leads to the same bits.
#pragma once

#include "epilogue.cuh"
#include "load_query.cuh"

namespace htree_cuda::sm90::htree_fwd {

// A set of units has bit i for unit i.
inline constexpr int kBothUnits = 3;

// The query of a unit that this thread's column in fragments of queries belongs to; of_columns() is that of its columns
// of products.
template <class Cfg>
__device__ __forceinline__ int of_rows(State<Cfg> const& s) { return Cfg::kPerUnit == 1 ? 0 : s.g / Cfg::kUnitHeads; }

template <class Cfg>
__device__ __forceinline__ int of_columns(State<Cfg> const& s) {
  return Cfg::kPerUnit == 1 ? 0 : 2 * s.tq / Cfg::kUnitHeads;
}

template <class Cfg>
__device__ __forceinline__ uint32_t query_of_columns(State<Cfg> const& s, int i) {
  return first_query(s) + i * Cfg::kPerUnit + of_columns(s);
}

template <class Cfg>
__device__ __forceinline__ bool query_works(State<Cfg> const& s, uint32_t query) {
  QueryTile const block = own_tile(s);
  return (tile_of_warp(s) >= 0) & block.has(query) & htree_fwd::works<Cfg>(s.args, block.t + query);
}

template <class Cfg>
__device__ __forceinline__ int column_position(State<Cfg> const& s, int i) {
  return Cfg::kPerUnit == 1 ? row_position(s, i) : s.columns[i].position;
}

template <class Cfg>
__device__ __forceinline__ int head_of_column(State<Cfg> const& s, int e) { return (2 * s.tq + e) % Cfg::kUnitHeads; }

// Whether a query of a unit takes the block. kAll: all queries of the warp do.
template <class Cfg, bool kAll = false>
__device__ __forceinline__ bool unit_takes(uint32_t unit, int query) {
  return kAll || Cfg::kPerUnit == 1 || (unit >> query * Cfg::kQueryBits & 1u) != 0;
}

__device__ __forceinline__ constexpr bool has_unit(int units, int i) { return units >> i & 1; }

template <class Cfg>
__device__ __forceinline__ auto& out_tile(State<Cfg>& s, int i, int tile) {
  return s.o[i * Cfg::kValueTileRows + tile];
}

__device__ __forceinline__ float column_max(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lanes));
  return x;
}

__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(kFullWarp, x, lanes);
  return x;
}

__device__ __forceinline__ void update_column_reference(Columns& columns, int e) {
  float const exponent = columns.max[e] * columns.unit[e];
  columns.reference[e] = fabsf(exponent) <= kNear ? exponent : not_a_number();
}

// Reads the state that the layer above left: its fragments of O hold the columns of O^T as rows.
template <class Cfg>
__device__ __forceinline__ void begin_columns(State<Cfg>& s, int i) {
  Columns& columns = s.columns[i];
  QueryTile const block = own_tile(s);
  std::int64_t const t = block.t + query_of_columns(s, i);
  bool const works = query_works(s, query_of_columns(s, i));
  columns.position = works ? candidates_of<Cfg>(s.args, t) - 1 : -1;
  std::int64_t const row = tile_of_warp(s) * kQueryTile + query_of_columns(s, i);
  // One address serves all loads with constant offsets.
  float const* const o = ptx::opaque(reinterpret_cast<float const*>(s.args.state_out + row * (Cfg::kV / 8) * 32) +
                                     16 * head_of_column(s, 0) + 4 * (s.g / 2) + s.g % 2);
  float2 const* const sums = ptx::opaque(s.args.state_sum + row * 16 + head_of_column(s, 0));
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    columns.unit[e] = __shfl_sync(kFullWarp, s.unit[i], 4 * (2 * s.tq + e));
    float2 const state = works ? sums[e] : float2{kNoLeaf, 0.0f};
    columns.max[e] = state.x;
    columns.sum[e] = s.g == 0 ? state.y : 0.0f;
    update_column_reference(columns, e);
#pragma unroll
    for (int tile = 0; tile < Cfg::kValueTileRows; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        out_tile(s, i, tile)[2 * half + e] = works ? o[(2 * tile + half) * 128 + e * 16] : 0.0f;
      }
    }
  }
}

template <class Cfg>
__device__ __forceinline__ uint32_t saved_unit(State<Cfg> const& s, int i) {
  return s.rope.shared + s.warp * (Cfg::kSteps * 512) + i * (Cfg::kSteps * 256) + ptx::lane_index() * 8;
}

// Where the rotations of the query of this thread's column are fetched to.
template <class Cfg>
__device__ __forceinline__ uint32_t fetched_unit_rotation(State<Cfg> const& s, int i) {
  return s.rope.shared + Cfg::kRotationOffset + s.warp * Cfg::kRotationBytes +
         (i * Cfg::kPerUnit + of_rows(s)) * Cfg::kPackedBytes;
}

// Fetches the rotations from which a query of unit i restarts that many ranks further on, while the ranks before that
// pass. The lanes that have columns of the query copy them.
template <class Cfg>
__device__ __forceinline__ void fetch_unit_rotation(State<Cfg> const& s, int i, int ranks, bool wanted) {
  int const from = row_position(s, i) - ranks * kSiblings;
  int const lane = static_cast<int>(ptx::lane_index()) % (32 / Cfg::kPerUnit);
  if (wanted && from >= 0 && lane < Cfg::kPackedBytes / 16) {
    ptx::copy_async_16B(fetched_unit_rotation(s, i) + lane * 16,
                        reinterpret_cast<char const*>(own<Cfg>(s.args).packed_restart_rotations) +
                            static_cast<std::int64_t>(from) * Cfg::kPackedBytes + lane * 16, 0);
  }
  ptx::copy_async_commit();
}

// Rotates the elements x and y of two pairs by angles with cosines c and sines s.
__device__ __forceinline__ void rotate_pairs(half2 c, half2 s, half2& x, half2& y) {
  half2 const sx = __hmul2(s, x);
  x = __hfma2(c, x, __hneg2(__hmul2(s, y)));
  y = __hfma2(c, y, sx);
}

// Whether the query of this thread's column restarts at the block at hand: at its first block, and then once a period.
// The period and top_k are powers of two, and the period is the smaller one (dispatch.h).
template <class Cfg>
__device__ __forceinline__ bool restarts(State<Cfg> const& s, int i) {
  return (((row_position(s, i) >> kLog2Siblings) + 1) & (s.args.restart_period - 1)) == 0;
}

template <int i, class Cfg>
__device__ __forceinline__ void restart_unit(State<Cfg>& s, bool restart) {
  ptx::copy_async_wait<0>();
  uint32_t const rotations = fetched_unit_rotation(s, i) + static_cast<uint32_t>(s.tq) * (Cfg::kSteps * 8);
#pragma unroll
  for (int step = 0; step < Cfg::kSteps; step += 2) {
    if (step % 4 == 0) __syncwarp();  // keeps the loads of all steps from being issued at once: registers
    uint4 const words = ptx::load_shared_16B(rotations + step * 8);
    half2 const(&of)[4] = reinterpret_cast<half2 const(&)[4]>(words);
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      float2 const saved = ptx::load_shared_8B(saved_unit(s, i) + (step + next) * 256);
      half2 x = reinterpret_cast<half2 const&>(saved.x);
      half2 y = reinterpret_cast<half2 const&>(saved.y);
      rotate_pairs(of[2 * next], of[2 * next + 1], x, y);
      if (Cfg::kPerUnit > 1 && !restart) continue;
      s.q[step + next][2 * i] = x;
      s.q[step + next][2 * i + 1] = y;
    }
  }
  __syncwarp();
  fetch_unit_rotation(s, i, s.args.restart_period, restart);
}

// Restarts those queries that take the block at hand and restart there.
template <class Cfg>
__device__ __forceinline__ void rotate_units_to(State<Cfg>& s, uint32_t const (&units)[2]) {
  if constexpr (Cfg::kPerUnit == 1) {
    if (units[0] != 0 && restarts(s, 0)) restart_unit<0>(s, true);
    if (units[1] != 0 && restarts(s, 1)) restart_unit<1>(s, true);
  } else {
    bool const restart[2] = {restarts(s, 0) && unit_takes<Cfg>(units[0], of_rows(s)),
                             restarts(s, 1) && unit_takes<Cfg>(units[1], of_rows(s))};
    if (!__any_sync(kFullWarp, restart[0] || restart[1])) return;
    if (__any_sync(kFullWarp, restart[0])) restart_unit<0>(s, restart[0]);
    if (__any_sync(kFullWarp, restart[1])) restart_unit<1>(s, restart[1]);
  }
}

// Rotates the queries that take the block to their next rank, 16 positions back.
template <int kUnits, bool kAll, class Cfg>
__device__ __forceinline__ void rotate_on(State<Cfg>& s, uint32_t const (&query_masks)[2]) {
  uint32_t const rotations = s.rope.shared + Cfg::kStepOffset + static_cast<uint32_t>(s.tq) * Cfg::kStepBytes;
  bool const rotated[2] = {unit_takes<Cfg, kAll>(query_masks[0], of_rows(s)),
                           unit_takes<Cfg, kAll>(query_masks[1], of_rows(s))};
#pragma unroll
  for (int step = 0; step < Cfg::kSteps; step += 2) {
    uint4 const words = ptx::load_shared_16B(rotations + step * 8);
    half2 const(&of)[4] = reinterpret_cast<half2 const(&)[4]>(words);
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      half2(&q)[4] = s.q[step + next];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!has_unit(kUnits, i)) continue;
        half2 x = q[2 * i], y = q[2 * i + 1];
        rotate_pairs(of[2 * next], __hneg2(of[2 * next + 1]), x, y);
        q[2 * i] = rotated[i] ? x : q[2 * i];
        q[2 * i + 1] = rotated[i] ? y : q[2 * i + 1];
      }
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void load_operand_a(State<Cfg> const& s, uint32_t (&a)[4], uint32_t address) {
  uint4 const x = ptx::load_shared_16B(address + s.rope.fragment_lane);
  a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
}

__device__ __forceinline__ bool column_overflows(float const (&x)[4]) {
  return !(ptx::max_or_nan(ptx::max_or_nan(x[0], x[1]), ptx::max_or_nan(x[2], x[3])) <= kSlack);
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

// Computes exponents again, from raw scores, in which keys may have scales of their own. The bits are the same unless a
// score of the query exceeds a maximum by more than kSlack; then the maximum is updated, and what was summed up to then
// is rescaled. Children past the rightmost candidate take no part, nor do queries that do not take the block.
template <class Cfg>
__device__ __forceinline__ void recompute_unit(State<Cfg>& s, int i, bool taken, uint32_t scales, float (&raw)[4],
                                               uint32_t (&p)[2], float (&sum)[2]) {
  Columns& columns = s.columns[i];
  float x[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int const child = s.g + e / 2 * 8;
    raw[e] *= row_scale::own_scale(ptx::load_shared_float(scales + child * 4));
    if (!taken || child > column_position(s, i)) raw[e] = -kInfinity;
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
template <int kUnits, bool kAll = false, class Cfg>
__device__ __forceinline__ void attend_units(State<Cfg>& s, uint32_t slot, uint32_t const (&query_masks)[2]) {
  float const scale = fabsf(ptx::load_shared_float(slot + Cfg::kScaleOffset));
  float products[2][4] = {};
#pragma unroll
  for (int step = 0; step < Cfg::kSteps; ++step) {
    uint32_t keys[4];
    load_operand_a(s, keys, slot + Cfg::kKeyOffset + step * kFragmentBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto const& q = reinterpret_cast<uint32_t const(&)[4]>(s.q[step]);
      if (has_unit(kUnits, i)) ptx::mma_fp16(products[i], keys, q[2 * i], q[2 * i + 1]);
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
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[e] = fmaf(products[i][e], factor[e % 2], -columns.reference[e % 2]);
      if (!taken) x[e] = -kInfinity;
    }
    again = again | column_overflows(x) | (taken & (column_position(s, i) < kSiblings));
    exponentiate_columns<Cfg>(x, p[i], sum[i]);
  }
  rotate_on<kUnits, kAll>(s, query_masks);
  if (__any_sync(kFullWarp, again)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (has_unit(kUnits, i)) {
        recompute_unit(s, i, unit_takes<Cfg, kAll>(query_masks[i], of_columns(s)), slot + Cfg::kScaleOffset,
                       products[i], p[i], sum[i]);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < Cfg::kValueTileRows; ++tile) {
    uint32_t values[4];
    load_operand_a(s, values, slot + Cfg::kValueOffset + tile * kFragmentBytes);
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
    if constexpr (Cfg::kPerUnit > 1) {
      s.columns[i].position -= unit_takes<Cfg, kAll>(query_masks[i], of_columns(s)) ? kSiblings : 0;
    }
    (i == 0 ? s.position : s.second_position.value) -=
        unit_takes<Cfg, kAll>(query_masks[i], of_rows(s)) ? kSiblings : 0;
  }
}

// Writes the results of a unit. There are no branches, not even by &&, because lanes meet to sum and to transpose.
template <class Cfg>
__device__ __forceinline__ void write_unit(State<Cfg>& s, int i) {
  constexpr float kLogTwo = 0.693147180559945309f;
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
        infinite_to_nan(fmaf(columns.max[e], columns.unit[e] * kLogTwo, log2f(columns.sum[e]) * kLogTwo)));
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
  QueryTile const block = own_tile(s);
  std::int64_t const in_block = first_query(s) + query;
  std::int64_t const parent = s.args.parents[(tile_of_warp(s) * kQueryTile + in_block) * s.args.top_k + rank];
  int const last = candidates_of<Cfg>(s.args, block.t + in_block) - 1;
  int const children = rank == last / kSiblings ? last % kSiblings + 1 : kSiblings;
  tree::pack::Source const& values = s.args.values;
  typename Cfg::Element const* const rows =
      static_cast<typename Cfg::Element const*>(values.in) + block.bh / s.args.H_kv * values.stride_b +
      (first_row(s) + parent * kSiblings) * values.stride_n + block.bh % s.args.H_kv * values.stride_h + s.g;
  bool const own = of_columns(s) == query % Cfg::kPerUnit;
#pragma unroll 1
  for (int child = 0; child < children; ++child) {
    typename Cfg::Element const* const row = rows + child * values.stride_n;
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
  std::int64_t const list = static_cast<std::int64_t>(block_of_warp<Cfg>(s.args, 0)) * kQueryTile * s.args.top_k;
  int const count = s.args.union_count[block_of_warp<Cfg>(s.args, 0)];
  int rank[Cfg::kQueriesPerWarp] = {};
#pragma unroll 1
  for (int entry = 0; entry < count; ++entry) {
    uint32_t const query_masks = static_cast<uint32_t>(
        mask_of_entry<Cfg>(s.args, static_cast<uint32_t>(list) + entry) >> Cfg::kQueriesPerWarp * s.warp);
    char const* const block = packed_parents(s) + own<Cfg>(s.args).union_nodes[list + entry] * s.args.block_bytes;
    bool const negative = *reinterpret_cast<int const*>(block) < 0;
#pragma unroll
    for (int query = 0; query < Cfg::kQueriesPerWarp; ++query) {
      if ((query_masks >> query & 1u) == 0) continue;
      if (negative) propagate_nan_swapab(s, query, rank[query]);
      rank[query] += 1;
    }
  }
}

template <class Cfg>
__device__ __forceinline__ void begin_units(State<Cfg>& s, Ring<Cfg> const& ring) {
  s.rope.shared = ring.stages - Cfg::kRingOffset;
  s.rope.fragment_lane = ptx::opaque(s.lane * 16);
  if (!s.active) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int step = 0; step < Cfg::kSteps; ++step) {
      auto const& x = reinterpret_cast<uint32_t const(&)[4]>(s.q[step]);
      ptx::store_shared_8B(saved_unit(s, i) + step * 256, {x[2 * i], x[2 * i + 1]});
    }
    fetch_unit_rotation(s, i, 0, true);
  }
  begin_columns(s, 0);
  begin_columns(s, 1);
}

// The consumer's loop.
template <class Cfg>
__device__ __forceinline__ void attend_selected_swapab(State<Cfg>& s, Ring<Cfg> const& ring) {
  begin_units(s, ring);
  RingPosition<Cfg::kStages> at;
  Ring<Cfg> const own(ptx::opaque(ring.stages));
  uint32_t next_query_mask = 0;  // of the stage behind the one at hand, which holds it, too
  if (s.groups > 0 && s.active) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    next_query_mask = ptx::load_shared_4B(own.mask(own.stage(at.slot), s.warp));
  }
#pragma unroll 1
  for (int groups = s.groups; groups > 0; --groups) {
    own.barriers.wait_full(at, "htree_fwd consumer: full");
    uint32_t const stage = own.stage(at.slot);
    uint32_t query_mask = next_query_mask;
    if (s.active) next_query_mask = ptx::load_shared_4B(own.next_mask(stage, s.warp));
#pragma unroll 1
    while (query_mask != 0) {
      uint32_t slots = query_mask | query_mask >> Cfg::kQueryBits;
      if constexpr (Cfg::kQueriesPerWarp == 4) slots |= slots >> 2 * Cfg::kQueryBits;
      int const slot = __ffs(slots & ((1u << Cfg::kQueryBits) - 1)) - 1;
      uint32_t const query_masks = query_mask >> slot & Cfg::kOfSlot;
      query_mask &= ~(Cfg::kOfSlot << slot);
      uint32_t const units[2] = {query_masks & Cfg::kOfUnit, query_masks >> Cfg::kUnitBits};
      rotate_units_to(s, units);
      uint32_t const address = stage + slot * Cfg::kSlotBytes;
      if (Cfg::kPerUnit > 1 && query_masks == Cfg::kOfSlot) {
        attend_units<kBothUnits, true>(s, address, units);
      } else if (units[0] != 0 && units[1] != 0) {
        attend_units<kBothUnits>(s, address, units);
      } else if (units[0] != 0) {
        attend_units<1>(s, address, units);
      } else {
        attend_units<2>(s, address, units);
      }
    }
    __syncwarp();
    if (s.lane == 0) barriers::mbarrier_arrive(stage + Cfg::kEmptyOffset);
    at = at.ahead(1);
  }
  if (!s.active) return;
  if (*s.args.has_nonfinite_v != 0) propagate_nan_swapab(s);
  write_unit(s, 0);
  write_unit(s, 1);
}

}  // namespace htree_cuda::sm90::htree_fwd

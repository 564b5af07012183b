// Swap A/B in selected layers, for groups of 8 heads or fewer: what score and attend passes share. Two or four
// neighbouring queries share a warp.
//
// The children of a block are the rows of its products and heads are columns: scores are S^T = K q^T, by m16n8k16. The
// 8 columns of a product are a unit, of one query or of two with 4 heads or fewer; a warp has two units, which share
// what the warp reads of shared memory. A unit multiplies where one of its queries takes the block; a query that does
// not take it does not rotate. In fragments of products lane 4 g + t has children g and g + 8 of columns 2 t and
// 2 t + 1. In fragments of queries the lane has column g, so a lane may hold one query of a unit there and the other
// one here.
//
// A query rotates from rank to rank by packed fp16 arithmetic, two pairs of elements at a time, with a rotation in
// shared memory that all queries read. It restarts from its unrotated self every `restart_period` ranks, as in
// rope_inplace.cuh.
//
// Whatever is decided for a query follows from its own data.
#pragma once

#include <type_traits>

#include "fragments.cuh"
#include "load_query.cuh"
#include "smem.cuh"
#include "softmax.cuh"

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
  QueryTile const tile = own_tile(s);
  return (tile_of_warp(s) >= 0) & tile.has(query) & htree_fwd::works<Cfg>(s.args, tile.t + query);
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

// The row of the query of a unit in importance, expanded candidates and state.
template <class Cfg>
__device__ __forceinline__ std::int64_t row_of_columns(State<Cfg> const& s, int i) {
  return tile_of_warp(s) * kQueryTile + query_of_columns(s, i);
}

// The index of the block at hand in the rows of importance and of expanded candidates.
template <class Cfg>
__device__ __forceinline__ int block_of_columns(State<Cfg> const& s, int i) {
  return s.columns.last_block + i * Cfg::kPerUnit * static_cast<int>(s.args.width / kSiblings) -
         (column_position(s, i) >> kLog2Siblings);
}

// The place of a unit's columns before the first block; -1 where the query has no layer of this kind.
template <class Cfg>
__device__ __forceinline__ bool begin_columns(State<Cfg>& s, int i) {
  bool const works = query_works(s, query_of_columns(s, i));
  std::int64_t const t = own_tile(s).t + query_of_columns(s, i);
  s.columns[i].position = works ? candidates_of<Cfg>(s.args, t) - 1 : -1;
  if (i == 0) {
    s.columns.last_block =
        static_cast<int>(row_of_columns(s, 0) * (s.args.width / kSiblings)) + s.args.top_k - 1;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) s.columns[i].unit[e] = __shfl_sync(kFullWarp, s.unit[i], 4 * (2 * s.tq + e));
  return works;
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
  if constexpr (Cfg::kRestartsAlways) return;
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

__device__ __forceinline__ bool column_overflows(float const (&x)[4]) {
  return !(ptx::max_or_nan(ptx::max_or_nan(x[0], x[1]), ptx::max_or_nan(x[2], x[3])) <= kSlack);
}

// Goes on from the block at hand, which the queries of `query_masks` took.
template <int kUnits, bool kAll, class Cfg>
__device__ __forceinline__ void advance_units(State<Cfg>& s, uint32_t const (&query_masks)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!has_unit(kUnits, i)) continue;
    if constexpr (Cfg::kPerUnit > 1) {
      s.columns[i].position -= unit_takes<Cfg, kAll>(query_masks[i], of_columns(s)) ? kSiblings : 0;
    }
    (i == 0 ? s.position : s.second_position.value) -=
        unit_takes<Cfg, kAll>(query_masks[i], of_rows(s)) ? kSiblings : 0;
  }
}

// Products of the keys in `slot` with the units of kUnits.
template <int kUnits, class Cfg>
__device__ __forceinline__ void multiply_units(State<Cfg>& s, uint32_t slot, float (&products)[2][4]) {
#pragma unroll
  for (int step = 0; step < Cfg::kSteps; ++step) {
    uint32_t keys[4];
    load_fragment(keys, slot + s.rope.fragment_lane + Cfg::kKeyOffset + step * kFragmentBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto const& q = reinterpret_cast<uint32_t const(&)[4]>(s.q[step]);
      if (has_unit(kUnits, i)) ptx::mma_fp16(products[i], keys, q[2 * i], q[2 * i + 1]);
    }
  }
}

// Takes the blocks of a query mask one after the other. take(kUnits, kAll, slot, query_masks) is called for each, with
// constants for the units that take it and for whether all of their queries do.
template <class Cfg, class Take>
__device__ __forceinline__ void each_block(State<Cfg>& s, uint32_t stage, uint32_t query_mask, Take const& take) {
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
      take(std::integral_constant<int, kBothUnits>{}, std::true_type{}, address, units);
    } else if (units[0] != 0 && units[1] != 0) {
      take(std::integral_constant<int, kBothUnits>{}, std::false_type{}, address, units);
    } else if (units[0] != 0) {
      take(std::integral_constant<int, 1>{}, std::false_type{}, address, units);
    } else {
      take(std::integral_constant<int, 2>{}, std::false_type{}, address, units);
    }
  }
}

// Before the first block, apart from the columns: saves the unrotated queries and fetches the first rotations.
template <class Cfg>
__device__ __forceinline__ void save_units(State<Cfg>& s, Ring<Cfg> const& ring) {
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
}

}  // namespace htree_cuda::sm90::htree_fwd

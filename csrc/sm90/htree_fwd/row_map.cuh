// Who a consumer warp works for: its query, or two or four, and where they are in the call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/pairs.cuh"
#include "tiles.cuh"

namespace htree_cuda::sm90::htree_fwd {

// Swap A/B: what this thread knows of a unit, of the query and the heads of its columns 2 tq and 2 tq + 1.
struct Columns {
  float unit[2];
  float max[2];
  float reference[2];
  float sum[2];  // over the children of this thread
  // Score passes: logarithm of the sum, and the rightmost candidate's score, as in State.
  float log_sum[2];
  float right[2];
  int position;  // as State::position, where a unit has several queries
};

struct ColumnPairs {
  Columns of[2];
  // Index of the last block of the first unit's query in the rows of importance and of expanded candidates.
  int last_block;

  __device__ Columns& operator[](int i) { return of[i]; }
  __device__ Columns const& operator[](int i) const { return of[i]; }
};

// What a thread of a consumer warp knows. A warp has 16 rows, which are the heads of one query or of two or four
// neighbouring queries; this thread has parts of rows g and g + 8, its rows 0 and 1.
template <class Cfg>
struct State {
  struct Nothing {};
  struct Each {
    bool first, second;
  };
  struct Position {
    int value;
  };
  // What selected layers add: addresses of operands, and the rotation in place.
  struct Rotation {
    uint32_t shared;         // the shared memory of the CTA
    uint32_t fragment_lane;  // offset of this lane's part of a fragment
    // Ranks until the query restarts, or in half-selected layers blocks left out until then; -1 before the first block.
    int left = -1;
    half2 rotated[Cfg::kReadsValues || Cfg::kSwapAB ? 1 : Cfg::kSteps][4];
    // The matrices that rotate a query to its next rank, or in half-selected layers over a block that it leaves out.
    uint32_t step[Cfg::kSwapAB ? 1 : Cfg::kK / 8];
    uint32_t expanded = 0;  // attend pass: the expanded candidates of the block that waits
    int column = 0;         // score pass: the child whose importance this thread stores
  };

  Args const& args;
  int const lane;
  int const g;
  int const tq;
  uint32_t const warp;
  int stages;    // that pass by
  bool active;   // a query of the warp exists, and this layer is of this kind for it
  // The position of the query as the block at hand sees it is n - 1 - 16 rank. It is below 16 in the query's last block
  // and negative behind it.
  int position;
  int cursor;    // index of the block at hand in the rows of importance and of expanded candidates
  half2 q[Cfg::kSteps][4];
  float unit[2];
  float max[2];        // running maximum as a raw score; in the importance sweep the maximum that the lse has
  float reference[2];  // max * unit, in the importance sweep plus log_sum; NaN where that is too far from zero
  bool far = false;    // importance sweep: the reference of some head is NaN
  // Where queries share a warp, the two rows may belong to different queries.
  std::conditional_t<Cfg::kSwapAB, Each, Nothing> each_active;
  std::conditional_t<Cfg::kSharesWarp, Each, Nothing> each_far;
  std::conditional_t<Cfg::kSwapAB, Position, Nothing> second_position;
  // Blocks that passed by. With it `position` holds n - 1 of the queries of both rows and `cursor` the first block of
  // row 0, and neither moves.
  std::conditional_t<Cfg::kPacksPositions, Position, Nothing> passed;
  float sum[2];      // sum of the exponentials
  float log_sum[2];  // lse_g * log2(e) = max * unit + log_sum
  float right[2];    // the rightmost candidate's score, which the lse leaves out
  float o[Cfg::kValueTiles][4];
  std::conditional_t<Cfg::kIsSelected, Rotation, Nothing> rope;
  std::conditional_t<Cfg::kSwapAB, ColumnPairs, Nothing> columns;

  __device__ explicit State(Args const& args)
      : args(args),
        lane(threadIdx.x % 32),
        g(lane / 4),
        tq(lane % 4),
        warp(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)) {}
};

// Whether the consumers of the CTA split one query.
template <class Cfg>
__device__ __forceinline__ bool split(State<Cfg> const& s) { return s.args.split; }

template <class Cfg>
__device__ __forceinline__ bool takes_rank(State<Cfg> const& s, int rank) {
  return consumer_of(s.args, rank) == static_cast<int>(s.warp);
}

// The tile that the warp's queries are in; -1 where there is none, which happens where queries share a warp.
template <class Cfg>
__device__ __forceinline__ int tile_of_warp(State<Cfg> const& s) { return tile_of_warp<Cfg>(s.args, s.warp); }

template <class Cfg>
__device__ __forceinline__ QueryTile own_tile(State<Cfg> const& s) {
  return QueryTile(s.args.tiles, tile_of_warp(s));
}

// The place of the warp's first query in its tile, where queries share a warp.
template <class Cfg>
__device__ __forceinline__ uint32_t first_query(State<Cfg> const& s) {
  return s.warp % (Cfg::kConsumers / Cfg::kQueriesPerWarp) * Cfg::kQueriesPerWarp;
}

// The place in its tile of the query of row i.
template <class Cfg>
__device__ __forceinline__ uint32_t query_of_row(State<Cfg> const& s, int i = 0) {
  if constexpr (Cfg::kPerUnit > 1) return first_query(s) + i * Cfg::kPerUnit + s.g / Cfg::kUnitHeads;
  if constexpr (Cfg::kSharesWarp) return first_query(s) + i;
  return split(s) ? 0 : s.warp;
}

template <class Cfg>
__device__ __forceinline__ int head_of_row(State<Cfg> const& s, int i) {
  return Cfg::kPerUnit > 1 ? s.g % Cfg::kUnitHeads : Cfg::kSharesWarp ? s.g : s.g + 8 * i;
}

template <class Cfg>
__device__ __forceinline__ std::int64_t launch_row(State<Cfg> const& s, int i = 0) {
  return tile_of_warp(s) * kQueryTile + query_of_row(s, i);
}

template <class Cfg>
__device__ __forceinline__ std::int64_t state_row(State<Cfg> const& s, int i = 0) {
  return tile_of_warp(s) * kQueryTile + (Cfg::kSharesWarp ? query_of_row(s, i) : s.warp);
}

// kPacksPositions: n - 1 of the query of row i; -1 where the layer is of another kind for it.
template <class Cfg>
__device__ __forceinline__ int first_position(State<Cfg> const& s, int i) {
  // Through opaque, because the compiler would keep both halves in registers.
  int const both = Cfg::kPerUnit == 1 ? s.position : static_cast<int>(ptx::opaque(static_cast<uint32_t>(s.position)));
  return i == 0 ? static_cast<std::int16_t>(both & 0xffff) : both >> 16;
}

template <class Cfg>
__device__ __forceinline__ bool row_active(State<Cfg> const& s, int i) {
  if constexpr (Cfg::kPacksPositions) return first_position(s, i) >= 0;
  if constexpr (Cfg::kSwapAB) return i == 0 ? s.each_active.first : s.each_active.second;
  return s.active;
}

template <class Cfg>
__device__ __forceinline__ int row_position(State<Cfg> const& s, int i) {
  if constexpr (Cfg::kPacksPositions) return first_position(s, i) - s.passed.value * kSiblings;
  if constexpr (Cfg::kSwapAB) return i == 0 ? s.position : s.second_position.value;
  return s.position;
}

template <class Cfg>
__device__ __forceinline__ bool row_far(State<Cfg> const& s, int i) {
  if constexpr (Cfg::kSharesWarp) return i == 0 ? s.each_far.first : s.each_far.second;
  return s.far;
}

// The lanes that have rows of the same queries as this lane.
template <class Cfg>
__device__ __forceinline__ uint32_t own_lanes(State<Cfg> const& s) {
  return Cfg::kPerUnit == 1 ? kFullWarp : 0xffffu << (ptx::lane_index() & 16);
}

// The place of the rightmost candidate in the last block.
template <class Cfg>
__device__ __forceinline__ int rightmost(State<Cfg> const& s, int i = 0) {
  return row_position(s, i) & (kSiblings - 1);
}

// The cursor of the query of row i.
template <class Cfg>
__device__ __forceinline__ int row_cursor(State<Cfg> const& s, int i) {
  int const first =
      Cfg::kSharesWarp && i == 1 ? s.cursor + Cfg::kPerUnit * static_cast<int>(s.args.width / kSiblings) : s.cursor;
  if constexpr (Cfg::kPacksPositions) return first + s.passed.value;
  return first;
}

template <class Cfg>
__device__ __forceinline__ bool row_exists(State<Cfg> const& s, QueryTile const& tile, int i) {
  return (!Cfg::kSharesWarp || tile_of_warp(s) >= 0) && tile.has(query_of_row(s, i));
}

template <class Cfg>
__device__ __forceinline__ bool row_works(State<Cfg> const& s, QueryTile const& tile, int i) {
  return row_exists(s, tile, i) &&
         htree_fwd::works<Cfg>(s.args, tile.t + query_of_row(s, i));
}

// Goes on by so many blocks.
template <class Cfg>
__device__ __forceinline__ void advance_blocks(State<Cfg>& s, int blocks) {
  if constexpr (Cfg::kPacksPositions) {
    s.passed.value += blocks;
    return;
  }
  s.position -= blocks * kSiblings;
  if constexpr (Cfg::kSwapAB) s.second_position.value -= blocks * kSiblings;
  s.cursor += blocks;
}

// The position and the cursor before the first block.
template <class Cfg>
__device__ __forceinline__ void begin_sweep(State<Cfg>& s, QueryTile const& tile) {
  std::int64_t const t = tile.t + query_of_row(s);
  s.cursor = static_cast<int>(launch_row(s) * (s.args.width / kSiblings));
  if constexpr (Cfg::kPacksPositions) {
    s.passed.value = 0;
    int const first = row_works(s, tile, 0) ? candidates_of<Cfg>(s.args, t) - 1 : -1;
    int const second = row_works(s, tile, 1) ? candidates_of<Cfg>(s.args, t + Cfg::kPerUnit) - 1 : -1;
    s.position = (first & 0xffff) | second << 16;
  } else {
    s.position = row_active(s, 0) ? candidates_of<Cfg>(s.args, t) - 1 : -1;
    if constexpr (Cfg::kSwapAB) {
      s.second_position.value = row_active(s, 1) ? candidates_of<Cfg>(s.args, t + Cfg::kPerUnit) - 1 : -1;
    }
  }
}

// Puts an active query back to its first block, before the second sweep of a selected layer.
template <class Cfg>
__device__ __forceinline__ void repeat_sweep(State<Cfg>& s) {
  s.position = (s.args.top_k - 1) * kSiblings + rightmost(s);
  s.cursor = static_cast<int>(launch_row(s) * (s.args.width / kSiblings));
}

template <class Cfg>
__device__ __forceinline__ char const* packed_blocks(State<Cfg> const& s) {
  return packed_blocks<Cfg>(s.args);
}

template <class Cfg>
__device__ __forceinline__ std::int64_t first_head_of(State<Cfg> const& s, uint32_t query) {
  QueryTile const tile = own_tile(s);
  std::int64_t const b = tile.bh / s.args.H_kv;
  std::int64_t const h_kv = tile.bh % s.args.H_kv;
  return ((b * s.args.tiles.T_q + tile.first + ptx::opaque(query)) * s.args.H_kv + h_kv) * s.args.G;
}

// The unnormalised output of a row, [V / 8, heads, 8].
template <class Cfg>
__device__ __forceinline__ float* state_of_row(Args const& args, std::int64_t row) {
  return reinterpret_cast<float*>(args.state_out) + row * (Cfg::kV * Cfg::kUnitHeads);
}

// The index of a query's first head in the outputs. The tile is looked up again, because it would occupy registers
// throughout the loop.
template <class Cfg>
__device__ __forceinline__ std::int64_t first_head(State<Cfg> const& s, int i = 0) {
  return first_head_of(s, query_of_row(s, i));
}

// Whether row i is a head that exists, of a query that has this layer kind.
template <class Cfg>
__device__ __forceinline__ bool has_head(State<Cfg> const& s, int i) {
  return head_of_row(s, i) < s.args.G && (!Cfg::kSharesWarp || row_active(s, i));
}

// The index in the outputs of row i's head. `first` is that of the first head of row 0's query.
template <class Cfg>
__device__ __forceinline__ std::int64_t head_index(State<Cfg> const& s, std::int64_t first, int i) {
  return first + head_of_row(s, i) + (Cfg::kSharesWarp && i == 1 ? Cfg::kPerUnit * s.args.H_kv * s.args.G : 0);
}

}  // namespace htree_cuda::sm90::htree_fwd

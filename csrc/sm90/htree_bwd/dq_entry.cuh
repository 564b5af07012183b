// dq of entry layers: dq_entry. Queries visit the same KV blocks in their entry layer, so that four queries and four
// blocks, 64 heads and 64 nodes, are one product of WGMMA. A warpgroup holds a query tile and the KV tiles pass by.
// What lies between the products belongs to one warp, whose 16 rows are the heads of one query, or of two or four.
//
//   barrier        who arrives                    who waits      what becomes visible, or free
//   queries_full   producer, once, and the bytes  8 consumers    the panels of both query tiles
//   full[stage]    producer, once, and the bytes  8 consumers    a KV tile
//   empty[stage]   each consumer warp, once, when producer       the stage may be overwritten
//                  its products are complete
//
// Keys and queries are rotated by their positions. So dq is summed in the frame of the query's rotation and rotated
// back once, in the end. The sum goes to the query tile, where dq_selected finds it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "args.h"
#include "device/barriers.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "host/launch_overlapped.cuh"
#include "operands.cuh"
#include "reverse_index/lookup.cuh"
#include "traits.cuh"
#include "weights.cuh"

namespace htree_cuda::sm90::htree_bwd {

template <class Cfg>
struct DqEntryRing {
  uint32_t queries;
  uint32_t stages;
  uint32_t headers;
  RingBarriers<Cfg::kStages> barriers;
  uint32_t queries_full;

  __device__ explicit DqEntryRing(uint32_t shared)
      : queries(shared),
        stages(queries + Cfg::kTiles * Cfg::kPanelsBytes),
        headers(stages + Cfg::kStages * Cfg::kPanelsBytes),
        barriers{headers + Cfg::kStages * kKvTileHeader, headers + Cfg::kStages * (kKvTileHeader + 8)},
        queries_full(barriers.empty + 8 * Cfg::kStages) {}

  __device__ void init() const {
    barriers.init(1, Cfg::Roles::kConsumers);
    barriers::mbarrier_init(queries_full, 1);
  }
  __device__ uint32_t query_tile(int i) const { return queries + i * Cfg::kPanelsBytes; }
  __device__ uint32_t stage(uint32_t slot) const { return stages + slot * Cfg::kPanelsBytes; }
  __device__ uint32_t header(uint32_t slot) const { return headers + slot * kKvTileHeader; }
};

// The rows of a CTA: kRows of one head. CTAs of the last rows, which have the most candidates, come first. Where the
// entry layer changes with the position, a CTA may have rows of both layers: then the KV tiles of the lower layer pass
// by first.
template <class Cfg>
struct DqEntryCta {
  int head;
  int first;   // the first row
  int layer;   // entry layer of the last row
  int before;  // KV tiles of the layer below that, all that may be candidates; zero where no row has that entry layer
  int tiles;   // KV tiles of `layer`, up to the reach of the last row
  int end;     // past the last row that is a query of the chunk
  std::int64_t origin;   // row r stands at position origin + r
  sequences::Rows rows;  // with sequences of different lengths

  __device__ __forceinline__ explicit DqEntryCta(Args const& args) {
    int const index = static_cast<int>(ptx::block_index());
    head = index % args.chunk.heads;
    first = args.chunk.rows - (index / args.chunk.heads + 1) * Cfg::kRows;
    end = min(first + Cfg::kRows, args.chunk.queries);
    origin = args.chunk.position(0);
    if (args.sequences.any()) {
      rows = args.sequences.rows_from(first, Cfg::kRows);
      end = first + rows.count;
      origin = std::int64_t{rows.t} - first;
    }
    int const last = end - 1;
    layer = before = tiles = 0;
    if (last < first) return;
    layer = entry_layer(position(last), args.tree.top_k);
    before = entry_layer(position(first), args.tree.top_k) < layer ? args.tree.top_k / kTileBlocks : 0;
    tiles = (candidates_in_entry(position(last), layer) + kTileRows - 1) / kTileRows;
  }

  __device__ __forceinline__ std::int64_t position(int row) const { return origin + row; }
  // The first KV tile of a layer, of the CTA's head.
  __device__ __forceinline__ std::int64_t kv_tile(Args const& args, int of_layer) const {
    std::int64_t const tile = static_cast<std::int64_t>(head) * args.tiles[of_layer];
    if (!args.sequences.any()) return tile;
    return tile + sequences::first_tile(rows.before, rows.sequence, of_layer, args.tree.top_k);
  }

  __device__ __forceinline__ std::int64_t query_tile(Args const& args) const {
    return (static_cast<std::int64_t>(head) * args.chunk.rows + first) / tile_queries(Cfg::kHeads);
  }
};

// The producer, one thread of its warp.
template <class Cfg>
__device__ void produce_kv_tiles(Args const& args, DqEntryRing<Cfg> const& ring) {
  DqEntryCta<Cfg> const cta(args);
  if (threadIdx.x % 32 != 0 || cta.tiles == 0) return;
  barriers::mbarrier_arrive_expect_bytes(ring.queries_full, Cfg::kTiles * Cfg::kPanelsBytes);
#pragma unroll
  for (int i = 0; i < Cfg::kTiles; ++i) {
    char const* const tile = args.query_tiles + (cta.query_tile(args) + i) * Cfg::kQueryTileBytes;
    ptx::bulk_load(ring.query_tile(i), tile + kQueryTileHeader, Cfg::kPanelsBytes, ring.queries_full);
  }
  auto const tiles_of = [&](int layer) {
    return args.kv_tiles[layer] + cta.kv_tile(args, layer) * Cfg::kKvTileBytes;
  };
  char const* operands = tiles_of(cta.before > 0 ? cta.layer - 1 : cta.layer);
  RingPosition<Cfg::kStages> at;
#pragma unroll 1
  for (int tile = -cta.before; tile < cta.tiles; ++tile) {
    if (tile == 0) operands = tiles_of(cta.layer);
    ring.barriers.wait_empty(at, "dq_entry producer: empty");
    uint32_t const full = ring.barriers.full_at(at.slot);
    barriers::mbarrier_arrive_expect_bytes(full, Cfg::kKvTileBytes);
    ptx::bulk_load(ring.header(at.slot), operands, kKvTileHeader, full);
    ptx::bulk_load(ring.stage(at.slot), operands + kKvTileHeader, Cfg::kPanelsBytes, full);
    operands += Cfg::kKvTileBytes;
    at = at.ahead(1);
  }
}

// A consumer warp and its query.
template <class Cfg>
class DqEntryConsumer {
  using Element =
      std::conditional_t<std::is_same_v<typename Cfg::Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kColumns = kTileRows / 8;                 // eights of nodes
  static constexpr int kSteps = kK / wgmma::kDepth;              // of the product with q
  static constexpr int kDepths = kTileRows / wgmma::kDepth;      // of the product with dS
  static constexpr int kQueries = Cfg::kQueries;
  static constexpr int kRows = kQueries == 1 ? 1 : 2;            // of a thread, of different queries
  static_assert(kColumns * 4 == wgmma::kAccumulators && kTileBlocks == kDepths);

public:
  __device__ DqEntryConsumer(Args const& args, int warp)
      : args_(args), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4), warp_(warp) {
    DqEntryCta<Cfg> const cta(args);
    tiles_ = cta.before + cta.tiles;
    auto const begin_of = [&](int row, int layer) { return row < cta.end && layer == cta.layer ? cta.before : 0; };
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int const row = cta.first + warp * kQueries + query_of_row(i);
      candidates_[i] = 0;
      begin_[i] = 0;
      if (row >= cta.end) continue;
      std::int64_t const t = cta.position(row);
      int const layer = entry_layer(t, args.tree.top_k);
      candidates_[i] = candidates_in_entry(t, layer);
      begin_[i] = begin_of(row, layer);
    }
    row_ = cta.first + warp * kQueries + lane_ / 8 % kQueries;
    begin_of_word_ = 0;
    if (row_ < cta.end) {
      int const layer = entry_layer(cta.position(row_), args.tree.top_k);
      begin_of_word_ = begin_of(row_, layer);
      index_ = reverse_index::Expanded(args, layer, cta.head);
    }
    float const* const header = reinterpret_cast<float const*>(tile_of(cta)) + warp % 4 * kMaxGroupHeads + g_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unit_[i] = __ldg(header + 8 * i);
      lse2_[i] = __ldg(header + kTileRows + 8 * i);
      delta_[i] = __ldg(header + 2 * kTileRows + 8 * i);
      scaled_lse2_[i] = lse2_[i] - exponent_of(weight_scale_[i]);
    }
    clear(dq_);
  }

  __device__ void run(DqEntryRing<Cfg> const& ring) {
    if (tiles_ > 0) {
      barriers::mbarrier_wait(ring.queries_full, 0, "dq_entry consumer: queries");
      multiply_tiles(ring);
    }
    finish();
  }

private:
  // Says which of the warp's queries row g (i = 0) or g + 8 (i = 1) belongs to. One query has both.
  __device__ __forceinline__ int query_of_row(int i) const {
    return kQueries == 1 ? 0 : kQueries == 2 ? i : 2 * i + g_ / 4;
  }

  __device__ __forceinline__ char* tile_of(DqEntryCta<Cfg> const& cta) const {
    return args_.query_tiles + (cta.query_tile(args_) + warp_ / 4) * Cfg::kQueryTileBytes;
  }

  static __device__ __forceinline__ auto& flat(float (&x)[kColumns][4]) {
    return reinterpret_cast<float(&)[4 * kColumns]>(x);
  }
  __device__ __forceinline__ auto& dq() { return reinterpret_cast<float(&)[kK / 2]>(dq_); }

  // The loop over KV tiles. Exponentials of a tile run while its dP is multiplied, and dS is computed while dS K of the
  // tile before is multiplied. Nothing is in flight from one iteration to the next, because ptxas would serialise the
  // products (C7514).
  __device__ __forceinline__ void multiply_tiles(DqEntryRing<Cfg> const& ring) {
    // The shuffles tell the compiler that addresses are uniform, so that descriptors live in uniform registers.
    uint32_t const queries = __shfl_sync(kFullWarp, ring.query_tile(warp_ / 4), 0);
    wgmma::Descriptor const dout(queries + kK / 64 * kPanelBytes);
    load_q(queries);
    RingPosition<Cfg::kStages> at;
    // The stage whose keys are multiplied with ds. In the first iteration ds is zero, and any keys serve.
    uint32_t held = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
    uint32_t ds[kDepths][4] = {};
    uint32_t const zero = static_cast<uint32_t>(args_.tree.layers) >> 31;  // zero, unknown to the compiler
    fetch_expanded(0);
#pragma unroll 1
    for (int tile = 0; tile < tiles_; ++tile) {
      float p[kColumns][4], dp[kColumns][4];
      ring.barriers.wait_full(at, "dq_entry consumer: full");
      uint32_t const stage = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
      multiply_keys(p, wgmma::Descriptor(stage));
      multiply_values(dp, dout, wgmma::Descriptor(stage + kK / 64 * kPanelBytes));
      add_keys(ds, wgmma::Descriptor(held, kPanelBytes));
      float2 inverse[kColumns];
      load_inverse(inverse, ring.header(at.slot));
      uint32_t masked[kRows][2];
      load_masked(tile, masked);
      fetch_expanded(tile + 1);
      wgmma::wait<2>();
      wgmma::pin(flat(p));
      // The branches keep ptxas from moving the exponentials, and dS below, behind the waits.
      bool any = (masked[0][0] & masked[0][1]) != ~0u;
      if constexpr (kRows == 2) any = __any_sync(kFullWarp, any || (masked[1][0] & masked[1][1]) != ~0u);
      if (any) exponentiate(p, inverse);
      wgmma::wait<1>();
      wgmma::pin(flat(dp));
      uint32_t next[kDepths][4] = {};
      half2 largest[2] = {};
      if (any) compute_ds(p, dp, inverse, masked, next, largest);
      wgmma::wait<0>();
      wgmma::pin(dq());
      wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kDepths]>(ds));
      if (tile > 0) barriers::release(ring.barriers.empty_at(at.behind(1).slot));
      if (overflows(largest)) recompute(p, dp, inverse, masked, next);
      // The or makes more than a copy of this. ptxas would merge the registers of a copy, and it serialises products
      // whose operands are written while others are in flight (C7513).
#pragma unroll
      for (int i = 0; i < 4 * kDepths; ++i) ds[i / 4][i % 4] = next[i / 4][i % 4] | zero;
      held = stage;
      at = at.ahead(1);
    }
    add_keys(ds, wgmma::Descriptor(held, kPanelBytes));
    wgmma::wait<0>();
    wgmma::pin(dq());
  }

  // A fragments of the warp's own rows of q. In shared memory, q would be read for every tile: 16 KB at K = V = 128,
  // beside 64 KB for the other operands and 16 KB that copies write, at 128 bytes a cycle, in the 768 cycles of the
  // products.
  __device__ __forceinline__ void load_q(uint32_t queries) {
    int const row = warp_ % 4 * kMaxGroupHeads + lane_ % 16;
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      int const chunk = kk % 4 * 2 + lane_ / 16;
      ptx::load_matrix_x4(q_[kk], queries + kk / 4 * kPanelBytes + row * 128 + ((chunk ^ row % 8) << 4));
    }
  }

  // Issues Q K^T.
  __device__ __forceinline__ void multiply_keys(float (&sums)[kColumns][4], wgmma::Descriptor const& keys) const {
    wgmma::fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      wgmma::mma_rs<cutlass::half_t>(flat(sums), q_[kk], keys.at(kk / 4 * kPanelBytes + kk % 4 * 32), kk > 0);
    }
    wgmma::commit();
  }

  // Issues dO V^T.
  static __device__ __forceinline__ void multiply_values(float (&sums)[kColumns][4], wgmma::Descriptor const& dout,
                                                         wgmma::Descriptor const& values) {
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kV / wgmma::kDepth; ++step) {
      int const offset = step / 4 * kPanelBytes + step % 4 * 32;
      wgmma::mma_ss<Element>(flat(sums), dout.at(offset), values.at(offset), step > 0);
    }
    wgmma::commit();
  }

  // Issues dq += dS K.
  __device__ __forceinline__ void add_keys(uint32_t const (&ds)[kDepths][4], wgmma::Descriptor const& keys) {
    wgmma::pin(dq());
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kDepths; ++i) {
      wgmma::mma_rs<cutlass::half_t, wgmma::Major::MN>(dq(), ds[i], keys.at(i * wgmma::kDepth * 128), true);
    }
    wgmma::commit();
  }

  // Lane i has nodes 8 (i % 8) .. 8 (i % 8) + 7 of a tile for query i / 8, and loads the index word of their KV block. In tiles
  // of the layer below the query's entry layer all nodes count as expanded, which masks them.
  __device__ __forceinline__ void fetch_expanded(int tile) {
    expanded_ = ~0u;
    tile -= begin_of_word_;
    if (tile >= 0) expanded_ = index_.of_block(args_, tile * kTileBlocks + lane_ % 8 / 2, row_);
  }

  // The masked nodes of a tile, a bit each: nodes that the query expanded and nodes past the query. All nodes of a
  // layer above the query's entry layer are past it, since candidates_ counts nodes of the entry layer.
  __device__ __forceinline__ void load_masked(int tile, uint32_t (&masked)[kRows][2]) const {
    uint32_t four = (expanded_ >> (lane_ % 2 * 8) & 0xffu) << (lane_ % 4 * 8);
    four |= __shfl_xor_sync(kFullWarp, four, 1);
    four |= __shfl_xor_sync(kFullWarp, four, 2);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const position = candidates_[row] - 1 - (tile - begin_[row]) * kTileRows - 32 * i;
        masked[row][i] = __shfl_sync(kFullWarp, four, 8 * query_of_row(row) + 4 * i) |
                         (position < 0 ? ~0u : reverse_index::causal_mask(position));
      }
    }
  }

  // The inverse row scales of this thread's columns.
  __device__ __forceinline__ void load_inverse(float2 (&inverse)[kColumns], uint32_t header) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      inverse[column] = ptx::load_shared_8B(header + tq_ * 8 + column * 32);
    }
  }

  // The lower half of the result is ones where the query attends the first of this thread's two nodes of a column, the
  // upper half where it attends the second.
  __device__ __forceinline__ uint32_t attended(uint32_t const (&masked)[2], int column) const {
    uint32_t const second = ~masked[column / 4] << (6 - 2 * tq_);  // the node's bit is the sign of byte column % 4
    return ptx::spread_signs(second << 1, second, column % 4);
  }

  // Scores of a tile become probabilities, times the scale of their row.
  __device__ __forceinline__ void exponentiate(float (&p)[kColumns][4], float2 const (&inverse)[kColumns]) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[column][e] =
            probability(p[column][e], e % 2 ? inverse[column].y : inverse[column].x, unit_[e / 2], scaled_lse2_[e / 2]);
      }
    }
  }

  // Computes the scaled dS as A fragments, and the largest of each row.
  __device__ __forceinline__ void compute_ds(float const (&p)[kColumns][4], float const (&dp)[kColumns][4],
                                        float2 const (&inverse)[kColumns], uint32_t const (&masked)[kRows][2],
                                        uint32_t (&ds)[kDepths][4], half2 (&largest)[2]) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const mask = attended(masked[i % kRows], column);
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          x[e] = weight(true, p[column][2 * i + e], dp[column][2 * i + e], delta_[i],
                        e % 2 ? inverse[column].y : inverse[column].x);
        }
        uint32_t const both = Pairs<__half>::pack(x[0], x[1]) & mask;
        ds[column / 2][column % 2 * 2 + i] = both;
        largest[i] = __hmax2(largest[i], __habs2(*reinterpret_cast<half2 const*>(&both)));
      }
    }
  }

  // Whether a weight of some head overflows.
  static __device__ __forceinline__ bool overflows(half2 const (&largest)[2]) {
    half2 const both = __hmax2(largest[0], largest[1]);
    return __any_sync(kFullWarp, fmaxf(__low2float(both), __high2float(both)) > kMaxWeight);
  }

  // Lowers the scales of rows and computes dS once more.
  __device__ __forceinline__ void recompute(float (&p)[kColumns][4], float const (&dp)[kColumns][4],
                                      float2 const (&inverse)[kColumns], uint32_t const (&masked)[kRows][2],
                                      uint32_t (&ds)[kDepths][4]) {
    float const back[2] = {inverse_of(weight_scale_[0]), inverse_of(weight_scale_[1])};
    float largest[2] = {};
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const i = e / 2;
        uint32_t const mask = attended(masked[i % kRows], column);
        p[column][e] = weight(mask >> (e % 2 * 16) & 1u, p[column][e] * back[i], dp[column][e], delta_[i],
                              e % 2 ? inverse[column].y : inverse[column].x);
        largest[i] = fmaxf(largest[i], fabsf(p[column][e]));
      }
    }
    lower_scale(weight_scale_, largest, [&](float const (&factor)[2]) {
#pragma unroll
      for (int block = 0; block < kK / 8; ++block) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dq_[block][e] *= factor[e / 2];
      }
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) scaled_lse2_[i] = lse2_[i] - exponent_of(weight_scale_[i]);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ds[column / 2][column % 2 * 2 + i] =
            Pairs<__half>::pack(p[column][2 * i] * weight_scale_[i], p[column][2 * i + 1] * weight_scale_[i]);
      }
    }
  }

  // Rotates the sums back and writes them where the panels of the tile were.
  __device__ __forceinline__ void finish() {
    DqEntryCta<Cfg> const cta(args_);
    float const inverse[2] = {inverse_of(weight_scale_[0]), inverse_of(weight_scale_[1])};
    float* const out = reinterpret_cast<float*>(tile_of(cta) + kQueryTileHeader) +
                       (warp_ % 4 * kMaxGroupHeads + g_) * kK + 2 * tq_;
    float2 const* rotations[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rotations[i] = args_.rotations + static_cast<std::int64_t>(max(candidates_[i] - 1, 0)) * (kK / 2) + 2 * tq_;
    }
#pragma unroll
    for (int lo = 0; lo < kK / 16; ++lo) {
      int const hi = lo + kK / 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float4 const rotation = __ldg(reinterpret_cast<float4 const*>(rotations[i % kRows] + 8 * lo));
        float2 const x = {dq_[lo][2 * i] * inverse[i], dq_[lo][2 * i + 1] * inverse[i]};
        float2 const y = {dq_[hi][2 * i] * inverse[i], dq_[hi][2 * i + 1] * inverse[i]};
        float2* const row = reinterpret_cast<float2*>(out + 8 * i * kK);
        row[4 * lo] = {x.x * rotation.x + y.x * rotation.y, x.y * rotation.z + y.y * rotation.w};
        row[4 * hi] = {y.x * rotation.x - x.x * rotation.y, y.y * rotation.z - x.y * rotation.w};
      }
    }
  }

  Args const& args_;
  int const lane_;
  int const g_;
  int const tq_;
  int const warp_;
  int tiles_;
  int candidates_[kRows];
  int begin_[kRows];   // the first tile of the layer of the row's query
  int row_;            // of the query whose index words this lane loads
  int begin_of_word_;  // begin_ of that query
  reverse_index::Expanded index_;
  uint32_t expanded_ = 0;  // of a KV block of the tile at hand
  uint32_t q_[kSteps][4];
  float unit_[2];
  float lse2_[2];
  float scaled_lse2_[2];  // less the logarithm of the scale
  float delta_[2];
  float weight_scale_[2] = {kInitialProbabilityScale, kInitialProbabilityScale};
  float dq_[kK / 8][4];
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) dq_entry_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  uint32_t const shared = align_shared<Cfg>(shared_memory);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  wait_for_previous_grid();

  DqEntryRing<Cfg> const ring(shared);
  if (threadIdx.x == 0) {
    ring.init();
    barriers::mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= Cfg::Roles::kConsumers) {
    ptx::lower_registers<Cfg::Roles::kProducerRegisters>();
    if (warp == Cfg::Roles::kConsumers) produce_kv_tiles<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::Roles::kConsumerRegisters>();
    DqEntryConsumer<Cfg>(args, warp).run(ring);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

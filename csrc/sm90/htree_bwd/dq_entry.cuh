// The share of dq of each query's first layer. Queries visit the same parents there, so that four queries and four
// parents, 64 heads and 64 nodes, are one product of WGMMA: a warpgroup holds a tile of queries, and the tiles of nodes
// pass by. What lies between the products is a warp's own: its 16 rows are the heads of one query.
//
//   barrier        arrives                        waits          makes visible / frees
//   queries        producer, once, and the bytes  8 consumers    the panels of both tiles of queries
//   full[stage]    producer, once, and the bytes  8 consumers    a tile of nodes
//   empty[stage]   each consumer warp, once,      producer       the stage may be overwritten
//                  when its products are complete
//
// Keys and queries are rotated by their positions, so that dq adds up rotated by the query's and rotations back once in the
// end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/wgmma.cuh"
#include "operands.cuh"

namespace htree_cuda::sm90::htree_bwd {

template <class Cfg>
struct FirstQueriesRing {
  uint32_t queries;
  uint32_t stages;
  uint32_t headers;
  RingBarriers<Cfg::kStages> barriers;
  uint32_t queries_full;

  __device__ explicit FirstQueriesRing(uint32_t shared)
      : queries(shared),
        stages(queries + Cfg::kTiles * Cfg::kPanelsBytes),
        headers(stages + Cfg::kStages * Cfg::kPanelsBytes),
        barriers{headers + Cfg::kStages * kNodeTileHeader, headers + Cfg::kStages * (kNodeTileHeader + 8)},
        queries_full(barriers.empty + 8 * Cfg::kStages) {}

  __device__ void init() const {
    barriers.init(1, Cfg::kConsumers);
    barriers::mbarrier_init(queries_full, 1);
  }
  __device__ uint32_t query_tile(int i) const { return queries + i * Cfg::kPanelsBytes; }
  __device__ uint32_t stage(uint32_t slot) const { return stages + slot * Cfg::kPanelsBytes; }
  __device__ uint32_t header(uint32_t slot) const { return headers + slot * kNodeTileHeader; }
};

// Eight rows of a head; the last, which have the most candidates, come first. Where a longer sequence gets another first
// layer, one block may have rows of both: the tiles of one layer pass by, then those of the one above.
struct FirstBlock {
  int head;
  int first;   // row
  int layer;   // of the last row
  int before;  // tiles of nodes of the layer below that, up to all that may be candidates; none where no row needs them
  int tiles;   // and those of `layer`, up to the reach of the last row

  __device__ __forceinline__ explicit FirstBlock(Args const& args) {
    int const index = static_cast<int>(ptx::block_index());
    head = index % args.chunk.heads;
    first = args.chunk.rows - (index / args.chunk.heads + 1) * kGroupQueries;
    int const last = min(first + kGroupQueries, args.chunk.queries) - 1;
    layer = before = tiles = 0;
    if (last < first) return;
    layer = entry_layer(args.chunk.position(last), args.tree.top_k);
    before = entry_layer(args.chunk.position(first), args.tree.top_k) < layer ? args.tree.top_k / kTileParents : 0;
    tiles = (candidates_in_entry(args.chunk.position(last), layer) + kTileRows - 1) / kTileRows;
  }

  __device__ __forceinline__ std::int64_t query_tile(Args const& args) const {
    return (static_cast<std::int64_t>(head) * args.chunk.rows + first) / kTileQueries;
  }
};

template <class Cfg>
__device__ void produce_first_nodes(Args const& args, FirstQueriesRing<Cfg> const& ring) {
  FirstBlock const block(args);
  if (threadIdx.x % 32 != 0 || block.tiles == 0) return;
  barriers::mbarrier_arrive_expect_bytes(ring.queries_full, Cfg::kTiles * Cfg::kPanelsBytes);
#pragma unroll
  for (int i = 0; i < Cfg::kTiles; ++i) {
    char const* const tile = args.query_tiles + (block.query_tile(args) + i) * Cfg::kQueryTileBytes;
    ptx::bulk_load(ring.query_tile(i), tile + kQueryTileHeader, Cfg::kPanelsBytes, ring.queries_full);
  }
  auto const tiles_of = [&](int layer) {
    return args.node_tiles[layer] + static_cast<std::int64_t>(block.head) * args.tiles[layer] * Cfg::kNodeTileBytes;
  };
  char const* nodes = tiles_of(block.before > 0 ? block.layer - 1 : block.layer);
  RingPosition<Cfg::kStages> at;
#pragma unroll 1
  for (int tile = -block.before; tile < block.tiles; ++tile) {
    if (tile == 0) nodes = tiles_of(block.layer);
    ring.barriers.wait_empty(at, "htree_bwd first queries producer: empty");
    uint32_t const full = ring.barriers.full_at(at.slot);
    barriers::mbarrier_arrive_expect_bytes(full, Cfg::kNodeTileBytes);
    ptx::bulk_load(ring.header(at.slot), nodes, kNodeTileHeader, full);
    ptx::bulk_load(ring.stage(at.slot), nodes + kNodeTileHeader, Cfg::kPanelsBytes, full);
    nodes += Cfg::kNodeTileBytes;
    at = at.ahead(1);
  }
}

template <class Cfg>
class FirstQuery {
  using Element =
      std::conditional_t<std::is_same_v<typename Cfg::Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kColumns = kTileRows / 8;  // blocks of eight nodes
  static constexpr int kSteps = kK / wgmma::kDepth;
  static constexpr int kDepths = kTileRows / wgmma::kDepth;
  static_assert(kColumns * 4 == wgmma::kAccumulators && kTileParents == kDepths);

public:
  __device__ FirstQuery(Args const& args, int warp)
      : args_(args), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4), warp_(warp) {
    FirstBlock const block(args);
    tiles_ = block.before + block.tiles;
    row_ = block.first + warp;
    candidates_ = 0;
    begin_ = 0;
    if (row_ < args.chunk.queries) {
      std::int64_t const t = args.chunk.position(row_);
      int const layer = entry_layer(t, args.tree.top_k);
      candidates_ = candidates_in_entry(t, layer);
      if (layer == block.layer) begin_ = block.before;
      below_ = Below(args, layer, block.head);
    }
    float const* const header = reinterpret_cast<float const*>(tile_of(block)) + warp % 4 * kMaxGroupHeads + g_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unit_[i] = __ldg(header + 8 * i);
      lse2_[i] = __ldg(header + kTileRows + 8 * i);
      delta_[i] = __ldg(header + 2 * kTileRows + 8 * i);
      scaled_lse2_[i] = lse2_[i] - exponent_of(weight_scale_[i]);
    }
    clear(dq_);
  }

  __device__ void run(FirstQueriesRing<Cfg> const& ring) {
    if (tiles_ > 0) {
      barriers::mbarrier_wait(ring.queries_full, 0, "htree_bwd first queries consumer: queries");
      walk(ring);
    }
    finish();
  }

private:
  __device__ __forceinline__ char* tile_of(FirstBlock const& block) const {
    return args_.query_tiles + (block.query_tile(args_) + warp_ / 4) * Cfg::kQueryTileBytes;
  }

  static __device__ __forceinline__ auto& flat(float (&x)[kColumns][4]) {
    return reinterpret_cast<float(&)[4 * kColumns]>(x);
  }
  __device__ __forceinline__ auto& dq() { return reinterpret_cast<float(&)[kK / 2]>(dq_); }

  // Exponentials of a tile run under its dP, what follows from dP under dS K of the tile before. Nothing is in flight
  // from one rotation of the loop to the next: ptxas would serialise the products (C7514).
  __device__ __forceinline__ void walk(FirstQueriesRing<Cfg> const& ring) {
    // Through shuffles, which tell the compiler that addresses are uniform: descriptors live in uniform registers.
    uint32_t const queries = __shfl_sync(kFullWarp, ring.query_tile(warp_ / 4), 0);
    wgmma::Descriptor const dout(queries + kK / 64 * kPanelBytes);
    load_q(queries);
    RingPosition<Cfg::kStages> at;
    // The stage whose keys are multiplied; before there are weights, those of the first by zeros.
    uint32_t held = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
    uint32_t ds[kDepths][4] = {};
    uint32_t const zero = static_cast<uint32_t>(args_.tree.layers) >> 31;  // which the compiler does not know
    fetch_expanded(0);
#pragma unroll 1
    for (int tile = 0; tile < tiles_; ++tile) {
      float p[kColumns][4], dp[kColumns][4];
      ring.barriers.wait_full(at, "htree_bwd first queries consumer: full");
      uint32_t const stage = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
      multiply_keys(p, wgmma::Descriptor(stage));
      multiply_values(dp, dout, wgmma::Descriptor(stage + kK / 64 * kPanelBytes));
      add_keys(ds, wgmma::Descriptor(held, kPanelBytes));
      float2 inverse[kColumns];
      load_inverse(inverse, ring.header(at.slot));
      uint32_t masked[2];
      find_masked(tile, masked);
      fetch_expanded(tile + 1);
      wgmma::wait<2>();
      wgmma::pin(flat(p));
      // Blocks of their own, or ptxas puts them behind the wait.
      bool const any = (masked[0] & masked[1]) != ~0u;
      if (any) exponentiate(p, inverse);
      wgmma::wait<1>();
      wgmma::pin(flat(dp));
      uint32_t early[kDepths][4] = {};
      half2 largest[2] = {};
      if (any) weigh(p, dp, inverse, masked, early, largest);
      wgmma::wait<0>();
      wgmma::pin(dq());
      wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kDepths]>(ds));
      if (tile > 0) barriers::release(ring.barriers.empty_at(at.behind(1).slot));
      if (leave(largest)) fit(p, dp, inverse, masked, early);
      // No mere copies: ptxas would merge both registers, and serialises products whose operands are written while
      // others are under way (C7513).
#pragma unroll
      for (int i = 0; i < 4 * kDepths; ++i) ds[i / 4][i % 4] = early[i / 4][i % 4] | zero;
      held = stage;
      at = at.ahead(1);
    }
    add_keys(ds, wgmma::Descriptor(held, kPanelBytes));
    wgmma::wait<0>();
    wgmma::pin(dq());
  }

  // A fragments of the warp's own rows. From shared memory q would be read for every tile: 16 KB more at K = V = 128,
  // beside 64 for the other operands and 16 that copies write, at 128 bytes a clock, in the 768 of the products.
  __device__ __forceinline__ void load_q(uint32_t queries) {
    int const row = warp_ % 4 * kMaxGroupHeads + lane_ % 16;
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      int const chunk = kk % 4 * 2 + lane_ / 16;
      ptx::load_matrix_x4(q_[kk], queries + kk / 4 * kPanelBytes + row * 128 + ((chunk ^ row % 8) << 4));
    }
  }

  // Begins Q K^T.
  __device__ __forceinline__ void multiply_keys(float (&sums)[kColumns][4], wgmma::Descriptor const& keys) const {
    wgmma::fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      wgmma::mma_rs<cutlass::half_t>(flat(sums), q_[kk], keys.at(kk / 4 * kPanelBytes + kk % 4 * 32), kk > 0);
    }
    wgmma::commit();
  }

  // Begins dO V^T.
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

  // Begins dq += dS K.
  __device__ __forceinline__ void add_keys(uint32_t const (&ds)[kDepths][4], wgmma::Descriptor const& keys) {
    wgmma::pin(dq());
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kDepths; ++i) {
      wgmma::mma_rs<cutlass::half_t, wgmma::Major::MN>(dq(), ds[i], keys.at(i * wgmma::kDepth * 128), true);
    }
    wgmma::commit();
  }

  // Lane i asks for nodes 8 (i % 8) .. 8 (i % 8) + 7 of a tile. All of a layer below the query's own seem expanded.
  __device__ __forceinline__ void fetch_expanded(int tile) {
    expanded_ = ~0u;
    tile -= begin_;
    if (tile >= 0) expanded_ = below_.of_group(args_, tile * (kTileRows / kGroupParents) + lane_ % 8, row_);
  }

  // Nodes of a tile that the query expanded or that lie beyond it, a bit each: all of a layer above its own do.
  __device__ __forceinline__ void find_masked(int tile, uint32_t (&masked)[2]) const {
    uint32_t four = (expanded_ & 0xffu) << (lane_ % 4 * 8);
    four |= __shfl_xor_sync(kFullWarp, four, 1);
    four |= __shfl_xor_sync(kFullWarp, four, 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const position = candidates_ - 1 - (tile - begin_) * kTileRows - 32 * i;
      masked[i] = __shfl_sync(kFullWarp, four, 4 * i) | (position < 0 ? ~0u : causal_mask(position));
    }
  }

  // Of this thread's columns.
  __device__ __forceinline__ void load_inverse(float2 (&inverse)[kColumns], uint32_t header) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      inverse[column] = ptx::load_shared_8B(header + tq_ * 8 + column * 32);
    }
  }

  // Both halves of the word are ones where the first and the second of this thread's nodes of a column are open.
  __device__ __forceinline__ uint32_t open(uint32_t const (&masked)[2], int column) const {
    uint32_t const second = ~masked[column / 4] << (6 - 2 * tq_);  // its bit is the sign of byte column % 4
    return ptx::spread_signs(second << 1, second, column % 4);
  }

  // The scores of a tile to probabilities, times the row's scale.
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

  // dS, scaled, in A fragments, and the largest of each row.
  __device__ __forceinline__ void weigh(float const (&p)[kColumns][4], float const (&dp)[kColumns][4],
                                        float2 const (&inverse)[kColumns], uint32_t const (&masked)[2],
                                        uint32_t (&ds)[kDepths][4], half2 (&largest)[2]) const {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      uint32_t const mask = open(masked, column);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
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

  // Whether a weight left the range of its row's scale: a vote among the heads of one query.
  static __device__ __forceinline__ bool leave(half2 const (&largest)[2]) {
    half2 const both = __hmax2(largest[0], largest[1]);
    return __any_sync(kFullWarp, fmaxf(__low2float(both), __high2float(both)) > kMaxWeight);
  }

  // Lowers scales, and weighs once more.
  __device__ __forceinline__ void fit(float (&p)[kColumns][4], float const (&dp)[kColumns][4],
                                      float2 const (&inverse)[kColumns], uint32_t const (&masked)[2],
                                      uint32_t (&ds)[kDepths][4]) {
    float const back[2] = {inverse_of(weight_scale_[0]), inverse_of(weight_scale_[1])};
    float largest[2] = {};
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      uint32_t const mask = open(masked, column);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int const i = e / 2;
        p[column][e] = weight(mask >> (e % 2 * 16) & 1u, p[column][e] * back[i], dp[column][e], delta_[i],
                              e % 2 ? inverse[column].y : inverse[column].x);
        largest[i] = fmaxf(largest[i], fabsf(p[column][e]));
      }
    }
    fit_scale(weight_scale_, largest, [&](float const (&factor)[2]) {
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

  // FragmentRotations the sums back and writes them where the tile's panels were.
  __device__ __forceinline__ void finish() {
    FirstBlock const block(args_);
    float const inverse[2] = {inverse_of(weight_scale_[0]), inverse_of(weight_scale_[1])};
    float* const out = reinterpret_cast<float*>(tile_of(block) + kQueryTileHeader) +
                       (warp_ % 4 * kMaxGroupHeads + g_) * kK + 2 * tq_;
    float2 const* const rotations =
        args_.rotations + static_cast<std::int64_t>(max(candidates_ - 1, 0)) * (kK / 2) + 2 * tq_;
#pragma unroll
    for (int lo = 0; lo < kK / 16; ++lo) {
      int const hi = lo + kK / 16;
      float4 const rotation = __ldg(reinterpret_cast<float4 const*>(rotations + 8 * lo));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
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
  int row_;
  int candidates_;
  int begin_;  // the first tile of its layer
  Below below_;
  uint32_t expanded_ = 0;  // of eight nodes of the tile at hand
  uint32_t q_[kSteps][4];
  float unit_[2];
  float lse2_[2];
  float scaled_lse2_[2];  // less the logarithm of the scale
  float delta_[2];
  float weight_scale_[2] = {kFirstScaleOfProbability, kFirstScaleOfProbability};
  float dq_[kK / 8][4];
};

template <class Cfg>
__device__ void run_first_queries(Args const& args, uint32_t shared, int warp) {
  FirstQueriesRing<Cfg> const ring(shared);
  if (threadIdx.x == 0) {
    ring.init();
    barriers::mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= Cfg::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (warp == Cfg::kConsumers) produce_first_nodes<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    FirstQuery<Cfg>(args, warp).run(ring);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

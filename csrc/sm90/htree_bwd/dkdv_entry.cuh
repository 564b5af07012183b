// dk and dv by WGMMA of nodes as the queries whose first layer theirs is reach them. Those visit the parents 0, 1, 2, ...,
// keys and queries are rotated by positions of their own, and so all is dense: a warpgroup holds 64 nodes, a warp 16 of
// them, one parent, and takes four queries of 16 heads at a time.
//
//   S^T = K Q^T   dP^T = V dO^T   P, dS between them and   dV += P^T dO   dK += dS^T Q
//
// Both products of a tile are added while the scores of the next are multiplied; dP passes behind the exponentials.
//
//   barrier        arrives                        waits          makes visible / frees
//   full[stage]    producer, once, and the bytes  8 consumers    a tile of queries
//   empty[stage]   each consumer warp, once       producer       the stage may be overwritten
//   unit full      producer, once, and the bytes  8 consumers    the unit's number, its tiles of nodes
//   unit empty     each consumer warp, once       producer       number and nodes may be overwritten
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "device/wgmma.cuh"
#include "operands.cuh"

namespace htree_cuda::sm90::htree_bwd {

// The first row that visits a node of its first layer, if the node exists; rows.end: none.
__device__ __forceinline__ int first_visitor(Args const& args, int layer, FirstRows const& rows, int node) {
  std::int64_t const late = (static_cast<std::int64_t>(node) << (kLog2Siblings * layer)) - args.chunk.position(0);
  return static_cast<int>(min(max(late, static_cast<std::int64_t>(rows.begin)), static_cast<std::int64_t>(rows.end)));
}

// What a CTA works on: two tiles of nodes and a segment of the rows.
struct FirstUnit {
  int layer;
  int head;
  int tile;     // the first
  int first;    // row, of a whole tile of queries
  int end;      // of rows that visit
  int earlier;  // segments that are added before this one; negative: no row visits these nodes

  // Ordered (layer; head; segment; nodes): those at work together read the same rows, and of the same nodes earlier
  // segments have begun.
  static __device__ __forceinline__ FirstUnit numbered(Args const& args, unsigned unit) {
    int layer = args.lowest;
    while (layer < args.highest && unit >= static_cast<unsigned>(args.first_tile_unit[layer + 1])) ++layer;
    unit -= args.first_tile_unit[layer];
    unsigned const per_segment = args.tiles[layer] / kUnitTiles;
    int const tile = static_cast<int>(unit % per_segment) * kUnitTiles;
    unit /= per_segment;
    unsigned const segments = args.tile_segments[layer];
    int const head = static_cast<int>(unit / segments);
    int const segment = static_cast<int>(unit % segments);
    FirstRows const rows(args.chunk, layer, args.tree.top_k);
    int const segment_rows = args.tile_segment_rows[layer];
    int const reached = first_visitor(args, layer, rows, tile * kTileRows);
    int const first = max(segment * segment_rows, reached / kTileQueries * kTileQueries);
    int const end = min((segment + 1) * segment_rows, rows.end);
    int const earlier = max(first, reached) < end ? segment - reached / segment_rows : -1;
    return {layer, head, tile, first, end, earlier};
  }
};

template <class Cfg>
struct FirstNodesRing {
  uint32_t nodes;
  uint32_t stages;
  RingBarriers<Cfg::kStages> barriers;
  RingBarriers<1> unit_barriers;
  uint32_t number;  // of the unit; negative: there is none left

  __device__ explicit FirstNodesRing(uint32_t shared)
      : nodes(shared),
        stages(nodes + Cfg::kUnitTiles * Cfg::kAreaBytes),
        barriers{stages + Cfg::kStages * Cfg::kAreaBytes, stages + Cfg::kStages * (Cfg::kAreaBytes + 8)},
        unit_barriers{barriers.empty + 8 * Cfg::kStages, barriers.empty + 8 * Cfg::kStages + 8},
        number(unit_barriers.empty + 8) {}

  __device__ void init() const {
    barriers.init(1, Cfg::kConsumers);
    unit_barriers.init(1, Cfg::kConsumers);
  }

  __device__ __forceinline__ uint32_t tile(uint32_t i) const { return nodes + i * Cfg::kAreaBytes; }
  __device__ __forceinline__ uint32_t stage(uint32_t slot) const { return stages + slot * Cfg::kAreaBytes; }
};

// By one thread.
template <class Cfg>
__device__ void produce_first_queries(Args const& args, FirstNodesRing<Cfg> const& ring) {
  RingPosition<Cfg::kStages> at;
  RingPosition<1> unit_at;
  for (;;) {
    int const number = atomicAdd(args.next_tile_unit, 1);
    bool const any = number < args.tile_units;
    FirstUnit const unit = any ? FirstUnit::numbered(args, number) : FirstUnit{};
    if (any && unit.earlier < 0) continue;

    uint32_t const full = ring.unit_barriers.full_at(0);
    ring.unit_barriers.wait_empty(unit_at, "htree_bwd first nodes producer: unit empty");
    unit_at = unit_at.ahead(1);
    ptx::store_shared_4B(ring.number, any ? number : -1);
    barriers::mbarrier_arrive_expect_bytes(full, any ? Cfg::kUnitTiles * Cfg::kNodeBytes : 0);
    if (!any) return;
#pragma unroll
    for (int i = 0; i < Cfg::kUnitTiles; ++i) {
      ptx::bulk_load(ring.tile(i) + Cfg::kNodeOffset,
                     args.node_tiles[unit.layer] +
                         (static_cast<std::int64_t>(unit.head) * args.tiles[unit.layer] + unit.tile + i) *
                             node_tile_bytes(Cfg::kK, Cfg::kV),
                     Cfg::kNodeBytes, full);
    }

    char const* queries = args.query_tiles + (static_cast<std::int64_t>(unit.head) * args.chunk.rows + unit.first) /
                                                 kTileQueries * query_tile_bytes(Cfg::kK, Cfg::kV);
#pragma unroll 1
    for (int row = unit.first; row < unit.end; row += kTileQueries) {
      ring.barriers.wait_empty(at, "htree_bwd first nodes producer: empty");
      uint32_t const stage_full = ring.barriers.full_at(at.slot);
      barriers::mbarrier_arrive_expect_bytes(stage_full, Cfg::kQueryBytes);
      ptx::bulk_load(ring.stage(at.slot) + Cfg::kQueryOffset, queries, Cfg::kQueryBytes, stage_full);
      queries += query_tile_bytes(Cfg::kK, Cfg::kV);
      at = at.ahead(1);
    }
  }
}

// A consumer warp. Rows of all results are nodes, g and g + 8 of the parent's in this thread; block 2 j + part of eight
// columns holds heads 8 part ... of query j.
template <class Cfg>
class FirstParent {
  using Element = typename Cfg::Element;
  using Value = std::conditional_t<std::is_same_v<Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kStepBytes = wgmma::kDepth * 128;  // of a contraction over rows: one query
  static constexpr uint32_t kNone = ~0u;  // bottom: nothing is expanded
  using Products = float[wgmma::kAccumulators];
  using Fragments = uint32_t[kTileQueries][4];
  static_assert(kTileQueries * wgmma::kDepth == kTileRows && wgmma::kDepth == kMaxGroupHeads);

public:
  __device__ FirstParent(Args const& args, FirstNodesRing<Cfg> const& ring)
      : args_(args), ring_(ring), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4) {}

  __device__ void run() {
    RingPosition<1> unit_at;
    for (;;) {
      ring_.unit_barriers.wait_full(unit_at, "htree_bwd first nodes consumer: unit full");
      unit_at = unit_at.ahead(1);
      if (static_cast<int>(ptx::load_shared_4B(ring_.number)) < 0) return;
      multiply();
      FirstUnit const unit = this_unit();
      barriers::release(ring_.unit_barriers.empty_at(0));
      finish(unit);
    }
  }

private:
  // Found out anew where it is asked for: registers are few while products are at work.
  __device__ __forceinline__ FirstUnit this_unit() const {
    return FirstUnit::numbered(args_, static_cast<int>(ptx::load_shared_4B(ring_.number)));
  }

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ int parent_of(FirstUnit const& unit) const { return unit.tile * kTileParents + warp(); }

  __device__ __forceinline__ void begin(FirstUnit const& unit) {
    int const parent = parent_of(unit);
    FirstRows const rows(args_.chunk, unit.layer, args_.tree.top_k);
    // Opaque: kept from unit to unit it would cost a register.
    uint32_t const header = ptx::opaque(ring_.tile(warp() / kTileParents) + Cfg::kNodeOffset);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = warp() % kTileParents * kSiblings + g_ + 8 * i;
      int const node = parent * kSiblings + g_ + 8 * i;
      inverse_[i] = ptx::load_shared_float(header + 4 * row) * kHeadroomFactor;
      first_[i] = node < args_.tree.N[unit.layer] ? first_visitor(args_, unit.layer, rows, node)
                                                  : std::numeric_limits<int>::max();
      weight_scale_[i] = kFirstScale;
    }
    expanded_ = kNone;
    if (unit.layer > 0) {
      std::uint32_t const* const entry = entry_of(args_, unit.layer - 1, unit.head, 2 * parent, unit.first + tq_);
      expanded_ = static_cast<uint32_t>(entry - args_.visits.layer[0]);
    }
    words_[0] = words_[1] = 0;
#pragma unroll
    for (auto& x : dk_) x = 0.0f;
#pragma unroll
    for (auto& x : dv_) x = 0.0f;
  }

  // ---- who takes part --------------------------------------------------------------------------------------------

  // A lane asks for query tq of a tile and children g and g + 8, where the row has come so far.
  __device__ __forceinline__ void fetch(int row) {
    if (expanded_ == kNone) return;
    std::uint32_t const* const entries = args_.visits.layer[0];
    if (row >= first_[0]) words_[0] = __ldg(entries + expanded_);
    if (row >= first_[1]) words_[1] = __ldg(entries + (expanded_ + args_.chunk.rows));
    expanded_ += kTileQueries;
  }

  // Who takes part in a tile: bit 4 i + j: child g + 8 i is a leaf of query j. Of the warp: bit 4 lane + j; where none
  // is set for half the queries, nothing is exponentiated.
  struct Open {
    uint32_t own;
    uint32_t warp;

    __device__ __forceinline__ bool operator()(int i, int block) const { return own >> (4 * i + block / 2) & 1u; }
    __device__ __forceinline__ bool half(int which) const { return warp & 0x33333333u << (2 * which); }
  };

  // A lane finds out about query tq, which is `row`, if that comes before `end`.
  __device__ __forceinline__ Open find_open(int row, int end) const {
    Open open{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool const mine = row < end && row >= first_[i] && (words_[i] >> g_ & 1u) == 0;
      uint32_t const warp = __ballot_sync(kFullWarp, mine);
      open.own |= (warp >> (lane_ & ~3) & 0xfu) << (4 * i);
      open.warp |= warp;
    }
    return open;
  }

  // ---- products --------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply() {
    FirstUnit const unit = this_unit();
    begin(unit);
    uint32_t const nodes = __shfl_sync(kFullWarp, ring_.tile(warp() / kTileParents), 0);
    wgmma::Descriptor const keys(nodes + Cfg::kKeyOffset);
    wgmma::Descriptor const values(nodes + Cfg::kValueOffset);
    Products s, dp;
    Fragments p = {}, ds = {};
    int row = unit.first + tq_;
    int const end = unit.end;
    auto const begin_scores = [&] {
      ring_.barriers.wait_full(at_, "htree_bwd first nodes consumer: full");
      multiply<cutlass::half_t, kK>(s, keys, wgmma::Descriptor(ring_.stage(at_.slot) + Cfg::kKeyOffset));
      wgmma::wait<0>();
      wgmma::pin(s);
    };
    fetch(row);
    begin_scores();
    for (;;) {
      uint32_t const stage = __shfl_sync(kFullWarp, ring_.stage(at_.slot), 0);
      multiply<Value, kV>(dp, values, wgmma::Descriptor(stage + Cfg::kValueOffset));
      Open const open = find_open(row, end);
      row += kTileQueries;
      bool const more = row / kTileQueries * kTileQueries < end;
      if (more) fetch(row);
      exponentiate(s, p, stage, open);
      add<Value>(dv_, p, stage + Cfg::kValueOffset);
      wgmma::wait<1>();
      wgmma::pin(dp);
      differentiate(s, dp, ds, stage, open);
      add<cutlass::half_t>(dk_, ds, stage + Cfg::kKeyOffset);
      uint32_t const held = ring_.barriers.empty_at(at_.slot);
      at_ = at_.ahead(1);
      if (!more) {
        wgmma::wait<0>();
        pin_sums(p, ds);
        barriers::release(held);
        break;
      }
      begin_scores();
      pin_sums(p, ds);
      barriers::release(held);
    }
  }

  __device__ __forceinline__ void pin_sums(Fragments& p, Fragments& ds) {
    wgmma::pin(dv_);
    wgmma::pin(dk_);
    wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kTileQueries]>(p));
    wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kTileQueries]>(ds));
  }

  // 64 nodes by 64 query heads.
  template <class Type, int kDim>
  __device__ __forceinline__ void multiply(Products& x, wgmma::Descriptor const& nodes,
                                           wgmma::Descriptor const& queries) const {
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < kDim / wgmma::kDepth; ++step) {
      int const offset = step / 4 * kPanelBytes + step % 4 * 32;
      wgmma::mma_ss<Type>(x, nodes.at(offset), queries.at(offset), step > 0);
    }
    wgmma::commit();
  }

  template <class Type, int kCount>
  __device__ __forceinline__ void add(float (&sums)[kCount], Fragments const& weights, uint32_t panels) const {
    wgmma::Descriptor const rows(panels, kPanelBytes);
    wgmma::pin(sums);
    wgmma::fence();
#pragma unroll
    for (int query = 0; query < kTileQueries; ++query) {
      wgmma::mma_rs<Type, wgmma::Major::MN>(sums, weights[query], rows.at(query * kStepBytes), true);
    }
    wgmma::commit();
  }

  // Where two columns' numbers lie in the header of a tile of queries: unit, then lse2, then delta.
  __device__ __forceinline__ uint32_t columns(uint32_t stage, int block) const {
    return stage + Cfg::kQueryOffset + tq_ * 8 + block * 32;
  }

  // Scores to probabilities, of all children: what takes no part is left out of the fragments.
  __device__ __forceinline__ void exponentiate(Products& s, Fragments& p, uint32_t stage, Open const& open) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) p[2 * half + i / 4][i % 4] = 0;
      // Blocks of their own also keep ptxas from asking for all headers at once: there are no registers for them.
      if (!open.half(half)) continue;
#pragma unroll
      for (int block = kTileQueries * half; block < kTileQueries * (half + 1); ++block) {
        float2 const unit = ptx::load_shared_8B(columns(stage, block));
        float2 const lse2 = ptx::load_shared_8B(columns(stage, block) + 4 * kTileRows);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * block + 2 * i];
          float& y = s[4 * block + 2 * i + 1];
          x = ptx::exp2_movable(fmaf(x * inverse_[i], unit.x, -lse2.x));
          y = ptx::exp2_movable(fmaf(y * inverse_[i], unit.y, -lse2.y));
          if (open(i, block)) p[block / 2][block % 2 * 2 + i] = Pairs<Element>::pack(x, y);
        }
      }
    }
  }

  // Probabilities and dP to dS.
  __device__ __forceinline__ void differentiate(Products& s, Products const& dp, Fragments& ds, uint32_t stage,
                                                Open const& open) {
    float largest[2] = {};
#pragma unroll
    for (int block = 0; block < 2 * kTileQueries; ++block) {
      float2 const unit = ptx::load_shared_8B(columns(stage, block));
      float2 const delta = ptx::load_shared_8B(columns(stage, block) + 8 * kTileRows);
      float2 const size = {unit.x * kHeadroomFactor, unit.y * kHeadroomFactor};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const e = 4 * block + 2 * i;
        s[e] = s[e] * (dp[e] - delta.x) * size.x;
        s[e + 1] = s[e + 1] * (dp[e + 1] - delta.y) * size.y;
        if (open(i, block)) largest[i] = fmaxf(largest[i], fmaxf(fabsf(s[e]), fabsf(s[e + 1])));
      }
    }
    fit_scale(weight_scale_, largest, [&](float const (&factor)[2]) {
#pragma unroll
      for (int e = 0; e < kK / 2; ++e) dk_[e] *= factor[e / 2 % 2];
    });
#pragma unroll
    for (int block = 0; block < 2 * kTileQueries; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const e = 4 * block + 2 * i;
        uint32_t& pair = ds[block / 2][block % 2 * 2 + i];
        pair = 0;
        if (open(i, block)) pair = Pairs<__half>::pack(s[e] * weight_scale_[i], s[e + 1] * weight_scale_[i]);
      }
    }
  }

  // ---- sums ------------------------------------------------------------------------------------------------------

  // Segments are added in ascending order, so that sums repeat bitwise. Those before were begun before.
  __device__ __forceinline__ void finish(FirstUnit const& unit) {
    if (parent_of(unit) >= args_.tree.parents[unit.layer]) return;
    int* const done =
        args_.tile_done + (unit.head * args_.node_rows + args_.begin[unit.layer]) / kSiblings + parent_of(unit);
    if (lane_ == 0) {
      while (atomicAdd(done, 0) != unit.earlier) __nanosleep(200);
    }
    __syncwarp();
    add_sums(unit);
    __threadfence();
    __syncwarp();
    if (lane_ == 0) atomicAdd(done, 1);
  }

  __device__ __forceinline__ void add_sums(FirstUnit const& unit) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const node = parent_of(unit) * kSiblings + g_ + 8 * i;
      if (node >= args_.tree.N[unit.layer]) continue;
      std::int64_t const row = unit.head * args_.node_rows + args_.begin[unit.layer] + node;
      float const scale = kUnitScale * inverse_of(weight_scale_[i]);
      float* const dk = args_.dk + row * kK + 2 * tq_;
      float const* const rotations = reinterpret_cast<float const*>(args_.rotations + node * (kK / 2)) + 4 * tq_;
#pragma unroll
      for (int block = 0; block < kK / 16; ++block) {
        float4 const rotation = __ldg(reinterpret_cast<float4 const*>(rotations + 16 * block));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float const lo = dk_[4 * block + 2 * i + e] * scale;
          float const hi = dk_[4 * block + 2 * i + e + kK / 4] * scale;
          float const cosine = e == 0 ? rotation.x : rotation.z;
          float const sine = e == 0 ? rotation.y : rotation.w;
          atomicAdd(dk + 8 * block + e, lo * cosine + hi * sine);
          atomicAdd(dk + 8 * block + e + kK / 2, hi * cosine - lo * sine);
        }
      }
      float* const dv = args_.dv + row * kV + 2 * tq_;
#pragma unroll
      for (int e = 0; e < kV / 4; ++e) atomicAdd(dv + e / 2 * 8 + e % 2, dv_[4 * (e / 2) + 2 * i + e % 2]);
    }
  }

  Args const& args_;
  FirstNodesRing<Cfg> const ring_;
  int const lane_;
  int const g_;
  int const tq_;
  RingPosition<Cfg::kStages> at_;
  float inverse_[2];       // of the keys, less the headroom
  int first_[2];           // row that visits the node
  float weight_scale_[2];
  // In the reverse index, from the bottom's table on, which the others follow: this lane's row of the tile to come. All of
  // a chunk's have fewer than 2^32 entries.
  uint32_t expanded_;
  uint32_t words_[2] = {};  // of the tile to come
  float dk_[kK / 2];
  float dv_[kV / 2];
};

template <class Cfg>
__device__ void run_first_nodes(Args const& args, uint32_t shared, int warp) {
  FirstNodesRing<Cfg> const ring(shared);
  if (threadIdx.x == 0) {
    ring.init();
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  if (warp >= Cfg::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (threadIdx.x == Cfg::kConsumers * 32) produce_first_queries<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    FirstParent<Cfg>(args, ring).run();
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

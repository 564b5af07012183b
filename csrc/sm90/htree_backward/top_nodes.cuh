// dk and dv of the top layer's nodes by WGMMA. Every query visits the parents 0, 1, 2, ..., keys and queries are turned
// by positions of their own, and so all is dense: a warpgroup holds 64 nodes, a warp 16 of them, one parent, and takes
// four queries of 16 heads at a time.
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

#include "../device/wgmma.cuh"
#include "operands.cuh"

namespace htree_cuda::gradient {

// The first row that visits a node of the top layer which exists; chunk.queries: none. Queries that select all nodes pass
// them over.
__device__ __forceinline__ int first_visitor(Args const& args, int node) {
  int const top = args.tree.layers - 1;
  int const late = (max(node, top > 0 ? args.tree.top_k : 0) << (kLog2Siblings * top)) -
                   static_cast<int>(args.chunk.position(0));
  return min(max(late, 0), args.chunk.queries);
}

// What a CTA works on: two tiles of nodes and a segment of the rows.
struct TopUnit {
  int head;
  int tile;     // the first
  int first;    // row, of a whole tile of queries
  int end;
  int earlier;  // segments that are added before this one; negative: no row visits these nodes

  static __device__ __forceinline__ int count(Args const& args, int tiles) {
    return args.chunk.heads * args.top_segments * (args.top_tiles / tiles);
  }

  // Ordered (head; segment; nodes): those at work together read the same rows, and of the same nodes earlier segments
  // have begun.
  static __device__ __forceinline__ TopUnit numbered(Args const& args, int tiles, int unit) {
    int const per_segment = args.top_tiles / tiles;
    int const tile = unit % per_segment * tiles;
    unit /= per_segment;
    int const segment = unit % args.top_segments;
    int const reached = first_visitor(args, tile * kTileRows);
    int const first = max(segment * args.top_segment_rows, reached / kTileQueries * kTileQueries);
    int const end = min((segment + 1) * args.top_segment_rows, args.chunk.queries);
    int const earlier = max(first, reached) < end ? segment - reached / args.top_segment_rows : -1;
    return {unit / args.top_segments, tile, first, end, earlier};
  }
};

template <class Cfg>
struct TopNodesRing {
  uint32_t nodes;
  uint32_t stages;
  RingBarriers<Cfg::kStages> barriers;
  RingBarriers<1> unit_barriers;
  uint32_t number;  // of the unit; negative: there is none left

  __device__ explicit TopNodesRing(uint32_t shared)
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
__device__ void produce_top_queries(Args const& args, TopNodesRing<Cfg> const& ring) {
  int const units = TopUnit::count(args, Cfg::kUnitTiles);
  RingPosition<Cfg::kStages> at;
  RingPosition<1> unit_at;
  for (;;) {
    int const number = atomicAdd(args.next_top_unit, 1);
    bool const any = number < units;
    TopUnit const unit = any ? TopUnit::numbered(args, Cfg::kUnitTiles, number) : TopUnit{};
    if (any && unit.earlier < 0) continue;

    uint32_t const full = ring.unit_barriers.full_at(0);
    ring.unit_barriers.wait_empty(unit_at, "htree_backward top nodes producer: unit empty");
    unit_at = unit_at.ahead(1);
    ptx::store_shared_4B(ring.number, any ? number : -1);
    barriers::mbarrier_arrive_expect_bytes(full, any ? Cfg::kUnitTiles * Cfg::kNodeBytes : 0);
    if (!any) return;
#pragma unroll
    for (int i = 0; i < Cfg::kUnitTiles; ++i) {
      ptx::bulk_load(ring.tile(i) + Cfg::kNodeOffset,
                     args.top_nodes + (static_cast<std::int64_t>(unit.head) * args.top_tiles + unit.tile + i) *
                                          node_tile_bytes(Cfg::kK, Cfg::kV),
                     Cfg::kNodeBytes, full);
    }

    char const* queries = args.top_queries + (static_cast<std::int64_t>(unit.head) * args.chunk.rows + unit.first) /
                                                 kTileQueries * query_tile_bytes(Cfg::kK, Cfg::kV);
#pragma unroll 1
    for (int row = unit.first; row < unit.end; row += kTileQueries) {
      ring.barriers.wait_empty(at, "htree_backward top nodes producer: empty");
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
class TopParent {
  using Element = typename Cfg::Element;
  using Value = std::conditional_t<std::is_same_v<Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kStepBytes = wgmma::kDepth * 128;  // of a contraction over rows: one query
  using Products = float[wgmma::kAccumulators];
  using Fragments = uint32_t[kTileQueries][4];
  static_assert(kTileQueries * wgmma::kDepth == kTileRows && wgmma::kDepth == kMaxGroupHeads);

public:
  __device__ TopParent(Args const& args, TopNodesRing<Cfg> const& ring)
      : args_(args), ring_(ring), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4) {}

  __device__ void run() {
    RingPosition<1> unit_at;
    for (;;) {
      ring_.unit_barriers.wait_full(unit_at, "htree_backward top nodes consumer: unit full");
      unit_at = unit_at.ahead(1);
      if (static_cast<int>(ptx::load_shared_4B(ring_.number)) < 0) return;
      multiply();
      TopUnit const unit = this_unit();
      release(ring_.unit_barriers.empty_at(0));
      finish(unit);
    }
  }

private:
  // Found out anew where it is asked for: registers are few while products are at work.
  __device__ __forceinline__ TopUnit this_unit() const {
    return TopUnit::numbered(args_, Cfg::kUnitTiles, static_cast<int>(ptx::load_shared_4B(ring_.number)));
  }

  __device__ __forceinline__ void release(uint32_t empty) const {
    __syncwarp();
    if (lane_ == 0) barriers::mbarrier_arrive(empty);
  }

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ int parent_of(TopUnit const& unit) const { return unit.tile * kTileParents + warp(); }

  __device__ __forceinline__ void begin(TopUnit const& unit) {
    int const top = args_.tree.layers - 1;
    int const parent = parent_of(unit);
    // Opaque: kept from unit to unit it would cost a register.
    uint32_t const header = ptx::opaque(ring_.tile(warp() / kTileParents) + Cfg::kNodeOffset);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = warp() % kTileParents * kSiblings + g_ + 8 * i;
      int const node = parent * kSiblings + g_ + 8 * i;
      inverse_[i] = ptx::load_shared_float(header + 4 * row) * kHeadroomFactor;
      first_[i] = node < args_.tree.N[top] ? first_visitor(args_, node) : std::numeric_limits<int>::max();
      weight_scale_[i] = kFirstScale;
    }
    if (top > 0) {
      expanded_ = (unit.head * args_.tree.groups[top - 1] + 2 * parent) * args_.chunk.rows + unit.first + tq_;
    }
#pragma unroll
    for (auto& x : dk_) x = 0.0f;
#pragma unroll
    for (auto& x : dv_) x = 0.0f;
  }

  // ---- who takes part --------------------------------------------------------------------------------------------

  // A lane asks for query tq of a tile and children g and g + 8, where the row has come so far.
  __device__ __forceinline__ void fetch(int row) {
    if (args_.tree.layers == 1) return;
    std::uint32_t const* const expanded = args_.visits.layer[args_.tree.layers - 2];
    if (row >= first_[0]) words_[0] = __ldg(expanded + expanded_);
    if (row >= first_[1]) words_[1] = __ldg(expanded + (expanded_ + args_.chunk.rows));
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

  // A lane finds out about query tq, which is `row`.
  __device__ __forceinline__ Open find_open(int row) const {
    Open open{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool const mine = row < args_.chunk.queries && row >= first_[i] && (words_[i] >> g_ & 1u) == 0;
      uint32_t const warp = __ballot_sync(kFullWarp, mine);
      open.own |= (warp >> (lane_ & ~3) & 0xfu) << (4 * i);
      open.warp |= warp;
    }
    return open;
  }

  // ---- products --------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply() {
    TopUnit const unit = this_unit();
    begin(unit);
    uint32_t const nodes = __shfl_sync(kFullWarp, ring_.tile(warp() / kTileParents), 0);
    wgmma::Descriptor const keys(nodes + Cfg::kKeyOffset);
    wgmma::Descriptor const values(nodes + Cfg::kValueOffset);
    Products s, dp;
    Fragments p = {}, ds = {};
    int row = unit.first + tq_;
    int const end = (unit.end + kTileQueries - 1) / kTileQueries * kTileQueries;
    auto const begin_scores = [&] {
      ring_.barriers.wait_full(at_, "htree_backward top nodes consumer: full");
      multiply<cutlass::half_t, kK>(s, keys, wgmma::Descriptor(ring_.stage(at_.slot) + Cfg::kKeyOffset));
      wgmma::wait<0>();
      wgmma::pin(s);
    };
    fetch(row);
    begin_scores();
    for (;;) {
      uint32_t const stage = __shfl_sync(kFullWarp, ring_.stage(at_.slot), 0);
      multiply<Value, kV>(dp, values, wgmma::Descriptor(stage + Cfg::kValueOffset));
      Open const open = find_open(row);
      row += kTileQueries;
      bool const more = row < end;
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
        release(held);
        break;
      }
      begin_scores();
      pin_sums(p, ds);
      release(held);
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

  // Segments are added in ascending order, so that sums repeat bit for bit. Those before were begun before.
  __device__ __forceinline__ void finish(TopUnit const& unit) {
    int const top = args_.tree.layers - 1;
    if (parent_of(unit) >= args_.tree.parents[top]) return;
    int* const done =
        args_.done + (unit.head * args_.node_rows + args_.begin[top]) / kSiblings + parent_of(unit);
    if (lane_ == 0) {
      while (atomicAdd(done, 0) != unit.earlier) __nanosleep(200);
    }
    __syncwarp();
    add_sums(unit);
    __threadfence();
    __syncwarp();
    if (lane_ == 0) atomicAdd(done, 1);
  }

  __device__ __forceinline__ void add_sums(TopUnit const& unit) const {
    int const top = args_.tree.layers - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const node = parent_of(unit) * kSiblings + g_ + 8 * i;
      if (node >= args_.tree.N[top]) continue;
      std::int64_t const row = unit.head * args_.node_rows + args_.begin[top] + node;
      float const scale = kUnitScale * inverse_of(weight_scale_[i]);
      float* const dk = args_.dk + row * kK + 2 * tq_;
      float const* const turns = reinterpret_cast<float const*>(args_.turns + node * (kK / 2)) + 4 * tq_;
#pragma unroll
      for (int block = 0; block < kK / 16; ++block) {
        float4 const turn = __ldg(reinterpret_cast<float4 const*>(turns + 16 * block));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float const lo = dk_[4 * block + 2 * i + e] * scale;
          float const hi = dk_[4 * block + 2 * i + e + kK / 4] * scale;
          float const cosine = e == 0 ? turn.x : turn.z;
          float const sine = e == 0 ? turn.y : turn.w;
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
  TopNodesRing<Cfg> const ring_;
  int const lane_;
  int const g_;
  int const tq_;
  RingPosition<Cfg::kStages> at_;
  float inverse_[2];       // of the keys, less the headroom
  int first_[2];           // row that visits the node
  float weight_scale_[2];
  uint32_t expanded_ = 0;   // in the reverse index: this lane's row of the tile to come; a chunk's has no 2^32 entries
  uint32_t words_[2] = {};  // of the tile to come
  float dk_[kK / 2];
  float dv_[kV / 2];
};

template <class Cfg>
__device__ void run_top_nodes(Args const& args, uint32_t shared, int warp) {
  TopNodesRing<Cfg> const ring(shared);
  if (threadIdx.x == 0) {
    ring.init();
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  if (warp >= Cfg::kConsumers) {
    ptx::lower_registers<Cfg::kProducerRegisters>();
    if (threadIdx.x == Cfg::kConsumers * 32) produce_top_queries<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::kConsumerRegisters>();
    TopParent<Cfg>(args, ring).run();
  }
}

}  // namespace htree_cuda::gradient

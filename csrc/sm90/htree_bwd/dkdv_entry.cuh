// dk and dv of entry layers: dkdv_entry. The queries whose entry layer this is visit the KV blocks 0, 1, 2, ..., and
// keys and queries are rotated by positions of their own, so that products are dense tiles. A warpgroup holds 64 nodes,
// a warp 16 of them, one KV block, and multiplies with 64 rows at a time: four queries of 16 heads, 8 of 8 or 16 of 4.
//
//   S^T = K Q^T   dP^T = V dO^T   P and dS between them   dV += P^T dO   dK += dS^T Q
//
// The sums of a tile are added while the scores of the next tile are multiplied, and dP while exponentials run.
//
//   barrier        who arrives                    who waits      what becomes visible, or free
//   full[stage]    producer, once, and the bytes  8 consumers    a query tile
//   empty[stage]   each consumer warp, once       producer       the stage may be overwritten
//   item full      producer, once, and the bytes  8 consumers    the number of the work item, its KV tiles
//   item empty     each consumer warp, once       producer       number and KV tiles may be overwritten
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "args.h"
#include "device/barriers.cuh"
#include "device/pairs.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "host/launch_overlapped.cuh"
#include "operands.cuh"
#include "ordered_sum.cuh"
#include "reverse_index/lookup.cuh"
#include "traits.cuh"
#include "weights.cuh"

namespace htree_cuda::sm90::htree_bwd {

// What a CTA works on: two KV tiles and a segment of the rows, of one head.
struct EntryItem : sequences::EntryWork {
  int head;

  template <int kTileQueries>
  static __device__ __forceinline__ EntryItem at(Args const& args, unsigned number) {
    return args.sequences.any() ? of_sequences(args, number) : of_batch<kTileQueries>(args, number);
  }

  // Items are ordered by layer, head, segment and nodes. So items at work at the same time read the same rows, and the
  // earlier segments of an item's nodes were begun before.
  template <int kTileQueries>
  static __device__ __forceinline__ EntryItem of_batch(Args const& args, unsigned index) {
    int layer = args.min_entry;
    while (layer < args.max_entry && index >= static_cast<unsigned>(args.entry[layer + 1].first_item)) ++layer;
    index -= args.entry[layer].first_item;
    EntrySegments const split = args.entry[layer];
    int const tile = static_cast<int>(index % split.pairs) * kItemTiles;
    index /= split.pairs;
    int const head = static_cast<int>(index / split.segments);
    int const segment = static_cast<int>(index % split.segments);
    // Opaque, because the producer has few registers, and the compiler would keep 64 bits of both from item to item.
    Chunk chunk = args.chunk;
    chunk.queries = static_cast<int>(ptx::opaque(static_cast<uint32_t>(chunk.queries)));
    chunk.q_start = ptx::opaque(static_cast<uint32_t>(chunk.q_start));
    EntryRows const rows(chunk, layer, args.tree.top_k);
    int const reached = first_visiting_row(chunk.position(0), layer, rows, tile * kTileRows);
    int const begin = split.first_row + segment * split.rows;
    int const first = max(begin, reached / kTileQueries * kTileQueries);
    int const end = min(begin + split.rows, rows.end);
    int const segments_before = max(first, reached) < end ? segment - split.of_row(reached) : -1;
    int const origin = static_cast<int>(chunk.position(0));
    int const nodes = static_cast<int>(args.tree.N[layer]);
    return {{layer, tile, first, end, segments_before, origin, rows.begin, rows.end, nodes, 0, 0, end - first}, head};
  }

  // From the chunk's list: the items of the heads alternate.
  static __device__ __forceinline__ EntryItem of_sequences(Args const& args, unsigned index) {
    int4 const* const words = reinterpret_cast<int4 const*>(args.sequences.entry + index / args.chunk.heads);
    return of(__ldg(words), __ldg(words + 1), __ldg(words + 2), static_cast<int>(index % args.chunk.heads));
  }
  static __device__ __forceinline__ EntryItem of(int4 const& x, int4 const& y, int4 const& z, int head) {
    return {{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w, z.x, z.y, z.z, z.w}, head};
  }

  __device__ __forceinline__ EntryRows rows() const { return {rows_begin, rows_end}; }
  __device__ __forceinline__ int blocks() const { return (nodes + kSiblings - 1) / kSiblings; }
};

template <class Cfg>
struct DkDvEntryRing {
  uint32_t nodes;
  uint32_t stages;
  RingBarriers<Cfg::kStages> barriers;
  RingBarriers<1> item_barriers;
  uint32_t item;  // the head of the work item, negative where no item is left; the item's number; at 16, the item

  __device__ explicit DkDvEntryRing(uint32_t shared)
      : nodes(shared),
        stages(nodes + kItemTiles * Cfg::kAreaBytes),
        barriers{stages + Cfg::kStages * Cfg::kAreaBytes, stages + Cfg::kStages * (Cfg::kAreaBytes + 8)},
        item_barriers{barriers.empty + 8 * Cfg::kStages, barriers.empty + 8 * Cfg::kStages + 8},
        item(item_barriers.empty + 8) {}

  __device__ void init() const {
    barriers.init(1, Cfg::Roles::kConsumers);
    item_barriers.init(1, Cfg::Roles::kConsumers);
  }

  __device__ __forceinline__ uint32_t tile(uint32_t i) const { return nodes + i * Cfg::kAreaBytes; }
  __device__ __forceinline__ uint32_t stage(uint32_t slot) const { return stages + slot * Cfg::kAreaBytes; }

  // Hands the item over to the consumers, or says that no item is left.
  __device__ __forceinline__ void store(EntryItem const& own, int number, bool any) const {
    ptx::store_shared_8B(item, {static_cast<uint32_t>(any ? own.head : -1), static_cast<uint32_t>(number)});
    uint4 const* const words = reinterpret_cast<uint4 const*>(static_cast<sequences::EntryWork const*>(&own));
#pragma unroll
    for (int i = 0; i < 3; ++i) ptx::store_shared_16B(item + 16 + 16 * i, words[i]);
  }
  __device__ __forceinline__ int head_of_item() const { return static_cast<int>(ptx::load_shared_4B(item)); }
  __device__ __forceinline__ int number_of_item() const { return static_cast<int>(ptx::load_shared_4B(item + 4)); }
  __device__ __forceinline__ int rows_of_item() const {
    return static_cast<int>(ptx::load_shared_4B(item + 16 + offsetof(sequences::EntryWork, count)));
  }
  __device__ __forceinline__ EntryItem load() const {
    auto const word = [&](int i) { return static_cast<int>(ptx::load_shared_4B(item + 16 + 4 * i)); };
    auto const four = [&](int i) { return int4{word(i), word(i + 1), word(i + 2), word(i + 3)}; };
    return EntryItem::of(four(0), four(4), four(8), head_of_item());
  }
};

// The producer, one thread.
template <class Cfg>
__device__ void produce_query_tiles(Args const& args, DkDvEntryRing<Cfg> const& ring) {
  RingPosition<Cfg::kStages> at;
  RingPosition<1> item_at;
  // Counted again for every item, for want of a register.
  auto const items = [&] {
    return args.sequences.any() ? args.sequences.counts->entry * static_cast<int>(ptx::opaque(args.chunk.heads))
                                : args.tile_items;
  };
  for (;;) {
    int const number = atomicAdd(args.next_tile_item, 1);
    bool const any = number < items();
    EntryItem const item = any ? EntryItem::at<Cfg::kTileQueries>(args, number) : EntryItem{};
    if (any && item.segments_before < 0) continue;

    uint32_t const full = ring.item_barriers.full_at(0);
    ring.item_barriers.wait_empty(item_at, "dkdv_entry producer: item empty");
    item_at = item_at.ahead(1);
    ring.store(item, number, any);
    barriers::mbarrier_arrive_expect_bytes(full, any ? kItemTiles * Cfg::kBlockBytes : 0);
    if (!any) return;
#pragma unroll
    for (int i = 0; i < kItemTiles; ++i) {
      // Where there is an odd number of tiles, the last one stands for the tile behind it, which no row visits.
      int const tile = min(item.tile + i, (item.blocks() - 1) / kTileBlocks);
      ptx::bulk_load(ring.tile(i) + Cfg::kBlockOffset,
                     args.kv_tiles[item.layer] +
                         (static_cast<std::int64_t>(item.head) * args.tiles[item.layer] + item.tile_begin + tile) *
                             kv_tile_bytes(Cfg::kK, Cfg::kV),
                     Cfg::kBlockBytes, full);
    }

    int const rows = static_cast<int>(ptx::opaque(static_cast<uint32_t>(args.chunk.rows)));
    char const* queries = args.query_tiles + (static_cast<std::int64_t>(item.head) * rows + item.first) /
                                                 Cfg::kTileQueries * query_tile_bytes(Cfg::kK, Cfg::kV);
#pragma unroll 1
    for (int row = item.first; row < item.end; row += Cfg::kTileQueries) {
      ring.barriers.wait_empty(at, "dkdv_entry producer: empty");
      uint32_t const stage_full = ring.barriers.full_at(at.slot);
      barriers::mbarrier_arrive_expect_bytes(stage_full, Cfg::kQueryBytes);
      ptx::bulk_load(ring.stage(at.slot) + Cfg::kQueryOffset, queries, Cfg::kQueryBytes, stage_full);
      queries += query_tile_bytes(Cfg::kK, Cfg::kV);
      at = at.ahead(1);
    }
  }
}

// A consumer warp and its KV block. Rows of all results are nodes of the block, g and g + 8 in this thread. Eight
// columns are eight heads, of one query or of two.
template <class Cfg>
class DkDvEntryConsumer {
  using Element = typename Cfg::Element;
  using Value = std::conditional_t<std::is_same_v<Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kStepBytes = wgmma::kDepth * 128;  // a step of a contraction over rows
  static constexpr int kSteps = kTileRows / wgmma::kDepth;
  static constexpr int kTileQueries = Cfg::kTileQueries;
  static constexpr bool kFewQueries = kTileQueries == 4;  // lanes decide by query, else by node
  static constexpr uint32_t kNone = ~0u;  // at the bottom, where nothing is expanded
  using Products = float[wgmma::kAccumulators];
  using Fragments = uint32_t[kSteps][4];

public:
  __device__ DkDvEntryConsumer(Args const& args, DkDvEntryRing<Cfg> const& ring)
      : args_(args), ring_(ring), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4) {}

  __device__ void run() {
    RingPosition<1> item_at;
    for (;;) {
      ring_.item_barriers.wait_full(item_at, "dkdv_entry consumer: item full");
      item_at = item_at.ahead(1);
      if (ring_.head_of_item() < 0) return;
      multiply();
      EntryItem const item = ring_.load();
      int const number = ring_.number_of_item();
      barriers::release(ring_.item_barriers.empty_at(0));
      finish(item, number);
    }
  }

private:
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ int block_of(EntryItem const& item) const { return item.tile * kTileBlocks + warp(); }

  __device__ __forceinline__ void begin(EntryItem const& item) {
    int const block = block_of(item);
    EntryRows const rows = item.rows();
    // Opaque, because an address that is kept from item to item costs a register.
    uint32_t const header = ptx::opaque(ring_.tile(warp() / kTileBlocks) + Cfg::kBlockOffset);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = warp() % kTileBlocks * kSiblings + g_ + 8 * i;
      int const node = block * kSiblings + g_ + 8 * i;
      inverse_[i] = ptx::load_shared_float(header + 4 * row) * kHeadroomFactor;
      int const first = node < item.nodes ? first_visiting_row(item.origin, item.layer, rows, node)
                                          : std::numeric_limits<int>::max();
      first_ = i == 0 ? within(item, first) : first_ | within(item, first) << 16;
      weight_scale_[i] = kInitialScale;
    }
    expanded_ = kNone;
    if (item.layer > 0) {
      // Where lanes decide by node, lane i loads the word of query i % kTileQueries.
      int const query = kFewQueries ? tq_ : lane_ % kTileQueries;
      int const which = kFewQueries ? block : min(block, args_.tree.words[item.layer - 1] - 1);
      std::uint32_t const* const word =
          reverse_index::word_at(args_, item.layer - 1, item.head, which, item.first + query);
      expanded_ = static_cast<uint32_t>(word - args_.index.layer[0]);
    }
    word_ = 0;
#pragma unroll
    for (auto& x : dk_) x = 0.0f;
#pragma unroll
    for (auto& x : dv_) x = 0.0f;
  }

  // ---- which query attends which node ------------------------------------------------------------------------------

  // Rows are counted from the item's first one on, so that first_of has 16 bits: the products need the registers. An item
  // has fewer than kMaxItemRows.
  static __device__ __forceinline__ int within(EntryItem const& item, int row) {
    return min(max(row - item.first, 0), sequences::kMaxItemRows);
  }
  // The first row that visits node g + 8 i.
  __device__ __forceinline__ int first_of(int i) const {
    // Through opaque, because the compiler would keep both halves in registers.
    return static_cast<int>(ptx::opaque(static_cast<uint32_t>(first_)) >> (16 * i) & 0xffffu);
  }

  // A lane loads its index word of the tile that begins with `row`: of query tq, once the rows have come as far as node g, or
  // of another query, of all rows, for want of a register.
  __device__ __forceinline__ void fetch(int row) {
    if (expanded_ == kNone) return;
    std::uint32_t const* const words = args_.index.layer[0];
    if constexpr (!kFewQueries) {
      word_ = __ldg(words + expanded_);
      expanded_ += kTileQueries;
      return;
    }
    if (row + tq_ >= first_of(0)) word_ = __ldg(words + expanded_);
    expanded_ += kTileQueries;
  }

  // Which query attends which node in a tile. Bit 4 i + j of `own` says that node g + 8 i is a leaf of query j; bit 4
  // lane + j of `warp` says the same of some node of the lanes. Half a tile without such bits is not exponentiated.
  // Where a tile has more queries, the bits are 16 i + j, and one for each half of the tile.
  struct Attends {
    uint32_t own;
    uint32_t warp;
    int in_columns;  // which of the two queries of eight columns this thread's two columns have

    __device__ __forceinline__ bool operator()(int i, int block) const {
      if constexpr (kFewQueries) return own >> (4 * i + block / 2) & 1u;
      int const query = kTileQueries == 8 ? block : 2 * block + in_columns;
      return own >> (16 * i + query) & 1u;
    }
    __device__ __forceinline__ bool half(int which) const {
      if constexpr (kFewQueries) return warp & 0x33333333u << (2 * which);
      return warp >> which & 1u;
    }
  };

  // The queries of the tile that begins with `row`, of those before `end`.
  __device__ __forceinline__ Attends find_attends(int row, int end) const {
    Attends attends{};
    if constexpr (!kFewQueries) {
      uint32_t expanded = 0;  // bit kTileQueries i + j: query j expanded node g + 8 i
      // Lanes look at the lower eight nodes for bits i = 0, and at the upper ones for i = 1.
      uint32_t const nodes = word_ >> (lane_ / kTileQueries % 2 * 8);
#pragma unroll
      for (int node = 0; node < 8; ++node) {
        uint32_t const queries = __ballot_sync(kFullWarp, nodes >> node & 1u);
        if (g_ == node) expanded = queries;
      }
      auto const up_to = [&](int count) { return (1u << min(max(count, 0), kTileQueries)) - 1u; };
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // The difference of rows must not overflow where no row visits the node.
        int const first = min(first_of(i), row + kTileQueries) - row;
        attends.own |= (up_to(end - row) & ~up_to(first) & ~(expanded >> (kTileQueries * i))) << (16 * i);
      }
      uint32_t const either = attends.own | attends.own >> 16;
      constexpr uint32_t kFirstHalf = (1u << kTileQueries / 2) - 1u;
      attends.warp = __any_sync(kFullWarp, (either & kFirstHalf) != 0);
      attends.warp |= __any_sync(kFullWarp, (either & kFirstHalf << kTileQueries / 2) != 0) << 1;
      attends.in_columns = tq_ / 2;
      return attends;
    }
    row += tq_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool const leaf = row < end && row >= first_of(i) && (word_ >> (g_ + 8 * i) & 1u) == 0;
      uint32_t const warp = __ballot_sync(kFullWarp, leaf);
      attends.own |= (warp >> (lane_ & ~3) & 0xfu) << (4 * i);
      attends.warp |= warp;
    }
    return attends;
  }

  // ---- products --------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void multiply() {
    begin(ring_.load());
    uint32_t const nodes = __shfl_sync(kFullWarp, ring_.tile(warp() / kTileBlocks), 0);
    wgmma::Descriptor const keys(nodes + Cfg::kKeyOffset);
    wgmma::Descriptor const values(nodes + Cfg::kValueOffset);
    Products s, dp;
    Fragments p = {}, ds = {};
    int row = 0;
    // The end is read again for every tile, for want of a register.
    auto const end = [&] { return ring_.rows_of_item(); };
    auto const begin_scores = [&] {
      ring_.barriers.wait_full(at_, "dkdv_entry consumer: full");
      multiply<cutlass::half_t, kK>(s, keys, wgmma::Descriptor(ring_.stage(at_.slot) + Cfg::kKeyOffset));
      wgmma::wait<0>();
      wgmma::pin(s);
    };
    fetch(row);
    begin_scores();
    for (;;) {
      uint32_t const stage = __shfl_sync(kFullWarp, ring_.stage(at_.slot), 0);
      multiply<Value, kV>(dp, values, wgmma::Descriptor(stage + Cfg::kValueOffset));
      Attends const attends = find_attends(row, end());
      row += kTileQueries;
      bool const more = row < end();
      if (more) fetch(row);
      exponentiate(s, p, stage, attends);
      add<Value>(dv_, p, stage + Cfg::kValueOffset);
      wgmma::wait<1>();
      wgmma::pin(dp);
      differentiate(s, dp, ds, stage, attends);
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
    wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kSteps]>(p));
    wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kSteps]>(ds));
  }

  // Issues a product of 64 nodes and 64 query heads.
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
    for (int step = 0; step < kSteps; ++step) {
      wgmma::mma_rs<Type, wgmma::Major::MN>(sums, weights[step], rows.at(step * kStepBytes), true);
    }
    wgmma::commit();
  }

  // Where the numbers of this thread's two columns lie in the header of a query tile: unit, then lse2, then delta.
  __device__ __forceinline__ uint32_t columns(uint32_t stage, int block) const {
    return stage + Cfg::kQueryOffset + tq_ * 8 + block * 32;
  }

  // Scores of all nodes become probabilities; pairs that do not attend are left out of the fragments.
  __device__ __forceinline__ void exponentiate(Products& s, Fragments& p, uint32_t stage,
                                               Attends const& attends) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) p[2 * half + i / 4][i % 4] = 0;
      // The branch also keeps ptxas from loading all headers at once, for which there are no registers.
      if (!attends.half(half)) continue;
#pragma unroll
      for (int block = 4 * half; block < 4 * (half + 1); ++block) {
        float2 const unit = ptx::load_shared_8B(columns(stage, block));
        float2 const lse2 = ptx::load_shared_8B(columns(stage, block) + 4 * kTileRows);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * block + 2 * i];
          float& y = s[4 * block + 2 * i + 1];
          x = ptx::exp2_movable(fmaf(x * inverse_[i], unit.x, -lse2.x));
          y = ptx::exp2_movable(fmaf(y * inverse_[i], unit.y, -lse2.y));
          if (attends(i, block)) p[block / 2][block % 2 * 2 + i] = Pairs<Element>::pack(x, y);
        }
      }
    }
  }

  // Probabilities and dP become dS.
  __device__ __forceinline__ void differentiate(Products& s, Products const& dp, Fragments& ds, uint32_t stage,
                                                Attends const& attends) {
    float largest[2] = {};
#pragma unroll
    for (int block = 0; block < kTileRows / 8; ++block) {
      float2 const unit = ptx::load_shared_8B(columns(stage, block));
      float2 const delta = ptx::load_shared_8B(columns(stage, block) + 8 * kTileRows);
      float2 const size = {unit.x * kHeadroomFactor, unit.y * kHeadroomFactor};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const e = 4 * block + 2 * i;
        s[e] = s[e] * (dp[e] - delta.x) * size.x;
        s[e + 1] = s[e + 1] * (dp[e + 1] - delta.y) * size.y;
        if (attends(i, block)) largest[i] = fmaxf(largest[i], fmaxf(fabsf(s[e]), fabsf(s[e + 1])));
      }
    }
    lower_scale(weight_scale_, largest, [&](float const (&factor)[2]) {
#pragma unroll
      for (int e = 0; e < kK / 2; ++e) dk_[e] *= factor[e / 2 % 2];
    });
#pragma unroll
    for (int block = 0; block < kTileRows / 8; ++block) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const e = 4 * block + 2 * i;
        uint32_t& pair = ds[block / 2][block % 2 * 2 + i];
        pair = 0;
        if (attends(i, block)) pair = Pairs<__half>::pack(s[e] * weight_scale_[i], s[e + 1] * weight_scale_[i]);
      }
    }
  }

  // ---- sums ------------------------------------------------------------------------------------------------------

  // Leaves the sums of this item for add_segments, or adds them to those of the block, in the order of the segments.
  __device__ __forceinline__ void finish(EntryItem const& item, int number) {
    if (block_of(item) >= item.blocks()) return;
    std::int64_t const block = item.block_begin + block_of(item);
    std::int64_t const row = item.head * args_.node_rows + args_.begin[item.layer] + block * kSiblings;
    int* const segments_added = args_.tile_segments_added + row / kSiblings;
    float* dk = args_.dk + row * kK;
    float* dv = args_.dv + row * kV;
    EntrySegments const& split = args_.entry[item.layer];
    bool const apart = !args_.sequences.any() && split.sums_apart;
    if (apart) {
      dk = args_.entry_sums + split.place_of_sums(number) * (kItemNodes * (kK + kV));
      dv = dk + kItemNodes * kK + warp() * kSiblings * kV;
      dk += warp() * kSiblings * kK;
    } else {
      wait_for_segments(segments_added, item.segments_before, lane_);
    }
    int const nodes = static_cast<int>(item.nodes - block_of(item) * kSiblings);
    each_four_columns(item, dk, dv, [&](int node, float* to, float4 four) {
      ptx::reduce_add_16B_if(!apart && node < nodes, to, four);
      if (apart) *reinterpret_cast<float4*>(to) = four;
    });
    if (!apart) count_segment(segments_added, lane_);
  }

  // Calls add(node of the block, address, values) for the sums of this thread's nodes, four columns of dk or dv at a
  // time. The block's rows begin at `dk` and `dv`.
  template <class Add>
  __device__ __forceinline__ void each_four_columns(EntryItem const& item, float* dk, float* dv, Add&& add) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const node = g_ + 8 * i;
      auto const add_four = [&](FourColumns const& x) { add(node, x.to, x.values); };
      float const scale = kUnitScale * inverse_of(weight_scale_[i]);
      float* const keys = dk + node * kK + 2 * tq_;
      float const* const rotations =
          reinterpret_cast<float const*>(args_.rotations + (block_of(item) * kSiblings + node) * (kK / 2)) + 4 * tq_;
#pragma unroll
      for (int block = 0; block < kK / 16; ++block) {
        float4 const rotation = __ldg(reinterpret_cast<float4 const*>(rotations + 16 * block));
        float lo[2], hi[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float const x = dk_[4 * block + 2 * i + e] * scale;
          float const y = dk_[4 * block + 2 * i + e + kK / 4] * scale;
          float const cosine = e == 0 ? rotation.x : rotation.z;
          float const sine = e == 0 ? rotation.y : rotation.w;
          lo[e] = x * cosine + y * sine;
          hi[e] = y * cosine - x * sine;
        }
        add_four(four_columns(keys + 8 * block, keys + 8 * block + kK / 2, {lo[0], lo[1]}, {hi[0], hi[1]}, tq_));
      }
      float* const values = dv + node * kV + 2 * tq_;
#pragma unroll
      for (int block = 0; block < kV / 8; block += 2) {
        auto const of = [&](int which) { return float2{dv_[4 * which + 2 * i], dv_[4 * which + 2 * i + 1]}; };
        add_four(four_columns(values + 8 * block, values + 8 * block + 8, of(block), of(block + 1), tq_));
      }
    }
  }

  Args const& args_;
  DkDvEntryRing<Cfg> const ring_;
  int const lane_;
  int const g_;
  int const tq_;
  RingPosition<Cfg::kStages> at_;
  float inverse_[2];       // inverse row scales of the keys, less the headroom
  int first_;              // the first row that visits each of the two nodes, 16 bits each
  float weight_scale_[2];
  // Where this lane's index word of the next tile lies, counted from the table of the bottom, which the tables of the
  // other layers follow. All tables of a chunk have fewer than 2^32 words.
  uint32_t expanded_;
  uint32_t word_ = 0;  // this lane's index word of the next tile
  float dk_[kK / 2];
  float dv_[kV / 2];
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) dkdv_entry_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  uint32_t const shared = align_shared<Cfg>(shared_memory);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  wait_for_previous_grid();

  DkDvEntryRing<Cfg> const ring(shared);
  if (threadIdx.x == 0) {
    ring.init();
    barriers::mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= Cfg::Roles::kConsumers) {
    ptx::lower_registers<Cfg::Roles::kProducerRegisters>();
    if (threadIdx.x == Cfg::Roles::kConsumers * 32) produce_query_tiles<Cfg>(args, ring);
  } else {
    ptx::raise_registers<Cfg::Roles::kConsumerRegisters>();
    DkDvEntryConsumer<Cfg>(args, ring).run();
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

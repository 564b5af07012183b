// Values below the first layer for groups of 8 heads or fewer: two neighbouring queries a warp. At the bottom, where nothing is
// closed.
//
// The children of a parent are the rows of its products and the heads of one query their columns: scores are keys times the
// turned query, S^T = K q^T, and what is added is O^T = V^T P^T, m16n8k16 both, so that products have no rows to spare with 8
// heads, and what is read of shared memory serves both queries if both take the parent. If one does, it alone multiplies. Lane
// 4 g + t has children g and g + 8 of heads 2 t and 2 t + 1; movmatrix brings P where it is an operand.
//
// A query turns from rank to rank by packed arithmetic, x += y-like, two pairs of elements at a time, by what is read of shared
// memory for both; it begins anew from itself every few ranks of its own, as in turning.cuh.
//
// Whatever is decided for a query follows from its own data: a vote that the other one asked for leads to the same bits.
#pragma once

#include "../device/pairs.cuh"
#include "consumer.cuh"
#include "query.cuh"

namespace htree_cuda::layer {

template <class Cfg>
class BelowPairs : public Query<Cfg> {
  using Base = Query<Cfg>;
  using Element = typename Cfg::Element;
  using Base::active;
  using Base::active_;
  using Base::args_;
  using Base::g_;
  using Base::groups_;
  using Base::kInfinity;
  using Base::kK;
  using Base::kNear;
  using Base::kNoLeaf;
  using Base::kSlack;
  using Base::kSteps;
  using Base::kV;
  using Base::lane_;
  using Base::o_;
  using Base::position;
  using Base::position_;
  using Base::q_;
  using Base::second_position_;
  using Base::state_row;
  using Base::tq_;
  using Base::unit_;
  using Base::warp_;
  static constexpr int kTiles = kV / 16;
  static constexpr uint32_t kFragmentBytes = 512;
  static constexpr int kBoth = 3;  // of sets of queries, bit i: query i

public:
  __device__ BelowPairs(Args const& args, Ring<Cfg> const& ring)
      : Base(args), shared_(ring.stages - Cfg::kRingOffset), fragment_lane_(ptx::opaque(lane_ * 16)) {
    if (!active_) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      begin_heads(i);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        auto const& x = reinterpret_cast<uint32_t const(&)[4]>(q_[step]);
        ptx::store_shared_8B(saved_query(i) + step * 256, {x[2 * i], x[2 * i + 1]});
      }
      fetch_turns(i, 0);
    }
  }

  __device__ void run(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    Ring<Cfg> const own(ptx::opaque(ring.stages));
    uint32_t next_mine = 0;  // of the stage behind the one at hand, which says so: there nobody waits for it
    if (groups_ > 0 && active_) {
      own.barriers.wait_full(at, "htree_layer consumer: full");
      next_mine = ptx::load_shared_4B(own.mask(own.stage(at.slot), warp_));
    }
#pragma unroll 1
    for (int groups = groups_; groups > 0; --groups) {
      own.barriers.wait_full(at, "htree_layer consumer: full");
      uint32_t const stage = own.stage(at.slot);
      uint32_t mine = next_mine;
      if (active_) next_mine = ptx::load_shared_4B(own.next_mask(stage, warp_));
#pragma unroll 1
      while (mine != 0) {
        uint32_t const slots = (mine | mine >> 16) & 0xffffu;
        int const slot = __ffs(slots) - 1;
        uint32_t const takers = mine >> slot & 0x10001u;
        mine &= ~(0x10001u << slot);
        if ((takers & 1u) != 0 && left_[0] == 0) begin_turning(0);
        if (takers >> 16 != 0 && left_[1] == 0) begin_turning(1);
        uint32_t const address = stage + slot * Cfg::kSlotBytes;
        if (takers == 0x10001u) {
          add<kBoth>(address);
        } else if (takers == 1u) {
          add<1>(address);
        } else {
          add<2>(address);
        }
      }
      __syncwarp();
      if (lane_ == 0) barriers::mbarrier_arrive(stage + Cfg::kEmptyOffset);
      at = at.ahead(1);
    }
    if (!active_) return;
    if (*args_.spoilt != 0) spoil();
    if (active(0)) write_result(0);
    if (active(1)) write_result(1);
  }

private:
  // Of one query, what this thread knows of its heads 2 tq and 2 tq + 1, as Query does of rows.
  struct Heads {
    float unit[2];
    float max[2];
    float reference[2];
    float sum[2];  // of this thread's children
  };

  static __device__ __forceinline__ constexpr bool has(int queries, int i) { return queries >> i & 1; }

  __device__ __forceinline__ auto& out(int i, int tile) { return o_[i * kTiles + tile]; }

  static __device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lanes));
    return x;
  }

  static __device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(kFullWarp, x, lanes);
    return x;
  }

  // The state that the layer above left: rows of O^T are columns of its fragments.
  __device__ __forceinline__ void begin_heads(int i) {
    Heads& heads = heads_[i];
    float const* const o = reinterpret_cast<float const*>(args_.state_out + state_row(i) * (kV / 8) * 32);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const head = 2 * tq_ + e;
      heads.unit[e] = __shfl_sync(kFullWarp, unit_[i], 4 * head);
      float2 const state = active(i) ? args_.state_sum[state_row(i) * 16 + head] : float2{kNoLeaf, 0.0f};
      heads.max[e] = state.x;
      heads.sum[e] = g_ == 0 ? state.y : 0.0f;
      refer(heads, e);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const at = ((2 * tile + half) * 32 + 4 * head + g_ / 2) * 4 + g_ % 2;
          out(i, tile)[2 * half + e] = active(i) ? o[at] : 0.0f;
        }
      }
    }
  }

  static __device__ __forceinline__ void refer(Heads& heads, int e) {
    float const exponent = heads.max[e] * heads.unit[e];
    heads.reference[e] = fabsf(exponent) <= kNear ? exponent : Base::not_a_number();
  }

  // ---- turning

  __device__ __forceinline__ uint32_t saved_query(int i) const {
    return shared_ + warp_ * (kSteps * 512) + i * (kSteps * 256) + ptx::lane_index() * 8;
  }
  __device__ __forceinline__ uint32_t fetched_turns(int i) const {
    return shared_ + Cfg::kTurnOffset + warp_ * Cfg::kTurnBytes + i * Cfg::kPackedBytes;
  }

  // Those from which query i begins anew that many ranks further are under way while the ranks before it pass.
  __device__ __forceinline__ void fetch_turns(int i, int ranks) const {
    int const from = position(i) - ranks * kSiblings;
    int const lane = static_cast<int>(ptx::lane_index());
    if (from >= 0 && lane < Cfg::kPackedBytes / 16) {
      ptx::copy_async_16B(fetched_turns(i) + lane * 16,
                          reinterpret_cast<char const*>(own<Cfg>(args_).packed_begin_turns) +
                              static_cast<std::int64_t>(from) * Cfg::kPackedBytes + lane * 16, 0);
    }
    ptx::copy_async_commit();
  }

  // The elements x and y of two pairs, from a position to one further by the angles of these, backwards where sin is negated.
  static __device__ __forceinline__ void turn(half2 c, half2 s, half2& x, half2& y) {
    half2 const sx = __hmul2(s, x);
    x = __hfma2(c, x, __hneg2(__hmul2(s, y)));
    y = __hfma2(c, y, sx);
  }

  __device__ __forceinline__ void begin_turning(int i) {
    ptx::copy_async_wait<0>();
    __syncwarp();
    uint32_t const turns = fetched_turns(i) + static_cast<uint32_t>(tq_) * (kSteps * 8);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint4 const words = ptx::load_shared_16B(turns + step * 8);
      half2 const(&of)[4] = reinterpret_cast<half2 const(&)[4]>(words);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        float2 const saved = ptx::load_shared_8B(saved_query(i) + (step + next) * 256);
        half2 x = reinterpret_cast<half2 const&>(saved.x);
        half2 y = reinterpret_cast<half2 const&>(saved.y);
        turn(of[2 * next], of[2 * next + 1], x, y);
        q_[step + next][2 * i] = x;
        q_[step + next][2 * i + 1] = y;
      }
    }
    __syncwarp();
    fetch_turns(i, args_.turn_period);
    left_[i] = args_.turn_period;
  }

  // ---- a parent

  __device__ __forceinline__ void load_fragment(uint32_t (&a)[4], uint32_t address) const {
    uint4 const x = ptx::load_shared_16B(address + fragment_lane_);
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  }

  static __device__ __forceinline__ bool asks(float const (&x)[4]) {
    return !(ptx::max_or_nan(ptx::max_or_nan(x[0], x[1]), ptx::max_or_nan(x[2], x[3])) <= kSlack);
  }

  // P of a parent, rounded to the dtype, as operand B, and its sums.
  static __device__ __forceinline__ void exponentiate(float const (&x)[4], uint32_t (&p)[2], float (&sum)[2]) {
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = ptx::exp2_movable(x[e]);
    sum[0] = y[0] + y[2];
    sum[1] = y[1] + y[3];
    p[0] = ptx::transpose_matrix(Pairs<Element>::pack(y[0], y[1]));
    p[1] = ptx::transpose_matrix(Pairs<Element>::pack(y[2], y[3]));
  }

  // Again, from raw scores, in which keys may have scales of their own: the same bits, unless a score exceeds a maximum by more
  // than kSlack, which raises it and rescales what was summed up to then. Children behind the rightmost candidate take no part.
  __device__ __forceinline__ void compute_again(int i, uint32_t scales, float (&raw)[4], uint32_t (&p)[2], float (&sum)[2]) {
    Heads& heads = heads_[i];
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int const child = g_ + e / 2 * 8;
      raw[e] *= rope::own_scale(ptx::load_shared_float(scales + child * 4));
      if (child > position(i)) raw[e] = -kInfinity;
      x[e] = fmaf(raw[e], heads.unit[e % 2], -heads.reference[e % 2]);
    }
    if (__any_sync(kFullWarp, asks(x))) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float const largest = column_max(fmaxf(raw[e], raw[2 + e]));
        if ((largest - heads.max[e]) * heads.unit[e] > kSlack) {
          float const factor = ptx::exp2_movable((heads.max[e] - largest) * heads.unit[e]);
          heads.max[e] = largest;
          refer(heads, e);
          heads.sum[e] *= factor;
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            out(i, tile)[e] *= factor;
            out(i, tile)[2 + e] *= factor;
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = (raw[e] - heads.max[e % 2]) * heads.unit[e % 2];
    }
    exponentiate(x, p, sum);
  }

  // The parent in `slot`, for the queries that take it.
  template <int kTakers>
  __device__ __forceinline__ void add(uint32_t slot) {
    float const scale = fabsf(ptx::load_shared_float(slot + Cfg::kScaleOffset));
    float products[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t keys[4];
      load_fragment(keys, slot + Cfg::kKeyOffset + step * kFragmentBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        auto const& q = reinterpret_cast<uint32_t const(&)[4]>(q_[step]);
        if (has(kTakers, i)) ptx::mma_fp16(products[i], keys, q[2 * i], q[2 * i + 1]);
      }
    }
    uint32_t p[2][2];
    float sum[2][2];
    bool again = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has(kTakers, i)) continue;
      Heads const& heads = heads_[i];
      float const factor[2] = {scale * heads.unit[0], scale * heads.unit[1]};
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = fmaf(products[i][e], factor[e % 2], -heads.reference[e % 2]);
      again = again | asks(x) | (position(i) < kSiblings);
      exponentiate(x, p[i], sum[i]);
    }
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) turn_on<kTakers>(step);
    if (__any_sync(kFullWarp, again)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (has(kTakers, i)) compute_again(i, slot + Cfg::kScaleOffset, products[i], p[i], sum[i]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t values[4];
      load_fragment(values, slot + Cfg::kValueOffset + tile * kFragmentBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (has(kTakers, i)) Pairs<Element>::mma(out(i, tile), values, p[i][0], p[i][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has(kTakers, i)) continue;
      heads_[i].sum[0] += sum[i][0];
      heads_[i].sum[1] += sum[i][1];
      left_[i] -= 1;
    }
    if (has(kTakers, 0)) position_ -= kSiblings;
    if (has(kTakers, 1)) second_position_.value -= kSiblings;
  }

  // To the next rank, sixteen positions back, the elements of two steps.
  template <int kTakers>
  __device__ __forceinline__ void turn_on(int step) {
    uint4 const words = ptx::load_shared_16B(shared_ + Cfg::kStepOffset + static_cast<uint32_t>(tq_) * Cfg::kStepBytes + step * 8);
    half2 const(&of)[4] = reinterpret_cast<half2 const(&)[4]>(words);
#pragma unroll
    for (int next = 0; next < 2; ++next) {
      half2(&q)[4] = q_[step + next];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (has(kTakers, i)) turn(of[2 * next], __hneg2(of[2 * next + 1]), q[2 * i], q[2 * i + 1]);
      }
    }
  }

  // ---- the end

  // Without branches: lanes meet to sum and to transpose.
  __device__ __forceinline__ void write_result(int i) {
    constexpr float kLogTwo = 0.693147180559945309f;
    Heads& heads = heads_[i];
    std::int64_t const first = Base::first_head(i);
    float inverse[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      heads.sum[e] = column_sum(heads.sum[e]);
      inverse[e] = 1.0f / heads.sum[e];
      int const head = 2 * tq_ + e;
      ptx::store_global_if(g_ == e && head < args_.G, args_.lse + first + head,
                           infinite_to_nan(fmaf(heads.max[e], heads.unit[e] * kLogTwo, log2f(heads.sum[e]) * kLogTwo)));
    }
    uint32_t* const row = reinterpret_cast<uint32_t*>(static_cast<Element*>(args_.out) + (first + g_) * kV) + tq_;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const(&o)[4] = out(i, tile);
        uint32_t const word = ptx::transpose_matrix(Pairs<Element>::pack(
            infinite_to_nan(o[2 * half] * inverse[0]), infinite_to_nan(o[2 * half + 1] * inverse[1])));
        ptx::store_global_4B_if(g_ < args_.G, row + 8 * tile + 4 * half, word);
      }
    }
  }

  // See Consumer::spoil.
  __device__ __forceinline__ void spoil() {
    std::int64_t const list = static_cast<std::int64_t>(block_of_warp<Cfg>(args_, 0)) * kBlockQueries * args_.top_k;
    int const count = args_.union_count[block_of_warp<Cfg>(args_, 0)];
    int rank[2] = {0, 0};
#pragma unroll 1
    for (int entry = 0; entry < count; ++entry) {
      uint32_t const takers = mask_of_entry<Cfg>(args_, static_cast<uint32_t>(list) + entry) >> 2 * warp_ & 3u;
      char const* const block = Base::packed_parents() + own<Cfg>(args_).union_nodes[list + entry] * args_.block_bytes;
      bool const negative = *reinterpret_cast<int const*>(block) < 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if ((takers >> i & 1u) == 0) continue;
        if (negative) spoil(i, args_.parents[Base::row(i) * args_.top_k + rank[i]], rank[i]);
        rank[i] += 1;
      }
    }
  }

  __device__ __forceinline__ void spoil(int i, std::int64_t parent, int rank) {
    QueryBlock const block = Base::own_block();
    int const last = candidates_of<Cfg>(args_, args_.blocks.q_start + block.first + Base::query(i)) - 1;
    int const children = rank == last / kSiblings ? last % kSiblings + 1 : kSiblings;
    packing::Source const& values = args_.values;
    Element const* const rows = static_cast<Element const*>(values.in) + block.bh / args_.H_kv * values.stride_b +
                                parent * kSiblings * values.stride_n + block.bh % args_.H_kv * values.stride_h + g_;
#pragma unroll 1
    for (int child = 0; child < children; ++child) {
      Element const* const row = rows + child * values.stride_n;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (isfinite(static_cast<float>(row[16 * tile + 8 * half]))) continue;
          out(i, tile)[2 * half] = out(i, tile)[2 * half + 1] = Base::not_a_number();
        }
      }
    }
  }

  uint32_t const shared_;
  uint32_t const fragment_lane_;
  Heads heads_[2];
  int left_[2] = {0, 0};  // ranks until turning begins anew
};

}  // namespace htree_cuda::layer

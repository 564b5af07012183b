// Walk::kBelow: a warp computes the scores of its query against one selected parent after the other, by ldmatrix and
// mma.sync. A rank has a RoPE position of its own, so the query turns from parent to parent: in place, by the sixteen
// positions between them, with turns that stay in registers. It begins anew from the query itself and the table every
// few ranks of its own (`Args::turn_period`), before what rounding adds up to matters.
#pragma once

#include "consumer.cuh"

namespace htree_cuda::layer {

template <class Cfg>
class BelowConsumer : public Consumer<Cfg> {
  using Base = Consumer<Cfg>;
  using Base::active_;
  using Base::args_;
  using Base::cursor_;
  using Base::groups_;
  using Base::kHalf;
  using Base::kK;
  using Base::kSteps;
  using Base::kValueTiles;
  using Base::lane_;
  using Base::o_;
  using Base::position_;
  using Base::q_;
  using Base::tq_;
  using Base::warp_;

public:
  __device__ explicit BelowConsumer(Args const& args)
      : Base(args),
        key_lane_(ptx::opaque(lane_offset(Cfg::kKeyRowBytes, lane_ / 16, lane_ / 8 % 2))),
        value_lane_(ptx::opaque(lane_offset(Cfg::kValueRowBytes, lane_ / 8 % 2, lane_ / 16))) {
    if (!active_) return;
    // Where there is a second parent, the table reaches so far.
    if (position_ >= kSiblings) {
#pragma unroll
      for (int kk = 0; kk < kHalf; ++kk) step_[kk] = turns(kSiblings, kk);
    }
    if (Base::split()) skip(warp_);
    if constexpr (Cfg::kReadsValues) {
      fetch_closed();
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        auto const& x = reinterpret_cast<uint32_t const(&)[4]>(q_[kk]);
        saved_query()[kk * 32] = {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]),
                                  __uint_as_float(x[3])};
      }
    }
  }

  __device__ void run(Ring<Cfg> const& ring) {
    if (Cfg::kReadsValues && args_.layer == 0) {
      walk<true>(ring);
    } else {
      walk<false>(ring);
    }
    if constexpr (Cfg::kReadsValues) {
      if (*args_.spoilt != 0) spoil();
    }
    Base::finish(ring);
  }

private:
  template <bool kBottom>
  __device__ __forceinline__ void walk(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    Ring<Cfg> const own(ptx::opaque(ring.stages));
#pragma unroll 1
    for (int groups = groups_; groups > 0; --groups) {
      own.barriers.wait_full(at, "htree_layer consumer: full");
      uint32_t const stage = own.stage(at.slot);
      uint32_t mine = active_ ? ptx::load_shared_4B(own.mask(stage, warp_)) : 0u;
      uint32_t slot = slot_of(stage, mine);
#pragma unroll 1
      while (mine != 0) {
        if (left_ <= 0) begin_turning();
        mine &= mine - 1;
        uint32_t const next = slot_of(stage, mine);
        parent<kBottom>(slot);
        slot = next;
      }
      __syncwarp();
      if (lane_ == 0) barriers::mbarrier_arrive(stage + Cfg::kEmptyOffset);
      at = at.ahead(1);
    }
  }

  // The first that is left.
  static __device__ __forceinline__ uint32_t slot_of(uint32_t stage, uint32_t mine) {
    return stage + (__ffs(mine) - 1) * Cfg::kSlotBytes;
  }

  // Where this lane points ldmatrix in 16 rows, in the half and at the chunk that its eight lanes name: such that the two
  // registers of a fragment of B come one after the other.
  __device__ __forceinline__ uint32_t lane_offset(int row_bytes, int half, int chunk) const {
    int const row = lane_ % 8 + half * 8;
    return row * row_bytes + ((chunk ^ row % 8) << 4);
  }

  // Of rows that begin at multiples of 128 bytes and are at most 256 long, the two chunks of step kk as this lane names
  // them: four addresses serve all steps, the rest is a constant.
  static __device__ __forceinline__ uint32_t chunks_of(uint32_t lane_address, int kk) {
    return (lane_address ^ (kk % 4 << 5)) + kk / 4 * 128;
  }

  // Beside O there are no registers for the query as it is: it waits where the state was read and will be written.
  __device__ __forceinline__ float4* saved_query() const {
    static_assert(!Cfg::kReadsValues || kSteps <= kValueTiles);
    return args_.state_out + Base::state_row() * kValueTiles * 32 + lane_;
  }

  // The query as the parent at hand sees it.
  __device__ __forceinline__ auto& turned() {
    if constexpr (Cfg::kReadsValues) {
      return q_;
    } else {
      return turned_;
    }
  }

  __device__ __forceinline__ rope::Turns turns(int position, int kk) const {
    uint4 const x =
        __ldg(reinterpret_cast<uint4 const*>(args_.fragment_turns + (position * (kK / 8) + kk * 4 + tq_)));
    return *reinterpret_cast<rope::Turns const*>(&x);
  }

  // A split query: on by so many periods, which are others' to sum.
  __device__ __forceinline__ void skip(int periods) {
    position_ -= periods * args_.turn_period * kSiblings;
    cursor_ += periods * args_.turn_period;
  }

  __device__ __forceinline__ void begin_turning() {
    if (Base::split() && left_ == 0) {
      skip(Cfg::kConsumers - 1);
      if constexpr (Cfg::kReadsValues) fetch_closed();
    }
    if constexpr (Cfg::kReadsValues) {
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        float4 const x = saved_query()[kk * 32];
        auto& words = reinterpret_cast<uint32_t(&)[4]>(q_[kk]);
        words[0] = __float_as_uint(x.x), words[1] = __float_as_uint(x.y);
        words[2] = __float_as_uint(x.z), words[3] = __float_as_uint(x.w);
      }
    }
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
      rope::turn_fragments(turned()[kk], turned()[kk + kHalf], q_[kk], q_[kk + kHalf], turns(position_, kk));
    }
    left_ = args_.turn_period;
  }

  // On to the next rank.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) rope::turn_fragments_back(turned()[kk], turned()[kk + kHalf], step_[kk]);
  }

  // Scores of the parent at hand, in two chains of products, whose latency is long; then the query turns to the next.
  __device__ __forceinline__ void scores(uint32_t slot, float (&raw)[2][4]) {
    float upper[2][4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[tile][e] = upper[tile][e] = 0.0f;
    }
    uint32_t const keys = slot + key_lane_;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int const kk = i / 2 + i % 2 * kHalf;
      uint32_t b[4];
      ptx::load_matrix_x4(b, chunks_of(keys, kk) + Cfg::kKeyOffset);
      auto const& a = reinterpret_cast<uint32_t const(&)[4]>(turned()[kk]);
      float(&to)[2][4] = i % 2 ? upper : raw;
      ptx::mma_fp16(to[0], a, b[0], b[1]);
      ptx::mma_fp16(to[1], a, b[2], b[3]);
    }
    turn();
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[tile][e] += upper[tile][e];
    }
    Base::apply(Base::load_scales(slot + Cfg::kScaleOffset), raw);
  }

  // Which candidates of the parent at hand are closed, in a layer that selects.
  __device__ __forceinline__ void fetch_closed() {
    if (args_.layer > 0 && position_ >= 0) closed_ = args_.closed[cursor_];
  }

  template <bool kBottom>
  __device__ __forceinline__ void parent(uint32_t slot) {
    bool const last = position_ < kSiblings;
    float raw[2][4];
    scores(slot, raw);
    if constexpr (Cfg::kReadsValues) {
      if constexpr (!kBottom) Base::mask(raw, closed_);
      uint32_t p[1][4];
      Base::template exponentials<1>(raw, p, kBottom && last ? Base::behind(Base::rightmost()) : 0u);
      add_values(slot, p[0]);
    } else if constexpr (Cfg::kPass == Pass::kNormaliser) {
      Base::add_to_normaliser(raw, last);
    } else {
      Base::weigh(raw, 0, true);
    }
    position_ -= kSiblings;
    cursor_ += 1;
    left_ -= 1;
    if constexpr (Cfg::kReadsValues && !kBottom) fetch_closed();
  }

  // See Base::spoil.
  __device__ __forceinline__ void spoil() {
    std::int64_t const list = static_cast<std::int64_t>(ptx::block_index()) * kBlockQueries * args_.top_k;
    int const count = args_.union_count[ptx::block_index()];
    int rank = 0;
#pragma unroll 1
    for (int entry = 0; entry < count; ++entry) {
      bool const mine =
          Base::split() ? Base::takes(entry) : args_.union_masks[list + entry] >> warp_ & 1u;
      char const* const block = Base::packed_parents() + args_.union_nodes[list + entry] * args_.block_bytes;
      if (mine && *reinterpret_cast<float const*>(block) < 0.0f) {
        Base::spoil(args_.parents[Base::row() * args_.top_k + rank], rank);
      }
      rank += Base::split() || mine;
    }
  }

  // O += P V, each fragment of V loaded a step ahead.
  __device__ __forceinline__ void add_values(uint32_t slot, uint32_t const (&p)[4]) {
    uint32_t const values = slot + value_lane_;
    uint32_t b[2][4];
    ptx::load_matrix_x4_transposed(b[0], chunks_of(values, 0) + Cfg::kValueOffset);
#pragma unroll
    for (int step = 0; step < kValueTiles / 2; ++step) {
      uint32_t(&now)[4] = b[step % 2];
      if (step + 1 < kValueTiles / 2) {
        ptx::load_matrix_x4_transposed(b[(step + 1) % 2], chunks_of(values, step + 1) + Cfg::kValueOffset);
      }
      Pairs<typename Cfg::Element>::mma(o_[2 * step], p, now[0], now[1]);
      Pairs<typename Cfg::Element>::mma(o_[2 * step + 1], p, now[2], now[3]);
    }
  }

  uint32_t const key_lane_;
  uint32_t const value_lane_;
  uint32_t closed_ = 0;
  int left_ = -1;  // ranks until turning begins anew; -1: until it begins
  half2 turned_[Cfg::kReadsValues ? 1 : kSteps][4];
  rope::Turns step_[kHalf];
};

}  // namespace htree_cuda::layer

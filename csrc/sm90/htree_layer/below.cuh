// Walk::kBelow: a warp computes the scores of its query against one selected parent after the other, by mma.sync, whose
// operands lie in shared memory as lanes read them (tree_pack). A rank has a RoPE position of its own, so the query turns
// from parent to parent: in place, by the sixteen positions between them, with turns that stay in registers. It begins
// anew from the query itself and the table every few ranks of its own (`Args::turn_period`), before what rounding adds up
// to matters.
//
// A parent stays for two rounds of the loop: in the first its products with the query are formed, in the second its scores
// become exponentials and its values are added. So a round works on two parents, and what one of them waits for, products
// one after the other or exponentials, passes under instructions of the other and under the query's turning. Exponentials
// are taken as if no maximum rose, beside the vote on that, and again where one does: so they are one block of instructions
// with the products.
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
  using Base::kK;
  using Base::kSlack;
  using Base::kSteps;
  using Base::kValueTiles;
  using Base::lane_;
  using Base::max_;
  using Base::o_;
  using Base::position_;
  using Base::q_;
  using Base::reference_;
  using Base::sum_;
  using Base::tq_;
  using Base::unit_;
  using Base::warp_;
  using Factors = typename Base::Factors;

public:
  __device__ BelowConsumer(Args const& args, Ring<Cfg> const& ring)
      : Base(args),
        shared_(ring.stages - Cfg::kRingOffset),
        fragment_lane_(ptx::opaque(lane_ * 16)),
        column_(static_cast<int>(ptx::opaque(Base::column()))) {
    if (!active_) return;
    int const g = lane_ / 4;
    bool const holds = lane_ % 4 == g / 2;
#pragma unroll
    for (int i = 0; i < kK / 32; ++i) {
      uint4 const x = __ldg(reinterpret_cast<uint4 const*>(args.step_turn + g * (kK / 32) + i));
      uint32_t const words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) step_[4 * i + tile] = holds ? rope::inverse_column(words[tile], g) : 0u;
    }
    uint32_t const zeros = fetched_turns() + Cfg::kZerosOffset;
    if (lane_ < 4) ptx::store_shared_16B(zeros + lane_ * 16, {0, 0, 0, 0});
    if (Base::split()) skip(warp_);
    if constexpr (Cfg::kReadsValues) {
      uint32_t const saved = saved_query();
#pragma unroll
      for (int kk = 0; kk < kSteps; ++kk) {
        auto const& x = reinterpret_cast<uint32_t const(&)[4]>(q_[kk]);
        ptx::store_shared_16B(saved + kk * 512, {x[0], x[1], x[2], x[3]});
      }
    }
    fetch_turns(0);
  }

  __device__ void run(Ring<Cfg> const& ring) {
    if constexpr (Cfg::kReadsValues) {
      if (args_.layer == 0) {
        add_all<true>(ring);
      } else {
        add_all<false>(ring);
      }
      if (*args_.spoilt != 0) spoil();
      Base::finish_values(ring);
    } else {
      choose(ring);
    }
  }

private:
  // Values are read a round late, so that the stage of the parent that waits is kept while others pass by. After so many
  // without a parent of this query the one that waits is finished alone: the producer cannot fill the stage that is kept,
  // and the one that is waited for must not be that.
  static constexpr int kPatience = Cfg::kStages / 2;
  static constexpr uint32_t kNone = ~0u;  // is no address
  static_assert(kPatience >= 1 && kPatience + 2 <= Cfg::kStages);

  template <bool kBottom>
  __device__ __forceinline__ void add_all(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    Ring<Cfg> const own(ptx::opaque(ring.stages));
    Waiting waiting;
    clear(waiting);
    uint32_t kept = kNone;  // the stage of the parent that waits, when others have followed
    int patience = kPatience;
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
      at = at.ahead(1);
      if (mine == 0) {
        if (active_) next_mine = ptx::load_shared_4B(own.next_mask(stage, warp_));
        release(stage);
        patience -= 1;
        if (kept != kNone && patience == 0) {
          add_last<kBottom>(waiting);
          release(kept);
          clear(waiting);
          kept = kNone;
        }
        continue;
      }
      uint32_t slot = slot_of(stage, mine);
#pragma unroll 1
      do {
        if (left_ <= 0) begin_turning();
        mine &= mine - 1;
        uint32_t const next = slot_of(stage, mine);
        // Where none waits its scores are -infinity: it has no weight, whatever the values.
        if (waiting.slot == kNone) waiting.slot = slot;
        add<kBottom>(waiting, slot, mine == 0, own.next_mask(stage, warp_), next_mine);
        if (kept != kNone) release(kept);
        kept = kNone;
        slot = next;
      } while (mine != 0);
      kept = stage;
      patience = kPatience;
    }
    if (kept != kNone) {
      add_last<kBottom>(waiting);
      release(kept);
    }
  }

  // What is known of the parent that waits, in a values pass.
  struct Waiting {
    float products[2][4];
    float scale;
    uint32_t slot;
  };

  static __device__ __forceinline__ void clear(Waiting& waiting) {
    clear(waiting.products, -Base::kInfinity);
    waiting.scale = 1.0f;
    waiting.slot = kNone;
  }

  // The normaliser, then the importance relative to it: the parents pass by twice.
  __device__ __forceinline__ void choose(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    score_all<Sums::kNormaliser>(ring, at);
    if (active_) {
      Base::finish_normaliser(ring);
      Base::begin_walk(QueryBlock(args_.blocks, block_index()));
      if (Base::split()) skip(warp_);
      left_ = -1;
      ptx::copy_async_wait<0>();  // turns of a rank behind the last may be on their way
      fetch_turns(0);
    }
    score_all<Sums::kImportance>(ring, at);
  }

  template <Sums kSums>
  __device__ __forceinline__ void score_all(Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) {
    Ring<Cfg> const own(ptx::opaque(ring.stages));
    Scored scored;
    clear(scored.scores, -Base::kInfinity);
    scored.scale = 1.0f;
    scored.cursor = cursor_;  // what is written there before there is a parent, is written again
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
        score<kSums>(slot, scored);
        slot = next;
      }
      release(stage);
      at = at.ahead(1);
    }
    if (left_ >= 0) account_last<kSums>(scored);  // there was a parent
  }

  __device__ __forceinline__ void release(uint32_t stage) const {
    __syncwarp();
    if (lane_ == 0) barriers::mbarrier_arrive(stage + Cfg::kEmptyOffset);
  }

  static __device__ __forceinline__ void clear(float (&products)[2][4], float value) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) products[tile][e] = value;
    }
  }

  // The first that is left.
  static __device__ __forceinline__ uint32_t slot_of(uint32_t stage, uint32_t mine) {
    return stage + (__ffs(mine) - 1) * Cfg::kSlotBytes;
  }

  // Beside O there are no registers for the query as it is: each thread leaves its part in shared memory.
  // What is needed every few ranks alone is found out again there: registers are scarcer than instructions.
  __device__ __forceinline__ uint32_t saved_query() const {
    return shared_ + warp_ * (kSteps * 512) + ptx::lane_index() * 16;
  }

  // The query as the parent at hand sees it.
  __device__ __forceinline__ auto& turned() {
    if constexpr (Cfg::kReadsValues) {
      return q_;
    } else {
      return turned_;
    }
  }

  // The turns of the rank at hand are fetched while the ranks before it pass.
  __device__ __forceinline__ uint32_t fetched_turns() const {
    return shared_ + Cfg::kTurnOffset + warp_ * Cfg::kTurnBytes;
  }

  // Those of the rank that many further.
  __device__ __forceinline__ void fetch_turns(int ranks) const {
    int const position = position_ - ranks * kSiblings;
    int const lane = static_cast<int>(ptx::lane_index());
    if (position >= 0 && lane < Cfg::kColumnsBytes / 16) {
      ptx::copy_async_16B(fetched_turns() + lane * 16, args_.begin_turns + (position * (kK / 4) + lane), 0);
    }
    ptx::copy_async_commit();
  }

  // A split query: on by so many periods, which are others' to sum.
  __device__ __forceinline__ void skip(int periods) {
    position_ -= periods * args_.turn_period * kSiblings;
    cursor_ += periods * args_.turn_period;
  }

  __device__ __forceinline__ void begin_turning() {
    if (Base::split() && left_ == 0) skip(Cfg::kConsumers - 1);
    ptx::copy_async_wait<0>();
    __syncwarp();
    int const lane = static_cast<int>(ptx::lane_index());
    bool const holds = lane % 4 == lane / 8;
    uint32_t const columns = fetched_turns() + (holds ? lane / 4 * Cfg::kColumnBytes : Cfg::kZerosOffset);
#pragma unroll
    for (int i = 0; i < kK / 32; ++i) {
      uint4 const x = ptx::load_shared_16B(columns + i * 16);
      uint32_t const matrices[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int kk = 2 * i; kk < 2 * i + 2; ++kk) {
        uint32_t q[4];
        if constexpr (Cfg::kReadsValues) {
          uint4 const words = ptx::load_shared_16B(saved_query() + kk * 512);
          q[0] = words.x, q[1] = words.y, q[2] = words.z, q[3] = words.w;
        } else {
#pragma unroll
          for (int word = 0; word < 4; ++word) q[word] = reinterpret_cast<uint32_t const&>(q_[kk][word]);
        }
        multiply(kk, q, matrices[2 * kk % 4], matrices[2 * kk % 4 + 1]);
      }
    }
    __syncwarp();
    fetch_turns(args_.turn_period * (Base::split() ? Cfg::kConsumers : 1));
    left_ = args_.turn_period;
  }

  // Step kk of the turned query: of what is given, by the matrices of its tiles.
  __device__ __forceinline__ void multiply(int kk, uint32_t const (&q)[4], uint32_t low, uint32_t high) {
    auto& to = reinterpret_cast<uint32_t(&)[4]>(turned()[kk]);
    ptx::multiply_fp16(to[0], to[1], q[0], q[1], low);
    ptx::multiply_fp16(to[2], to[3], q[2], q[3], high);
  }

  // Turns step kk to the next rank.
  __device__ __forceinline__ void turn(int kk) {
    multiply(kk, reinterpret_cast<uint32_t const(&)[4]>(turned()[kk]), step_[2 * kk], step_[2 * kk + 1]);
  }

  __device__ __forceinline__ void advance() {
    position_ -= kSiblings;
    cursor_ += 1;
    left_ -= 1;
  }

  // Operands B of two products, which contract 16 columns of keys or the 16 rows of 16 columns of values: one address serves
  // all of a parent, the rest is a constant.
  static constexpr int kFragmentBytes = 512;

  static __device__ __forceinline__ void load_fragment(uint32_t (&b)[4], uint32_t address) {
    uint4 const x = ptx::load_shared_16B(address);
    b[0] = x.x, b[1] = x.y, b[2] = x.z, b[3] = x.w;
  }

  __device__ __forceinline__ void load_keys(uint32_t (&b)[4], uint32_t slot, int i) const {
    load_fragment(b, slot + fragment_lane_ + Cfg::kKeyOffset + i * kFragmentBytes);
  }

  __device__ __forceinline__ void multiply_keys(float (&products)[2][4], uint32_t const (&b)[4], int i) {
    auto const& a = reinterpret_cast<uint32_t const(&)[4]>(turned()[i]);
    ptx::mma_fp16(products[0], a, b[0], b[1]);
    ptx::mma_fp16(products[1], a, b[2], b[3]);
  }

  static __device__ __forceinline__ uint32_t scales_of(uint32_t slot) { return slot + Cfg::kScaleOffset; }

  __device__ __forceinline__ void load_values(uint32_t (&b)[4], uint32_t slot, int i) const {
    load_fragment(b, slot + fragment_lane_ + Cfg::kValueOffset + i * kFragmentBytes);
  }

  __device__ __forceinline__ void multiply_values(uint32_t const (&p)[4], uint32_t const (&b)[4], int i) {
    Pairs<typename Cfg::Element>::mma(o_[2 * i], p, b[0], b[1]);
    Pairs<typename Cfg::Element>::mma(o_[2 * i + 1], p, b[2], b[3]);
  }

  // Exponents of the scores whose products these are, relative to the reference.
  __device__ __forceinline__ void exponents(Factors const& factors, float const (&products)[2][4],
                                            float (&x)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = Base::exponent_of_product(e / 2, products[tile][e], factors);
    }
  }

  // Whether one of this thread's exceeds kSlack, so that a maximum rises, or is NaN.
  static __device__ __forceinline__ bool asks(float const (&x)[2][4]) {
    float largest[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      largest[tile] =
          ptx::max_or_nan(ptx::max_or_nan(x[tile][0], x[tile][1]), ptx::max_or_nan(x[tile][2], x[tile][3]));
    }
    return !(ptx::max_or_nan(largest[0], largest[1]) <= kSlack);
  }

  // Again, from raw scores, which a vote among the heads of one query has led to: whatever it decides follows from this query's
  // data. Where a score exceeds a maximum by more than kSlack, raises it and rescales what was summed up to then.
  template <bool kMasked>
  __device__ __forceinline__ void compute_again(Waiting& waiting, uint32_t dead, float (&x)[2][4]) {
    auto& raw = waiting.products;
    Base::apply_own(scales_of(waiting.slot), raw);
    if constexpr (kMasked) Base::mask(raw, dead);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = Base::near_exponent(e / 2, raw[tile][e]);
    }
    if (!__any_sync(kFullWarp, asks(x))) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const largest = quad_max(Base::template row_max<1>(raw, i));
      float const factor = Base::exponent(i, largest) > kSlack ? Base::raise(i, largest) : 1.0f;
      sum_[i] *= factor;
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        o_[tile][2 * i] *= factor;
        o_[tile][2 * i + 1] *= factor;
      }
    }
    exponents_of(raw, x);
  }

  __device__ __forceinline__ void exponents_of(float const (&raw)[2][4], float (&x)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = Base::exponent(e / 2, raw[tile][e]);
    }
  }

  // P of a parent, rounded to the dtype, in A fragments, and its sums.
  static __device__ __forceinline__ void exponentiate(float const (&x)[2][4], uint32_t (&p)[4], float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = ptx::exp2_movable(x[e / 2][2 * i + e % 2]);
      sum[i] = (y[0] + y[1]) + (y[2] + y[3]);
      p[i] = Pairs<typename Cfg::Element>::pack(y[0], y[1]);
      p[2 + i] = Pairs<typename Cfg::Element>::pack(y[2], y[3]);
    }
  }

  // P of the parent that waits, kMasked: but for children of `dead`. Exponentials pass while the warp votes on its maxima.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(Waiting& waiting, uint32_t dead, uint32_t (&p)[4]) {
    float x[2][4];
    float sum[2];
    exponents(Base::factors(waiting.scale), waiting.products, x);
    if constexpr (kMasked) Base::mask(x, dead);
    bool const again = asks(x);
    exponentiate(x, p, sum);
    if (__any_sync(kFullWarp, again)) {
      compute_again<kMasked>(waiting, dead, x);
      exponentiate(x, p, sum);
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
  }

  // A round of a values pass: the values of the parent that waits are added to O, and that in `slot` waits in its place; the
  // query turns on to the next rank. `next_mine` becomes what is at `mask`, if asked for: its latency passes beside the products.
  template <bool kBottom>
  __device__ __forceinline__ void add(Waiting& waiting, uint32_t slot, bool asked, uint32_t mask, uint32_t& next_mine) {
    auto& products = waiting.products;
    uint32_t const closed = closed_;
    if constexpr (!kBottom) closed_ = args_.closed[cursor_];
    uint32_t keys[2][4];
    load_keys(keys[0], slot, 0);
    uint32_t p[4];
    weigh<!kBottom>(waiting, closed, p);
    // One block of instructions, and the compiler interleaves them: products of the one parent, of the other, and turns.
    constexpr int kValueSteps = kValueTiles / 2;
    ptx::load_shared_4B_if(asked, next_mine, mask);
    clear(products, 0.0f);
    uint32_t values[2][4];
    load_values(values[0], waiting.slot, 0);
#pragma unroll
    for (int i = 0; i < (kSteps > kValueSteps ? kSteps : kValueSteps); ++i) {
      if (i + 1 < kValueSteps) load_values(values[(i + 1) % 2], waiting.slot, i + 1);
      if (i + 1 < kSteps) load_keys(keys[(i + 1) % 2], slot, i + 1);
      if (i < kSteps) multiply_keys(products, keys[i % 2], i);
      if (i < kValueSteps) multiply_values(p, values[i % 2], i);
      if (i < kSteps) turn(i);
    }
    waiting.scale = ptx::load_shared_float(scales_of(slot));
    waiting.slot = slot;
    advance();
  }

  // The same, bit for bit, with no parent behind it: where that happens is a matter of the neighbours. Only the last parent
  // of all has children behind the query.
  template <bool kBottom>
  __device__ __forceinline__ void add_last(Waiting& waiting) {
    uint32_t p[4];
    if constexpr (kBottom) {
      weigh<true>(waiting, was_last() ? Base::behind(Base::rightmost()) : 0u, p);
    } else {
      weigh<true>(waiting, closed_, p);
    }
#pragma unroll
    for (int i = 0; i < kValueTiles / 2; ++i) {
      uint32_t values[4];
      load_values(values, waiting.slot, i);
      multiply_values(p, values, i);
    }
  }

  // Whether the parent that waits is the query's last.
  __device__ __forceinline__ bool was_last() const { return position_ < 0; }

  // What is known of the parent that waits, in a scoring pass.
  struct Scored {
    float scores[2][4];  // normaliser: products, which the scale has not met; importance: exponents
    float scale;
    int cursor;
  };

  // A round of a scoring pass.
  template <Sums kSums>
  __device__ __forceinline__ void score(uint32_t slot, Scored& scored) {
    account<kSums>(scored);
    float scale = ptx::load_shared_float(scales_of(slot));
    float products[2][4];
    clear(products, 0.0f);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t keys[4];
      load_keys(keys, slot, i);
      multiply_keys(products, keys, i);
      turn(i);
    }
    Base::settle(scale, scales_of(slot), products);
    if constexpr (kSums == Sums::kImportance) {
      if (!Base::far_) {
        exponents(Base::finite_factors(scale), products, scored.scores);
      } else {
        Base::apply(scale, products);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          scored.scores[i / 4][i % 4] = Base::importance_exponent(i % 4 / 2, products[i / 4][i % 4]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) scored.scores[i / 4][i % 4] = products[i / 4][i % 4];
    }
    scored.scale = scale;
    scored.cursor = cursor_;
    advance();
  }

  template <Sums kSums>
  __device__ __forceinline__ void account(Scored& scored) {
    float x[2][4];
    if constexpr (kSums == Sums::kNormaliser) {
      float sum[2];
      auto const sum_up = [&] {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          sum[i] = (ptx::exp2_movable(x[0][2 * i]) + ptx::exp2_movable(x[0][2 * i + 1])) +
                   (ptx::exp2_movable(x[1][2 * i]) + ptx::exp2_movable(x[1][2 * i + 1]));
        }
      };
      exponents(Base::factors(scored.scale), scored.scores, x);
      bool const again = asks(x);
      sum_up();  // while the warp votes
      if (__any_sync(kFullWarp, again)) {
        Base::apply(scored.scale, scored.scores);
        Base::template raise_own<1>(scored.scores);
        exponents_of(scored.scores, x);
        sum_up();
      }
      sum_[0] += sum[0];
      sum_[1] += sum[1];
    } else {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[tile][e] = ptx::exp2_movable(scored.scores[tile][e]);
      }
      Base::add_columns(x, scored.cursor, column_);
    }
  }

  template <Sums kSums>
  __device__ __forceinline__ void account_last(Scored& scored) {
    if constexpr (kSums == Sums::kNormaliser) {
      Base::apply(scored.scale, scored.scores);
      Base::add_to_normaliser(scored.scores, was_last());
    } else {
      account<kSums>(scored);
    }
  }

  // See Base::spoil.
  __device__ __forceinline__ void spoil() {
    std::int64_t const list = static_cast<std::int64_t>(block_index()) * kBlockQueries * args_.top_k;
    int const count = args_.union_count[block_index()];
    int rank = 0;
#pragma unroll 1
    for (int entry = 0; entry < count; ++entry) {
      bool const mine =
          Base::split() ? Base::takes(entry) : args_.union_masks[list + entry] >> warp_ & 1u;
      char const* const block = Base::packed_parents() + args_.union_nodes[list + entry] * args_.block_bytes;
      if (mine && *reinterpret_cast<int const*>(block) < 0) {
        Base::spoil(args_.parents[Base::row() * args_.top_k + rank], rank);
      }
      rank += Base::split() || mine;
    }
  }

  uint32_t const shared_;
  uint32_t const fragment_lane_;
  int const column_;
  uint32_t closed_ = 0;  // of the parent that waits, candidates that are no leaves
  int left_ = -1;  // ranks until turning begins anew; -1: until it begins
  half2 turned_[Cfg::kReadsValues ? 1 : kSteps][4];
  uint32_t step_[kK / 8];  // the matrices that turn a query to its next rank
};

}  // namespace htree_cuda::layer

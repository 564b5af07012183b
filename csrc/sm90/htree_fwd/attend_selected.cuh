// Values in a selected layer, see rotating.cuh.
//
// A parent stays for two rounds of the loop: in the first its products with the query are formed, in the second its scores
// become exponentials and its values are added. So a round works on two parents, and what one of them waits for, products
// one after the other or exponentials, passes under instructions of the other and under the query's rotating. Exponentials
// are taken as if no maximum rose, beside the vote on that, and again where one does: so they are one block of instructions
// with the products.
#pragma once

#include "rope_inplace.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
class SelectedAttend : public RotatingConsumer<Cfg> {
  using Base = RotatingConsumer<Cfg>;
  using Base::active_;
  using Base::advance;
  using Base::args_;
  using Base::overflows;
  using Base::clear;
  using Base::cursor_;
  using Base::exponents;
  using Base::exponents_of;
  using Base::fragment_lane_;
  using Base::groups_;
  using Base::kHalfSelected;
  using Base::kFragmentBytes;
  using Base::kSlack;
  using Base::kSteps;
  using Base::kValueTiles;
  using Base::load_fragment;
  using Base::load_keys;
  using Base::multiply_keys;
  using Base::o_;
  using Base::position_;
  using Base::release;
  using Base::rest_of;
  using Base::scales_of;
  using Base::slot_of;
  using Base::sum_;
  using Base::rotate;
  using Base::rotate_to;
  using Base::warp_;
  using Base::was_last;

public:
  __device__ SelectedAttend(Args const& args, Ring<Cfg> const& ring) : Base(args, ring) {}

  __device__ void run(Ring<Cfg> const& ring) {
    if (args_.layer == 0) {
      add_all<true>(ring);
    } else {
      add_all<false>(ring);
    }
    if (active_ && *args_.has_nonfinite_v != 0) propagate_nan();
    Base::finish_values(ring);
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
    uint32_t next_query_mask = 0;  // of the stage behind the one at hand, which says so: there nobody waits for it
    if (groups_ > 0 && active_) {
      own.barriers.wait_full(at, "htree_fwd consumer: full");
      next_query_mask = ptx::load_shared_4B(own.mask(own.stage(at.slot), warp_));
    }
#pragma unroll 1
    for (int groups = groups_; groups > 0; --groups) {
      own.barriers.wait_full(at, "htree_fwd consumer: full");
      uint32_t const stage = own.stage(at.slot);
      uint32_t query_mask = next_query_mask;
      at = at.ahead(1);
      if (query_mask == 0) {
        if (active_) next_query_mask = ptx::load_shared_4B(own.next_mask(stage, warp_));
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
      uint32_t slot = slot_of(stage, query_mask);
#pragma unroll 1
      do {
        rotate_to(stage, query_mask);
        query_mask = rest_of(query_mask);
        uint32_t const next = slot_of(stage, query_mask);
        // Where none waits its scores are -infinity: it has no weight, whatever the values.
        if (waiting.slot == kNone) waiting.slot = slot;
        add<kBottom>(waiting, slot, query_mask == 0, own.next_mask(stage, warp_), next_query_mask);
        if (kept != kNone) release(kept);
        kept = kNone;
        slot = next;
      } while (query_mask != 0);
      kept = stage;
      patience = kPatience;
    }
    if (kept != kNone) {
      add_last<kBottom>(waiting);
      release(kept);
    }
  }

  // What is known of the parent that waits, in a attend pass.
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

  __device__ __forceinline__ void load_values(uint32_t (&b)[4], uint32_t slot, int i) const {
    load_fragment(b, slot + fragment_lane_ + Cfg::kValueOffset + i * kFragmentBytes);
  }

  __device__ __forceinline__ void multiply_values(uint32_t const (&p)[4], uint32_t const (&b)[4], int i) {
    Pairs<typename Cfg::Element>::mma(o_[2 * i], p, b[0], b[1]);
    Pairs<typename Cfg::Element>::mma(o_[2 * i + 1], p, b[2], b[3]);
  }

  // Again, from raw scores, which a vote among the heads of one query has led to: whatever it decides follows from this query's
  // data. Where a score exceeds a maximum by more than kSlack, raises it and rescales what was summed up to then.
  template <bool kMasked>
  __device__ __forceinline__ void recompute(Waiting& waiting, uint32_t masked, float (&x)[2][4]) {
    auto& raw = waiting.products;
    Base::apply_own(scales_of(waiting.slot), raw);
    if constexpr (kMasked) Base::mask(raw, masked);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = Base::near_exponent(e / 2, raw[tile][e]);
    }
    if (!__any_sync(kFullWarp, overflows(x))) return;
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

  // P of the parent that waits, kMasked: but for children of `masked`. Exponentials pass while the warp votes on its maxima.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(Waiting& waiting, uint32_t masked, uint32_t (&p)[4]) {
    float x[2][4];
    float sum[2];
    exponents(Base::factors(waiting.scale), waiting.products, x);
    if constexpr (kMasked) Base::mask(x, masked);
    bool const again = overflows(x);
    exponentiate(x, p, sum);
    if (__any_sync(kFullWarp, again)) {
      recompute<kMasked>(waiting, masked, x);
      exponentiate(x, p, sum);
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
  }

  // A round of a attend pass: the values of the parent that waits are added to O, and that in `slot` waits in its place; the
  // query rotates on to the next rank. `next_query_mask` becomes what is at `mask`, if asked for: its latency passes beside the products.
  template <bool kBottom>
  __device__ __forceinline__ void add(Waiting& waiting, uint32_t slot, bool asked, uint32_t mask, uint32_t& next_query_mask) {
    auto& products = waiting.products;
    uint32_t const expanded = expanded_;
    if constexpr (!kBottom) expanded_ = args_.expanded[cursor_];
    uint32_t keys[2][4];
    load_keys(keys[0], slot, 0);
    uint32_t p[4];
    weigh<!kBottom>(waiting, expanded, p);
    // One block of instructions, and the compiler interleaves them: products of the one parent, of the other, and rotations.
    constexpr int kValueSteps = kValueTiles / 2;
    ptx::load_shared_4B_if(asked, next_query_mask, mask);
    clear(products, 0.0f);
    uint32_t values[2][4];
    load_values(values[0], waiting.slot, 0);
#pragma unroll
    for (int i = 0; i < (kSteps > kValueSteps ? kSteps : kValueSteps); ++i) {
      if (i + 1 < kValueSteps) load_values(values[(i + 1) % 2], waiting.slot, i + 1);
      if (i + 1 < kSteps) load_keys(keys[(i + 1) % 2], slot, i + 1);
      if (i < kSteps) multiply_keys(products, keys[i % 2], i);
      if (i < kValueSteps) multiply_values(p, values[i % 2], i);
      if (!kHalfSelected && i < kSteps) rotate(i);
    }
    waiting.scale = ptx::load_shared_float(scales_of(slot));
    waiting.slot = slot;
    advance();
  }

  // The same, bitwise, with no parent behind it: where that happens is a matter of the neighbours. Only the last parent
  // of all has children behind the query.
  template <bool kBottom>
  __device__ __forceinline__ void add_last(Waiting& waiting) {
    uint32_t p[4];
    if constexpr (kBottom) {
      weigh<true>(waiting, was_last() ? Base::behind(Base::rightmost()) : 0u, p);
    } else {
      weigh<true>(waiting, expanded_, p);
    }
#pragma unroll
    for (int i = 0; i < kValueTiles / 2; ++i) {
      uint32_t values[4];
      load_values(values, waiting.slot, i);
      multiply_values(p, values, i);
    }
  }

  // See Base::propagate_nan.
  __device__ __forceinline__ void propagate_nan() {
    std::int64_t const list = static_cast<std::int64_t>(block_index<Cfg>(args_)) * kBlockQueries * args_.top_k;
    int const count = args_.union_count[block_index<Cfg>(args_)];
    int rank = 0;
#pragma unroll 1
    for (int entry = 0; entry < count; ++entry) {
      bool const query_mask =
          Base::split() ? Base::takes(entry) : mask_of_entry<Cfg>(args_, static_cast<uint32_t>(list) + entry) >> warp_ & 1u;
      char const* const block = Base::packed_parents() + own<Cfg>(args_).union_nodes[list + entry] * args_.block_bytes;
      if (query_mask && *reinterpret_cast<int const*>(block) < 0) {
        Base::propagate_nan(args_.parents[Base::row() * args_.top_k + rank], rank);
      }
      rank += Base::split() || query_mask;
    }
  }

  uint32_t expanded_ = 0;  // of the parent that waits, candidates that are no leaves
};

}  // namespace htree_cuda::sm90::htree_fwd

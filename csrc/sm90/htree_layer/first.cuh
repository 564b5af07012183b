// Walk::kFirst: a warpgroup computes the scores of its four queries against four parents at once by WGMMA, 64 heads by 64
// keys, and adds P V likewise, 64 heads by V columns; keys and values are where the bulk copy put them. All queries see the
// same parents, so nothing is read twice. What is between the two products belongs to a warp and its query alone; scores
// of parents that it does not take are ignored, and their P is zero. In values passes the queries wait in shared memory:
// beside O and the scores there are no registers for them.
#pragma once

#include <type_traits>

#include "../device/wgmma.cuh"
#include "consumer.cuh"

namespace htree_cuda::layer {

template <class Cfg>
class FirstConsumer : public Consumer<Cfg> {
  using Base = Consumer<Cfg>;
  using Base::active_;
  using Base::args_;
  using Base::cursor_;
  using Base::groups_;
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
  static constexpr int kParents = Cfg::kStageSlots;
  static constexpr int kHalfGroup = kParents / 2;
  static constexpr int kWords = kParents / 2;  // of 16 bits for each parent
  static_assert(kParents * kSiblings == 64 && wgmma::kAccumulators == 8 * kParents && wgmma::kDepth == kSiblings);

public:
  __device__ explicit FirstConsumer(Args const& args) : Base(args) {}

  __device__ void run(Ring<Cfg> const& ring) {
    if constexpr (Cfg::kReadsValues) {
      store_queries(queries_of(ring));
      add_all(ring, wgmma::Descriptor(queries_of(ring)));
      if (*args_.spoilt != 0) spoil();
      Base::finish_values(ring);
    } else {
      choose(ring);
    }
  }

private:
  // A group of parents whose scores are under way.
  struct Begun {
    float raw[2 * kParents][4];
    uint32_t stage;
    uint32_t mine;  // a bit for each parent that the query takes
  };

  // The normaliser, then the importance relative to it: the parents pass by twice.
  __device__ __forceinline__ void choose(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    score_all<Sums::kNormaliser>(ring, at);
    if (active_) Base::finish_normaliser(ring);
    Base::begin_walk(QueryBlock(args_.blocks, ptx::block_index()));
    score_all<Sums::kImportance>(ring, at);
  }

  // Two groups at a time: the scores of the second are under way while those of the first are considered.
  template <Sums kSums>
  __device__ __forceinline__ void score_all(Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) {
    int group = 0;
    for (; group + 1 < groups_; group += 2) {
      Begun first, second;
      begin(first, ring, at);
      multiply_keys(first);
      begin(second, ring, at);
      multiply_keys(second);
      consider<kSums, 1>(first);
      consider<kSums, 0>(second);
    }
    if (group < groups_) {
      Begun last;
      begin(last, ring, at);
      multiply_keys(last);
      consider<kSums, 0>(last);
    }
  }

  // While P V of a group is multiplied the exponentials of the next begin.
  __device__ __forceinline__ void add_all(Ring<Cfg> const& ring, wgmma::Descriptor const& queries) {
    if (groups_ == 0) return;
    RingPosition<Cfg::kStages> at;
    // The stage whose values are multiplied; before there are scores, those of the first by a P of zeros.
    uint32_t held = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
    uint32_t p[kParents][4] = {};
    uint32_t const zero = static_cast<uint32_t>(args_.layer) >> 31;  // which the compiler does not know
    fetch_closed();
    for (int group = 0; group < groups_; ++group) {
      Begun begun;
      begin(begun, ring, at);
      multiply_keys(begun, queries);
      multiply_values(p, held);
      float scales[kParents];
      load_scales(scales, begun.stage);
      uint32_t dead[kWords];
      find_dead(begun.mine, dead);
      position_ -= kParents * kSiblings;
      cursor_ += kParents;
      fetch_closed();
      wgmma::wait<1>();
      wgmma::pin(products(begun.raw));
      float sum[2] = {};
      uint32_t early[kHalfGroup][4] = {};
      // A block of its own, or ptxas puts it behind the wait.
      if (begun.mine != 0) exponentiate<0>(begun.raw, scales, dead, early, sum);
      wgmma::wait<0>();
      wgmma::pin(out());
      wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kParents]>(p));
      if (group > 0) release(held);
      held = begun.stage;
      // No mere copies: ptxas would merge both registers, and serialises products whose operands are written while others
      // are under way (C7513).
#pragma unroll
      for (int i = 0; i < 4 * kHalfGroup; ++i) p[i / 4][i % 4] = early[i / 4][i % 4] | zero;
      auto& late = reinterpret_cast<uint32_t(&)[kHalfGroup][4]>(p[kHalfGroup]);
      exponentiate<kHalfGroup>(begun.raw, scales, dead, late, sum);
      rescale(begun, dead, p, sum);
    }
    multiply_values(p, held);
    wgmma::wait<0>();
    wgmma::pin(out());
    release(held);
  }

  __device__ __forceinline__ auto& out() { return reinterpret_cast<float(&)[4 * kValueTiles]>(o_); }

  static __device__ __forceinline__ auto& products(float (&raw)[2 * kParents][4]) {
    return reinterpret_cast<float(&)[wgmma::kAccumulators]>(raw);
  }

  static __device__ __forceinline__ auto& of_parent(float (&raw)[2 * kParents][4], int slot) {
    return reinterpret_cast<float(&)[2][4]>(raw[2 * slot]);
  }

  static __device__ __forceinline__ uint32_t scales_of(uint32_t stage, int slot) {
    return stage + Cfg::kScaleOffset + slot * Cfg::kScaleBytes;
  }

  static __device__ __forceinline__ void load_scales(float (&scales)[kParents], uint32_t stage) {
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) scales[slot] = ptx::load_shared_float(scales_of(stage, slot));
  }

  __device__ __forceinline__ void release(uint32_t stage) const {
    __syncwarp();
    if (lane_ == 0) barriers::mbarrier_arrive(stage + Cfg::kEmptyOffset);
  }

  // Of the parents of the group at hand, those up to the query's own; the others are not written. Lane i asks for those
  // of parents 2 (i % 2) and the next: a value that is the same in all lanes would go to a uniform register, and wait
  // for it here.
  __device__ __forceinline__ void fetch_closed() {
    if constexpr (Cfg::kReadsValues) {
      if (!active_ || args_.layer == 0) return;
      int const slot = lane_ % kWords * 2;
      std::uint16_t const* const closed = args_.closed + cursor_ + slot;
      if (position_ >= (slot + 1) * kSiblings) {
        closed_ = *reinterpret_cast<uint32_t const*>(closed);
      } else if (position_ >= slot * kSiblings) {
        closed_ = *closed;
      }
    }
  }

  // Where the queries of this warpgroup are.
  __device__ __forceinline__ uint32_t queries_of(Ring<Cfg> const& ring) const {
    return __shfl_sync(kFullWarp, ring.stages - Cfg::kRingOffset + warp_ / 4 * Cfg::kQueryBytes, 0);
  }

  // In the order of WGMMA's operands; a lane points stmatrix at row lane % 16 of its query, chunk lane / 16 of two.
  __device__ __forceinline__ void store_queries(uint32_t queries) const {
    int const row = warp_ % 4 * 16 + lane_ % 16;
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      int const chunk = kk % 4 * 2 + lane_ / 16;
      ptx::store_matrix_x4(queries + kk / 4 * Cfg::kQueryPanelBytes + row * 128 + ((chunk ^ row % 8) << 4),
                           reinterpret_cast<uint32_t const(&)[4]>(q_[kk]));
    }
    ptx::fence_proxy_async_shared();
    barriers::named_sync(Cfg::kQueryBarrier + warp_ / 4, 128);
  }

  // Waits for the next group, and begins to read which of it the query takes.
  __device__ __forceinline__ void begin(Begun& begun, Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) const {
    ring.barriers.wait_full(at, "htree_layer consumer: full");
    // Through a shuffle, which tells the compiler that it is uniform: descriptors live in uniform registers.
    begun.stage = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
    begun.mine = active_ ? ptx::load_shared_4B(ring.mask(begun.stage, warp_)) : 0u;
    at = at.ahead(1);
  }

  // Begins the scores; the queries in shared memory.
  __device__ __forceinline__ void multiply_keys(Begun& begun, wgmma::Descriptor const& queries) const {
    wgmma::Descriptor const keys(begun.stage + Cfg::kKeyOffset);
    wgmma::fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      wgmma::mma_ss<cutlass::half_t>(products(begun.raw), queries.at(kk / 4 * Cfg::kQueryPanelBytes + kk % 4 * 32),
                                     keys.at(kk / 4 * Cfg::kPanelBytes + kk % 4 * 32), kk > 0);
    }
    wgmma::commit();
  }

  // The same, this warp's query in registers.
  __device__ __forceinline__ void multiply_keys(Begun& begun) const {
    wgmma::Descriptor const keys(begun.stage + Cfg::kKeyOffset);
    wgmma::fence();
#pragma unroll
    for (int kk = 0; kk < kSteps; ++kk) {
      wgmma::mma_rs<cutlass::half_t>(products(begun.raw), reinterpret_cast<uint32_t const(&)[4]>(q_[kk]),
                                     keys.at(kk / 4 * Cfg::kPanelBytes + kk % 4 * 32), kk > 0);
    }
    wgmma::commit();
  }

  // O += P V.
  __device__ __forceinline__ void multiply_values(uint32_t const (&p)[kParents][4], uint32_t stage) {
    using Element =
        std::conditional_t<std::is_same_v<typename Cfg::Element, __half>, cutlass::half_t, cutlass::bfloat16_t>;
    wgmma::Descriptor const values(stage + Cfg::kValueOffset, Cfg::kPanelBytes);
    wgmma::pin(out());
    wgmma::fence();
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      wgmma::mma_rs<Element, wgmma::Major::MN>(out(), p[slot], values.at(slot * kSiblings * 128), true);
    }
    wgmma::commit();
  }

  // The scores of a group, once at most kPending later products are not complete.
  template <Sums kSums, int kPending>
  __device__ __forceinline__ void consider(Begun& begun) {
    auto& raw = begun.raw;
    float scales[kParents];
    load_scales(scales, begun.stage);
    wgmma::wait<kPending>();
    wgmma::pin(products(raw));
    if (isnan(scales[0] + scales[1] + scales[2] + scales[3])) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Base::settle(scales[slot], scales_of(begun.stage, slot), of_parent(raw, slot));
      }
    }
    release(begun.stage);
    if constexpr (kSums == Sums::kImportance) {
      weigh(raw, scales, begun.mine);
    } else if (whole(begun.mine)) {
      normalise(raw, scales);
    } else {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Base::apply(scales[slot], of_parent(raw, slot));
        if (begun.mine >> slot & 1u) Base::add_to_normaliser(of_parent(raw, slot), position_ < (slot + 1) * kSiblings);
      }
    }
    position_ -= kParents * kSiblings;
    cursor_ += kParents;
  }

  // Of twice kTiles tiles those that are this lane's, the upper ones where `lanes` is set in its number, summed with
  // those of the lane that keeps the others.
  template <int kTiles>
  __device__ __forceinline__ void halve(float (&sums)[2 * kParents][2], int lanes) const {
    bool const upper = lane_ & lanes;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float const low = sums[tile][e];
        float const high = sums[tile + kTiles][e];
        sums[tile][e] = (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, lanes);
      }
    }
  }

  // The importance of a group: column sums over the heads, by a butterfly that halves what is sent. In the end a lane
  // holds columns 2 lane and 2 lane + 1 of the 64, and writes those of a parent that the query takes.
  __device__ __forceinline__ void weigh(float (&raw)[2 * kParents][4], float const (&scales)[kParents],
                                        uint32_t mine) const {
    float sums[2 * kParents][2];
    if (!Base::far_) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Factors const factors = Base::finite_factors(scales[slot]);
        sum_columns(of_parent(raw, slot), 2 * slot, sums,
                    [&](int i, float product) { return Base::exponent_of_product(i, product, factors); });
      }
    } else {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Base::apply(scales[slot], of_parent(raw, slot));
        sum_columns(of_parent(raw, slot), 2 * slot, sums,
                    [&](int i, float score) { return Base::importance_exponent(i, score); });
      }
    }
    halve<4>(sums, 16);
    halve<2>(sums, 8);
    halve<1>(sums, 4);
    ptx::store_global_8B_if(mine >> lane_ / 8 & 1u,
                            args_.importance + static_cast<std::int64_t>(cursor_) * kSiblings + 2 * lane_,
                            {sums[0][0], sums[0][1]});
  }

  // Of a parent whose tiles are `first` and the next, over the two heads of this thread.
  template <class Exponent>
  static __device__ __forceinline__ void sum_columns(float const (&raw)[2][4], int first, float (&sums)[2 * kParents][2],
                                                     Exponent const& exponent) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sums[first + tile][e] =
            ptx::exp2_movable(exponent(0, raw[tile][e])) + ptx::exp2_movable(exponent(1, raw[tile][2 + e]));
      }
    }
  }

  // The query takes all of the group, and has more behind it.
  __device__ __forceinline__ bool whole(uint32_t mine) const {
    return mine == (1u << kParents) - 1 && position_ >= kParents * kSiblings;
  }

  // Children of `dead` (bit 8 tile + e: that of this thread's column) take no part.
  static __device__ __forceinline__ void mask(float (&raw)[2][4], uint32_t dead) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (dead >> (8 * tile + e % 2) & 1u) raw[tile][e] = -Base::kInfinity;
      }
    }
  }

  // Exponentials of a parent's children, not of those that are `dead`.
  __device__ __forceinline__ void exponentials(float const (&raw)[2][4], float scale, uint32_t dead,
                                               float (&x)[2][4]) const {
    Factors const factors = Base::factors(scale);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = Base::exponent_of_product(e / 2, raw[tile][e], factors);
    }
    mask(x, dead);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = ptx::exp2_movable(x[tile][e]);
    }
  }

  // What exponentials of a group may sum up to in a thread before the maximum is raised: none is larger then. Or NaN, which
  // asks for the exact way.
  static constexpr float kMost = 256.0f;  // 2^kSlack

  static __device__ __forceinline__ bool asks(float const (&sum)[2]) { return !(sum[0] <= kMost && sum[1] <= kMost); }

  // The scores of a whole group in the normaliser; maxima and sums are of this thread's columns alone.
  __device__ __forceinline__ void normalise(float (&raw)[2 * kParents][4], float const (&scales)[kParents]) {
    float sum[2] = {};
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      float x[2][4];
      exponentials(of_parent(raw, slot), scales[slot], 0, x);
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
    }
    if (asks(sum)) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) Base::apply(scales[slot], of_parent(raw, slot));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum_[i] *= Base::raise(i, fmaxf(max_[i], Base::template row_max<kParents>(raw, i)));
        sum[i] = 0.0f;
#pragma unroll
        for (int tile = 0; tile < 2 * kParents; ++tile) {
          sum[i] += ptx::exp2_movable(Base::exponent(i, raw[tile][2 * i])) +
                    ptx::exp2_movable(Base::exponent(i, raw[tile][2 * i + 1]));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] += sum[i];
  }

  // Candidates that take no part in P, in the order of this thread's columns: bit 16 (slot % 2) + 8 tile + e of word
  // slot / 2.
  __device__ __forceinline__ void find_dead(uint32_t mine, uint32_t (&dead)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) dead[i] = __shfl_sync(kFullWarp, closed_, (lane_ & ~1) + i);
    if (!whole(mine)) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        bool const last = args_.layer == 0 && position_ < (slot + 1) * kSiblings;
        uint32_t const more = (mine >> slot & 1u) == 0 ? 0xffffu : last ? Base::behind(Base::rightmost()) : 0u;
        dead[slot / 2] |= more << (slot % 2 * kSiblings);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) dead[i] >>= 2 * tq_;
  }

  // P of half a group from parent kBegin on, rounded to the dtype, in A fragments, and its sums.
  template <int kBegin>
  __device__ __forceinline__ void exponentiate(float (&raw)[2 * kParents][4], float const (&scales)[kParents],
                                               uint32_t const (&dead)[kWords], uint32_t (&p)[kHalfGroup][4],
                                               float (&sum)[2]) const {
    using Element = typename Cfg::Element;
#pragma unroll
    for (int slot = kBegin; slot < kBegin + kHalfGroup; ++slot) {
      float x[2][4];
      exponentials(of_parent(raw, slot), scales[slot], dead[slot / 2] >> slot % 2 * kSiblings, x);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
        p[slot - kBegin][i] = Pairs<Element>::pack(x[0][2 * i], x[0][2 * i + 1]);
        p[slot - kBegin][2 + i] = Pairs<Element>::pack(x[1][2 * i], x[1][2 * i + 1]);
      }
    }
  }

  // Adds the sums of a group. Where they ask for it P is computed again, and where a maximum rises sums and O are rescaled:
  // that is rare, so it shows in the sums of exponentials that are computed as if it did not.
  __device__ __forceinline__ void rescale(Begun& begun, uint32_t (&dead)[kWords], uint32_t (&p)[kParents][4],
                                          float (&sum)[2]) {
    auto& raw = begun.raw;
    // Votes among the heads of one query: whatever they decide follows from this query's data.
    if (__any_sync(kFullWarp, asks(sum))) {
      // Through a shuffle: otherwise the outcome of every test above would be kept until here.
#pragma unroll
      for (auto& word : dead) word = __shfl_sync(kFullWarp, word, lane_);
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Base::apply_own(scales_of(begun.stage, slot), of_parent(raw, slot));
        mask(of_parent(raw, slot), dead[slot / 2] >> slot % 2 * kSiblings);
      }
      sum[0] = sum[1] = 0.0f;
      Base::template exponentiate<kParents>(raw, p, sum, [&](int i, float x) { return Base::near_exponent(i, x); });
      if (__any_sync(kFullWarp, asks(sum))) raise_maxima(raw, p, sum);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] += sum[i];
  }

  __device__ __forceinline__ void raise_maxima(float const (&raw)[2 * kParents][4], uint32_t (&p)[kParents][4],
                                               float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const largest = quad_max(Base::template row_max<kParents>(raw, i));
      float const factor = Base::raise(i, fmaxf(max_[i], largest));
      sum_[i] *= factor;
      sum[i] = 0.0f;
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        o_[tile][2 * i] *= factor;
        o_[tile][2 * i + 1] *= factor;
      }
    }
    Base::template exponentiate<kParents>(raw, p, sum, [&](int i, float x) { return Base::exponent(i, x); });
  }

  // See Base::spoil.
  __device__ __forceinline__ void spoil() {
    QueryBlock const block(args_.blocks, ptx::block_index());
    int const count = parents_of<Cfg>(args_, block, Base::query());
#pragma unroll 1
    for (int parent = 0; parent < count; ++parent) {
      if (Base::split() && !Base::takes(parent)) continue;
      char const* const tile = Base::packed_parents() + parent / kParents * kParents * args_.block_bytes;
      if (reinterpret_cast<int const*>(tile)[parent % kParents * kSiblings] < 0) Base::spoil(parent, parent);
    }
  }

  uint32_t closed_ = 0;  // candidates that are no leaves, of two parents of the group at hand
};

}  // namespace htree_cuda::layer

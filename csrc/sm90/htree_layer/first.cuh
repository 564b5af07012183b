// Walk::kFirst: a warpgroup computes the scores of its four queries against four parents at once by WGMMA, 64 heads by 64
// keys, and adds P V likewise, 64 heads by V columns; keys and values are where the bulk copy put them. All queries see the
// same parents, so nothing is read twice. What is between the two products belongs to a warp and its query alone, and passes
// under the products of the other warpgroups; scores of parents that the query does not take are ignored, and their P is
// zero. In values passes the queries wait in shared memory: beside O and the scores there are no registers for them.
//
// kPairs: a warp has two queries of 8 heads at most, a warpgroup eight. A row belongs to one of them, and so do the votes,
// masks and sums that follow: a query's bits do not depend on which other one shares its warp.
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
  using Base::kPairs;
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
  static constexpr int kWords = kParents / 2;  // of 16 bits for each parent
  static constexpr int kGroupsFetched = 32 / kWords;  // whose closed candidates a warp asks for at once
  static constexpr int kQueries = Cfg::kQueries;
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
  };

  // The normaliser, then the importance relative to it: the parents pass by twice.
  __device__ __forceinline__ void choose(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    score_all<Sums::kNormaliser>(ring, at);
    if (active_) Base::finish_normaliser(ring);
    Base::begin_walk(Base::own_block());
    score_all<Sums::kImportance>(ring, at);
  }

  template <Sums kSums>
  __device__ __forceinline__ void score_all(Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) {
    Ring<Cfg> const own(ptx::opaque(ring.stages));  // or the compiler finds out again where shared memory begins, each time
#pragma unroll 1
    for (int group = 0; group < groups_; ++group) {
      Begun begun;
      begin(begun, own, at);
      multiply_keys(begun);
      float scales[kParents];
      load_scales(scales, begun.stage);
      wgmma::wait<0>();
      wgmma::pin(products(begun.raw));
      if constexpr (kPairs) {
        consider_pair<kSums>(begun, scales);
      } else {
        consider<kSums>(begun, scales);
      }
      Base::pass(kParents);
    }
  }

  // Scores of a group and P V of the one before are multiplied together, then this group's P is formed: what a warpgroup does
  // between its products passes under those of the others.
  __device__ __forceinline__ void add_all(Ring<Cfg> const& ring, wgmma::Descriptor const& queries) {
    if (groups_ == 0) return;
    RingPosition<Cfg::kStages> at;
    // The stage whose values are multiplied; before there are scores, those of the first by a P of zeros.
    uint32_t held = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
    uint32_t p[kParents][4] = {};
    uint32_t closed[kQueries];  // candidates that are no leaves, of the groups at hand: fetch_closed
    uint32_t next_closed[kQueries];  // not of pairs: registers
#pragma unroll
    for (int i = 0; i < kQueries && !kPairs; ++i) next_closed[i] = fetch_closed(i, 0);
#pragma unroll 1
    for (int group = 0; group < groups_; ++group) {
      if (group % kGroupsFetched == 0) {
#pragma unroll
        for (int i = 0; i < kQueries; ++i) {
          closed[i] = kPairs ? fetch_closed(i, 0) : next_closed[i];
          if (!kPairs) next_closed[i] = fetch_closed(i, kGroupsFetched * kParents);
        }
      }
      Begun begun;
      begin(begun, ring, at);
      multiply_keys(begun, queries);
      multiply_values(p, held);
      float scales[kParents];
      load_scales(scales, begun.stage);
      uint32_t dead[kQueries][kWords];
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        find_dead(i, begun.stage, closed[i], group % kGroupsFetched * kWords, dead[i]);
      }
      Base::pass(kParents);
      wgmma::wait<0>();
      wgmma::pin(products(begun.raw));
      wgmma::pin(out());
      wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kParents]>(p));
      if (group > 0) release(held);
      held = begun.stage;
      if constexpr (kPairs) {
        exponentiate_pair(begun, scales, dead, p);
      } else {
        exponentiate(begun, scales, dead[0], p);
      }
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

  // Of kGroupsFetched groups from the parent so many further on, those up to the query's own; the others are not written.
  // Lane i has those of parents 2 i and the next.
  __device__ __forceinline__ uint32_t fetch_closed(int query, int parents) const {
    if ((!kPairs && !active_) || args_.layer == 0) return 0;
    int const parent = parents + 2 * lane_;
    int const position = Base::position(query);
    std::uint16_t const* const closed = args_.closed + Base::cursor(query) + parent;
    if (position >= (parent + 1) * kSiblings) return *reinterpret_cast<uint32_t const*>(closed);
    return position >= parent * kSiblings ? *closed : 0u;
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

  // Waits for the next group.
  __device__ __forceinline__ void begin(Begun& begun, Ring<Cfg> const& ring, RingPosition<Cfg::kStages>& at) const {
    ring.barriers.wait_full(at, "htree_layer consumer: full");
    // Through a shuffle, which tells the compiler that it is uniform: descriptors live in uniform registers.
    begun.stage = __shfl_sync(kFullWarp, ring.stage(at.slot), 0);
    at = at.ahead(1);
  }

  // Whether the query takes a parent of the group at hand: those up to its own, unless others share the query.
  __device__ __forceinline__ bool takes(uint32_t stage, int slot, int query = 0) const {
    if (!kPairs && Base::split()) return ptx::load_shared_4B(Ring<Cfg>::mask(stage, warp_)) >> slot & 1u;
    return Base::position(query) >= slot * kSiblings;
  }

  // It takes all of the group, and has more behind it.
  __device__ __forceinline__ bool whole(int query = 0) const {
    return (kPairs || !Base::split()) && Base::position(query) >= kParents * kSiblings;
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

  // The scores of a group; its stage is given back as soon as nothing of it is needed.
  template <Sums kSums>
  __device__ __forceinline__ void consider(Begun& begun, float (&scales)[kParents]) {
    auto& raw = begun.raw;
    if (kSums == Sums::kNormaliser && whole()) {
      normalise(begun, scales);
      release(begun.stage);
      return;
    }
    if (isnan(scales[0] + scales[1] + scales[2] + scales[3])) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Base::settle(scales[slot], scales_of(begun.stage, slot), of_parent(raw, slot));
      }
    }
    if constexpr (kSums == Sums::kImportance) {
      bool const mine = takes(begun.stage, lane_ / 8);
      release(begun.stage);
      weigh(raw, scales, mine);
    } else {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Base::apply(scales[slot], of_parent(raw, slot));
        if (takes(begun.stage, slot)) {
          Base::add_to_normaliser(of_parent(raw, slot), position_ < (slot + 1) * kSiblings);
        }
      }
      release(begun.stage);
    }
  }

  // The same of a pair.
  template <Sums kSums>
  __device__ __forceinline__ void consider_pair(Begun& begun, float const (&scales)[kParents]) {
    if constexpr (kSums == Sums::kImportance) {
      weigh_pair(begun, scales);
    } else if (whole(0) && whole(1)) {
      normalise_rows<true, true>(begun, scales);
      release(begun.stage);
    } else {
      normalise_ends(begun, scales);
      release(begun.stage);
    }
  }

  // Scores of row i, by the scales that keys have for themselves.
  __device__ __forceinline__ void apply_own(int i, uint32_t scales, float (&raw)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float2 const scale = ptx::load_shared_8B(scales + tile * 32 + tq_ * 8);
      raw[tile][2 * i] *= rope::own_scale(scale.x);
      raw[tile][2 * i + 1] *= rope::own_scale(scale.y);
    }
  }

  // What `normalise` does, for either row or both.
  template <bool kFirstRow, bool kSecondRow>
  __device__ __forceinline__ void normalise_rows(Begun& begun, float const (&scales)[kParents]) {
    auto& raw = begun.raw;
    float sum[2] = {};
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      float x[2][4];
      exponentials(of_parent(raw, slot), scales[slot], 0, x);
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 0 ? !kFirstRow : !kSecondRow) continue;
      if (asks(sum[i])) {
#pragma unroll
        for (int slot = 0; slot < kParents; ++slot) apply_own(i, scales_of(begun.stage, slot), of_parent(raw, slot));
        sum[i] = sum_up_row(raw, i, [&](float x) { return Base::near_exponent(i, x); });
        if (asks(sum[i])) {
          sum_[i] *= Base::raise(i, fmaxf(max_[i], Base::template row_max<kParents>(raw, i)));
          sum[i] = sum_up_row(raw, i, [&](float x) { return Base::exponent(i, x); });
        }
      }
      sum_[i] += sum[i];
    }
  }

  // A group that some query does not take as a whole, or ends in.
  __device__ __forceinline__ void normalise_ends(Begun& begun, float const (&scales)[kParents]) {
    if (whole(0)) normalise_rows<true, false>(begun, scales);
    if (whole(1)) normalise_rows<false, true>(begun, scales);
    if (!whole(0)) add_end(0, begun);
    if (!whole(1)) add_end(1, begun);
  }

  // What `consider` does then, for row i.
  __device__ __forceinline__ void add_end(int i, Begun& begun) {
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      auto& raw = of_parent(begun.raw, slot);
      apply_own(i, scales_of(begun.stage, slot), raw);
      if (takes(begun.stage, slot, i)) Base::add_row_to_normaliser(raw, i, Base::position(i) < (slot + 1) * kSiblings);
    }
  }

  // Importance of a group, of either query.
  __device__ __forceinline__ void weigh_pair(Begun& begun, float const (&scales)[kParents]) {
    auto& raw = begun.raw;
    float shared[kParents];
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) shared[slot] = scales[slot];
    if (isnan(scales[0] + scales[1] + scales[2] + scales[3])) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) Base::settle(shared[slot], scales_of(begun.stage, slot), of_parent(raw, slot));
    }
    release(begun.stage);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sums[2 * kParents][2];
#pragma unroll
      for (int tile = 0; tile < 2 * kParents; ++tile) {
        float const scale = shared[tile / 2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float const product = raw[tile][2 * i + e];
          sums[tile][e] = ptx::exp2_movable(
              Base::far(i) ? Base::importance_exponent(i, product * fabsf(scale))
                           : Base::exponent_of_product(i, product, Base::finite_factors(scale)));
        }
      }
      halve<4>(sums, 16);
      halve<2>(sums, 8);
      halve<1>(sums, 4);
      ptx::store_global_8B_if(Base::position(i) >= lane_ / 8 * kSiblings,
                              args_.importance + static_cast<std::int64_t>(Base::cursor(i)) * kSiblings + 2 * lane_,
                              {sums[0][0], sums[0][1]});
    }
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
  // holds columns 2 lane and 2 lane + 1 of the 64, and writes them if they are of a parent that the query takes.
  __device__ __forceinline__ void weigh(float (&raw)[2 * kParents][4], float const (&scales)[kParents], bool mine) const {
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
    ptx::store_global_8B_if(mine, args_.importance + static_cast<std::int64_t>(cursor_) * kSiblings + 2 * lane_,
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

  // Of row i alone.
  static __device__ __forceinline__ void mask_row(int i, float (&raw)[2][4], uint32_t dead) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (dead >> (8 * tile + e) & 1u) raw[tile][2 * i + e] = -Base::kInfinity;
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

  // What exponentials of a group may sum up to in a thread before the maximum is raised: none is larger then. NaN asks too.
  static constexpr float kMost = 256.0f;  // 2^kSlack

  static __device__ __forceinline__ bool asks(float const (&sum)[2]) { return !(sum[0] <= kMost && sum[1] <= kMost); }
  static __device__ __forceinline__ bool asks(float sum) { return !(sum <= kMost); }

  // Sums of the exponentials of exponent(row, raw score).
  template <class Exponent>
  static __device__ __forceinline__ void sum_up(float const (&raw)[2 * kParents][4], float (&sum)[2],
                                                Exponent const& exponent) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = sum_up_row(raw, i, [&](float x) { return exponent(i, x); });
  }

  template <class Exponent>
  static __device__ __forceinline__ float sum_up_row(float const (&raw)[2 * kParents][4], int i, Exponent const& exponent) {
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < 2 * kParents; ++tile) {
      sum += ptx::exp2_movable(exponent(raw[tile][2 * i])) + ptx::exp2_movable(exponent(raw[tile][2 * i + 1]));
    }
    return sum;
  }

  // The scores of a whole group in the normaliser; maxima and sums are of this thread's columns alone.
  __device__ __forceinline__ void normalise(Begun& begun, float const (&scales)[kParents]) {
    auto& raw = begun.raw;
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
      for (int slot = 0; slot < kParents; ++slot) Base::apply_own(scales_of(begun.stage, slot), of_parent(raw, slot));
      sum_up(raw, sum, [&](int i, float x) { return Base::near_exponent(i, x); });
      if (asks(sum)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) sum_[i] *= Base::raise(i, fmaxf(max_[i], Base::template row_max<kParents>(raw, i)));
        sum_up(raw, sum, [&](int i, float x) { return Base::exponent(i, x); });
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] += sum[i];
  }

  // Candidates that take no part in P, in the order of this thread's columns: bit 16 (slot % 2) + 8 tile + e of word
  // slot / 2. `closed`: what fetch_closed found, those of this group from lane `first` on.
  __device__ __forceinline__ void find_dead(int query, uint32_t stage, uint32_t closed, int first,
                                            uint32_t (&dead)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) dead[i] = __shfl_sync(kFullWarp, closed, first + i);
    if (!whole(query)) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        bool const last = args_.layer == 0 && Base::position(query) < (slot + 1) * kSiblings;
        uint32_t const more = !takes(stage, slot, query) ? 0xffffu : last ? Base::behind(Base::rightmost(query)) : 0u;
        dead[slot / 2] |= more << (slot % 2 * kSiblings);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) dead[i] >>= 2 * tq_;
  }

  // P of a group, rounded to the dtype, in A fragments, and its sums. Where they ask for it P is computed again, and where a
  // maximum rises sums and O are rescaled: that is rare, so it shows in the sums of exponentials that are computed as if it
  // did not.
  __device__ __forceinline__ void exponentiate(Begun& begun, float const (&scales)[kParents], uint32_t (&dead)[kWords],
                                               uint32_t (&p)[kParents][4]) {
    using Element = typename Cfg::Element;
    auto& raw = begun.raw;
    float sum[2] = {};
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      float x[2][4];
      exponentials(of_parent(raw, slot), scales[slot], dead[slot / 2] >> slot % 2 * kSiblings, x);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
        p[slot][i] = Pairs<Element>::pack(x[0][2 * i], x[0][2 * i + 1]);
        p[slot][2 + i] = Pairs<Element>::pack(x[1][2 * i], x[1][2 * i + 1]);
      }
    }
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

  // The same of a pair: each has its own votes and masks.
  __device__ __forceinline__ void exponentiate_pair(Begun& begun, float const (&scales)[kParents], uint32_t (&dead)[2][kWords],
                                                    uint32_t (&p)[kParents][4]) {
    using Element = typename Cfg::Element;
    auto& raw = begun.raw;
    float sum[2] = {};
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      Factors const factors = Base::factors(scales[slot]);
      float x[2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[tile][e] = Base::exponent_of_product(e / 2, raw[2 * slot + tile][e], factors);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mask_row(i, x, dead[i][slot / 2] >> slot % 2 * kSiblings);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e / 2][2 * i + e % 2] = ptx::exp2_movable(x[e / 2][2 * i + e % 2]);
        sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
        p[slot][i] = Pairs<Element>::pack(x[0][2 * i], x[0][2 * i + 1]);
        p[slot][2 + i] = Pairs<Element>::pack(x[1][2 * i], x[1][2 * i + 1]);
      }
    }
    if (__any_sync(kFullWarp, asks(sum))) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!__any_sync(kFullWarp, asks(sum[i]))) continue;
#pragma unroll
        for (auto& word : dead[i]) word = __shfl_sync(kFullWarp, word, lane_);
#pragma unroll
        for (int slot = 0; slot < kParents; ++slot) {
          apply_own(i, scales_of(begun.stage, slot), of_parent(raw, slot));
          mask_row(i, of_parent(raw, slot), dead[i][slot / 2] >> slot % 2 * kSiblings);
        }
        sum[i] = exponentiate_row(raw, i, p, [&](float x) { return Base::near_exponent(i, x); });
        if (!__any_sync(kFullWarp, asks(sum[i]))) continue;
        float const largest = quad_max(Base::template row_max<kParents>(raw, i));
        float const factor = Base::raise(i, fmaxf(max_[i], largest));
        sum_[i] *= factor;
#pragma unroll
        for (int tile = 0; tile < kValueTiles; ++tile) {
          o_[tile][2 * i] *= factor;
          o_[tile][2 * i + 1] *= factor;
        }
        sum[i] = exponentiate_row(raw, i, p, [&](float x) { return Base::exponent(i, x); });
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] += sum[i];
  }

  // Row i of Base::exponentiate.
  template <class Exponent>
  __device__ __forceinline__ float exponentiate_row(float const (&raw)[2 * kParents][4], int i, uint32_t (&p)[kParents][4],
                                                    Exponent const& exponent) const {
    using Element = typename Cfg::Element;
    float sum = 0.0f;
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = ptx::exp2_movable(exponent(raw[2 * slot + e / 2][2 * i + e % 2]));
      sum += (x[0] + x[1]) + (x[2] + x[3]);
      p[slot][i] = Pairs<Element>::pack(x[0], x[1]);
      p[slot][2 + i] = Pairs<Element>::pack(x[2], x[3]);
    }
    return sum;
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
    QueryBlock const block = Base::own_block();
#pragma unroll
    for (int query = 0; query < kQueries; ++query) {
      if (kPairs && !Base::active(query)) continue;
      int const count = parents_of<Cfg>(args_, block, Base::query(query));
#pragma unroll 1
      for (int parent = 0; parent < count; ++parent) {
        if (!kPairs && Base::split() && !Base::takes(parent)) continue;
        char const* const tile = Base::packed_parents() + parent / kParents * kParents * args_.block_bytes;
        if (reinterpret_cast<int const*>(tile)[parent % kParents * kSiblings] < 0) Base::spoil(parent, parent, query);
      }
    }
  }
};

}  // namespace htree_cuda::layer

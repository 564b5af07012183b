// LayerKind::kEntry: a warpgroup computes the scores of its four queries against four parents at once by WGMMA, 64 heads by 64
// keys, and adds P V likewise, 64 heads by V columns; keys and values are where the bulk copy put them. All queries see the
// same parents, so nothing is read twice. What is between the two products belongs to a warp and its query alone, and passes
// under the products of the other warpgroups; scores of parents that the query does not take are ignored, and their P is
// zero. In attend passes the queries wait in shared memory: beside O and the scores there are no registers for them.
//
// kSharesWarp: a warp has two queries of 8 heads at most, a warpgroup eight, or four of 4 and sixteen. A row belongs to one of them, and
// so do the votes, masks and sums that follow: a query's bits do not depend on which others share its warp. Of four, lanes
// 0 to 15 have rows of the first and the third, the others of the second and the fourth.
#pragma once

#include "entry_groups.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
class EntryConsumer : public EntryGroups<Cfg> {
  using Base = EntryGroups<Cfg>;
  using Base::active_;
  using Base::all_whole;
  using Base::any_own;
  using Base::args_;
  using Base::begin;
  using Base::cursor_;
  using Base::fetch_expanded;
  using Base::fetch_maximum;
  using Base::find_masked;
  using Base::groups_;
  using Base::keep_maximum;
  using Base::kept_expanded;
  using Base::kept_cursor;
  using Base::kGroupsFetched;
  using Base::kOwnLanes;
  using Base::kParents;
  using Base::kPerUnit;
  using Base::kRows;
  using Base::kSharesWarp;
  using Base::kValueTiles;
  using Base::kWords;
  using Base::lane_;
  using Base::load_scales;
  using Base::mask;
  using Base::mask_row;
  using Base::max_;
  using Base::multiply_keys;
  using Base::multiply_values;
  using Base::o_;
  using Base::of_parent;
  using Base::out;
  using Base::position_;
  using Base::products;
  using Base::queries_of;
  using Base::release;
  using Base::scales_of;
  using Base::store_queries;
  using Base::sum_;
  using Base::takes;
  using Base::tq_;
  using Base::whole;
  using Begun = typename Base::Begun;
  using Factors = typename Base::Factors;

public:
  __device__ explicit EntryConsumer(Args const& args) : Base(args) {}

  __device__ void run(Ring<Cfg> const& ring) {
    if constexpr (Cfg::kReadsValues) {
      store_queries(queries_of(ring));
      add_all(ring, wgmma::Descriptor(queries_of(ring)));
      if (*args_.has_nonfinite_v != 0) propagate_nan();
      Base::finish_values(ring);
    } else {
      choose(ring);
    }
  }

private:
  // The lse, then the importance relative to it: the parents pass by twice.
  __device__ __forceinline__ void choose(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    score_all<Sweep::kLse>(ring, at);
    if (active_) Base::finish_lse(ring);
    Base::begin_sweep(Base::own_block());
    score_all<Sweep::kImportance>(ring, at);
  }

  template <Sweep kSweep>
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
      if constexpr (kSharesWarp) {
        score_group_rows<kSweep>(begun, scales);
      } else {
        score_group<kSweep>(begun, scales);
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
    uint32_t expanded[kRows];  // candidates that are no leaves, of the groups at hand: fetch_expanded
    uint32_t next_expanded = 0;  // not where queries share a warp: registers
    if constexpr (!kSharesWarp) next_expanded = fetch_expanded(0, 0);
    if constexpr (Cfg::kKeeps) {
      if (lane_ % kOwnLanes == 0) ptx::store_shared_4B(kept_cursor(ring), static_cast<uint32_t>(cursor_));
      keep_maximum(ring, 0);
      keep_maximum(ring, 1);
    }
#pragma unroll 1
    for (int group = 0; group < groups_; ++group) {
      if (group % kGroupsFetched == 0) {
        if constexpr (Cfg::kKeeps) {
          __syncwarp();
          cursor_ = static_cast<int>(ptx::load_shared_4B(kept_cursor(ring)));
#pragma unroll
          for (int i = 0; i < kRows; ++i) ptx::store_shared_4B(kept_expanded(ring) + 128 * i, fetch_expanded(i, 0));
          __syncwarp();
        } else {
#pragma unroll
          for (int i = 0; i < kRows; ++i) expanded[i] = kSharesWarp ? fetch_expanded(i, 0) : next_expanded;
          if constexpr (!kSharesWarp) next_expanded = fetch_expanded(0, kGroupsFetched * kParents);
        }
      }
      Begun begun;
      begin(begun, ring, at);
      multiply_keys(begun, queries);
      multiply_values(p, held);
      float scales[kParents];
      load_scales(scales, begun.stage);
      uint32_t masked[kRows][kWords];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        int const first = group % kGroupsFetched * kWords;
        if constexpr (Cfg::kKeeps) {
          static_assert(kWords == 2);
          float2 const words = ptx::load_shared_8B(kept_expanded(ring) / 64 * 64 + 128 * i + 4 * first);
          masked[i][0] = __float_as_uint(words.x), masked[i][1] = __float_as_uint(words.y);
        } else {
#pragma unroll
          for (int word = 0; word < kWords; ++word) masked[i][word] = __shfl_sync(kFullWarp, expanded[i], first + word);
        }
        find_masked(i, begun.stage, masked[i]);
      }
      if (kPerUnit > 1) __syncwarp();  // halves of the warp may end apart; they wait for the products together
      Base::pass(kParents);
      wgmma::wait<0>();
      wgmma::pin(products(begun.raw));
      wgmma::pin(out());
      wgmma::pin(reinterpret_cast<uint32_t(&)[4 * kParents]>(p));
      if (group > 0) release(held);
      held = begun.stage;
      if constexpr (kSharesWarp) {
        exponentiate_rows(ring, begun, scales, masked, p);
      } else {
        exponentiate(begun, scales, masked[0], p);
      }
    }
    multiply_values(p, held);
    wgmma::wait<0>();
    wgmma::pin(out());
    release(held);
    if constexpr (Cfg::kKeeps) {
      fetch_maximum(ring, 0);
      fetch_maximum(ring, 1);
    }
  }

  // The scores of a group; its stage is given back as soon as nothing of it is needed.
  template <Sweep kSweep>
  __device__ __forceinline__ void score_group(Begun& begun, float (&scales)[kParents]) {
    auto& raw = begun.raw;
    if (kSweep == Sweep::kLse && whole()) {
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
    if constexpr (kSweep == Sweep::kImportance) {
      bool const query_mask = takes(begun.stage, lane_ / 8);
      release(begun.stage);
      weigh(raw, scales, query_mask);
    } else {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Base::apply(scales[slot], of_parent(raw, slot));
        if (takes(begun.stage, slot)) {
          Base::add_to_lse(of_parent(raw, slot), position_ < (slot + 1) * kSiblings);
        }
      }
      release(begun.stage);
    }
  }

  // The same where rows are of different queries.
  template <Sweep kSweep>
  __device__ __forceinline__ void score_group_rows(Begun& begun, float const (&scales)[kParents]) {
    if constexpr (kSweep == Sweep::kImportance) {
      weigh_rows(begun, scales);
    } else if (all_whole()) {
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
      raw[tile][2 * i] *= row_scale::own_scale(scale.x);
      raw[tile][2 * i + 1] *= row_scale::own_scale(scale.y);
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
      if (overflows(sum[i])) {
#pragma unroll
        for (int slot = 0; slot < kParents; ++slot) apply_own(i, scales_of(begun.stage, slot), of_parent(raw, slot));
        sum[i] = sum_up_row(raw, i, [&](float x) { return Base::near_exponent(i, x); });
        if (overflows(sum[i])) {
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

  // What `score_group` does then, for row i.
  __device__ __forceinline__ void add_end(int i, Begun& begun) {
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      auto& raw = of_parent(begun.raw, slot);
      apply_own(i, scales_of(begun.stage, slot), raw);
      if (takes(begun.stage, slot, i)) Base::add_row_to_lse(raw, i, Base::position(i) < (slot + 1) * kSiblings);
    }
  }

  // Importance of a group, of the query of either row.
  __device__ __forceinline__ void weigh_rows(Begun& begun, float const (&scales)[kParents]) {
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
      float* const importance = args_.importance + static_cast<std::int64_t>(Base::cursor(i)) * kSiblings;
      if constexpr (kPerUnit == 1) {
        halve<4>(sums, 16);
        halve<2>(sums, 8);
        halve<1>(sums, 4);
        ptx::store_global_8B_if(Base::position(i) >= lane_ / 8 * kSiblings, importance + 2 * lane_, {sums[0][0], sums[0][1]});
      } else {  // a lane has both tiles of a parent in the end
        halve<4>(sums, 8);
        halve<2>(sums, 4);
        int const slot = lane_ % kOwnLanes / 4;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          ptx::store_global_8B_if(Base::position(i) >= slot * kSiblings, importance + slot * kSiblings + 8 * tile + 2 * tq_,
                                  {sums[tile][0], sums[tile][1]});
        }
      }
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
  __device__ __forceinline__ void weigh(float (&raw)[2 * kParents][4], float const (&scales)[kParents], bool query_mask) const {
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
    ptx::store_global_8B_if(query_mask, args_.importance + static_cast<std::int64_t>(cursor_) * kSiblings + 2 * lane_,
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

  // Exponentials of a parent's children, not of those that are `masked`.
  __device__ __forceinline__ void exponentials(float const (&raw)[2][4], float scale, uint32_t masked,
                                               float (&x)[2][4]) const {
    Factors const factors = Base::factors(scale);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = Base::exponent_of_product(e / 2, raw[tile][e], factors);
    }
    mask(x, masked);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[tile][e] = ptx::exp2_movable(x[tile][e]);
    }
  }

  // What exponentials of a group may sum up to in a thread before the maximum is raised: none is larger then. NaN overflows too.
  static constexpr float kMost = 256.0f;  // 2^kSlack

  static __device__ __forceinline__ bool overflows(float const (&sum)[2]) { return !(sum[0] <= kMost && sum[1] <= kMost); }
  static __device__ __forceinline__ bool overflows(float sum) { return !(sum <= kMost); }

  // Sweep of the exponentials of exponent(row, raw score).
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

  // The scores of a whole group in the lse; maxima and sums are of this thread's columns alone.
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
    if (overflows(sum)) {
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) Base::apply_own(scales_of(begun.stage, slot), of_parent(raw, slot));
      sum_up(raw, sum, [&](int i, float x) { return Base::near_exponent(i, x); });
      if (overflows(sum)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) sum_[i] *= Base::raise(i, fmaxf(max_[i], Base::template row_max<kParents>(raw, i)));
        sum_up(raw, sum, [&](int i, float x) { return Base::exponent(i, x); });
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] += sum[i];
  }

  // P of a group, rounded to the dtype, in A fragments, and its sums. Where they ask for it P is computed again, and where a
  // maximum rises sums and O are rescaled: that is rare, so it shows in the sums of exponentials that are computed as if it
  // did not.
  __device__ __forceinline__ void exponentiate(Begun& begun, float const (&scales)[kParents], uint32_t (&masked)[kWords],
                                               uint32_t (&p)[kParents][4]) {
    using Element = typename Cfg::Element;
    auto& raw = begun.raw;
    float sum[2] = {};
#pragma unroll
    for (int slot = 0; slot < kParents; ++slot) {
      float x[2][4];
      exponentials(of_parent(raw, slot), scales[slot], masked[slot / 2] >> slot % 2 * kSiblings, x);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
        p[slot][i] = Pairs<Element>::pack(x[0][2 * i], x[0][2 * i + 1]);
        p[slot][2 + i] = Pairs<Element>::pack(x[1][2 * i], x[1][2 * i + 1]);
      }
    }
    // Votes among the heads of one query: whatever they decide follows from this query's data.
    if (__any_sync(kFullWarp, overflows(sum))) {
      // Through a shuffle: otherwise the outcome of every test above would be kept until here.
#pragma unroll
      for (auto& word : masked) word = __shfl_sync(kFullWarp, word, lane_);
#pragma unroll
      for (int slot = 0; slot < kParents; ++slot) {
        Base::apply_own(scales_of(begun.stage, slot), of_parent(raw, slot));
        mask(of_parent(raw, slot), masked[slot / 2] >> slot % 2 * kSiblings);
      }
      sum[0] = sum[1] = 0.0f;
      Base::template exponentiate<kParents>(raw, p, sum, [&](int i, float x) { return Base::near_exponent(i, x); });
      if (__any_sync(kFullWarp, overflows(sum))) raise_maxima(raw, p, sum);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] += sum[i];
  }

  // The same where rows are of different queries: each has its own votes and masks.
  __device__ __forceinline__ void exponentiate_rows(Ring<Cfg> const& ring, Begun& begun, float const (&scales)[kParents],
                                                    uint32_t (&masked)[2][kWords], uint32_t (&p)[kParents][4]) {
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
        mask_row(i, x, masked[i][slot / 2] >> slot % 2 * kSiblings);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e / 2][2 * i + e % 2] = ptx::exp2_movable(x[e / 2][2 * i + e % 2]);
        sum[i] += (x[0][2 * i] + x[0][2 * i + 1]) + (x[1][2 * i] + x[1][2 * i + 1]);
        p[slot][i] = Pairs<Element>::pack(x[0][2 * i], x[0][2 * i + 1]);
        p[slot][2 + i] = Pairs<Element>::pack(x[1][2 * i], x[1][2 * i + 1]);
      }
    }
    if (__any_sync(kFullWarp, overflows(sum))) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bool const again = any_own(overflows(sum[i]));
        if (kPerUnit == 1 ? !again : !__any_sync(kFullWarp, again)) continue;
#pragma unroll
        for (auto& word : masked[i]) word = __shfl_sync(kFullWarp, word, lane_);
        if (kPerUnit == 1 || again) {
#pragma unroll
          for (int slot = 0; slot < kParents; ++slot) {
            apply_own(i, scales_of(begun.stage, slot), of_parent(raw, slot));
            mask_row(i, of_parent(raw, slot), masked[i][slot / 2] >> slot % 2 * kSiblings);
          }
          sum[i] = exponentiate_row(raw, i, p, [&](float x) { return Base::near_exponent(i, x); });
        }
        bool const rises = any_own((kPerUnit == 1 || again) && overflows(sum[i]));
        if (kPerUnit == 1 && !rises) continue;
        float const largest = quad_max(Base::template row_max<kParents>(raw, i));
        if constexpr (Cfg::kKeeps) {
          fetch_maximum(ring, i);
          __syncwarp();  // before it is written again
        }
        if (kPerUnit > 1 && !rises) continue;
        float const factor = Base::raise(i, fmaxf(max_[i], largest));
        if constexpr (Cfg::kKeeps) keep_maximum(ring, i);
        sum_[i] *= factor;
#pragma unroll
        for (int tile = 0; tile < kValueTiles; ++tile) {
          o_[tile][2 * i] *= factor;
          o_[tile][2 * i + 1] *= factor;
        }
        sum[i] = exponentiate_row(raw, i, p, [&](float x) { return Base::exponent(i, x); });
      }
      if (kPerUnit > 1) __syncwarp();
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

  // See Base::propagate_nan.
  __device__ __forceinline__ void propagate_nan() {
    QueryBlock const block = Base::own_block();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (kSharesWarp && !Base::active(i)) continue;
      int const count = parents_of<Cfg>(args_, block, Base::query(i));
#pragma unroll 1
      for (int parent = 0; parent < count; ++parent) {
        if (!kSharesWarp && Base::split() && !Query<Cfg>::takes(parent)) continue;
        char const* const tile = Base::packed_parents() + parent / kParents * kParents * args_.block_bytes;
        if (reinterpret_cast<int const*>(tile)[parent % kParents * kSiblings] < 0) Base::propagate_nan(parent, parent, i);
      }
    }
    __syncwarp();
  }
};

}  // namespace htree_cuda::sm90::htree_fwd

// What every consumer warp of the layer kernel does with its query, whichever way it walks: account for the scores of a
// parent, and write the result.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/pairs.cuh"
#include "query.cuh"

namespace htree_cuda::sm90::htree_fwd {

// What an infinite input reached is NaN, whatever its sign and weight.
__device__ __forceinline__ float infinite_to_nan(float x) { return fmaf(x, 0.0f, x); }

// Whatever is decided or computed for a row follows from its own query. A score is `raw` (tree/rope.cuh), and so is the
// maximum relative to which it is exponentiated: the difference of the maximum and itself is exactly zero however large it is, where that of products rounded apart is not. What is rounded is a matter of 2^-13 at most
// while |max * unit| <= kNear, though, and then one instruction makes an exponent of a product, relative to `reference_`. Beyond
// that the reference is a NaN; so is the scale of keys that do not share one. Exponents that are NaN ask, as those that
// exceed the reference by too much do, to be computed again from raw scores: in the same way, which gives uneven keys the bits
// that they would have as even ones, since the siblings that make them uneven may be later tokens; and if those ask too, from
// differences of raw scores.
template <class Cfg>
class Consumer : public Query<Cfg> {
protected:
  using Base = Query<Cfg>;
  using Element = typename Cfg::Element;
  using Base::active;
  using Base::active_;
  using Base::args_;
  using Base::each_far_;
  using Base::far;
  using Base::far_;
  using Base::first_head;
  using Base::g_;
  using Base::has_head;
  using Base::head;
  using Base::head_of;
  using Base::kInfinity;
  using Base::kLargest;
  using Base::kNoLeaf;
  using Base::kPerUnit;
  using Base::kSharesWarp;
  using Base::kSlack;
  using Base::kV;
  using Base::kValueTiles;
  using Base::lane_;
  using Base::log_sum_;
  using Base::max_;
  using Base::not_a_number;
  using Base::o_;
  using Base::own_block;
  using Base::position;
  using Base::query;
  using Base::refer;
  using Base::reference_;
  using Base::right_;
  using Base::rightmost;
  using Base::row;
  using Base::split;
  using Base::state_row;
  using Base::sum_;
  using Base::tq_;
  using Base::unit_;
  using Base::warp_;

  __device__ explicit Consumer(Args const& args) : Base(args) {}

  // Raises row i's maximum to `largest` and returns what its sums are multiplied by.
  __device__ __forceinline__ float raise(int i, float largest) {
    float const factor = ptx::exp2_movable((max_[i] - largest) * unit_[i]);
    max_[i] = largest;
    refer(i);
    return factor;
  }

  // What products with keys are multiplied by, for either row, where one scale serves all of a parent.
  struct Factors {
    float row[2];
  };

  __device__ __forceinline__ Factors factors(float scale) const {
    return {{fabsf(scale) * unit_[0], fabsf(scale) * unit_[1]}};
  }

  // For importance, which nothing overflows about: finite, so that products of zero stay zero.
  __device__ __forceinline__ Factors finite_factors(float scale) const {
    return {{fminf(fabsf(scale) * unit_[0], kLargest), fminf(fabsf(scale) * unit_[1], kLargest)}};
  }

  __device__ __forceinline__ float exponent_of_product(int i, float product, Factors const& factors) const {
    return fmaf(product, factors.row[i], -reference_[i]);
  }

  // Of a raw score, the same bits.
  __device__ __forceinline__ float near_exponent(int i, float raw) const {
    return fmaf(raw, unit_[i], -reference_[i]);
  }

  __device__ __forceinline__ float exponent(int i, float raw) const { return (raw - max_[i]) * unit_[i]; }

  // raw[tile][e]: column 8 tile + 2 tq + e % 2 of row e / 2, products before and scores after, by the scales that the 16 keys
  // of a parent have at `scales`.
  __device__ __forceinline__ void apply_own(uint32_t scales, float (&raw)[2][4]) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float2 const scale = ptx::load_shared_8B(scales + tile * 32 + tq_ * 8);
      float const own[2] = {row_scale::own_scale(scale.x), row_scale::own_scale(scale.y)};
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[tile][e] *= own[e % 2];
    }
  }

  // By the scale that they share.
  static __device__ __forceinline__ void apply(float scale, float (&raw)[2][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[tile][e] *= fabsf(scale);
    }
  }

  // Products of keys that share no scale meet theirs, while the stage is there.
  __device__ __forceinline__ void settle(float& scale, uint32_t scales, float (&products)[2][4]) const {
    if (!isnan(scale)) return;
    apply_own(scales, products);
    scale = 1.0f;
  }

  // Candidates of `masked` (bit c: child c) take no part. Of scores or of their exponents.
  __device__ __forceinline__ void mask(float (&raw)[2][4], uint32_t masked) const {
    uint32_t const query_mask = masked >> (2 * tq_);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (query_mask >> (8 * tile + e % 2) & 1u) raw[tile][e] = -kInfinity;
      }
    }
  }

  template <int kParents>
  static __device__ __forceinline__ float row_max(float const (&raw)[2 * kParents][4], int i) {
    float largest = fmaxf(raw[0][2 * i], raw[0][2 * i + 1]);
#pragma unroll
    for (int tile = 1; tile < 2 * kParents; ++tile) {
      largest = fmaxf(largest, fmaxf(raw[tile][2 * i], raw[tile][2 * i + 1]));
    }
    return largest;
  }

  // Children behind the rightmost candidate, in the last parent.
  static __device__ __forceinline__ uint32_t behind(int rightmost) { return 0xffffu & ~((2u << rightmost) - 1u); }

  // The scores of a parent in the lse.
  __device__ __forceinline__ void add_to_lse(float (&raw)[2][4], bool last) {
    if (last) {
      int const child = rightmost();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // One lane of the quad holds the rightmost candidate; the others keep 0.
        float const x = child < 8 ? (child % 2 ? raw[0][2 * i + 1] : raw[0][2 * i])
                                  : (child % 2 ? raw[1][2 * i + 1] : raw[1][2 * i]);
        right_[i] = child % 8 / 2 == tq_ ? x : 0.0f;
      }
      mask(raw, 0xffffu & ~((1u << child) - 1u));
    }
    normalise<1>(raw);
  }

  // Of row i alone.
  __device__ __forceinline__ void add_row_to_lse(float const (&raw)[2][4], int i, bool last) {
    float x[4] = {raw[0][2 * i], raw[0][2 * i + 1], raw[1][2 * i], raw[1][2 * i + 1]};
    if (last) {
      int const child = rightmost(i);
      float const right = child < 8 ? (child % 2 ? x[1] : x[0]) : (child % 2 ? x[3] : x[2]);
      right_[i] = child % 8 / 2 == tq_ ? right : 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (8 * (e / 2) + 2 * tq_ + e % 2 >= child) x[e] = -kInfinity;
      }
    }
    float const largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    if (exponent(i, largest) > kSlack) sum_[i] *= raise(i, largest);
    sum_[i] += ptx::exp2_movable(exponent(i, x[0])) + ptx::exp2_movable(exponent(i, x[1]));
    sum_[i] += ptx::exp2_movable(exponent(i, x[2])) + ptx::exp2_movable(exponent(i, x[3]));
  }

  // Maxima and running sums are of this thread's columns alone; merged in the end.
  template <int kParents>
  __device__ __forceinline__ void raise_own(float const (&raw)[2 * kParents][4]) {
    float const largest[2] = {row_max<kParents>(raw, 0), row_max<kParents>(raw, 1)};
    bool const raises[2] = {exponent(0, largest[0]) > kSlack, exponent(1, largest[1]) > kSlack};
    if (raises[0] || raises[1]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (raises[i]) sum_[i] *= raise(i, largest[i]);
      }
    }
  }

  template <int kParents>
  __device__ __forceinline__ void normalise(float const (&raw)[2 * kParents][4]) {
    raise_own<kParents>(raw);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int tile = 0; tile < 2 * kParents; ++tile) {
        sum_[i] += ptx::exp2_movable(exponent(i, raw[tile][2 * i])) +
                   ptx::exp2_movable(exponent(i, raw[tile][2 * i + 1]));
      }
    }
  }

  // The logarithm of exp(s - lse_g), of a raw score.
  __device__ __forceinline__ float importance_exponent(int i, float raw) const {
    return fmaf(raw - max_[i], unit_[i], -log_sum_[i]);
  }

  // The child whose column sum this thread holds in the end.
  __device__ __forceinline__ int column() const { return (lane_ & 16) / 2 + 2 * tq_ + (lane_ & 8) / 8; }

  // The importance of a parent's children: column sums over the heads, by a butterfly that halves what is sent, first two
  // columns of four, then one of two.
  __device__ __forceinline__ void add_columns(float const (&weights)[2][4], int cursor, int column_summed) {
    float column[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) column[c] = weights[c / 2][c % 2] + weights[c / 2][2 + c % 2];
    bool const second = lane_ & 16;
    float a = second ? column[2] : column[0];
    float b = second ? column[3] : column[1];
    a += __shfl_xor_sync(kFullWarp, second ? column[0] : column[2], 16);
    b += __shfl_xor_sync(kFullWarp, second ? column[1] : column[3], 16);
    bool const odd = lane_ & 8;
    float sum = odd ? b : a;
    sum += __shfl_xor_sync(kFullWarp, odd ? a : b, 8);
    sum += __shfl_xor_sync(kFullWarp, sum, 4);
    ptx::store_global_if((lane_ & 4) == 0,
                         args_.importance + static_cast<std::int64_t>(cursor) * kSiblings + column_summed, sum);
  }

  // Of two, whose children one butterfly leaves in the lanes of a warp: the parent that lane / 16 says, its tile that the next
  // bit says.
  __device__ __forceinline__ void add_columns_of_two(float const (&weights)[2][2][4], int cursor, bool store = true) {
    float column[2][4];
#pragma unroll
    for (int parent = 0; parent < 2; ++parent) {
#pragma unroll
      for (int c = 0; c < 4; ++c) column[parent][c] = weights[parent][c / 2][c % 2] + weights[parent][c / 2][2 + c % 2];
    }
    bool const second = lane_ & 16;
    float own[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      own[c] = second ? column[1][c] : column[0][c];
      own[c] += __shfl_xor_sync(kFullWarp, second ? column[0][c] : column[1][c], 16);
    }
    bool const high = lane_ & 8;
    float pair[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      pair[e] = high ? own[2 + e] : own[e];
      pair[e] += __shfl_xor_sync(kFullWarp, high ? own[e] : own[2 + e], 8);
    }
    bool const odd = lane_ & 4;
    float sum = odd ? pair[1] : pair[0];
    sum += __shfl_xor_sync(kFullWarp, odd ? pair[0] : pair[1], 4);
    int const child = (lane_ & 24) + 2 * tq_ + (lane_ & 4) / 4;
    ptx::store_global_if(store, args_.importance + static_cast<std::int64_t>(cursor) * kSiblings + child, sum);
  }

  // P of some parents, rounded to the dtype, in A fragments. exponent: of row i, from a raw score.
  template <int kParents, class Exponent>
  __device__ __forceinline__ void exponentiate(float const (&raw)[2 * kParents][4], uint32_t (&p)[kParents][4],
                                               float (&sum)[2], Exponent const& exponent) const {
#pragma unroll
    for (int parent = 0; parent < kParents; ++parent) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] = ptx::exp2_movable(exponent(i, raw[2 * parent + e / 2][2 * i + e % 2]));
        }
        sum[i] += (x[0] + x[1]) + (x[2] + x[3]);
        p[parent][i] = Pairs<Element>::pack(x[0], x[1]);
        p[parent][2 + i] = Pairs<Element>::pack(x[2], x[3]);
      }
    }
  }

  // The ring holds zeros for values that are not finite. Once all is summed, those that the query took become NaN: the
  // parents whose scales have that sign are looked up again, and their values read where they came from. `row_of`: of this thread.
  __device__ __forceinline__ void propagate_nan(std::int64_t parent, int rank, int row_of = 0) {
    QueryBlock const block = own_block();
    int const last = candidates_of<Cfg>(args_, args_.blocks.q_start + block.first + query(row_of)) - 1;
    uint32_t masked = rank == last / kSiblings ? behind(last % kSiblings) : 0u;
    if (args_.layer > 0) masked = args_.expanded[row(row_of) * (args_.width / kSiblings) + rank];
    tree::pack::Source const& values = args_.values;
    Element const* const rows = static_cast<Element const*>(values.in) + block.bh / args_.H_kv * values.stride_b +
                                parent * kSiblings * values.stride_n + block.bh % args_.H_kv * values.stride_h + 2 * tq_;
#pragma unroll 1
    for (uint32_t open = 0xffffu & ~masked; open != 0; open &= open - 1) {
      Element const* const row = rows + (__ffs(open) - 1) * values.stride_n;
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (isfinite(static_cast<float>(row[8 * tile + e]))) continue;
          if (!kSharesWarp || row_of == 0) o_[tile][e] = not_a_number();
          if (!kSharesWarp || row_of == 1) o_[tile][2 + e] = not_a_number();
        }
      }
    }
  }

  __device__ __forceinline__ void finish_values(Ring<Cfg> const& ring) {
    if (!active_) return;
    sum_[0] = quad_sum(sum_[0]);
    sum_[1] = quad_sum(sum_[1]);
    if (args_.layer > 0) {
      write_state();
    } else if (split()) {
      merge_heads(ring);
      write_merged_result(ring);
    } else {
      write_result();
    }
  }

  __device__ __forceinline__ void sync_consumers() const {
    barriers::named_sync(Cfg::kMergeBarrier, Cfg::kConsumers * 32);
  }

  // Maximum, sum and the rightmost candidate's score of both heads over all consumers, in the order of their ranks; O is
  // rescaled to the maximum.
  __device__ __forceinline__ void merge_heads(Ring<Cfg> const& ring) {
    sync_consumers();  // in attend passes nobody reads the ring any more
    if (tq_ == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4 const query_mask = {__float_as_uint(max_[i]), __float_as_uint(sum_[i]), __float_as_uint(right_[i]), 0u};
        ptx::store_shared_16B(ring.stages + Cfg::kMergeHeadOffset + (warp_ * 16 + head(i)) * 16, query_mask);
      }
    }
    sync_consumers();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = kNoLeaf;
      float sum = 0.0f;
      float right = 0.0f;
#pragma unroll 1
      for (int w = 0; w < Cfg::kConsumers; ++w) {
        uint4 const other = ptx::load_shared_16B(ring.stages + Cfg::kMergeHeadOffset + (w * 16 + head(i)) * 16);
        float const raised = fmaxf(largest, __uint_as_float(other.x));
        sum = sum * ptx::exp2_movable((largest - raised) * unit_[i]) +
              __uint_as_float(other.y) * ptx::exp2_movable((__uint_as_float(other.x) - raised) * unit_[i]);
        right += __uint_as_float(other.z);
        largest = raised;
      }
      float const factor = raise(i, largest);
      sum_[i] = sum;
      right_[i] = right;
      if constexpr (Cfg::kReadsValues) {
#pragma unroll
        for (int tile = 0; tile < kValueTiles; ++tile) {
          o_[tile][2 * i] *= factor;
          o_[tile][2 * i + 1] *= factor;
        }
      }
    }
  }

  // From maxima and sums of this thread's columns to max_ and log_sum_ of the query.
  __device__ __forceinline__ void finish_lse(Ring<Cfg> const& ring) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] *= raise(i, quad_max(max_[i]));
      sum_[i] = quad_sum(sum_[i]);
      right_[i] = quad_sum(right_[i]);
    }
    if (split()) merge_heads(ring);
    float excess[2];
    float shift[2] = {kLargest, kLargest};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      log_sum_[i] = log2f(sum_[i]);
      excess[i] = 0.0f;
      if (!args_.strict_causal) {
        // By how much the rightmost candidate raises the logarithm of the lse: log2(1 + 2^right).
        float const right = fmaf(right_[i] - max_[i], unit_[i], -log_sum_[i]);
        float const raised = fmaxf(right, 0.0f) + log2f(1.0f + ptx::exp2_approx(-fabsf(right)));
        excess[i] = raised > kLargest ? kLargest : raised;  // infinity - infinity is NaN
        if (head(i) < args_.G) shift[i] = excess[i];
      }
    }
    // With the rightmost candidate in the lse all other importance may vanish: one power of two for all heads
    // keeps the largest above 2^-13.
    if constexpr (!kSharesWarp) shift[0] = shift[1] = fminf(shift[0], shift[1]);
#pragma unroll
    for (int i = 0; i < (kSharesWarp ? 2 : 1); ++i) {
#pragma unroll
      for (int lanes = 4; lanes < 32 / kPerUnit; lanes *= 2) shift[i] = fminf(shift[i], __shfl_xor_sync(kFullWarp, shift[i], lanes));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!args_.strict_causal) log_sum_[i] += excess[i] - shift[kSharesWarp ? i : 0];
      refer(i, log_sum_[i]);
      if (head(i) >= args_.G) reference_[i] = log_sum_[i] = kInfinity;
    }
    if constexpr (kSharesWarp) {
      unsigned const far[2] = {__ballot_sync(kFullWarp, isnan(reference_[0])), __ballot_sync(kFullWarp, isnan(reference_[1]))};
      each_far_ = {(far[0] & Base::own_lanes()) != 0, (far[1] & Base::own_lanes()) != 0};
      far_ = (far[0] | far[1]) != 0;
    } else {
      far_ = __any_sync(kFullWarp, isnan(reference_[0]) || isnan(reference_[1]));
    }
  }

  __device__ __forceinline__ void write_state() {
    if constexpr (kSharesWarp) {
      write_states();
      return;
    }
    if (tq_ == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) args_.state_sum[state_row() * 16 + head(i)] = {max_[i], sum_[i]};
    }
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
      args_.state_out[(state_row() * kValueTiles + tile) * 32 + lane_] = {o_[tile][0], o_[tile][1], o_[tile][2],
                                                                          o_[tile][3]};
    }
  }

  // Of several queries, as layers below read them: what is left of a query's 16 rows are heads that do not exist, with scores of zero.
  __device__ __forceinline__ void write_states() const {
    constexpr int kLanes = 32 / kPerUnit;  // that have rows of one query
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!active(i)) continue;
      if (tq_ == 0) {
        float2* const sums = args_.state_sum + state_row(i) * 16 + head(i);
        sums[0] = {max_[i], sum_[i]};
#pragma unroll
        for (int rest = Base::kUnitHeads; rest < 16; rest += Base::kUnitHeads) sums[rest] = {0.0f, 1.0f};
      }
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        float4* const out = args_.state_out + (state_row(i) * kValueTiles + tile) * 32 + lane_ % kLanes;
        out[0] = {o_[tile][2 * i], o_[tile][2 * i + 1], 0.0f, 0.0f};
#pragma unroll
        for (int rest = kLanes; rest < 32; rest += kLanes) out[rest] = {0.0f, 0.0f, 0.0f, 0.0f};
      }
    }
  }

  __device__ __forceinline__ void write_tile(std::int64_t first, int tile, float const (&o)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has_head(i)) continue;
      float const inverse = 1.0f / sum_[i];
      uint32_t* const out = reinterpret_cast<uint32_t*>(static_cast<Element*>(args_.out) + head_of(first, i) * kV);
      out[4 * tile + tq_] =
          Pairs<Element>::pack(infinite_to_nan(o[2 * i] * inverse), infinite_to_nan(o[2 * i + 1] * inverse));
    }
  }

  __device__ __forceinline__ void write_lse(std::int64_t first) const {
    constexpr float kLogTwo = 0.693147180559945309f;
    if (tq_ != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has_head(i)) continue;
      args_.lse[head_of(first, i)] = infinite_to_nan(fmaf(max_[i], unit_[i] * kLogTwo, log2f(sum_[i]) * kLogTwo));
    }
  }

  __device__ __forceinline__ void write_result() const {
    std::int64_t const first = first_head();
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) write_tile(first, tile, o_[tile]);
    write_lse(first);
  }

  // After merge_heads: O summed over the consumers in the order of their ranks, each consumer some tiles.
  __device__ __forceinline__ void write_merged_result(Ring<Cfg> const& ring) const {
    auto const at = [&](int consumer, int tile) {
      return ring.stage(consumer / Cfg::kMergePerStage) + Cfg::kMergeOutOffset +
             consumer % Cfg::kMergePerStage * Cfg::kMergeOutBytes + (tile * 32 + lane_) * 16;
    };
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
      ptx::store_shared_16B(at(warp_, tile), {__float_as_uint(o_[tile][0]), __float_as_uint(o_[tile][1]),
                                              __float_as_uint(o_[tile][2]), __float_as_uint(o_[tile][3])});
    }
    sync_consumers();
    std::int64_t const first = first_head();
#pragma unroll 1
    for (int tile = warp_; tile < kValueTiles; tile += Cfg::kConsumers) {
      float o[4] = {};
#pragma unroll 1
      for (int w = 0; w < Cfg::kConsumers; ++w) {
        uint4 const other = ptx::load_shared_16B(at(w, tile));
        o[0] += __uint_as_float(other.x), o[1] += __uint_as_float(other.y);
        o[2] += __uint_as_float(other.z), o[3] += __uint_as_float(other.w);
      }
      write_tile(first, tile, o);
    }
    if (threadIdx.x < 32) write_lse(first);
  }
};

}  // namespace htree_cuda::sm90::htree_fwd

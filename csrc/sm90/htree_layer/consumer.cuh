// What every consumer warp of the layer kernel does with its query, whichever way it walks: load it, account for the
// scores of a parent, and write the result.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../device/pairs.cuh"
#include "mainloop.cuh"

namespace htree_cuda::layer {

// What an infinite input reached is NaN, whatever its sign and weight.
__device__ __forceinline__ float infinite_to_nan(float x) { return fmaf(x, 0.0f, x); }

// One query: 16 heads (rows lane / 4 and lane / 4 + 8 in this thread) and the parents it takes. A score is `raw`
// (device/rope.cuh), and so is the maximum relative to which it is exponentiated: the difference of the maximum and itself is
// exactly zero however large it is, where that of products rounded apart is not. What is rounded is a matter of 2^-13 at most
// while |max * unit| <= kNear, though, and then one instruction makes an exponent of a product, relative to `reference_`. Beyond
// that the reference is a NaN; so is the scale of keys that do not share one. Exponents that are NaN ask, as those that
// exceed the reference by too much do, to be computed again from raw scores: in the same way, which gives uneven keys the bits
// that they would have as even ones, since the siblings that make them uneven may be later tokens; and if those ask too, from
// differences of raw scores.
template <class Cfg>
class Consumer {
protected:
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kSteps = kK / 16;      // k-steps of QK
  static constexpr int kHalf = kK / 32;       // of them, in the order of memory, with the first elements of pairs
  static constexpr int kValueTiles = Cfg::kReadsValues ? kV / 8 : 1;
  static constexpr bool kBelow = Cfg::kIsBelow;
  // A running maximum is raised when an exponential would exceed 2^kSlack: rescaling is rare.
  static constexpr float kSlack = 8.0f;
  static constexpr float kNear = 4096.0f;
  static constexpr float kLargest = 3.402823466e38f;
  // The maximum before the first leaf: whatever score comes raises it, and what is summed up to then is zero.
  static constexpr float kNoLeaf = -kLargest;
  static constexpr float kInfinity = __builtin_huge_valf();

  __device__ explicit Consumer(Args const& args)
      : args_(args),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        tq_(lane_ % 4),
        warp_(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)) {
    QueryBlock const block(args.blocks, block_index<Cfg>(args));
    QueryWords words;
    fetch_query(block, words);  // under way while all else is found out
    groups_ = (stream_count<Cfg>(args, block) + Cfg::kStageSlots - 1) / Cfg::kStageSlots;
    active_ = block.first + query() < args.blocks.T_q && works<Cfg>(args, args.blocks.q_start + block.first + query());
    begin_walk(block);
    if (active_) {
      float2 state[2];
      fetch_state(state);
      turn_query(words);
      begin_state(state);
    } else {
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i) q_[i / 4][i % 4] = half2{};
    }
  }

  // Before the first parent.
  __device__ __forceinline__ void begin_walk(QueryBlock const& block) {
    std::int64_t const t = args_.blocks.q_start + block.first + query();
    position_ = active_ ? candidates_of<Cfg>(args_, t) - 1 : -1;
    cursor_ = static_cast<int>(row() * (args_.width / kSiblings));
  }

  // kBelow, before the first parent again, where the query is active.
  __device__ __forceinline__ void repeat_walk() {
    position_ = (args_.top_k - 1) * kSiblings + rightmost();
    cursor_ = static_cast<int>(row() * (args_.width / kSiblings));
  }

  // One query over all consumers of the block.
  __device__ __forceinline__ bool split() const { return args_.split; }
  __device__ __forceinline__ bool takes(int rank) const { return consumer_of(args_, rank) == static_cast<int>(warp_); }
  __device__ __forceinline__ uint32_t query() const { return split() ? 0 : warp_; }
  __device__ __forceinline__ int head_row(int i) const { return g_ + 8 * i; }
  __device__ __forceinline__ std::int64_t row() const {
    return static_cast<int>(block_index<Cfg>(args_)) * kBlockQueries + query();
  }
  __device__ __forceinline__ std::int64_t state_row() const {
    return static_cast<int>(block_index<Cfg>(args_)) * kBlockQueries + warp_;
  }

  // q in A fragments: the pair of elements 16 kk + 8 part + 2 tq of row i is words[i][kk][part].
  using QueryWords = uint32_t[2][kSteps][2];

  // Rows of heads beyond G are zero.
  __device__ __forceinline__ void fetch_query(QueryBlock const& block, QueryWords& words) const {
    std::int64_t const b = block.bh / args_.H_kv;
    std::int64_t const h_kv = block.bh % args_.H_kv;
    std::uint16_t const* const base = static_cast<std::uint16_t const*>(args_.q) + b * args_.q_stride_b +
                                      (block.first + query()) * args_.q_stride_t +
                                      h_kv * args_.G * args_.q_stride_h + 2 * tq_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint16_t const* const head = base + head_row(i) * args_.q_stride_h;
#pragma unroll
      for (int part = 0; part < 2 * kSteps; ++part) words[i][part / 2][part % 2] = 0;
      if (head_row(i) >= args_.G || block.first + query() >= args_.blocks.T_q) continue;
      if (args_.q_pairs) {
#pragma unroll
        for (int part = 0; part < 2 * kSteps; ++part) {
          words[i][part / 2][part % 2] = __ldg(reinterpret_cast<uint32_t const*>(head + 8 * part));
        }
      } else {
#pragma unroll
        for (int part = 0; part < 2 * kSteps; ++part) {
          uint32_t const low = __ldg(head + 8 * part);
          words[i][part / 2][part % 2] = low | static_cast<uint32_t>(__ldg(head + 8 * part + 1)) << 16;
        }
      }
    }
  }

  __device__ __forceinline__ void turn_query(QueryWords const& words) {
    if constexpr (!std::is_void_v<Element>) {
      turn_query_of<Element>(words);
    } else if (args_.q_half) {
      turn_query_of<__half>(words);
    } else {
      turn_query_of<__nv_bfloat16>(words);
    }
  }

  // What was fetched, normalised to fp16. Walk::kFirst: turned by n - 1, in float32 and rounded once.
  template <class Type>
  __device__ __forceinline__ void turn_query_of(QueryWords const& words) {
    float4 turns[kHalf][2];
    if constexpr (!kBelow) {  // on their way while the query is
#pragma unroll
      for (int i = 0; i < 2 * kHalf; ++i) {
        float2 const* const pair = args_.turns + position_ * (kK / 2) + 8 * i + 2 * tq_;
        turns[i / 2][i % 2] = __ldg(reinterpret_cast<float4 const*>(pair));
      }
    }
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t largest = 0;  // of magnitudes, which compare as their bits do
#pragma unroll
      for (int part = 0; part < 2 * kSteps; ++part) {
        largest = __vmaxu2(largest, words[i][part / 2][part % 2] & 0x7fff7fffu);
      }
      float2 const two = Pairs<Type>::unpack(largest);
      rope::QueryScale const scale = rope::query_scale(quad_max(fmaxf(two.x, two.y)), args_.scale);
      unit_[i] = scale.unit;
      factor[i] = scale.factor;
    }
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        float4 const& turn = turns[kk][part];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float2 lo = Pairs<Type>::unpack(words[i][kk][part]);
          float2 hi = Pairs<Type>::unpack(words[i][kk + kHalf][part]);
          lo.x *= factor[i], lo.y *= factor[i], hi.x *= factor[i], hi.y *= factor[i];
          if constexpr (!kBelow) {
            float2 const x = lo;
            float2 const y = hi;
            lo = {x.x * turn.x - y.x * turn.y, x.y * turn.z - y.y * turn.w};
            hi = {x.x * turn.y + y.x * turn.x, x.y * turn.w + y.y * turn.z};
          }
          int const even = rope::tile_of(2 * kk + part, 0), odd = rope::tile_of(2 * kk + part, 1);
          q_[even / 2][even % 2 * 2 + i] = __floats2half2_rn(lo.x, hi.x);
          q_[odd / 2][odd % 2 * 2 + i] = __floats2half2_rn(lo.y, hi.y);
        }
      }
    }
  }

  // What the layer above left, on its way while the query is: O, and maximum and sum. Zeros where Walk::kFirst begins.
  __device__ __forceinline__ void fetch_state(float2 (&state)[2]) {
    if constexpr (Cfg::kPass == Pass::kValues) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        state[i] = kBelow ? args_.state_sum[state_row() * 16 + head_row(i)] : float2{kNoLeaf, 0.0f};
      }
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (kBelow) o = args_.state_out[(state_row() * kValueTiles + tile) * 32 + lane_];
        o_[tile][0] = o.x, o_[tile][1] = o.y, o_[tile][2] = o.z, o_[tile][3] = o.w;
      }
    }
  }

  __device__ __forceinline__ void begin_state(float2 const (&state)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max_[i] = kNoLeaf;
      sum_[i] = 0.0f;
      right_[i] = 0.0f;
      reference_[i] = not_a_number();
      if constexpr (Cfg::kPass == Pass::kValues && kBelow) {
        max_[i] = state[i].x;
        refer(i);
        sum_[i] = tq_ == 0 ? state[i].y : 0.0f;
      }
    }
  }

  // Raises row i's maximum to `largest` and returns what its sums are multiplied by.
  __device__ __forceinline__ float raise(int i, float largest) {
    float const factor = ptx::exp2_movable((max_[i] - largest) * unit_[i]);
    max_[i] = largest;
    refer(i);
    return factor;
  }

  static __device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

  // Row i's reference where what is added to the maximum is the logarithm of a sum.
  __device__ __forceinline__ void refer(int i, float log_sum = 0.0f) {
    float const exponent = fmaf(max_[i], unit_[i], log_sum);
    reference_[i] = fabsf(exponent) <= kNear ? exponent : not_a_number();
  }

  // What products with keys are multiplied by, for either row, where one scale serves all of a parent.
  struct Factors {
    float row[2];
  };

  __device__ __forceinline__ Factors factors(float scale) const {
    return {{fabsf(scale) * unit_[0], fabsf(scale) * unit_[1]}};
  }

  // For importance, which nothing asks about: finite, so that products of zero stay zero.
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
      float const own[2] = {rope::own_scale(scale.x), rope::own_scale(scale.y)};
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

  // Candidates of `dead` (bit c: child c) take no part. Of scores or of their exponents.
  __device__ __forceinline__ void mask(float (&raw)[2][4], uint32_t dead) const {
    uint32_t const mine = dead >> (2 * tq_);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (mine >> (8 * tile + e % 2) & 1u) raw[tile][e] = -kInfinity;
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

  // The rightmost candidate's place among its siblings, in the last parent.
  __device__ __forceinline__ int rightmost() const { return position_ & (kSiblings - 1); }

  // Children behind the rightmost candidate, in the last parent.
  static __device__ __forceinline__ uint32_t behind(int rightmost) { return 0xffffu & ~((2u << rightmost) - 1u); }

  // The scores of a parent in the normaliser.
  __device__ __forceinline__ void add_to_normaliser(float (&raw)[2][4], bool last) {
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
  // parents whose scales have that sign are looked up again, and their values read where they came from.
  __device__ __forceinline__ void spoil(std::int64_t parent, int rank) {
    QueryBlock const block(args_.blocks, block_index<Cfg>(args_));
    int const last = candidates_of<Cfg>(args_, args_.blocks.q_start + block.first + query()) - 1;
    uint32_t dead = rank == last / kSiblings ? behind(last % kSiblings) : 0u;
    if (args_.layer > 0) dead = args_.closed[row() * (args_.width / kSiblings) + rank];
    packing::Source const& values = args_.values;
    Element const* const rows = static_cast<Element const*>(values.in) + block.bh / args_.H_kv * values.stride_b +
                                parent * kSiblings * values.stride_n + block.bh % args_.H_kv * values.stride_h + 2 * tq_;
#pragma unroll 1
    for (uint32_t open = 0xffffu & ~dead; open != 0; open &= open - 1) {
      Element const* const row = rows + (__ffs(open) - 1) * values.stride_n;
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!isfinite(static_cast<float>(row[8 * tile + e]))) o_[tile][e] = o_[tile][2 + e] = __int_as_float(0x7fffffff);
        }
      }
    }
  }

  __device__ __forceinline__ char const* packed_parents() const {
    return own<Cfg>(args_).packed +
           QueryBlock(args_.blocks, block_index<Cfg>(args_)).bh * own<Cfg>(args_).parents_per_head * args_.block_bytes;
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
    sync_consumers();  // in values passes nobody reads the ring any more
    if (tq_ == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4 const mine = {__float_as_uint(max_[i]), __float_as_uint(sum_[i]), __float_as_uint(right_[i]), 0u};
        ptx::store_shared_16B(ring.stages + Cfg::kMergeHeadOffset + (warp_ * 16 + head_row(i)) * 16, mine);
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
        uint4 const other = ptx::load_shared_16B(ring.stages + Cfg::kMergeHeadOffset + (w * 16 + head_row(i)) * 16);
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
  __device__ __forceinline__ void finish_normaliser(Ring<Cfg> const& ring) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] *= raise(i, quad_max(max_[i]));
      sum_[i] = quad_sum(sum_[i]);
      right_[i] = quad_sum(right_[i]);
    }
    if (split()) merge_heads(ring);
    float excess[2];
    float shift = kLargest;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      log_sum_[i] = log2f(sum_[i]);
      excess[i] = 0.0f;
      if (!args_.strict_causal) {
        // By how much the rightmost candidate raises the logarithm of the normaliser: log2(1 + 2^right).
        float const right = fmaf(right_[i] - max_[i], unit_[i], -log_sum_[i]);
        float const raised = fmaxf(right, 0.0f) + log2f(1.0f + ptx::exp2_approx(-fabsf(right)));
        excess[i] = raised > kLargest ? kLargest : raised;  // infinity - infinity is NaN
        if (head_row(i) < args_.G) shift = fminf(shift, excess[i]);
      }
    }
    // With the rightmost candidate in the normaliser all other importance may vanish: one power of two for all heads
    // keeps the largest above 2^-13.
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) shift = fminf(shift, __shfl_xor_sync(kFullWarp, shift, lanes));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!args_.strict_causal) log_sum_[i] += excess[i] - shift;
      refer(i, log_sum_[i]);
      if (head_row(i) >= args_.G) reference_[i] = log_sum_[i] = kInfinity;
    }
    far_ = __any_sync(kFullWarp, isnan(reference_[0]) || isnan(reference_[1]));
  }

  __device__ __forceinline__ void write_state() {
    if (tq_ == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        args_.state_sum[state_row() * 16 + head_row(i)] = {max_[i], sum_[i]};
      }
    }
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
      args_.state_out[(state_row() * kValueTiles + tile) * 32 + lane_] = {o_[tile][0], o_[tile][1], o_[tile][2],
                                                                          o_[tile][3]};
    }
  }

  // The query's first head in the outputs. Where the query is, is looked up again: it would occupy registers throughout
  // the loop.
  __device__ __forceinline__ std::int64_t first_head() const {
    QueryBlock const block(args_.blocks, block_index<Cfg>(args_));
    std::int64_t const b = block.bh / args_.H_kv;
    std::int64_t const h_kv = block.bh % args_.H_kv;
    return ((b * args_.blocks.T_q + block.first + query()) * args_.H_kv + h_kv) * args_.G;
  }

  __device__ __forceinline__ void write_tile(std::int64_t first, int tile, float const (&o)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (head_row(i) >= args_.G) continue;
      float const inverse = 1.0f / sum_[i];
      uint32_t* const out = reinterpret_cast<uint32_t*>(static_cast<Element*>(args_.out) + (first + head_row(i)) * kV);
      out[4 * tile + tq_] =
          Pairs<Element>::pack(infinite_to_nan(o[2 * i] * inverse), infinite_to_nan(o[2 * i + 1] * inverse));
    }
  }

  __device__ __forceinline__ void write_lse(std::int64_t first) const {
    constexpr float kLogTwo = 0.693147180559945309f;
    if (tq_ != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (head_row(i) >= args_.G) continue;
      args_.lse[first + head_row(i)] = infinite_to_nan(fmaf(max_[i], unit_[i] * kLogTwo, log2f(sum_[i]) * kLogTwo));
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

  Args const& args_;
  int const lane_;
  int const g_;
  int const tq_;
  uint32_t const warp_;
  int groups_;    // of parents that pass by
  bool active_;   // the query exists, and walks this layer in this way
  int position_;  // of the query as the parent at hand sees it: n - 1 - 16 rank; below 16 in the last parent, and negative behind it
  int cursor_;    // of that parent among all of the rows of importance or closed masks
  half2 q_[kSteps][4];
  float unit_[2];
  float max_[2];      // running maximum, raw; for importance: the normaliser's
  float reference_[2];  // max * unit, for importance and log_sum; NaN where that is too far from zero
  bool far_ = false;  // importance: some head's reference is
  float sum_[2];      // of the exponentials
  float log_sum_[2];  // of the normaliser: lse_g * log2(e) = max * unit + log_sum
  float right_[2];    // for the normaliser: the rightmost candidate's score
  float o_[kValueTiles][4];
};

}  // namespace htree_cuda::layer

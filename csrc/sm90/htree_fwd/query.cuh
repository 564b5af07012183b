// Who a consumer warp of the layer kernel works for: its query, or two or four, where they are in the call and in the walk, and how
// they are loaded.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device/pairs.cuh"
#include "producer.cuh"

namespace htree_cuda::sm90::htree_fwd {

// One query: 16 heads (rows lane / 4 and lane / 4 + 8 in this thread) and the parents it takes. Cfg::kSharesWarp: two, of 8 heads
// each, the second one's in rows 8 to 15, or four, of 4 heads: what this thread knows of a row is of that row's query, which of
// four may be another one in another half of the warp.
template <class Cfg>
class Query {
protected:
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kSteps = kK / 16;      // k-steps of QK
  static constexpr int kHalf = kK / 32;       // of them, in the order of memory, with the first elements of pairs
  static constexpr int kValueTiles = Cfg::kReadsValues ? kV / 8 : 1;
  static constexpr bool kSelected = Cfg::kIsSelected;
  static constexpr bool kSharesWarp = Cfg::kSharesWarp;
  static constexpr bool kSwapAB = Cfg::kSwapAB;
  static constexpr int kPerUnit = kSharesWarp ? Cfg::kQueriesPerWarp / 2 : 1;  // queries in 8 rows
  static constexpr int kUnitHeads = 8 / kPerUnit;
  // In a entry layer parents pass by all queries alike: what differs by row is where each begins, two numbers of 16 bits.
  static constexpr bool kPacksPositions = kSharesWarp && !kSelected;
  // A running maximum is raised when an exponential would exceed 2^kSlack: rescaling is rare.
  static constexpr float kSlack = 8.0f;
  static constexpr float kNear = 4096.0f;
  static constexpr float kLargest = 3.402823466e38f;
  // The maximum before the first leaf: whatever score comes raises it, and what is summed up to then is zero.
  static constexpr float kNoLeaf = -kLargest;
  static constexpr float kInfinity = __builtin_huge_valf();

  __device__ explicit Query(Args const& args)
      : args_(args),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        tq_(lane_ % 4),
        warp_(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)) {
    QueryBlock const block = own_block();
    QueryWords words;
    fetch_query(block, words);  // under way while all else is found out
    groups_ = (stream_count<Cfg>(args) + Cfg::kStageSlots - 1) / Cfg::kStageSlots;
    active_ = works(block, 0);
    if constexpr (kSwapAB) each_active_ = {active_, works(block, 1)};
    begin_sweep(block);
    if constexpr (kSharesWarp) active_ = __any_sync(kFullWarp, active(0) || active(1));
    if (active_) {
      float2 state[2];
      if constexpr (!kSwapAB) fetch_state(state);
      rotate_query(words);
      if constexpr (!kSwapAB) begin_state(state);
    } else {
#pragma unroll
      for (int i = 0; i < kSteps * 4; ++i) q_[i / 4][i % 4] = half2{};
    }
  }

  // Before the first parent.
  __device__ __forceinline__ void begin_sweep(QueryBlock const& block) {
    std::int64_t const t = args_.blocks.q_start + block.first + query();
    cursor_ = static_cast<int>(row() * (args_.width / kSiblings));
    if constexpr (kPacksPositions) {
      passed_.value = 0;
      int const first = works(block, 0) ? candidates_of<Cfg>(args_, t) - 1 : -1;
      int const second = works(block, 1) ? candidates_of<Cfg>(args_, t + kPerUnit) - 1 : -1;
      position_ = (first & 0xffff) | second << 16;
    } else {
      position_ = active(0) ? candidates_of<Cfg>(args_, t) - 1 : -1;
      if constexpr (kSwapAB) second_position_.value = active(1) ? candidates_of<Cfg>(args_, t + kPerUnit) - 1 : -1;
    }
  }

  // kSelected, before the first parent again, where the query is active.
  __device__ __forceinline__ void repeat_sweep() {
    position_ = (args_.top_k - 1) * kSiblings + rightmost();
    cursor_ = static_cast<int>(row() * (args_.width / kSiblings));
  }

  // One query over all consumers of the block.
  __device__ __forceinline__ bool split() const { return args_.split; }
  __device__ __forceinline__ bool takes(int rank) const { return consumer_of(args_, rank) == static_cast<int>(warp_); }
  // The block that the query is in, of the launch and of the call; kSharesWarp: -1 and of no meaning where there is none.
  __device__ __forceinline__ int block() const { return block_of_warp<Cfg>(args_, warp_); }
  __device__ __forceinline__ QueryBlock own_block() const { return QueryBlock(args_.blocks, block()); }

  // Of row i of this thread: its query in the block and its head, the query's row in the launch, and whether it walks.
  __device__ __forceinline__ uint32_t query(int i = 0) const {
    if constexpr (kPerUnit > 1) return first_query() + i * kPerUnit + g_ / kUnitHeads;
    if constexpr (kSharesWarp) return first_query() + i;
    return split() ? 0 : warp_;
  }
  // kSharesWarp: the warp's first query in its block.
  __device__ __forceinline__ uint32_t first_query() const {
    return warp_ % (Cfg::kConsumers / Cfg::kQueriesPerWarp) * Cfg::kQueriesPerWarp;
  }
  __device__ __forceinline__ int head(int i) const { return kPerUnit > 1 ? g_ % kUnitHeads : kSharesWarp ? g_ : g_ + 8 * i; }
  __device__ __forceinline__ std::int64_t row(int i = 0) const { return block() * kBlockQueries + query(i); }
  __device__ __forceinline__ std::int64_t state_row(int i = 0) const {
    return block() * kBlockQueries + (kSharesWarp ? query(i) : warp_);
  }
  __device__ __forceinline__ bool active(int i) const {
    if constexpr (kPacksPositions) return first_position(i) >= 0;
    if constexpr (kSwapAB) return i == 0 ? each_active_.first : each_active_.second;
    return active_;
  }
  __device__ __forceinline__ int position(int i) const {
    if constexpr (kPacksPositions) return first_position(i) - passed_.value * kSiblings;
    if constexpr (kSwapAB) return i == 0 ? position_ : second_position_.value;
    return position_;
  }
  // kPacksPositions: as the first parent sees it, n - 1; -1 where the query does not walk.
  __device__ __forceinline__ int first_position(int i) const {
    // Through opaque where the compiler would keep either one, in vector registers.
    int const both = kPerUnit == 1 ? position_ : static_cast<int>(ptx::opaque(static_cast<uint32_t>(position_)));
    return i == 0 ? static_cast<std::int16_t>(both & 0xffff) : both >> 16;
  }
  __device__ __forceinline__ bool far(int i) const {
    if constexpr (kSharesWarp) return i == 0 ? each_far_.first : each_far_.second;
    return far_;
  }
  // Those that have rows of the same queries.
  __device__ __forceinline__ uint32_t own_lanes() const { return kPerUnit == 1 ? kFullWarp : 0xffffu << (ptx::lane_index() & 16); }
  // The rightmost candidate's place among its siblings, in the last parent.
  __device__ __forceinline__ int rightmost(int i = 0) const { return position(i) & (kSiblings - 1); }
  // Of its candidates' parent at hand, as cursor_.
  __device__ __forceinline__ int cursor(int i) const {
    int const first = kSharesWarp && i == 1 ? cursor_ + kPerUnit * static_cast<int>(args_.width / kSiblings) : cursor_;
    if constexpr (kPacksPositions) return first + passed_.value;
    return first;
  }
  // On to the parent so many further.
  __device__ __forceinline__ void pass(int parents) {
    if constexpr (kPacksPositions) {
      passed_.value += parents;
      return;
    }
    position_ -= parents * kSiblings;
    if constexpr (kSwapAB) second_position_.value -= parents * kSiblings;
    cursor_ += parents;
  }

  __device__ __forceinline__ bool exists(QueryBlock const& block, int i) const {
    return (!kSharesWarp || this->block() >= 0) && block.first + query(i) < args_.blocks.T_q;
  }
  __device__ __forceinline__ bool works(QueryBlock const& block, int i) const {
    return exists(block, i) && htree_fwd::works<Cfg>(args_, args_.blocks.q_start + block.first + query(i));
  }

  // q in A fragments, kSwapAB B fragments: the two elements 16 kk + 8 part + 2 tq of row i is words[i][kk][part].
  using QueryWords = uint32_t[2][kSteps][2];

  // Rows of heads beyond G are zero.
  __device__ __forceinline__ void fetch_query(QueryBlock const& block, QueryWords& words) const {
    std::int64_t const b = block.bh / args_.H_kv;
    std::int64_t const h_kv = block.bh % args_.H_kv;
    std::uint16_t const* const base = static_cast<std::uint16_t const*>(args_.q) + b * args_.q_stride_b +
                                      h_kv * args_.G * args_.q_stride_h + 2 * tq_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint16_t const* const row =
          base + (block.first + query(i)) * args_.q_stride_t + head(i) * args_.q_stride_h;
#pragma unroll
      for (int part = 0; part < 2 * kSteps; ++part) words[i][part / 2][part % 2] = 0;
      if (head(i) >= args_.G || !exists(block, i)) continue;
      if (args_.q_pairs) {
#pragma unroll
        for (int part = 0; part < 2 * kSteps; ++part) {
          words[i][part / 2][part % 2] = __ldg(reinterpret_cast<uint32_t const*>(row + 8 * part));
        }
      } else {
#pragma unroll
        for (int part = 0; part < 2 * kSteps; ++part) {
          uint32_t const low = __ldg(row + 8 * part);
          words[i][part / 2][part % 2] = low | static_cast<uint32_t>(__ldg(row + 8 * part + 1)) << 16;
        }
      }
    }
  }

  __device__ __forceinline__ void rotate_query(QueryWords const& words) {
    if constexpr (!std::is_void_v<Element>) {
      rotate_query_of<Element>(words);
    } else if (args_.q_half) {
      rotate_query_of<__half>(words);
    } else {
      rotate_query_of<__nv_bfloat16>(words);
    }
  }

  // What was fetched, normalised to fp16. LayerKind::kEntry: rotated by n - 1, in float32 and rounded once.
  template <class Type>
  __device__ __forceinline__ void rotate_query_of(QueryWords const& words) {
    // On their way while the query is; those of the second row's when the first one's is rotated.
    float4 rotations[kHalf][2];
    auto const fetch_rotation = [&](int position) {
#pragma unroll
      for (int i = 0; i < 2 * kHalf; ++i) {
        float2 const* const pair = args_.rotations + (kSharesWarp ? max(position, 0) : position) * (kK / 2) + 8 * i + 2 * tq_;
        rotations[i / 2][i % 2] = __ldg(reinterpret_cast<float4 const*>(pair));
      }
    };
    if constexpr (!kSelected) fetch_rotation(position(0));
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t largest = 0;  // of magnitudes, which compare as their bits do
#pragma unroll
      for (int part = 0; part < 2 * kSteps; ++part) {
        largest = __vmaxu2(largest, words[i][part / 2][part % 2] & 0x7fff7fffu);
      }
      float2 const two = Pairs<Type>::unpack(largest);
      row_scale::QueryScale const scale = row_scale::query_scale(quad_max(fmaxf(two.x, two.y)), args_.scale);
      unit_[i] = scale.unit;
      factor[i] = scale.factor;
    }
    auto const rotate_row = [&](int i, int kk, int part) {
      float4 const& rotate = rotations[kk][part];
      float2 lo = Pairs<Type>::unpack(words[i][kk][part]);
      float2 hi = Pairs<Type>::unpack(words[i][kk + kHalf][part]);
      lo.x *= factor[i], lo.y *= factor[i], hi.x *= factor[i], hi.y *= factor[i];
      if constexpr (!kSelected) {
        float2 const x = lo;
        float2 const y = hi;
        lo = {x.x * rotate.x - y.x * rotate.y, x.y * rotate.z - y.y * rotate.w};
        hi = {x.x * rotate.y + y.x * rotate.x, x.y * rotate.w + y.y * rotate.z};
      }
      if constexpr (kSwapAB) {  // first elements of two pairs, and their second ones
        q_[2 * kk + part][2 * i] = __floats2half2_rn(lo.x, lo.y);
        q_[2 * kk + part][2 * i + 1] = __floats2half2_rn(hi.x, hi.y);
      } else {
        int const even = rope::tile_of(2 * kk + part, 0), odd = rope::tile_of(2 * kk + part, 1);
        q_[even / 2][even % 2 * 2 + i] = __floats2half2_rn(lo.x, hi.x);
        q_[odd / 2][odd % 2 * 2 + i] = __floats2half2_rn(lo.y, hi.y);
      }
    };
    if constexpr (kSharesWarp && !kSelected) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1) fetch_rotation(position(1));
#pragma unroll
        for (int part = 0; part < 2 * kHalf; ++part) rotate_row(i, part / 2, part % 2);
      }
    } else {
#pragma unroll
      for (int part = 0; part < 2 * kHalf; ++part) {
#pragma unroll
        for (int i = 0; i < 2; ++i) rotate_row(i, part / 2, part % 2);
      }
    }
  }

  // What the layer above left, on its way while the query is: O, and maximum and sum. Zeros where LayerKind::kEntry begins.
  __device__ __forceinline__ void fetch_state(float2 (&state)[2]) {
    if constexpr (Cfg::kPass == Pass::kAttend) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        state[i] = kSelected ? args_.state_sum[state_row() * 16 + head(i)] : float2{kNoLeaf, 0.0f};
      }
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (kSelected) o = args_.state_out[(state_row() * kValueTiles + tile) * 32 + lane_];
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
      if constexpr (Cfg::kPass == Pass::kAttend && kSelected) {
        max_[i] = state[i].x;
        refer(i);
        sum_[i] = tq_ == 0 ? state[i].y : 0.0f;
      }
    }
  }

  static __device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

  // Row i's reference where what is added to the maximum is the logarithm of a sum.
  __device__ __forceinline__ void refer(int i, float log_sum = 0.0f) {
    float const exponent = fmaf(max_[i], unit_[i], log_sum);
    reference_[i] = fabsf(exponent) <= kNear ? exponent : not_a_number();
  }

  __device__ __forceinline__ char const* packed_parents() const {
    return own<Cfg>(args_).packed +
           some_block<Cfg>(args_).bh * own<Cfg>(args_).parents_per_head * args_.block_bytes;
  }

  // The query's first head in the outputs. Where the query is, is looked up again: it would occupy registers throughout
  // the loop.
  __device__ __forceinline__ std::int64_t first_head(int i = 0) const { return first_head_of(query(i)); }
  __device__ __forceinline__ std::int64_t first_head_of(uint32_t query) const {
    QueryBlock const block = own_block();
    std::int64_t const b = block.bh / args_.H_kv;
    std::int64_t const h_kv = block.bh % args_.H_kv;
    return ((b * args_.blocks.T_q + block.first + ptx::opaque(query)) * args_.H_kv + h_kv) * args_.G;
  }

  // Whether row i of this thread is a head of an output.
  __device__ __forceinline__ bool has_head(int i) const { return head(i) < args_.G && (!kSharesWarp || active(i)); }

  // `first`: the first head of the query of row 0.
  __device__ __forceinline__ std::int64_t head_of(std::int64_t first, int i) const {
    return first + head(i) + (kSharesWarp && i == 1 ? kPerUnit * args_.H_kv * args_.G : 0);
  }

  Args const& args_;
  int const lane_;
  int const g_;
  int const tq_;
  uint32_t const warp_;
  int groups_;    // of parents that pass by
  bool active_;   // the query, or one of several, exists, and walks this layer in this way
  int position_;  // of the query as the parent at hand sees it: n - 1 - 16 rank; below 16 in the last parent, and negative behind it
  int cursor_;    // of that parent among all of the rows of importance or expanded masks
  half2 q_[kSteps][4];
  float unit_[2];
  float max_[2];      // running maximum, raw; for importance: the lse's
  float reference_[2];  // max * unit, for importance and log_sum; NaN where that is too far from zero
  bool far_ = false;  // importance: some head's reference is
  // kSharesWarp: of the queries of either row.
  struct Nothing {};
  struct Each {
    bool first, second;
  };
  struct Position {
    int value;
  };
  std::conditional_t<kSwapAB, Each, Nothing> each_active_;
  std::conditional_t<kSharesWarp, Each, Nothing> each_far_;
  std::conditional_t<kSwapAB, Position, Nothing> second_position_;
  // Parents; position_ holds n - 1 of the queries of both rows then, cursor_ the first parent of row 0's: neither moves.
  std::conditional_t<kPacksPositions, Position, Nothing> passed_;
  float sum_[2];      // of the exponentials
  float log_sum_[2];  // of the lse: lse_g * log2(e) = max * unit + log_sum
  float right_[2];    // for the lse: the rightmost candidate's score
  float o_[kValueTiles][4];
};

}  // namespace htree_cuda::sm90::htree_fwd

// The consumer warps of the layer kernel: one query against the parents that it takes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../device/pairs.cuh"
#include "mainloop.cuh"

namespace htree_cuda::layer {

// One query: 16 heads (rows lane / 4 and lane / 4 + 8 in this thread) against the parents it takes. Scores are `raw`
// until they are exponentiated: s * log2(e) = raw * unit[row], unit > 0 (a negative scale turns the query around).
template <class Cfg>
class Consumer {
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kSteps = kK / 16;      // k-steps of QK
  static constexpr int kHalf = kK / 32;       // of them in the low half of the pairs
  static constexpr int kValueTiles = Cfg::kReadsValues ? kV / 8 : 1;
  // A running maximum is raised when an exponential would exceed 2^kSlack: rescaling is rare.
  static constexpr float kSlack = 8.0f;
  // The offset before the first leaf: whatever score comes raises the maximum.
  static constexpr float kNoLeaf = 1e30f;
  static constexpr float kInfinity = __builtin_huge_valf();
  // Turns that are loaded ahead, in ranks and in k-steps of one: registers decide.
  static constexpr int kFetched = Cfg::kReadsValues ? 1 : 2;
  static constexpr int kAhead = Cfg::kReadsValues && kK == 128 && kV == 128 ? kHalf / 2 : kHalf;

public:
  __device__ Consumer(Args const& args, int warp)
      : args_(args), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4), warp_(warp) {
    QueryBlock const block(args.blocks, blockIdx.x);
    groups_ = (stream_count(args, block) + Cfg::kStageSlots - 1) / Cfg::kStageSlots;
    bool const exists = block.first + warp < args.blocks.T_q;
    std::int64_t const t = args.blocks.q_start + block.first + (exists ? warp : 0);
    Candidates const c = candidates(t, args.layer, args.layers, args.top_k);
    active_ = exists && works(args, c);
    position_ = c.n - 1;
    cursor_ = static_cast<int>(row() * (args.width / kSiblings));
    load_query(block);
    int const id = lane_ / 8;
    int const key_row = lane_ % 8 + (id / 2) * 8;
    key_lane_ = Cfg::kKeyOffset + key_row * Cfg::kKeyRowBytes + (((id % 2) ^ (key_row % 8)) << 4);
    int const value_row = lane_ % 8 + (id % 2) * 8;
    value_lane_ = Cfg::kValueOffset + value_row * Cfg::kValueRowBytes + (((id / 2) ^ (value_row % 8)) << 4);
    begin_state(exists);
  }

  __device__ void run(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    if (active_) {
#pragma unroll
      for (int i = 0; i < kFetched; ++i) fetch(i, i);
    }
    for (int group = 0; group < groups_; ++group) {
      ring.barriers.wait_full(at, "htree_layer consumer: full");
      uint32_t mine = active_ ? ptx::load_shared_4B(ring.masks + at.slot * Cfg::kMaskBytes + 4 * warp_) : 0u;
      uint32_t const stage = ring.stages + at.slot * Cfg::kStageBytes;
#pragma unroll 1
      while (mine != 0) {
        uint32_t const first = stage + (__ffs(mine) - 1) * Cfg::kSlotBytes;
        mine &= mine - 1;
        if (mine != 0) {
          two_parents(first, stage + (__ffs(mine) - 1) * Cfg::kSlotBytes);
          mine &= mine - 1;
        } else {
          one_parent(first);
        }
      }
      __syncwarp();
      if (lane_ == 0) barriers::mbarrier_arrive(ring.barriers.empty_at(at.slot));
      at = at.ahead(1);
    }
    finish();
  }

private:
  __device__ __forceinline__ int head_row(int i) const { return g_ + 8 * i; }
  __device__ __forceinline__ std::int64_t row() const {
    return static_cast<int>(ptx::block_index()) * kBlockQueries + warp_;
  }

  // q, normalised to fp16, in A fragments; rows of heads beyond G are zero.
  __device__ __forceinline__ void load_query(QueryBlock const& block) {
    std::int64_t const b = block.bh / args_.H_kv;
    std::int64_t const h_kv = block.bh % args_.H_kv;
    Element const* const base = static_cast<Element const*>(args_.q) + b * args_.q_stride_b +
                                (block.first + warp_) * args_.q_stride_t +
                                h_kv * args_.G * args_.q_stride_h + 2 * tq_;
    // All loads first: one latency, not one after the other.
    uint32_t words[2][kSteps][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Element const* const head = base + head_row(i) * args_.q_stride_h;
      bool const real = active_ && head_row(i) < args_.G;
#pragma unroll
      for (int part = 0; part < 2 * kSteps; ++part) words[i][part / 2][part % 2] = 0;
      if (!real) continue;
      if (args_.q_pairs) {
#pragma unroll
        for (int part = 0; part < 2 * kSteps; ++part) {
          words[i][part / 2][part % 2] = __ldg(reinterpret_cast<uint32_t const*>(head + 8 * part));
        }
      } else {
        unsigned short const* const bits = reinterpret_cast<unsigned short const*>(head);
#pragma unroll
        for (int part = 0; part < 2 * kSteps; ++part) {
          uint32_t const low = __ldg(bits + 8 * part);
          words[i][part / 2][part % 2] = low | static_cast<uint32_t>(__ldg(bits + 8 * part + 1)) << 16;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = 0.0f;
#pragma unroll
      for (int part = 0; part < 2 * kSteps; ++part) {
        float2 const x = Pairs<Element>::unpack(words[i][part / 2][part % 2]);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
      rope::Normaliser const scale = rope::normaliser(quad_max(largest));
      float const factor = args_.scale_log2 < 0.0f ? -scale.factor : scale.factor;
      unit_[i] = fmaxf(fabsf(args_.scale_log2) * scale.inverse, 1.17549435e-38f);  // not 0: 0 * -inf is NaN
#pragma unroll
      for (int part = 0; part < 2 * kSteps; ++part) {
        float2 const x = Pairs<Element>::unpack(words[i][part / 2][part % 2]);
        q_[part / 2][2 * (part % 2) + i] = __floats2half2_rn(x.x * factor, x.y * factor);
      }
    }
  }

  __device__ __forceinline__ void begin_state(bool exists) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      offset_[i] = kNoLeaf;
      sum_[i] = 0.0f;
      right_[i] = 0.0f;
      if constexpr (Cfg::kPass == Pass::kImportance) {
        offset_[i] = active_ ? -args_.normaliser[row() * 16 + head_row(i)] : 0.0f;
      }
    }
    if constexpr (Cfg::kPass == Pass::kValues) {
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[tile][e] = 0.0f;
      }
      if (!args_.first && exists) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float2 const state = args_.state_sum[row() * 16 + head_row(i)];
          offset_[i] = state.x;
          sum_[i] = tq_ == 0 ? state.y : 0.0f;
        }
#pragma unroll
        for (int tile = 0; tile < kValueTiles; ++tile) {
          float4 const o = args_.state_out[(row() * kValueTiles + tile) * 32 + lane_];
          o_[tile][0] = o.x, o_[tile][1] = o.y, o_[tile][2] = o.z, o_[tile][3] = o.w;
        }
      }
    }
  }

  // Raises row i's maximum to `largest` and returns what its sums are multiplied by. Exponentials are
  // 2^(raw * unit + offset), offset = -maximum * unit.
  __device__ __forceinline__ float raise(int i, float largest) {
    float const offset = -largest * unit_[i];
    float const factor = ptx::exp2_movable(offset - offset_[i]);
    offset_[i] = offset;
    return factor;
  }

  __device__ __forceinline__ float exponent(int i, float raw) const { return fmaf(raw, unit_[i], offset_[i]); }

  __device__ __forceinline__ rope::Turns turns(int ahead, int kk) const {
    int const further = position_ - kSiblings * ahead;
    rope::Turns const* const row = args_.turns + ((further < 0 ? rightmost() : further) * (kK / 8) + tq_);
    uint4 const x = __ldg(reinterpret_cast<uint4 const*>(row + kk * 4));
    return *reinterpret_cast<rope::Turns const*>(&x);
  }

  // k-steps in the order in which scores take them: the first half of them touches every 128-byte line of a row of
  // turns, so that the others, loaded when they are needed, come from L1.
  static constexpr int step_at(int i) { return kHalf == 4 ? (i % 2) * 2 + i / 2 : i; }

  // The turns of the query for the parent `ahead` ranks further, and which of its candidates are closed; the last
  // parent's where there is none.
  __device__ __forceinline__ void fetch(int buffer, int ahead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetched_[buffer][i] = turns(ahead, step_at(i));
    if constexpr (Cfg::kPass == Pass::kValues) {
      if (args_.layer > 0) closed_ = args_.closed[cursor_ + (position_ < kSiblings * ahead ? 0 : ahead)];
    }
  }

  // raw[tile][e]: column 8 tile + 2 tq + e % 2 of row e / 2. Two chains of products where registers allow: their
  // latency is what these passes wait for; beside O, the products of the parent before fill the gaps of one.
  __device__ __forceinline__ void scores(uint32_t slot, int ahead, float (&raw)[2][4]) {
    constexpr bool kTwoChains = Cfg::kPass != Pass::kValues;
    float second[2][4];
    float(&upper)[2][4] = kTwoChains ? second : raw;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[tile][e] = second[tile][e] = 0.0f;
    }
    rope::Turns late[kHalf - kAhead + 1];
#pragma unroll
    for (int i = kAhead; i < kHalf; ++i) late[i - kAhead] = turns(ahead, step_at(i));
    uint32_t const keys = slot + key_lane_;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      int const kk = step_at(i);
      half2 lo[4], hi[4];
      rope::turn_fragments(lo, hi, q_[kk], q_[kk + kHalf],
                           i < kAhead ? fetched_[ahead % kFetched][i] : late[i - kAhead]);
      uint32_t b[4];
      ptx::load_matrix_x4(b, keys ^ (kk << 5));
      auto const& a_lo = reinterpret_cast<uint32_t const(&)[4]>(lo);
      ptx::mma_fp16(raw[0], a_lo, b[0], b[1]);
      ptx::mma_fp16(raw[1], a_lo, b[2], b[3]);
      ptx::load_matrix_x4(b, keys ^ ((kk + kHalf) << 5));
      auto const& a_hi = reinterpret_cast<uint32_t const(&)[4]>(hi);
      ptx::mma_fp16(upper[0], a_hi, b[0], b[1]);
      ptx::mma_fp16(upper[1], a_hi, b[2], b[3]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float2 const scale = ptx::load_shared_8B(slot + Cfg::kScaleOffset + tile * 32 + tq_ * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (kTwoChains) raw[tile][e] += second[tile][e];
        raw[tile][e] *= e % 2 ? scale.y : scale.x;
      }
    }
  }

  // Candidates of `dead` (bit c: child c) take no part.
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

  static __device__ __forceinline__ float row_max(float const (&raw)[2][4], int i) {
    return fmaxf(fmaxf(raw[0][2 * i], raw[0][2 * i + 1]), fmaxf(raw[1][2 * i], raw[1][2 * i + 1]));
  }

  // The rightmost candidate's place among its siblings, in the last parent.
  __device__ __forceinline__ int rightmost() const { return position_ & (kSiblings - 1); }

  __device__ __forceinline__ void advance(int parents) {
    position_ -= parents * kSiblings;
    cursor_ += parents;
  }

  // At the bottom only what lies behind the query is closed.
  __device__ __forceinline__ uint32_t closed(bool last) const {
    if (args_.layer > 0) return closed_;
    return last ? 0xffffu & ~((2u << rightmost()) - 1u) : 0u;
  }

  __device__ __forceinline__ void one_parent(uint32_t slot) {
    bool const last = position_ < kSiblings;
    float raw[2][4];
    scores(slot, 0, raw);
    if constexpr (Cfg::kPass == Pass::kValues) {
      uint32_t const dead = closed(last);
      fetch(0, 1);
      uint32_t p[4];
      exponentials(raw, dead, p);
      if (last) {
        last_values(slot, p, dead);
      } else {
        weighted_values(slot, p, ~0u, ~0u);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) fetched_[0][i] = fetched_[1][i];
      fetch(1, 2);
      consider(raw, 0, last);
    }
    advance(1);
  }

  __device__ __forceinline__ void two_parents(uint32_t slot, uint32_t next_slot) {
    bool const last = position_ < 2 * kSiblings;
    float raw[2][4], next[2][4];
    scores(slot, 0, raw);
    if constexpr (Cfg::kPass == Pass::kValues) {
      uint32_t const dead = closed(false);
      fetch(0, 1);
      uint32_t p[4];
      exponentials(raw, dead, p);
      scores(next_slot, 1, next);  // between the products of the first
      weighted_values(slot, p, ~0u, ~0u);
      uint32_t const next_dead = closed(last);
      fetch(0, 2);
      exponentials(next, next_dead, p);
      if (last) {
        last_values(next_slot, p, next_dead);
      } else {
        weighted_values(next_slot, p, ~0u, ~0u);
      }
    } else {
      scores(next_slot, 1, next);
      fetch(0, 2);
      fetch(1, 3);
      consider(raw, 0, false);
      consider(next, 1, last);
    }
    advance(2);
  }

  __device__ __forceinline__ void consider(float (&raw)[2][4], int ahead, bool last) {
    if constexpr (Cfg::kPass == Pass::kNormaliser) {
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
      normalise(raw);
    } else {
      weigh(raw, ahead);
    }
  }

  // Running sums of this thread's columns alone; merged in the end.
  __device__ __forceinline__ void normalise(float const (&raw)[2][4]) {
    float const largest[2] = {row_max(raw, 0), row_max(raw, 1)};
    bool const raises[2] = {exponent(0, largest[0]) > kSlack, exponent(1, largest[1]) > kSlack};
    if (raises[0] || raises[1]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (raises[i]) sum_[i] *= raise(i, largest[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        sum_[i] += ptx::exp2_movable(exponent(i, raw[tile][2 * i])) +
                   ptx::exp2_movable(exponent(i, raw[tile][2 * i + 1]));
      }
    }
  }

  // Column sums over the heads, by a butterfly that halves what is sent: first two columns of four, then one of two.
  __device__ __forceinline__ void weigh(float const (&raw)[2][4], int ahead) {
    float column[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float const x = ptx::exp2_movable(exponent(0, raw[c / 2][c % 2]));
      float const y = ptx::exp2_movable(exponent(1, raw[c / 2][2 + c % 2]));
      column[c] = x + y;
    }
    bool const second = lane_ & 16;
    float a = second ? column[2] : column[0];
    float b = second ? column[3] : column[1];
    a += __shfl_xor_sync(kFullWarp, second ? column[0] : column[2], 16);
    b += __shfl_xor_sync(kFullWarp, second ? column[1] : column[3], 16);
    bool const odd = lane_ & 8;
    float sum = odd ? b : a;
    sum += __shfl_xor_sync(kFullWarp, odd ? a : b, 8);
    sum += __shfl_xor_sync(kFullWarp, sum, 4);
    if ((lane_ & 4) == 0) {
      int const c = (second ? 8 : 0) + 2 * tq_ + (odd ? 1 : 0);
      args_.importance[static_cast<std::int64_t>(cursor_ + ahead) * kSiblings + c] = sum;
    }
  }

  // P of one parent, rounded to the dtype, in A fragments; sums and O are rescaled where a maximum rises.
  __device__ __forceinline__ void exponentials(float (&raw)[2][4], uint32_t dead, uint32_t (&p)[4]) {
    if (dead != 0) mask(raw, dead);
    float const largest[2] = {row_max(raw, 0), row_max(raw, 1)};
    // A vote among the heads of one query: whatever it decides follows from this query's data.
    if (__any_sync(kFullWarp, exponent(0, largest[0]) > kSlack || exponent(1, largest[1]) > kSlack)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const row_largest = quad_max(largest[i]);
        float const factor = exponent(i, row_largest) > kSlack ? raise(i, row_largest) : 1.0f;
        sum_[i] *= factor;
#pragma unroll
        for (int tile = 0; tile < kValueTiles; ++tile) {
          o_[tile][2 * i] *= factor;
          o_[tile][2 * i + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          raw[tile][e] = ptx::exp2_movable(exponent(i, raw[tile][e]));
        }
      }
      sum_[i] += (raw[0][2 * i] + raw[0][2 * i + 1]) + (raw[1][2 * i] + raw[1][2 * i + 1]);
      p[i] = Pairs<Element>::pack(raw[0][2 * i], raw[0][2 * i + 1]);
      p[2 + i] = Pairs<Element>::pack(raw[1][2 * i], raw[1][2 * i + 1]);
    }
  }

  // Values that hold later tokens may be NaN, and 0 * NaN is NaN: they become zeros on the way to the product. Only a
  // query's last parent has such children.
  __device__ __forceinline__ void last_values(uint32_t slot, uint32_t const (&p)[4], uint32_t dead) {
    uint32_t const open = ~dead >> (2 * tq_);
    auto const rows = [&](int first) {
      return (open >> first & 1u ? 0x0000ffffu : 0u) | (open >> (first + 1) & 1u ? 0xffff0000u : 0u);
    };
    weighted_values(slot, p, rows(0), rows(8));
  }

  __device__ __forceinline__ void weighted_values(uint32_t slot, uint32_t const (&p)[4], uint32_t keep_low,
                                                  uint32_t keep_high) {
    uint32_t const values = slot + value_lane_;
#pragma unroll
    for (int step = 0; step < kValueTiles / 2; ++step) {
      uint32_t b[4];
      ptx::load_matrix_x4_transposed(b, values ^ (step << 5));
      Pairs<Element>::mma(o_[2 * step], p, b[0] & keep_low, b[1] & keep_high);
      Pairs<Element>::mma(o_[2 * step + 1], p, b[2] & keep_low, b[3] & keep_high);
    }
  }

  // Where the query is, looked up again: it would occupy registers throughout the loop.
  __device__ __forceinline__ void finish() {
    QueryBlock const block(args_.blocks, ptx::block_index());
    if (block.first + warp_ >= args_.blocks.T_q) return;
    if constexpr (Cfg::kPass == Pass::kNormaliser) {
      if (active_) finish_normaliser();
    } else if constexpr (Cfg::kPass == Pass::kValues) {
      sum_[0] = quad_sum(sum_[0]);
      sum_[1] = quad_sum(sum_[1]);
      args_.layer == 0 ? write_result(block) : write_state();
    }
  }

  __device__ __forceinline__ void finish_normaliser() {
    float lse[2], full[2];
    float shift = kInfinity;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const largest = -offset_[i];  // hugely negative without a leaf
      float const row_largest = quad_max(largest);
      float const factor = largest == row_largest ? 1.0f : ptx::exp2_approx(largest - row_largest);
      lse[i] = row_largest + log2f(quad_sum(sum_[i] * factor));
      full[i] = lse[i];
      if (!args_.strict_causal) {
        float const right = quad_sum(right_[i]) * unit_[i];
        float const base = fmaxf(lse[i], right);
        full[i] = base + log2f(ptx::exp2_approx(lse[i] - base) + ptx::exp2_approx(right - base));
        if (head_row(i) < args_.G) shift = fminf(shift, full[i] - lse[i]);
      }
    }
    // With the rightmost candidate in the normaliser all other importance may vanish: one power of two for all heads
    // keeps the largest above 2^-13.
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) shift = fminf(shift, __shfl_xor_sync(kFullWarp, shift, lanes));
    if (tq_ == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const x = args_.strict_causal ? lse[i] : full[i] - shift;
        args_.normaliser[row() * 16 + head_row(i)] = head_row(i) < args_.G ? x : kInfinity;
      }
    }
  }

  __device__ __forceinline__ void write_state() {
    if (tq_ == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        args_.state_sum[row() * 16 + head_row(i)] = {offset_[i], sum_[i]};
      }
    }
#pragma unroll
    for (int tile = 0; tile < kValueTiles; ++tile) {
      args_.state_out[(row() * kValueTiles + tile) * 32 + lane_] = {o_[tile][0], o_[tile][1], o_[tile][2], o_[tile][3]};
    }
  }

  __device__ __forceinline__ void write_result(QueryBlock const& block) {
    std::int64_t const b = block.bh / args_.H_kv;
    std::int64_t const h_kv = block.bh % args_.H_kv;
    std::int64_t const first_head = ((b * args_.blocks.T_q + block.first + warp_) * args_.H_kv + h_kv) * args_.G;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (head_row(i) >= args_.G) continue;
      float const inverse = 1.0f / sum_[i];
      uint32_t* const out =
          reinterpret_cast<uint32_t*>(static_cast<Element*>(args_.out) + (first_head + head_row(i)) * kV) + tq_;
#pragma unroll
      for (int tile = 0; tile < kValueTiles; ++tile) {
        out[4 * tile] = Pairs<Element>::pack(o_[tile][2 * i] * inverse, o_[tile][2 * i + 1] * inverse);
      }
      if (tq_ == 0) args_.lse[first_head + head_row(i)] = (log2f(sum_[i]) - offset_[i]) * 0.693147180559945309f;
    }
  }

  Args const& args_;
  int const lane_;
  int const g_;
  int const tq_;
  int const warp_;
  int groups_;    // of parents that pass by
  bool active_;
  int position_;  // of the query as the parent at hand sees it: n - 1 - 16 rank; below 16 in the last parent
  int cursor_;    // of that parent in a row of importance or closed masks
  uint32_t key_lane_;
  uint32_t value_lane_;
  uint32_t closed_ = 0;  // of the rank whose turns were fetched last
  rope::Turns fetched_[kFetched][kAhead];
  half2 q_[kSteps][4];
  float unit_[2];
  float offset_[2];  // of the exponent; kImportance: -lse_g
  float sum_[2];     // of the exponentials
  float right_[2];   // kNormaliser: the rightmost candidate's score
  float o_[kValueTiles][4];
};

}  // namespace htree_cuda::layer

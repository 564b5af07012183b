// What the consumers of one CTA and of a pair of CTAs do alike. A thread is lane l of a warp; of a product with 64 rows the
// warp has 16, of which the thread has l / 4 and l / 4 + 8 (wgmma.cuh).
#pragma once

#include <cstdint>

#include "device/gather.cuh"
#include "device/pairs.cuh"
#include "device/ptx.cuh"
#include "device/query_groups.cuh"
#include "device/wgmma.cuh"
#include "config.cuh"
#include "order.cuh"

namespace htree_cuda::sm90::sparse_attention_bwd {

// Where the operands of a CTA's products lie in shared memory.
template <class C>
struct Operands {
  uint32_t keys, q, dout, p, ds, rows;

  __device__ __forceinline__ explicit Operands(typename C::SharedStorage& shared)
      : keys(ptx::shared_address(&shared.keys[0])), q(ptx::shared_address(&shared.q[0])),
        dout(ptx::shared_address(&shared.dout[0])), p(ptx::shared_address(&shared.p[0])),
        ds(ptx::shared_address(&shared.ds[0])), rows(ptx::shared_address(&shared.rows[0])) {}
};

using query_groups::Unit;
using wgmma::Major;

// Bytes of a step along the rows of a panel.
inline constexpr int kRowStep = wgmma::kDepth * gather::kPanelBytesPerRow;

// Functions take the lane where registers are scarce: what they derive from fresh_lane() is not kept from tile to tile.
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int fresh_lane() { return static_cast<int>(ptx::lane_index()); }

// ---- P and dS --------------------------------------------------------------------------------------------------------

// The terms of this thread's two heads; `first` is the warp's first head. Heads past h_q have S = 0.
__device__ __forceinline__ void load_terms(KernelParams const& p, Unit const& u, int first, HeadTerms (&terms)[2],
                                           int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const head = first + lane / 4 + 8 * i;
    int64_t const at = static_cast<int64_t>(u.row) * p.h_q + min(head, p.h_q - 1);
    float4 const x = __ldg(reinterpret_cast<float4 const*>(p.terms) + at);
    terms[i] = {head < p.h_q ? x.x : INFINITY, x.y, x.z, x.w};
  }
}

// Their lse2 alone, which S needs before anything else.
__device__ __forceinline__ void load_lse2(KernelParams const& p, Unit const& u, int first, float (&lse2)[2],
                                          int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const head = first + lane / 4 + 8 * i;
    int64_t const at = static_cast<int64_t>(u.row) * p.h_q + min(head, p.h_q - 1);
    float const x = __ldg(&p.terms[at].lse2);
    lse2[i] = head < p.h_q ? x : INFINITY;
  }
}

// A bit for each of this thread's keys among kKeys from shared address `rows` on, 2 (lane % 4) + 0..1 of every eight: bit
// 2 j + i.
template <int kKeys>
__device__ __forceinline__ uint32_t valid_keys(uint32_t rows, int lane) {
  uint32_t valid = 0;
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = ptx::load_shared_4B(rows + 4 * (8 * j + 2 * (lane % 4) + i));
      valid |= (row >= 0 ? 1u : 0u) << (2 * j + i);
    }
  }
  return valid;
}

// S from the scores, in place.
template <int kCount>
__device__ __forceinline__ void exponentiate(KernelParams const& p, float const (&lse2)[2], float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] = ptx::exp2_movable(fmaf(s[i], p.scale_log2, -lse2[i / 2 % 2]));
  }
}

// P and dS from S and dP, in place. What does not count is replaced and not only weighted by zero: 0 * NaN is NaN.
template <int kCount>
__device__ __forceinline__ void form_operands(HeadTerms const (&terms)[2], uint32_t valid, float (&s)[kCount],
                                      float (&dp)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    bool const counts = valid >> (i / 4 * 2 + i % 2) & 1;
    HeadTerms const& head = terms[i / 2 % 2];
    dp[i] = counts ? s[i] * fmaf(head.slope, dp[i], head.offset) : 0.f;
    s[i] = counts ? s[i] * head.weight : 0.f;
  }
}

// The warp's 16 heads by 2 kCount keys, rounded, to an operand; `row` is the warp's first, `chunk` the first of 8 keys.
template <class Element, int kCount>
__device__ __forceinline__ void publish(uint32_t operand, int row, uint32_t chunk, float const (&x)[kCount],
                                        int lane) {
  auto const pack = [](float low, float high) { return Pairs<Element>::pack(low, high); };
#pragma unroll
  for (int j = 0; j < kCount / 4; j += 2) {
    uint32_t const fragment[4] = {pack(x[4 * j], x[4 * j + 1]), pack(x[4 * j + 2], x[4 * j + 3]),
                                  pack(x[4 * j + 4], x[4 * j + 5]), pack(x[4 * j + 6], x[4 * j + 7])};
    ptx::store_matrix_x4(operand + gather::swizzled_offset(row + lane % 16, chunk + j + lane / 16), fragment);
  }
}

// ---- sums of dkv -----------------------------------------------------------------------------------------------------

// sums (+)= weights^T rows: 64 keys by 2 kCount columns, over kHeadSteps steps of heads. The caller fences, once for products
// that follow each other: ptxas ends a group of products at each fence, which waits count.
template <class Element, int kHeadSteps, int kCount>
__device__ __forceinline__ void multiply(float (&sums)[kCount], uint32_t weights, uint32_t rows, bool accumulate) {
  wgmma::Descriptor const a(uniform(weights));
  wgmma::Descriptor const b(uniform(rows));
#pragma unroll
  for (int i = 0; i < kHeadSteps; ++i) {
    wgmma::mma_ss_transposed<Element>(sums, a.at(i * kRowStep), b.at(i * kRowStep), accumulate || i > 0);
  }
}

// Where this thread's part of a tile is added. Of a product with 64 rows of keys it has two rows, eight apart. For float32
// the neighbour of each too, whose sums lane l ^ 4 has.
template <class C, Sums = C::kSums>
struct Target;

template <class C>
struct Target<C, Sums::kAtomic> {
  int row[2][2];  // of kv, -1 for none: [eight apart][the even row, the odd one]
};

template <class C>
struct Target<C, Sums::kDeterministic> {
  int row[2];  // of kv, -1 for none
  float factor[2];
};

// The target of a lane in a tile whose row numbers lie at shared address `rows`; `first` is the warp's first key.
template <class C>
__device__ __forceinline__ Target<C> target_of(KernelParams const& p, Unit const& u, uint32_t rows, int first, int lane) {
  Target<C> target;
  int const key = first + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    auto const row = [&](int at) { return static_cast<int>(ptx::load_shared_4B(rows + 4 * (at + 8 * i))); };
    if constexpr (C::kSums == Sums::kAtomic) {
      target.row[i][0] = row(key & ~1);
      target.row[i][1] = row(key | 1);
    } else {
      target.row[i] = row(key);
      target.factor[i] = __ldg(p.factors + static_cast<int64_t>(u.b) * p.s_kv + max(target.row[i], 0));
    }
  }
  return target;
}

// Adds 64 keys by 2 kCount columns from `column` on, as integers. The kRows lanes with the same lane % 4 transpose what they
// have of kRows neighbouring rows, so that 4 kRows lanes add as many neighbours of a row.
template <class C, int kRows, int kCount>
__device__ __forceinline__ void add_integers(KernelParams const& p, Unit const& u, Target<C> const& target,
                                             float const (&sums)[kCount], int column, int lane) {
  constexpr int kLanes = 4 * kRows;
  long long* const first = static_cast<long long*>(p.sums) + static_cast<int64_t>(u.b) * p.s_kv * C::kHeadDim +
                           (column + lane % kLanes);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int row[kRows];
#pragma unroll
    for (int t = 0; t < kRows; ++t) row[t] = __shfl_sync(kFullWarp, target.row[i], lane / kLanes * kLanes + 4 * t);
#pragma unroll
    for (int j = 0; j < kCount / 4; j += kRows / 2) {
      float x[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) x[k] = sums[4 * (j + k / 2) + 2 * i + k % 2] * target.factor[i];
#pragma unroll
      for (int bit = kRows / 2; bit > 0; bit /= 2) {
        bool const upper = lane & (4 * bit);
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          if (k & bit) continue;
          float const other = __shfl_xor_sync(kFullWarp, upper ? x[k] : x[k | bit], 4 * bit);
          x[k | bit] = upper ? x[k | bit] : other;
          x[k] = upper ? other : x[k];
        }
      }
#pragma unroll
      for (int t = 0; t < kRows; ++t) {
        ptx::reduce_add_rounded_if(row[t] >= 0, first + static_cast<int64_t>(row[t]) * C::kHeadDim + 8 * j, x[t]);
      }
    }
  }
}

// Adds 64 keys by 2 kCount columns from `column` on, as order.cuh says. An instruction adds whole lines of 128 bytes where
// there are 32 columns: lanes l and l ^ 4 swap half of what they have of two neighbouring rows (an idea of the cuDNN
// frontend's backward).
template <class C, int kCount>
__device__ __forceinline__ void add(KernelParams const& p, Unit const& u, Target<C> const& target, float const (&sums)[kCount],
                                    int column, int lane) {
  if constexpr (C::kSums == Sums::kAtomic) {
    float* const first = static_cast<float*>(p.sums) + static_cast<int64_t>(u.b) * p.s_kv * C::kHeadDim;
    bool const odd = lane / 4 % 2 != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kCount % 16 == 0) {
        float* to[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int const block = odd == (r != 0) ? 0 : 16;
          to[r] = first + static_cast<int64_t>(target.row[i][r]) * C::kHeadDim + (column + 4 * (lane % 4) + block);
        }
#pragma unroll
        for (int j = 0; j < kCount / 16; ++j) {
          float const* const x = &sums[16 * j + 2 * i];
          float const low[4] = {x[0], x[1], x[4], x[5]};
          float const high[4] = {x[8], x[9], x[12], x[13]};
          float other[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) other[k] = __shfl_xor_sync(kFullWarp, high[k], 4);
          auto const pick = [](bool own, float const (&x)[4], float const (&y)[4]) {
            return make_float4(own ? x[0] : y[0], own ? x[1] : y[1], own ? x[2] : y[2], own ? x[3] : y[3]);
          };
          ptx::reduce_add_16B_if(target.row[i][0] >= 0, to[0] + 32 * j, pick(!odd, low, other));
          ptx::reduce_add_16B_if(target.row[i][1] >= 0, to[1] + 32 * j, pick(odd, low, other));
        }
      } else {
        static_assert(kCount % 8 == 0);
        int const row = odd ? target.row[i][1] : target.row[i][0];
        float* const to = first + static_cast<int64_t>(row) * C::kHeadDim + (column + 4 * (lane % 4));
#pragma unroll
        for (int j = 0; j < kCount / 4; j += 2) {
          float const* const x = &sums[4 * j + 2 * i];
          ptx::reduce_add_16B_if(row >= 0, to + 8 * j, make_float4(x[0], x[1], x[4], x[5]));
        }
      }
    }
  } else {
    static_assert(kCount % 8 == 0);
    // Whole lines of 256 bytes where sums of a pair pass L2 (64K rows 7% faster), else of 128, which takes fewer exchanges
    // between lanes (16K rows 8% faster; H100, 2026-11-28).
    if constexpr (C::kCtas > 1 && kCount % 16 == 0) {
      if (p.begun != nullptr) {
        add_integers<C, 8>(p, u, target, sums, column, lane);
      } else {
        add_integers<C, 4>(p, u, target, sums, column, lane);
      }
    } else {
      add_integers<C, 4>(p, u, target, sums, column, lane);
    }
  }
}

// ---- dq --------------------------------------------------------------------------------------------------------------

// This thread's part of row `i` of 64 heads by 2 kCount columns; `to` is where its first two columns go.
template <class Element, int kCount>
__device__ __forceinline__ void store_columns(char* to, float const (&x)[kCount], int i) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    __stcs(reinterpret_cast<uint32_t*>(to + 16 * j), Pairs<Element>::pack(x[4 * j + 2 * i], x[4 * j + 2 * i + 1]));
  }
}

// Zeros for `heads` heads from `first` on of a query without slots, by the threads of all consumers.
template <class C>
__device__ __forceinline__ void store_zeros(KernelParams const& p, Unit const& u, int first, int heads, int thread) {
  constexpr int kChunks = C::kHeadDim / 8;
  char* const to = p.dq + 2 * (static_cast<int64_t>(u.row) * p.h_q + first) * C::kHeadDim;
  for (int i = thread; i < min(heads, p.h_q - first) * kChunks; i += C::kConsumers * 128) {
    __stcs(reinterpret_cast<uint4*>(to + 16 * i), uint4{0, 0, 0, 0});
  }
}

}  // namespace htree_cuda::sm90::sparse_attention_bwd

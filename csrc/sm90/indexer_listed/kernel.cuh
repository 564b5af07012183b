// The listed indexer: a CTA takes one query and steps through the slots of its list in tiles of 64, whose keys it gathers
// one tile ahead. Warp w has heads 16 (w % 4) .. + 15 of the products with queries as rows, and slots 32 (w / 4) .. + 31.
//
//   z = q k^T                          both passes
//   logits = weights relu(z)           forward: four warps' sums are added in a fixed order
//   dz = g weights (z > 0)             rounded to the dtype, an operand of both products; in fp16 times a power of two of the
//                                      query, which dq and dk are divided by
//   dq += dz k      dweights += g relu(z)      in registers over the whole list; the two halves of the slots added at the end
//   dk[row] += dz^T q                  added to global memory, 16 bytes at a time, in any order
#pragma once

#include <cutlass/numeric_types.h>

#include "config.cuh"

namespace htree_cuda::sm90::indexer_listed {

inline constexpr int kTileBarrier = 1;  // 0 is __syncthreads'

// The place of a 16-byte piece in rows of kPieces pieces: eight rows that are read at once lie in different banks.
template <int kPieces>
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
  return static_cast<uint32_t>((row * kPieces + (piece ^ (row & 7))) * 16);
}

template <class C>
struct Query {
  using Shared = typename C::SharedStorage;
  using Element = typename C::Element;
  static constexpr int kTiles = C::kDim / 8;  // of eight columns

  KernelParams const& p;
  Shared& shared;
  int b;
  int s;
  int64_t row;   // b * s_q + s
  int length;
  KeyRange range;
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int const lane = static_cast<int>(threadIdx.x) % 32;

  __device__ __forceinline__ Query(KernelParams const& p, Shared& shared, int number)
      : p(p), shared(shared), b(number / p.s_q), s(number % p.s_q), row(number) {
    range = key_range(p.window, b, s, p.s_kv);
    length = p.topk;
    if (p.topk_length != nullptr) {
      length = min(max(p.topk_length[b * p.topk_length_stride_b + s * p.topk_length_stride_s], 0), p.topk);
    }
  }

  __device__ __forceinline__ int head(int half) const { return warp % 4 * 16 + lane / 4 + 8 * half; }

  __device__ __forceinline__ void load_query() const {
    auto const* const q = static_cast<Element const*>(p.q) + b * p.q_stride_b + s * p.q_stride_s;
#pragma unroll 1
    for (int i = threadIdx.x; i < C::kHeads * C::kRowPieces; i += C::kThreads) {
      int const h = i / C::kRowPieces;
      int const piece = i % C::kRowPieces;
      bool const exists = h < p.h_i;
      ptx::copy_async_16B(ptx::shared_address(shared.query) + piece_offset<C::kRowPieces>(h, piece),
                          q + (exists ? h : 0) * p.q_stride_h + piece * 8, exists ? 0 : -1);
    }
  }

  // Starts the gather of a tile; what is no valid slot becomes a row of zeros.
  __device__ __forceinline__ void gather(int tile, int buffer) const {
    int const* const indices = p.indices + b * p.indices_stride_b + s * p.indices_stride_s;
    auto const* const k = static_cast<Element const*>(p.k) + b * p.k_stride_b;
    auto const row_of = [&](int slot) {
      int const at = tile * C::kSlots + slot;
      int const found = at < length ? indices[at * p.indices_stride_t] : -1;
      return found >= range.first && found < range.end ? found : -1;
    };
#pragma unroll
    for (int i = threadIdx.x; i < C::kSlots * C::kRowPieces; i += C::kThreads) {
      int const slot = i / C::kRowPieces;
      int const piece = i % C::kRowPieces;
      int const found = row_of(slot);
      ptx::copy_async_16B(ptx::shared_address(shared.keys[buffer]) + piece_offset<C::kRowPieces>(slot, piece),
                          k + max(found, 0) * p.k_stride_s + piece * 8, found);
    }
    if (threadIdx.x < C::kSlots) {
      int const found = row_of(threadIdx.x);
      shared.row[buffer][threadIdx.x] = found;
      if constexpr (C::kPass == Pass::kBackward) {
        float const* const g = p.dlogits + b * p.dlogits_stride_b + s * p.dlogits_stride_s;
        shared.gradient[buffer][threadIdx.x] = found >= 0 ? g[(tile * C::kSlots + static_cast<int>(threadIdx.x)) * p.dlogits_stride_t] : 0.0f;
      }
    }
  }

  // z of the warp's 16 heads and 32 slots.
  __device__ __forceinline__ void multiply(float (&z)[4][4], int buffer) const {
    uint32_t const query = ptx::shared_address(shared.query);
    uint32_t const keys = ptx::shared_address(shared.keys[buffer]);
#pragma unroll
    for (int n = 0; n < 4; ++n) z[n][0] = z[n][1] = z[n][2] = z[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < C::kDim / 16; ++step) {
      uint32_t a[4];
      ptx::load_matrix_x4(a, query + piece_offset<C::kRowPieces>(warp % 4 * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t k[4];
        int const slot = warp / 4 * 32 + pair * 16 + lane / 16 * 8 + lane % 8;
        ptx::load_matrix_x4(k, keys + piece_offset<C::kRowPieces>(slot, 2 * step + lane / 8 % 2));
        Pairs<Element>::mma(z[2 * pair], a, k[0], k[1]);
        Pairs<Element>::mma(z[2 * pair + 1], a, k[2], k[3]);
      }
    }
  }

  // The first slot of the pair that this thread has of group n of eight.
  __device__ __forceinline__ int slot_of(int n) const { return warp / 4 * 32 + 8 * n + lane % 4 * 2; }

  __device__ __forceinline__ void store_logits(float const (&z)[4][4], float const (&weights)[2], int tile, int buffer) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // A head that does not exist is a row of zeros, whose product with an infinite key is NaN.
          if (head(half) < p.h_i) sum = fmaf(ptx::max_or_nan(z[n][2 * half + i], 0.0f), weights[half], sum);
        }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
        if (lane < 4) shared.sums[warp % 4][slot_of(n) + i] = sum;
      }
    }
    __syncthreads();
    int const at = tile * C::kSlots + static_cast<int>(threadIdx.x);
    if (threadIdx.x < C::kSlots && at < p.topk) {
      float const sum = (shared.sums[0][threadIdx.x] + shared.sums[1][threadIdx.x]) +
                        (shared.sums[2][threadIdx.x] + shared.sums[3][threadIdx.x]);
      p.out[b * p.out_stride_b + s * p.out_stride_s + at] = shared.row[buffer][threadIdx.x] >= 0 ? sum : -INFINITY;
    }
  }

  // The exponent of the power of two that takes the query's largest |g weight| to the top of fp16. What is not finite does
  // not count: its products are not finite at any scale.
  __device__ __forceinline__ int exponent_of_scale(float const (&weights)[2]) {
    int const* const indices = p.indices + b * p.indices_stride_b + s * p.indices_stride_s;
    float const* const g = p.dlogits + b * p.dlogits_stride_b + s * p.dlogits_stride_s;
    auto const larger = [](float most, float x) { return fabsf(x) < INFINITY ? fmaxf(most, fabsf(x)) : most; };
    float gradient = 0.0f;
#pragma unroll 1
    for (int at = threadIdx.x; at < length; at += C::kThreads) {
      int const found = indices[at * p.indices_stride_t];
      if (found >= range.first && found < range.end) gradient = larger(gradient, g[at * p.dlogits_stride_t]);
    }
    float weight = larger(larger(0.0f, weights[0]), weights[1]);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      gradient = fmaxf(gradient, __shfl_xor_sync(kFullWarp, gradient, d));
      weight = fmaxf(weight, __shfl_xor_sync(kFullWarp, weight, d));
    }
    if (lane == 0) shared.sums[0][warp] = gradient, shared.sums[1][warp] = weight;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < C::kThreads / 32; ++i) {
      gradient = fmaxf(gradient, shared.sums[0][i]);
      weight = fmaxf(weight, shared.sums[1][i]);
    }
    // x < 2^(biased exponent - 126)
    int const exponent = (__float_as_int(gradient) >> 23) + (__float_as_int(weight) >> 23) - 2 * 126;
    return min(max(C::kTopExponent - exponent, -120), 120);
  }

  // z becomes dz; adds to dweights.
  __device__ __forceinline__ void differentiate(float (&z)[4][4], float const (&weights)[2], float (&dweights)[2], int buffer,
                                                float scale) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float2 const g = *reinterpret_cast<float2 const*>(&shared.gradient[buffer][slot_of(n)]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = z[n][2 * half + i];
          float const own = i == 0 ? g.x : g.y;
          dweights[half] = fmaf(own, ptx::max_or_nan(x, 0.0f), dweights[half]);
          float const dz = C::kScaled ? own * weights[half] * scale : own * weights[half];
          x = x > 0.0f ? dz : 0.0f;
        }
      }
    }
  }

  // dq += dz k, over the warp's 32 slots; dz goes to shared memory on the way.
  __device__ __forceinline__ void add_dq(float const (&dz)[4][4], float (&dq)[kTiles][4], int buffer) const {
    uint32_t const keys = ptx::shared_address(shared.keys[buffer]);
    uint32_t const to = ptx::shared_address(shared.dz);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t const a[4] = {
          Pairs<Element>::pack(dz[2 * step][0], dz[2 * step][1]), Pairs<Element>::pack(dz[2 * step][2], dz[2 * step][3]),
          Pairs<Element>::pack(dz[2 * step + 1][0], dz[2 * step + 1][1]),
          Pairs<Element>::pack(dz[2 * step + 1][2], dz[2 * step + 1][3])};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const slot = slot_of(2 * step + i / 2);
        ptx::store_shared_4B(to + piece_offset<8>(head(i % 2), slot / 8) + slot % 8 * 2, a[i]);
      }
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        uint32_t k[4];
        int const slot = warp / 4 * 32 + step * 16 + lane / 8 % 2 * 8 + lane % 8;
        ptx::load_matrix_x4_transposed(k, keys + piece_offset<C::kRowPieces>(slot, 2 * pair + lane / 16));
        Pairs<Element>::mma(dq[2 * pair], a, k[0], k[1]);
        Pairs<Element>::mma(dq[2 * pair + 1], a, k[2], k[3]);
      }
    }
  }

  // dk of 16 slots and half of the columns a warp, to global memory.
  __device__ __forceinline__ void scatter_dk(int buffer, float unscale) const {
    constexpr int kGroups = kTiles / 2;  // of eight columns, of a warp
    int const slots = warp % 4 * 16;
    int const first_group = warp / 4 * kGroups;
    uint32_t const from = ptx::shared_address(shared.dz);
    uint32_t const query = ptx::shared_address(shared.query);
    float dk[kGroups][4];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) dk[n][0] = dk[n][1] = dk[n][2] = dk[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < C::kHeads / 16; ++step) {
      uint32_t a[4];
      // Matrices of dz, heads by slots, transposed: (slots, heads), (slots + 8, heads), (slots, heads + 8), both + 8.
      ptx::load_matrix_x4_transposed(a, from + piece_offset<8>(step * 16 + lane / 16 * 8 + lane % 8, slots / 8 + lane / 8 % 2));
#pragma unroll
      for (int pair = 0; pair < kGroups / 2; ++pair) {
        uint32_t q[4];
        int const h = step * 16 + lane / 8 % 2 * 8 + lane % 8;
        ptx::load_matrix_x4_transposed(q, query + piece_offset<C::kRowPieces>(h, first_group + 2 * pair + lane / 16));
        Pairs<Element>::mma(dk[2 * pair], a, q[0], q[1]);
        Pairs<Element>::mma(dk[2 * pair + 1], a, q[2], q[3]);
      }
    }
    // Two lanes exchange so that each has four neighbouring columns of one slot: even lanes of the upper eight slots.
    bool const odd = lane & 1;
    int const found = shared.row[buffer][slots + lane / 4 + (odd ? 8 : 0)];
    float* const to = p.dk + (static_cast<int64_t>(b) * p.s_kv + max(found, 0)) * C::kDim + first_group * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      float const x = __shfl_xor_sync(kFullWarp, odd ? dk[n][0] : dk[n][2], 1);
      float const y = __shfl_xor_sync(kFullWarp, odd ? dk[n][1] : dk[n][3], 1);
      float4 four = odd ? float4{x, y, dk[n][2], dk[n][3]} : float4{dk[n][0], dk[n][1], x, y};
      if constexpr (C::kScaled) four = {four.x * unscale, four.y * unscale, four.z * unscale, four.w * unscale};
      ptx::reduce_add_16B_if(found >= 0, to + 8 * n, four);
    }
  }

  // dq and dweights: the halves of the slots meet in shared memory.
  __device__ __forceinline__ void store(float const (&dq)[kTiles][4], float (&dweights)[2], float unscale) {
    auto* const halves = reinterpret_cast<float*>(shared.keys);
    dweights[0] = quad_sum(dweights[0]);
    dweights[1] = quad_sum(dweights[1]);
    __syncthreads();
    if (warp >= 4) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) halves[(4 * n + i) * 128 + threadIdx.x % 128] = dq[n][i];
      }
      if (lane % 4 == 0) shared.row_sums[head(0)] = dweights[0], shared.row_sums[head(1)] = dweights[1];
    }
    __syncthreads();
    if (warp >= 4) return;
    auto* const to = static_cast<Element*>(p.dq) + row * p.h_i * C::kDim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const h = head(half);
      if (h >= p.h_i) continue;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float x = dq[n][2 * half] + halves[(4 * n + 2 * half) * 128 + threadIdx.x];
        float y = dq[n][2 * half + 1] + halves[(4 * n + 2 * half + 1) * 128 + threadIdx.x];
        if constexpr (C::kScaled) x *= unscale, y *= unscale;
        *reinterpret_cast<uint32_t*>(to + h * C::kDim + 8 * n + lane % 4 * 2) = Pairs<Element>::pack(x, y);
      }
      if (lane % 4 == 0) p.dweights[row * p.h_i + h] = dweights[half] + shared.row_sums[h];
    }
  }

  __device__ __forceinline__ void run() {
    int const tiles = (p.topk + C::kSlots - 1) / C::kSlots;
    float weights[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const h = head(half);
      weights[half] = h < p.h_i ? p.weights[b * p.weights_stride_b + s * p.weights_stride_s + h * p.weights_stride_h] : 0.0f;
    }
    float dweights[2] = {0.0f, 0.0f};
    float dq[kTiles][4];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0.0f;
    load_query();
    gather(0, 0);
    ptx::copy_async_commit();
    int exponent = 0;
    if constexpr (C::kScaled) exponent = exponent_of_scale(weights);
    float const scale = ldexpf(1.0f, exponent);
    float const unscale = ldexpf(1.0f, -exponent);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      int const buffer = tile % 2;
      ptx::copy_async_wait<0>();
      // What is behind: this tile has landed for all, and nobody reads the tile before it any more. A tile without a valid
      // slot has no gradient, whatever the query holds.
      bool const own = threadIdx.x < C::kSlots && shared.row[buffer][threadIdx.x] >= 0;
      bool const any = barriers::named_sync_or(kTileBarrier, C::kThreads, own);
      if (tile + 1 < tiles) gather(tile + 1, 1 - buffer);
      ptx::copy_async_commit();
      if (C::kPass == Pass::kBackward && !any) continue;
      float z[4][4];
      multiply(z, buffer);
      if constexpr (C::kPass == Pass::kForward) {
        store_logits(z, weights, tile, buffer);
      } else {
        differentiate(z, weights, dweights, buffer, scale);
        add_dq(z, dq, buffer);
        __syncthreads();
        scatter_dk(buffer, unscale);
      }
    }
    ptx::copy_async_wait<0>();
    if constexpr (C::kPass == Pass::kBackward) store(dq, dweights, unscale);
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) indexer_listed_kernel(__grid_constant__ KernelParams const params) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename C::SharedStorage*>(shared_bytes);
  Query<C>(params, shared, static_cast<int>(blockIdx.x)).run();
}

}  // namespace htree_cuda::sm90::indexer_listed

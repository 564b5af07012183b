// Inputs of the benchmarks of kernels over index lists, and what their definitions in float64 share: hostile lists,
// strided tensors with NaN in the gaps, the causal rule, lengths, scores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <vector>

#include "params.h"
#include "protocol.h"
#include "random.h"

namespace htree_cuda::benchmark {

// Blocks of 256 threads for a loop over `n` elements in steps of the grid.
inline unsigned blocks(std::int64_t n) { return unsigned(std::min<std::int64_t>(2048, n / 256 + 1)); }

// ---- lists -----------------------------------------------------------------------------------------------------

// Slot j of query s: a permutation of [0, s_kv) of the query's own (a Feistel network over the next even power of two,
// walked until it lands inside), so the indices of a query are distinct, uniform and unsorted.
__device__ inline unsigned permuted(unsigned j, unsigned s_kv, std::uint64_t key) {
  int half = 1;
  while ((1u << (2 * half)) < s_kv) ++half;
  unsigned const mask = (1u << half) - 1;
  do {
    unsigned left = j >> half, right = j & mask;
    for (int round = 0; round < 4; ++round) {
      unsigned const next = left ^ (unsigned(mix(key * 4 + round + (std::uint64_t(right) << 32))) & mask);
      left = right;
      right = next;
    }
    j = (left << half) | right;
  } while (j >= s_kv);
  return j;
}

enum class Slots { kDistinct, kHostile, kInvalid };

static __global__ void fill_indices(int* indices, std::int64_t queries, int topk, int s_kv, Slots slots, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < queries * topk;
       i += std::int64_t(gridDim.x) * blockDim.x) {
    std::uint64_t const s = i / topk;
    unsigned const j = unsigned(i - std::int64_t(s) * topk);
    int index = s_kv > 0 ? int(permuted(j % unsigned(s_kv), unsigned(s_kv), mix(seed + s))) : -1;
    std::uint64_t const z = mix(seed * 77 + i);
    if (slots == Slots::kInvalid || (slots == Slots::kHostile && z % 3 == 0)) {
      int const kinds[6] = {-1, INT_MIN, INT_MAX, s_kv, s_kv + 1 + int(z >> 40), -2 - int(z >> 40)};
      index = kinds[(z >> 8) % 6];
    } else if (slots == Slots::kHostile && z % 3 == 1) {
      index = s_kv > 0 ? int((z >> 8) % std::uint64_t(s_kv < 7 ? s_kv : 7)) : -1;  // duplicates
    }
    indices[i] = index;
  }
}

// ---- shapes and scores -----------------------------------------------------------------------------------------

struct Shape {
  int B, s_q, s_kv, h_q, d, topk;
  Slots slots = Slots::kDistinct;
  bool causal = false, lengths = false, strided = false, poison = false, natural = false;
  bool odd = false;  // infinite and NaN values in what the op takes besides (lse, or sinks)
  __host__ __device__ int groups() const { return (h_q + 63) / 64; }
  std::int64_t q_pad() const { return strided ? 8 : 0; }  // elements after a head
  int head_pad() const { return strided ? 2 : 0; }        // heads after a query
  std::int64_t k_pad() const { return strided ? 16 : 0; }
};

struct Layout {
  std::int64_t q_h, q_s, q_b, k_s, k_b;
  explicit Layout(Shape const& s) {
    q_h = s.d + s.q_pad();
    q_s = (s.h_q + s.head_pad()) * q_h;
    q_b = s.s_q * q_s + (s.strided ? 64 : 0);
    k_s = s.d + s.k_pad();
    k_b = s.s_kv * k_s + (s.strided ? 128 : 0);
  }
};

__device__ inline bool slot_valid(int slot, int index, int s, std::int64_t start, std::int64_t k_stride, int length,
                                  int s_kv, bool causal) {
  bool const inside = slot < length && index >= 0 && index < s_kv;
  return inside && (!causal || index <= (start + s + 1) / k_stride - 1);
}

// scores[b][s][h][j] = <q, k> in float64, NaN where the slot is invalid; one warp each.
template <class Element>
__global__ void reference_scores(Element const* q, Element const* k, int const* indices, int const* lengths,
                                 std::int64_t const* starts, std::int64_t k_stride, Shape shape, Layout layout,
                                 double* scores, bool* valid) {
  std::int64_t const rows = std::int64_t(shape.B) * shape.s_q * shape.h_q * shape.topk;
  int const lane = threadIdx.x % 32;
  for (std::int64_t i = (blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x) / 32; i < rows;
       i += std::int64_t(gridDim.x) * blockDim.x / 32) {
    int const j = int(i % shape.topk);
    std::int64_t const row_head = i / shape.topk;
    int const h = int(row_head % shape.h_q);
    std::int64_t const row = row_head / shape.h_q;
    int const b = int(row / shape.s_q), s = int(row % shape.s_q);
    int const index = indices[row * shape.topk + j];
    bool const ok = slot_valid(j, index, s, shape.causal ? starts[b] : 0, k_stride,
                               shape.lengths ? lengths[row] : shape.topk, shape.s_kv, shape.causal);
    double sum = 0;
    if (ok) {
      Element const* const a = q + b * layout.q_b + s * layout.q_s + h * layout.q_h;
      Element const* const c = k + b * layout.k_b + index * layout.k_s;
      for (int x = lane; x < shape.d; x += 32) sum += double(float(a[x])) * double(float(c[x]));
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    if (lane == 0) {
      scores[i] = sum;
      if (h == 0) valid[row * shape.topk + j] = ok;
    }
  }
}

// Key rows that no valid slot names become NaN.
static __global__ void mark_selected(int const* indices, bool const* valid, Shape shape, bool* selected) {
  std::int64_t const count = std::int64_t(shape.B) * shape.s_q * shape.topk;
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < count;
       i += std::int64_t(gridDim.x) * blockDim.x) {
    if (valid[i]) selected[i / shape.topk / shape.s_q * shape.s_kv + indices[i]] = true;
  }
}

template <class Element>
__global__ void poison_unselected(Element* k, bool const* selected, Shape shape, Layout layout) {
  std::int64_t const row = blockIdx.x;
  if (selected[row]) return;
  Element* const x = k + row / shape.s_kv * layout.k_b + row % shape.s_kv * layout.k_s;
  for (int i = threadIdx.x; i < shape.d; i += blockDim.x) x[i] = Element(NAN);
}

// What lies between the rows of strided tensors must not matter: NaN.
template <class Element>
__global__ void poison_gaps(Element* q, Element* k, Shape shape, Layout layout) {
  std::int64_t const q_count = shape.B * layout.q_b, k_count = shape.B * layout.k_b;
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < q_count + k_count;
       i += std::int64_t(gridDim.x) * blockDim.x) {
    if (i < q_count) {
      std::int64_t const x = i % layout.q_b;
      bool const inside = x < shape.s_q * layout.q_s && x % layout.q_s / layout.q_h < shape.h_q &&
                          x % layout.q_s % layout.q_h < shape.d;
      if (!inside) q[i] = Element(NAN);
    } else {
      std::int64_t const x = (i - q_count) % layout.k_b;
      if (x >= shape.s_kv * layout.k_s || x % layout.k_s >= shape.d) k[i - q_count] = Element(NAN);
    }
  }
}

// ---- device memory ---------------------------------------------------------------------------------------------

// One growing allocation a purpose: checks reuse them.
struct Arena {
  void* data = nullptr;
  std::size_t bytes = 0;
  ~Arena() { cudaFree(data); }
  template <class T>
  T* get(std::int64_t count) {
    std::size_t const wanted = std::max<std::size_t>(16, std::size_t(count) * sizeof(T));
    if (wanted > bytes) {
      HTREE_CUDA_CHECK(cudaFree(data));
      HTREE_CUDA_CHECK(cudaMalloc(&data, wanted));
      bytes = wanted;
    }
    return static_cast<T*>(data);
  }
};

template <class Element>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<__nv_bfloat16>() { return DType::kBFloat16; }
template <>
constexpr DType dtype_of<__half>() { return DType::kFloat16; }

constexpr int kStrideTokens = 4;  // k_stride of the causal rule

// Lengths of each query: none, one, all, more, negative.
inline std::vector<int> odd_lengths(std::int64_t rows, int topk, std::uint64_t seed) {
  std::vector<int> lengths(rows);
  for (std::int64_t i = 0; i < rows; ++i) {
    std::int64_t const any = std::int64_t(mix(seed + i) % (topk + 1));
    std::int64_t const choices[] = {0, 1, topk, topk / 2, topk - 1, topk + 5, -3, 64, any};
    lengths[i] = int(choices[mix(seed + i * 31) % 9]);
  }
  return lengths;
}

// Positions of the first query of each batch that show it about half of the keys.
inline std::vector<std::int64_t> middle_starts(Shape const& s) {
  std::vector<std::int64_t> starts(s.B);
  for (int b = 0; b < s.B; ++b) starts[b] = std::int64_t(s.s_kv) * kStrideTokens / 2 + 97 * b;
  return starts;
}

static __global__ void count_differences(unsigned const* a, unsigned const* b, std::int64_t n, unsigned long long* differences) {
  unsigned long long mine = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t(blockDim.x) + threadIdx.x; i < n;
       i += std::int64_t(gridDim.x) * blockDim.x) {
    mine += a[i] != b[i];
  }
  if (mine != 0) atomicAdd(differences, mine);
}

}  // namespace htree_cuda::benchmark

// What the forward of htree attention, as its kernels multiply, cannot go below on the GPU at hand, however they are
// scheduled (lab/frozen/htree_layer.md, "The clock"): the matrix products of its pairs (a query with 16 heads, a parent with 16 children, K = V = 128) and nothing else,
// on all SMs for seconds, so that the clock is the one that the power limit leaves. Then the same with the reads
// of shared memory that feed them, and with exponentials.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -I csrc -I <CUTLASS>/include tests/hardware/products.cu -o products
//   ./products [transposes]
//
// Prints nanoseconds a pair of the whole GPU, cycles a pair of one SM and the clock; then, with the pairs of
// whole sequences (tree/geometry.cuh; top_k 512, 16 heads, one KV head), milliseconds a call. Then, or alone, what
// movmatrix costs, and whether it passes beside ldmatrix and mma.sync (lab/frozen/htree_backward.md).
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "host/cuda_check.h"
#include "tree/geometry.cuh"
#include "device/pairs.cuh"
#include "device/wgmma.cuh"

namespace {

using namespace htree_cuda;
using namespace htree_cuda::device;
using namespace htree_cuda::tree;

constexpr int kWarps = 12;
constexpr int kThreads = kWarps * 32;
constexpr int kSteps = 8;        // of 16 columns, of K and of V
constexpr int kParents = 4;      // a round of WGMMA; in shared memory a warp or warpgroup passes over as many
constexpr int kParentBytes = 8192;
constexpr int kQueryBytes = 64 * 256;  // of a warpgroup, in attend passes of entry layers
constexpr int kSharedBytes = 1024 + kParents * kParentBytes + kWarps / 4 * kQueryBytes;
constexpr double kSeconds = 1.5;

__device__ uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Two elements in (-1, 1).
template <class Element>
__device__ uint32_t random_pair(uint32_t seed) {
  uint32_t const x = mixed(seed);
  return Pairs<Element>::pack(static_cast<float>(static_cast<std::int16_t>(x)) * 0x1p-15f,
                              static_cast<float>(static_cast<std::int16_t>(x >> 16)) * 0x1p-15f);
}

__device__ void fill(uint32_t address) {
  for (int i = threadIdx.x; i < kParents * kParentBytes / 4; i += kThreads) {
    bool const key = i * 4 < kParents * kParentBytes / 2;
    ptx::store_shared_4B(address + 4 * i, key ? random_pair<__half>(i) : random_pair<__nv_bfloat16>(i));
  }
  for (int i = threadIdx.x; i < kWarps / 4 * kQueryBytes / 4; i += kThreads) {
    ptx::store_shared_4B(address + kParents * kParentBytes + 4 * i, random_pair<__half>(~i));
  }
  __syncthreads();
  ptx::fence_proxy_async_shared();
}

__device__ std::int64_t nanoseconds() {
  std::int64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

struct Times {
  std::int64_t clocks;
  std::int64_t nanoseconds;
};

// Selected layers: a warp a query, by mma.sync.
template <bool kRotates, bool kValues, bool kReads, bool kExponentials>
__global__ void __launch_bounds__(kThreads, 1) selected(int pairs, float* out, Times* times) {
  extern __shared__ char shared[];
  uint32_t const address = (ptx::shared_address(shared) + 1023) / 1024 * 1024;
  fill(address);
  int const lane = threadIdx.x % 32;
  uint32_t q[kSteps][4], p[4], b[kSteps][4], rotation[2];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      q[i][j] = random_pair<__half>(threadIdx.x * 64 + 4 * i + j);
      b[i][j] = random_pair<__half>(threadIdx.x * 64 + 32 + 4 * i + j);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) p[j] = random_pair<__nv_bfloat16>(threadIdx.x + j) & 0x7fff7fffu;
  // A rotation as a matrix (rope::RotationColumns): the query keeps its size.
  int const g = lane / 4;
  bool const holds = lane % 4 == g / 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) rotation[i] = !holds ? 0u : Pairs<__half>::pack(g % 2 ? 0.6f : 0.8f, g % 2 ? 0.8f : -0.6f);
  uint32_t const rows = address + (lane % 16) * 256 + ((lane / 16 ^ lane % 8) << 4);
  float o[2 * kSteps][4] = {}, s[2][4] = {}, sum = 0.0f;
  std::int64_t const begin = clock64(), began = nanoseconds();
#pragma unroll 1
  for (int pair = 0; pair < pairs; ++pair) {
    uint32_t const slot = rows + (pair + threadIdx.x / 32) % kParents * (kParentBytes / 2);
    if constexpr (kReads) {  // else the products would be the same every time
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t key[4] = {b[i][0], b[i][1], b[i][2], b[i][3]};
      if constexpr (kReads) ptx::load_matrix_x4(key, (slot ^ (i % 4 << 5)) + i / 4 * 128);
      ptx::mma_fp16(s[0], q[i], key[0], key[1]);
      ptx::mma_fp16(s[1], q[i], key[2], key[3]);
      if constexpr (kValues) {
        uint32_t value[4] = {b[i][0], b[i][1], b[i][2], b[i][3]};
        if constexpr (kReads) ptx::load_matrix_x4_transposed(value, (slot ^ (i % 4 << 5)) + i / 4 * 128 + kParents * kParentBytes / 2);
        ptx::mma_bf16(o[2 * i], p, value[0], value[1]);
        ptx::mma_bf16(o[2 * i + 1], p, value[2], value[3]);
      }
      if constexpr (kRotates) {
        ptx::multiply_fp16(q[i][0], q[i][1], q[i][0], q[i][1], rotation[0]);
        ptx::multiply_fp16(q[i][2], q[i][3], q[i][2], q[i][3], rotation[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kExponentials) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = ptx::exp2_movable(fmaf(s[i][e], 0.01f, -1.0f));
        if constexpr (kValues) p[2 * i] = Pairs<__nv_bfloat16>::pack(x[0], x[1]), p[2 * i + 1] = Pairs<__nv_bfloat16>::pack(x[2], x[3]);
        sum += (x[0] + x[1]) + (x[2] + x[3]);
      } else {
        asm volatile("" : "+f"(s[i][0]), "+f"(s[i][1]), "+f"(s[i][2]), "+f"(s[i][3]));
      }
    }
  }
  if (threadIdx.x == 0) times[blockIdx.x] = {clock64() - begin, nanoseconds() - began};
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) sum += o[i][0] + o[i][1] + o[i][2] + o[i][3];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) sum += Pairs<__half>::unpack(q[i][0]).x;
  sum += (s[0][0] + s[0][1] + s[0][2] + s[0][3]) + (s[1][0] + s[1][1] + s[1][2] + s[1][3]);
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// Entry layers: a warpgroup its four queries against four parents, by WGMMA; keys and values from shared memory, as always.
template <bool kValues, bool kExponentials>
__global__ void __launch_bounds__(kThreads, 1) entry(int pairs, float* out, Times* times) {
  extern __shared__ char shared[];
  uint32_t const address = __shfl_sync(0xffffffffu, (ptx::shared_address(shared) + 1023) / 1024 * 1024, 0);
  fill(address);
  uint32_t q[kSteps][4], p[kParents][4];  // kValues: queries in shared memory, as there is no room for them
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) q[i][j] = random_pair<__half>(threadIdx.x * 64 + 4 * i + j);
  }
#pragma unroll
  for (int i = 0; i < kParents; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) p[i][j] = random_pair<__nv_bfloat16>(threadIdx.x * 16 + 4 * i + j) & 0x7fff7fffu;
  }
  float o[64] = {}, s[32], sum = 0.0f;
  wgmma::Descriptor const keys(address);
  wgmma::Descriptor const queries(
      __shfl_sync(0xffffffffu, address + kParents * kParentBytes + threadIdx.x / 128 * kQueryBytes, 0));
  wgmma::Descriptor const values(address + kParents * kParentBytes / 2, 8192);
  std::int64_t const begin = clock64(), began = nanoseconds();
#pragma unroll 1
  for (int pair = 0; pair < pairs; pair += kParents) {
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int const step = i / 4 * 8192 + i % 4 * 32;
      if constexpr (kValues) {
        wgmma::mma_ss<cutlass::half_t>(s, queries.at(step), keys.at(step), i > 0);
      } else {
        wgmma::mma_rs<cutlass::half_t>(s, q[i], keys.at(step), i > 0);
      }
    }
    if constexpr (kValues) {
#pragma unroll
      for (int i = 0; i < kParents; ++i) {
        wgmma::mma_rs<cutlass::bfloat16_t, wgmma::Major::MN>(o, p[i], values.at(i * 2048), true);
      }
    }
    wgmma::commit();
    wgmma::wait<0>();
    wgmma::pin(s);
    if constexpr (kValues) wgmma::pin(o);
    if constexpr (kExponentials) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum += ptx::exp2_movable(fmaf(s[i], 0.01f, -1.0f));
    }
  }
  if (threadIdx.x == 0) times[blockIdx.x] = {clock64() - begin, nanoseconds() - began};
#pragma unroll
  for (int i = 0; i < 64; ++i) sum += o[i] + s[i % 32];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// Volatile: transposed twice, x would be as it was, and the compiler knows.
__device__ __forceinline__ void transpose(uint32_t& x) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
}

// So many movmatrix, ldmatrix.x4 and m16n8k16 a round of each of the block's warps.
template <int kMoves, int kReads, int kProducts>
__global__ void __launch_bounds__(kThreads, 1) transposes(int rounds, float* out, Times* times) {
  static_assert(kReads <= kSteps, "what is read again before it is used is not read");
  extern __shared__ char shared[];
  uint32_t const address = (ptx::shared_address(shared) + 1023) / 1024 * 1024;
  fill(address);
  uint32_t x[kSteps][4], a[kSteps][4];
  float c[kSteps][4] = {}, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i][j] = a[i][j] = random_pair<__half>(threadIdx.x * 64 + 4 * i + j);
  }
  std::int64_t const begin = clock64(), began = nanoseconds();
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    uint32_t const rows = address + ((threadIdx.x / 32 + round) % 8 * 512) + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i < kReads) ptx::load_matrix_x4(a[i], rows + i * 4096);
      if (i < kMoves) transpose(x[i % kSteps][i / kSteps % 4]);
      if (i < kProducts) ptx::mma_fp16(c[i % kSteps], a[i % kSteps], x[i % kSteps][2], x[i % kSteps][3]);
    }
  }
  if (threadIdx.x == 0) times[blockIdx.x] = {clock64() - begin, nanoseconds() - began};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3] + Pairs<__half>::unpack(x[i][0] ^ x[i][1]).x;
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

template <class Kernel>
double measure(char const* name, Kernel kernel) {
  int device = 0, blocks = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  HTREE_CUDA_CHECK(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device));
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  float* out = nullptr;
  Times* times = nullptr;
  HTREE_CUDA_CHECK(cudaMalloc(&out, blocks * kThreads * sizeof(float)));
  HTREE_CUDA_CHECK(cudaMalloc(&times, blocks * sizeof(Times)));
  int const pairs = 40000;
  double spent = 0.0, clocks = 0.0, nanoseconds = 0.0, launches = 0.0;
  std::vector<Times> found(blocks);
  while (spent < kSeconds) {
    kernel<<<blocks, kThreads, kSharedBytes>>>(pairs, out, times);
    HTREE_CUDA_CHECK(cudaMemcpy(found.data(), times, blocks * sizeof(Times), cudaMemcpyDeviceToHost));
    double longest = 0.0;
    for (auto const& t : found) longest = t.nanoseconds > longest ? static_cast<double>(t.nanoseconds) : longest;
    spent += longest * 1e-9;
    if (spent < kSeconds / 2) continue;  // the clock settles
    for (auto const& t : found) clocks += static_cast<double>(t.clocks), nanoseconds += static_cast<double>(t.nanoseconds);
    launches += 1.0;
  }
  double const all = launches * blocks * kWarps * static_cast<double>(pairs);
  double const a_pair = nanoseconds / all / blocks;
  std::printf("%-58s %8.5f ns %7.1f clocks %7.0f MHz\n", name, a_pair, clocks / all, clocks / nanoseconds * 1e3);
  std::fflush(stdout);
  HTREE_CUDA_CHECK(cudaFree(out));
  HTREE_CUDA_CHECK(cudaFree(times));
  return a_pair;
}

// Pairs of a whole sequence.
struct PairCounts {
  double attend_selected, score_selected, attend_entry, score_entry;
};

PairCounts pairs_of(std::int64_t T) {
  constexpr int kTopK = 512;
  int layers = 1;
  for (std::int64_t n = T; n > kTopK * kSiblings; n = (n + kSiblings - 1) / kSiblings) ++layers;
  PairCounts pairs{};
  for (std::int64_t t = 0; t < T; ++t) {
    int const first = entry_layer(t, kTopK);
    for (int l = first; l >= 0; --l) {
      double const parents = candidates(t, l, layers, kTopK).parents;
      (l == first ? pairs.attend_entry : pairs.attend_selected) += parents;
      if (l > 0) (l == first ? pairs.score_entry : pairs.score_selected) += parents;
    }
  }
  return pairs;
}

void measure_transposes() {
  std::printf("\na round of a warp:\n");
  measure("64 movmatrix, 16 m16n8k16", transposes<64, 0, 16>);
  measure("8 ldmatrix.x4, 16 m16n8k16", transposes<0, 8, 16>);
  measure("28 movmatrix, 8 ldmatrix.x4, 16 m16n8k16", transposes<28, 8, 16>);
  measure("40 movmatrix, 8 ldmatrix.x4, 16 m16n8k16", transposes<40, 8, 16>);
}

}  // namespace

int main(int count, char** words) {
  if (count > 1 && std::strcmp(words[1], "transposes") == 0) return measure_transposes(), 0;
  std::printf("a pair:\n");
  double const attend = measure("selected layer, attend: products", selected<true, true, false, false>);
  double const score = measure("selected layer, a sweep of a score pass: products", selected<true, false, false, false>);
  double const attend_fed = measure("selected layer, attend: and reads of shared memory", selected<true, true, true, false>);
  double const score_fed = measure("selected layer, a sweep of a score pass: and reads of shared memory", selected<true, false, true, false>);
  double const attend_all = measure("selected layer, attend: and exponentials", selected<true, true, true, true>);
  double const score_all = measure("selected layer, a sweep of a score pass: and exponentials", selected<true, false, true, true>);
  double const attend_still = measure("selected layer, attend, queries that are not rotated: products", selected<false, true, false, false>);
  double const score_still = measure("selected layer, score, queries that are not rotated: products", selected<false, false, false, false>);
  double const entry_attend = measure("entry layer, attend: products", entry<true, false>);
  double const entry_score = measure("entry layer, a sweep of a score pass: products", entry<false, false>);
  double const entry_attend_all = measure("entry layer, attend: and exponentials", entry<true, true>);
  double const entry_score_all = measure("entry layer, a sweep of a score pass: and exponentials", entry<false, true>);

  std::printf("\nms a call: products; products of queries that need not rotation; and reads; and exponentials\n");
  for (int log2_T : {14, 16, 17, 18, 20}) {
    PairCounts const x = pairs_of(std::int64_t{1} << log2_T);
    auto const total = [&](double v, double c, double fv, double fc) {
      return 1e-6 * (v * x.attend_selected + 2 * c * x.score_selected + fv * x.attend_entry + 2 * fc * x.score_entry);
    };
    std::printf("%8lld %8.2f %8.2f %8.2f %8.2f\n", 1ll << log2_T, total(attend, score, entry_attend, entry_score),
                total(attend_still, score_still, entry_attend, entry_score),
                total(attend_fed, score_fed, entry_attend, entry_score),
                total(attend_all, score_all, entry_attend_all, entry_score_all));
  }
  measure_transposes();
  return 0;
}

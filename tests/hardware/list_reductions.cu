// What the sums of the backward of sparse_attention cost alone: rows of dkv that ascending lists name, added where they lie.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -I csrc tests/hardware/list_reductions.cu -o list_reductions
//   ./list_reductions
//
// 132 blocks pass over 2,112 queries of 2,048 rows of 576 numbers, 64 rows at a time, nobody waiting for anybody. Vector
// reductions, a lane four numbers and four or eight lanes a row; bulk reductions of whole rows from shared memory; int64 in the
// place of float32, a lane one number and 4, 16 or 32 lanes a row; with and without a gather of bf16 rows beside.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "host/cuda_check.h"
#include "measure.h"

namespace {

using namespace htree_cuda;
using namespace htree_cuda::host;

constexpr int kCols = 576;
constexpr int kTile = 64;
constexpr int kTopk = 2048;
constexpr int kBlocks = 132;
constexpr int kQueries = kBlocks * 16;
constexpr int kThreads = 256;
constexpr int kShared = kTile * kCols * 4;

enum class Way { kVectors, kRows, kIntegers, kIntegerRows };

// Bytes of a number.
constexpr int size_of(Way way) { return way == Way::kVectors || way == Way::kRows ? 4 : 8; }

// kLanes lanes share a row, where lanes add.
template <Way way, int kLanes>
__device__ void add_tile(char* sums, int const* rows, uint32_t shared) {
  constexpr int kSize = size_of(way);
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if constexpr (way == Way::kVectors || way == Way::kIntegers) {
    constexpr int kNumbers = way == Way::kVectors ? 4 : 1;
    constexpr int kRows = 32 / kLanes;  // of an instruction
    static_assert(kCols % (kNumbers * kLanes) == 0);
    for (int first = 0; first < 8; first += kRows) {
      int64_t const row = rows[8 * warp + first + lane / kLanes];
      char* const to = sums + (row * kCols + kNumbers * (lane % kLanes)) * kSize;
#pragma unroll 6
      for (int j = 0; j < kCols / (kNumbers * kLanes); ++j) {
        char* const at = to + kLanes * kNumbers * kSize * j;
        if constexpr (way == Way::kVectors) {
          asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(at), "f"(1.f) : "memory");
        } else {
          asm volatile("red.global.add.u64 [%0], %1;" ::"l"(at), "l"(1ll) : "memory");
        }
      }
    }
  } else {
    constexpr int kParts = kSize / 4;
    constexpr int kBytes = kCols * 4;
    for (int i = threadIdx.x; i < kTile * kParts; i += kThreads) {
      char* const at = sums + static_cast<int64_t>(rows[i / kParts]) * kCols * kSize + i % kParts * kBytes;
      uint32_t const from = shared + i % kTile * kBytes;
      if constexpr (way == Way::kRows) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(at), "r"(from),
                     "r"(kBytes)
                     : "memory");
      } else {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u64 [%0], [%1], %2;" ::"l"(at), "r"(from),
                     "r"(kBytes)
                     : "memory");
      }
    }
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 1;" ::: "memory");
  }
}

template <Way way, int kLanes>
__global__ void __launch_bounds__(kThreads, 1)
    add_kernel(char* sums, char const* kv, int const* lists, bool gather, int* unused) {
  extern __shared__ __align__(128) int4 zeros[];
  for (int i = threadIdx.x; i < kShared / 16; i += kThreads) zeros[i] = make_int4(0, 0, 0, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  uint32_t const shared = static_cast<uint32_t>(__cvta_generic_to_shared(zeros));
  constexpr int kChunks = kCols * 2 / 16;
  int read = 0;
  for (int query = blockIdx.x; query < kQueries; query += kBlocks) {
    for (int tile = 0; tile < kTopk; tile += kTile) {
      int const* const rows = lists + static_cast<int64_t>(query) * kTopk + tile;
      for (int i = threadIdx.x; gather && i < kTile * kChunks; i += kThreads) {
        int4 const x =
            __ldg(reinterpret_cast<int4 const*>(kv + static_cast<int64_t>(rows[i / kChunks]) * kCols * 2) + i % kChunks);
        read ^= x.x ^ x.y ^ x.z ^ x.w;
      }
      add_tile<way, kLanes>(sums, rows, shared);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  if (read == 0x12345) *unused = read;  // kv holds zeros: the loads stay, nothing is written
}

struct Problem {
  char* sums;
  char* kv;
  int* lists;
  int* unused;
};

template <Way way, int kLanes>
void measure(char const* name, int s_kv, Problem const& p) {
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(add_kernel<way, kLanes>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  for (bool const gather : {false, true}) {
    double const best = hardware::best_ms(
        3, [&] { add_kernel<way, kLanes><<<kBlocks, kThreads, kShared>>>(p.sums, p.kv, p.lists, gather, p.unused); });
    double const bytes = static_cast<double>(kQueries) * kTopk * kCols * size_of(way);
    std::printf("%6d rows, %-20s %-12s %7.3f ms, %.2f TB/s added\n", s_kv, name, gather ? "with gather," : "alone,", best,
                bytes / best / 1e9);
  }
}

void run(int s_kv) {
  std::vector<int> lists(static_cast<size_t>(kQueries) * kTopk);
  std::vector<int> rows(s_kv);
  for (int i = 0; i < s_kv; ++i) rows[i] = i;
  std::mt19937 random(1);
  for (int query = 0; query < kQueries; ++query) {
    for (int i = 0; i < kTopk; ++i) std::swap(rows[i], rows[i + random() % (s_kv - i)]);
    auto const to = lists.begin() + static_cast<int64_t>(query) * kTopk;
    std::copy(rows.begin(), rows.begin() + kTopk, to);
    std::sort(to, to + kTopk);
  }
  Problem p{};
  size_t const numbers = static_cast<size_t>(s_kv) * kCols;
  HTREE_CUDA_CHECK(cudaMalloc(&p.sums, numbers * 8));
  HTREE_CUDA_CHECK(cudaMalloc(&p.kv, numbers * 2));
  HTREE_CUDA_CHECK(cudaMalloc(&p.lists, lists.size() * 4));
  HTREE_CUDA_CHECK(cudaMalloc(&p.unused, 4));
  HTREE_CUDA_CHECK(cudaMemset(p.sums, 0, numbers * 8));
  HTREE_CUDA_CHECK(cudaMemset(p.kv, 0, numbers * 2));
  HTREE_CUDA_CHECK(cudaMemcpy(p.lists, lists.data(), lists.size() * 4, cudaMemcpyHostToDevice));
  measure<Way::kVectors, 4>("float32, 64 bytes", s_kv, p);
  measure<Way::kVectors, 8>("float32, 128 bytes", s_kv, p);
  measure<Way::kRows, 1>("float32 bulk rows", s_kv, p);
  measure<Way::kIntegers, 4>("int64, 32 bytes", s_kv, p);
  measure<Way::kIntegers, 16>("int64, 128 bytes", s_kv, p);
  measure<Way::kIntegers, 32>("int64, 256 bytes", s_kv, p);
  measure<Way::kIntegerRows, 1>("int64 bulk half rows", s_kv, p);
  HTREE_CUDA_CHECK(cudaFree(p.sums));
  HTREE_CUDA_CHECK(cudaFree(p.kv));
  HTREE_CUDA_CHECK(cudaFree(p.lists));
  HTREE_CUDA_CHECK(cudaFree(p.unused));
}

}  // namespace

int main() {
  run(16384);
  run(65536);
  return 0;
}

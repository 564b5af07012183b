// What float32 reductions into global memory cost on Hopper: the floor of a backward that holds queries and adds dk and dv of
// the parents they visit where they lie (lab/frozen/htree_backward.md, "Nodes against queries with reductions").
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -I csrc tests/hardware/reductions.cu -o reductions
//   ./reductions
//
// A block stands for some neighbouring queries: it adds 16 KB (16 children, K = V = 128, dk and dv) to each parent of their
// union, ascending, from a ring in shared memory, by bulk reductions (cp.reduce.async.bulk) that one thread issues, or by
// vector reductions (red.global.add.v4.f32) of 256 threads. 4,096 and 8,192 parents are those of 64K and 128K tokens. The
// unions: those of independent queries, drawn afresh for each block; and those of neighbours that agree, of which a block
// exchanges an eighth with the block before. First it checks that sums come out.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "host/cuda_check.h"
#include "measure.h"
#include "device/ptx.cuh"

namespace {

using namespace htree_cuda;
using namespace htree_cuda::device;
using namespace htree_cuda::host;
using namespace htree_cuda::hardware;

constexpr int kFloats = 16 * (128 + 128);  // of a parent
constexpr int kBytes = 4 * kFloats;
constexpr int kSlots = 8;
constexpr int kThreads = 256;
constexpr int kShared = kSlots * kBytes + 128;
constexpr int kInFlight = kSlots - 1;  // groups, as if a slot were written again

__device__ void bulk_add(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ void vector_add(float* global, float4 x) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

template <bool kBulk>
__global__ void __launch_bounds__(kThreads, 1)
    reduce(float* sums, int const* lists, int const* counts, int longest, int blocks, float noise) {
  extern __shared__ char shared[];
  uint32_t const base = (ptx::shared_address(shared) + 127) / 128 * 128;
  float* const slots = reinterpret_cast<float*>(shared + (base - ptx::shared_address(shared)));
  for (int i = threadIdx.x; i < kSlots * kFloats; i += kThreads) slots[i] = 1.0f + noise * (i * 2654435761u);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    int const* const list = lists + static_cast<std::int64_t>(block) * longest;
    int const count = counts[block];
    if constexpr (kBulk) {
      if (threadIdx.x != 0) continue;
      for (int i = 0; i < count; ++i) {
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kInFlight) : "memory");
        bulk_add(sums + static_cast<std::int64_t>(list[i]) * kFloats, base + i % kSlots * kBytes, kBytes);
      }
    } else {
      for (int i = 0; i < count; ++i) {
        float* const to = sums + static_cast<std::int64_t>(list[i]) * kFloats;
        float4 const* const from = reinterpret_cast<float4 const*>(slots + i % kSlots * kFloats);
#pragma unroll
        for (int j = 0; j < kFloats / 4 / kThreads; ++j) {
          vector_add(to + 4 * (j * kThreads + threadIdx.x), from[j * kThreads + threadIdx.x]);
        }
      }
    }
  }
  if (kBulk && threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Ascending sets of `size` of `parents`, one a block.
std::vector<int> sets(int blocks, int parents, int size, bool agree) {
  std::mt19937 random(1);
  std::vector<int> order(parents), lists;
  for (int i = 0; i < parents; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (int block = 0; block < blocks; ++block) {
    if (agree) {  // an eighth leaves, as many come
      for (int i = 0; i < size / 8; ++i) std::swap(order[random() % size], order[size + random() % (parents - size)]);
    } else {
      std::shuffle(order.begin(), order.end(), random);
    }
    lists.insert(lists.end(), order.begin(), order.begin() + size);
    std::sort(lists.end() - size, lists.end());
  }
  return lists;
}

// Best of five launches, ms; `check`: every element is how often its parent was named.
template <bool kBulk>
double time_of(std::vector<int> const& lists, int size, int parents, int blocks, int processors, bool check) {
  float* sums = nullptr;
  HTREE_CUDA_CHECK(cudaMalloc(&sums, std::size_t(parents) * kBytes));
  HTREE_CUDA_CHECK(cudaMemset(sums, 0, std::size_t(parents) * kBytes));
  int* const device_lists = on_device(lists);
  int* const counts = on_device(std::vector<int>(blocks, size));
  HTREE_CUDA_CHECK(
      cudaFuncSetAttribute(reinterpret_cast<void const*>(reduce<kBulk>), cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  double const best = best_ms(check ? 1 : 5, [&] {
    reduce<kBulk><<<processors, kThreads, kShared>>>(sums, device_lists, counts, size, blocks, check ? 0.0f : 0x1p-32f);
  });
  if (check) {
    std::vector<float> host(std::size_t(parents) * kFloats);
    HTREE_CUDA_CHECK(cudaMemcpy(host.data(), sums, host.size() * 4, cudaMemcpyDeviceToHost));
    std::vector<int> named(parents);
    for (int const parent : lists) named[parent] += 1;
    int wrong = 0;
    for (std::size_t i = 0; i < host.size(); ++i) wrong += host[i] != named[i / kFloats];
    std::printf("%s: %s\n", kBulk ? "bulk" : "vector", wrong == 0 ? "sums are right" : "WRONG SUMS");
    if (wrong != 0) std::exit(1);
  }
  HTREE_CUDA_CHECK(cudaFree(sums));
  HTREE_CUDA_CHECK(cudaFree(device_lists));
  HTREE_CUDA_CHECK(cudaFree(counts));
  return best;
}

}  // namespace

int main() {
  int processors = 0;
  HTREE_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  std::vector<int> const few = sets(processors, 512, 64, false);
  time_of<true>(few, 64, 512, processors, processors, true);
  time_of<false>(few, 64, 512, processors, processors, true);
  // Unions of 12 queries with 512 parents each: as counted in tree inputs where neighbours agree, and as many as are expected
  // of independent ones.
  struct {
    char const* name;
    int parents, size;
    bool agree;
  } const cases[] = {{"64K, neighbours agree", 4096, 804, true},
                     {"64K, independent", 4096, 3271, false},
                     {"128K, neighbours agree", 8192, 1156, true},
                     {"128K, independent", 8192, 4416, false}};
  for (auto const& x : cases) {
    int const blocks = 8 * processors;
    std::vector<int> const lists = sets(blocks, x.parents, x.size, x.agree);
    double const bulk = time_of<true>(lists, x.size, x.parents, blocks, processors, false);
    double const vector = time_of<false>(lists, x.size, x.parents, blocks, processors, false);
    double const bytes = double(blocks) * x.size * kBytes;
    double const pairs = double(blocks) * 12 * 512;
    std::printf("%-24s union %4d: bulk %.2f TB/s, %.3f ns a pair; vector %.2f TB/s, %.3f ns a pair\n", x.name, x.size,
                1e-9 * bytes / bulk, 1e6 * bulk / pairs, 1e-9 * bytes / vector, 1e6 * vector / pairs);
  }
  return 0;
}

// What a cluster of two blocks that share what they gather would give on Hopper (lab/frozen/htree_layer.md and
// lab/frozen/sparse_attention_kernel.md, "Tried"): times of the copies alone, or with consumers that only wait.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -I csrc tests/hardware/gathers.cu -o gathers
//   ./gathers [blocks]         132 blocks, or so many
//
// Parents: blocks with twelve queries each, 512 parents of 8,192 a query, drawn at random or 12% apart from the query
// before; a ring of 5 stages of 4 parents, 8,256 bytes each; twelve warps that hold a parent of theirs for so many
// cycles. In a cluster the blocks step through the union of their 24 queries, and a parent that both need is copied to
// both. Then without a cluster: bulk copies of parents that lie as they do in shared memory, or half a line apart; and,
// as the layer kernel does, with the list read 32 parents ahead, which the others read where they need it: by one warp
// or two, and some of eight parents by warps of their own (cp.async).
//
// Rows: 64 rows of 1,152 bytes a tile, as 9 boxes of 64 columns each (TMA, 128-byte swizzle), three tiles in flight; in
// a cluster each block fetches half of the rows for both.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "host/cuda_check.h"
#include "host/driver.h"
#include "measure.h"
#include "device/barriers.cuh"
#include "device/ptx.cuh"

namespace {

using namespace htree_cuda;
using namespace htree_cuda::device;
using namespace htree_cuda::host;
using namespace htree_cuda::hardware;

int blocks = 132;

__device__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ void cluster_sync() { asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory"); }

// One lane of the warp, such that what it does runs on the uniform datapath.
__device__ bool elected() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen != 0;
}

__device__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ void bulk_load_to_both(uint32_t shared, void const* global, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
          shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(uint16_t{3})
      : "memory");
}

template <bool kCluster>
__device__ void load_box(uint32_t shared, CUtensorMap const* map, uint32_t barrier, int column, int row) {
  if constexpr (kCluster) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(uint16_t{3})
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
  }
}

// ---- parents ---------------------------------------------------------------------------------------------------

constexpr int kParents = 8192;
constexpr int kTopK = 512;
constexpr int kQueries = 12;  // of a block
constexpr int kParentBytes = 8256;
constexpr int kLine = 128;
constexpr int kLinesBytes = (kParentBytes + kLine - 1) / kLine * kLine;  // room of a parent that begins a line
constexpr int kSlotBytes = 8448;
constexpr int kStages = 5;
constexpr int kSlots = 4;
constexpr int kParentThreads = 32 * (kQueries + 1);
constexpr int kParentShared = kStages * kSlots * kSlotBytes + 256;

// Bit q of a mask: query q of the block, or of the two blocks, visits the parent. Parents are `stride` apart, and a
// copy lies `shift` bytes behind the beginning of a line in shared memory.
template <bool kCluster>
__global__ void __launch_bounds__(kParentThreads, 1)
    gather_parents(char const* data, int stride, int shift, int const* nodes, uint32_t const* masks, int const* counts,
                   int hold) {
  extern __shared__ char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ uint32_t taken[kStages][kSlots];
  uint32_t const base = (ptx::shared_address(shared) + 255) / 256 * 256;
  uint32_t const rank = kCluster ? rank_in_cluster() : 0;
  int const list = kCluster ? blockIdx.x / 2 : blockIdx.x;
  nodes += list * kParents, masks += list * kParents;
  int const count = counts[list];
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barriers::mbarrier_init(ptx::shared_address(&full[i]), 1);
      barriers::mbarrier_init(ptx::shared_address(&empty[i]), kCluster ? 2 * kQueries : kQueries);
    }
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  if (kCluster) cluster_sync();
  for (int first = 0, at = 0; first < count; first += kSlots, ++at) {
    int const stage = at % kStages;
    uint32_t const parity = at / kStages & 1;
    uint32_t const is_full = ptx::shared_address(&full[stage]);
    uint32_t const is_empty = ptx::shared_address(&empty[stage]);
    if (warp == kQueries) {
      bool const exists = lane < kSlots && first + lane < count;
      uint32_t const mask = exists ? masks[first + lane] : 0;
      uint32_t const own = mask >> (kQueries * rank) & 0xfff;
      uint32_t const theirs = kCluster ? mask >> (kQueries * (1 - rank)) & 0xfff : 0;
      char const* const source = data + static_cast<int64_t>(exists ? nodes[first + lane] : 0) * stride;
      uint32_t const slot = base + (stage * kSlots + lane) * kSlotBytes + shift;
      barriers::mbarrier_wait(is_empty, parity ^ 1, "gathers: empty");
      if (lane < kSlots) taken[stage][lane] = own;
      int const copies = __popc(__ballot_sync(0xffffffffu, own != 0));
      if (lane == 0) barriers::mbarrier_arrive_expect_bytes(is_full, copies * kParentBytes);
      __syncwarp();
      if (own != 0 && theirs == 0) ptx::bulk_load(slot, source, kParentBytes, is_full);
      if (own != 0 && theirs != 0 && lane % 2 == rank) bulk_load_to_both(slot, source, kParentBytes, is_full);
    } else {
      barriers::mbarrier_wait(is_full, parity, "gathers: full");
      int own = 0;
      for (int i = 0; i < kSlots; ++i) own += taken[stage][i] >> warp & 1;
      if (own * hold != 0) {
        for (long long const end = clock64() + own * hold; clock64() < end;) __nanosleep(20);
      }
      __syncwarp();
      if (lane == 0) barriers::mbarrier_arrive(is_empty);
      if (kCluster && lane == 1) arrive_at(is_empty, 1 - rank);
    }
  }
  __syncthreads();
  if (kCluster) cluster_sync();
}

// Of eight parents `kEighths` by cp.async of kCopyWarps warps, the others by bulk copies of kBulkWarps; the list is
// read ahead.
template <int kEighths, int kCopyWarps, int kBulkWarps>
constexpr int kAheadThreads = 32 * (kQueries + kBulkWarps + (kEighths > 0 ? kCopyWarps : 0));

template <int kEighths, int kCopyWarps, int kBulkWarps>
__global__ void __launch_bounds__(kAheadThreads<kEighths, kCopyWarps, kBulkWarps>, 1)
    gather_ahead(char const* data, int stride, int shift, int const* nodes, int const* counts) {
  extern __shared__ char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  uint32_t const base = (ptx::shared_address(shared) + 255) / 256 * 256;
  nodes += blockIdx.x * kParents;
  int const count = counts[blockIdx.x];
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barriers::mbarrier_init(ptx::shared_address(&full[i]), kBulkWarps + (kEighths > 0 ? 32 * kCopyWarps : 0));
      barriers::mbarrier_init(ptx::shared_address(&empty[i]), kQueries);
    }
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  int next = 0;  // lane i: parent i of 32
  for (int first = 0, at = 0; first < count; first += kSlots, ++at) {
    int const stage = at % kStages;
    uint32_t const parity = at / kStages & 1;
    uint32_t const is_full = ptx::shared_address(&full[stage]);
    uint32_t const is_empty = ptx::shared_address(&empty[stage]);
    auto const slot = [&](int i) { return base + (stage * kSlots + i) * kSlotBytes + shift; };
    int const there = min(count - first, kSlots);
    int const copied = at % 2 != 0 ? kEighths / 2 : (kEighths + 1) / 2;  // by cp.async, of this stage
    if (warp < kQueries) {
      barriers::mbarrier_wait(is_full, parity, "gathers: full");
      __syncwarp();
      if (lane == 0) barriers::mbarrier_arrive(is_empty);
      continue;
    }
    if (first % 32 == 0) next = first + lane < count ? nodes[first + lane] : 0;
    if (warp < kQueries + kBulkWarps) {
      int const node = __shfl_sync(0xffffffffu, next, first % 32 + lane % kSlots);
      char const* const from = data + static_cast<int64_t>(node) * stride;
      barriers::mbarrier_wait(is_empty, parity ^ 1, "gathers: empty");
      bool const own = lane >= copied && lane < there && lane % kBulkWarps == warp - kQueries;
      int const copies = __popc(__ballot_sync(0xffffffffu, own));
      if (lane == 0) barriers::mbarrier_arrive_expect_bytes(is_full, copies * kParentBytes);
      __syncwarp();
      if (own) ptx::bulk_load(slot(lane), from, kParentBytes, is_full);
    } else {
      int const thread = threadIdx.x - 32 * (kQueries + kBulkWarps);
      barriers::mbarrier_wait(is_empty, parity ^ 1, "gathers: empty");
      for (int i = 0; i < copied; ++i) {
        int const node = __shfl_sync(0xffffffffu, next, first % 32 + i);
        char const* const from = data + static_cast<int64_t>(node) * stride;
#pragma unroll
        for (int step = 0; step < (kParentBytes / 16 + 32 * kCopyWarps - 1) / (32 * kCopyWarps); ++step) {
          int const byte = (step * 32 * kCopyWarps + thread) * 16;
          if (i < there && byte < kParentBytes) ptx::copy_async_16B(slot(i) + byte, from + byte, 0);
        }
      }
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(is_full) : "memory");
    }
  }
  __syncthreads();
}

// ---- rows ------------------------------------------------------------------------------------------------------

constexpr int kTileRows = 64;
constexpr int kPanels = 9;
constexpr int kTileBytes = kTileRows * kPanels * 128;
constexpr int kTilesInFlight = 3;
constexpr int kTiles = 400;
constexpr int kRowShared = kTilesInFlight * kTileBytes + 1024;
constexpr int kProducers = 4;  // warps, each of them one elected thread
constexpr int kRowThreads = 32 * (kProducers + 1);

template <bool kCluster>
__global__ void __launch_bounds__(kRowThreads, 1) gather_rows(const __grid_constant__ CUtensorMap map, int const* rows) {
  extern __shared__ char shared[];
  __shared__ uint64_t full[kTilesInFlight], empty[kTilesInFlight];
  uint32_t const base = (ptx::shared_address(shared) + 1023) / 1024 * 1024;
  uint32_t const rank = kCluster ? rank_in_cluster() : 0;
  rows += (kCluster ? blockIdx.x / 2 : blockIdx.x) * kTiles * kTileRows;
  int const warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  int const lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTilesInFlight; ++i) {
      barriers::mbarrier_init(ptx::shared_address(&full[i]), 1);
      barriers::mbarrier_init(ptx::shared_address(&empty[i]), kCluster ? 2 : 1);
    }
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  if (kCluster) cluster_sync();
  constexpr int kOwnRows = kTileRows / (kCluster ? 2 : 1) / kProducers;
  for (int tile = 0; tile < kTiles; ++tile) {
    int const buffer = tile % kTilesInFlight;
    uint32_t const parity = tile / kTilesInFlight & 1;
    uint32_t const is_full = ptx::shared_address(&full[buffer]);
    uint32_t const is_empty = ptx::shared_address(&empty[buffer]);
    if (warp < kProducers) {
      int const first = (rank * kProducers + warp) * kOwnRows;
      int const row = rows[tile * kTileRows + first + lane % kOwnRows];
      barriers::mbarrier_wait(is_empty, parity ^ 1, "gathers: empty");
      if (threadIdx.x == 0) barriers::mbarrier_arrive_expect_bytes(is_full, kTileBytes);
      __syncwarp();
      uint32_t const to = __shfl_sync(0xffffffffu, base + buffer * kTileBytes + first * 128, 0);
#pragma unroll 4
      for (int i = 0; i < kOwnRows; ++i) {
        int const y = __shfl_sync(0xffffffffu, row, i);
        if (elected()) {
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            load_box<kCluster>(to + panel * kTileRows * 128 + i * 128, &map, is_full, panel * 64, y);
          }
        }
        __syncwarp();
      }
    } else if (lane == 0) {
      barriers::mbarrier_wait(is_full, parity, "gathers: full");
      barriers::mbarrier_arrive(is_empty);
      if (kCluster) arrive_at(is_empty, 1 - rank);
    }
  }
  __syncthreads();
  if (kCluster) cluster_sync();
}

// ---- host ------------------------------------------------------------------------------------------------------

// Best of five launches, ms.
template <class... Params, class... Args>
double time_of(void (*kernel)(Params...), bool cluster, int threads, int shared, Args... args) {
  HTREE_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster ? 2u : 1u, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return best_ms(5, [&] { HTREE_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...)); });
}

// Unions of the parents of `queries` neighbouring queries.
struct Lists {
  std::vector<int> nodes, counts;
  std::vector<uint32_t> masks;
};

Lists build_union(std::vector<std::vector<char>> const& visits, int queries) {
  Lists lists;
  for (std::size_t first = 0; first < visits.size(); first += queries) {
    std::size_t const begin = lists.nodes.size();
    for (int node = 0; node < kParents; ++node) {
      uint32_t mask = 0;
      for (int q = 0; q < queries; ++q) mask |= uint32_t(visits[first + q][node]) << q;
      if (mask != 0) lists.nodes.push_back(node), lists.masks.push_back(mask);
    }
    lists.counts.push_back(int(lists.nodes.size() - begin));
    lists.nodes.resize(begin + kParents), lists.masks.resize(begin + kParents);
  }
  return lists;
}

void parents() {
  char* data = nullptr;
  std::size_t const bytes = std::size_t(kParents) * kLinesBytes + kLine;
  std::vector<uint32_t> noise(bytes / 4);
  std::mt19937 bits(7);
  for (uint32_t& word : noise) word = uint32_t(bits());
  HTREE_CUDA_CHECK(cudaMalloc(&data, bytes));
  HTREE_CUDA_CHECK(cudaMemcpy(data, noise.data(), bytes, cudaMemcpyHostToDevice));
  for (bool const local : {false, true}) {
    std::mt19937 random(1);
    std::vector<int> order(kParents);
    std::iota(order.begin(), order.end(), 0);
    std::vector<std::vector<char>> visits;
    for (int q = 0; q < blocks * kQueries; ++q) {
      std::shuffle(order.begin(), order.end(), random);
      bool const fresh = !local || q % (2 * kQueries) == 0;
      std::vector<char> now = fresh ? std::vector<char>(kParents) : visits.back();
      int swaps = fresh ? 0 : kTopK * 12 / 100;
      int leave = swaps;
      int enter = fresh ? kTopK : swaps;
      for (int const node : order) {
        if (now[node] ? leave > 0 : enter > 0) {
          (now[node] ? leave : enter) -= 1;
          now[node] = !now[node];
        }
      }
      visits.push_back(std::move(now));
    }
    for (bool const cluster : {false, true}) {
      Lists const lists = build_union(visits, cluster ? 2 * kQueries : kQueries);
      int* const nodes = on_device(lists.nodes);
      uint32_t* const masks = on_device(lists.masks);
      int* const counts = on_device(lists.counts);
      double const mean = std::accumulate(lists.counts.begin(), lists.counts.end(), 0.0) / lists.counts.size();
      for (int const hold : {0, 1000, 1200}) {
        double const ms = time_of(cluster ? gather_parents<true> : gather_parents<false>, cluster, kParentThreads,
                                  kParentShared, static_cast<char const*>(data), kParentBytes, 0,
                                  static_cast<int const*>(nodes), static_cast<uint32_t const*>(masks),
                                  static_cast<int const*>(counts), hold);
        std::printf("parents, %-7s %-7s: union %4.0f, held %4d clocks: %.3f ms\n", local ? "local," : "random,",
                    cluster ? "cluster" : "alone", mean, hold, ms);
      }
      auto const ahead = [&](char const* what, auto kernel, int threads) {
        double const ms = time_of(kernel, false, threads, kParentShared, static_cast<char const*>(data) + kLine / 2,
                                  kLinesBytes, kLine / 2, static_cast<int const*>(nodes), static_cast<int const*>(counts));
        std::printf("parents, %-7s alone  : union %4.0f, list read ahead, %s: %.4f ms\n", local ? "local," : "random,", mean,
                    what, ms);
      };
      if (!cluster) {
        for (int const shift : {0, kLine / 2}) {
          double const ms = time_of(gather_parents<false>, false, kParentThreads, kParentShared,
                                    static_cast<char const*>(data), kLinesBytes, shift, static_cast<int const*>(nodes),
                                    static_cast<uint32_t const*>(masks), static_cast<int const*>(counts), 0);
          std::printf("parents, %-7s alone  : union %4.0f, from lines to %2d bytes behind one: %.3f ms\n",
                      local ? "local," : "random,", mean, shift, ms);
        }
        ahead("one warp", gather_ahead<0, 1, 1>, kAheadThreads<0, 1, 1>);
        ahead("two warps", gather_ahead<0, 1, 2>, kAheadThreads<0, 1, 2>);
        ahead("1 of 8 by cp.async of a warp", gather_ahead<1, 1, 1>, kAheadThreads<1, 1, 1>);
        ahead("2 of 8 by cp.async of a warp", gather_ahead<2, 1, 1>, kAheadThreads<2, 1, 1>);
        ahead("2 of 8 by cp.async of three", gather_ahead<2, 3, 1>, kAheadThreads<2, 3, 1>);
        ahead("3 of 8 by cp.async of three", gather_ahead<3, 3, 1>, kAheadThreads<3, 3, 1>);
      }
      HTREE_CUDA_CHECK(cudaFree(nodes));
      HTREE_CUDA_CHECK(cudaFree(masks));
      HTREE_CUDA_CHECK(cudaFree(counts));
    }
  }
  HTREE_CUDA_CHECK(cudaFree(data));
}

void rows() {
  for (int const count : {16384, 65536}) {
    char* data = nullptr;
    HTREE_CUDA_CHECK(cudaMalloc(&data, std::size_t(count) * kPanels * 128));
    HTREE_CUDA_CHECK(cudaMemset(data, 1, std::size_t(count) * kPanels * 128));
    std::mt19937 random(1);
    std::vector<int> which(blocks * kTiles * kTileRows);
    for (int& row : which) row = int(random() % count);
    int* const indices = on_device(which);
    CUtensorMap map;
    cuuint64_t const sizes[] = {kPanels * 64, cuuint64_t(count)};
    cuuint64_t const strides[] = {kPanels * 128};
    cuuint32_t const box[] = {64, 1};
    cuuint32_t const steps[] = {1, 1};
    static auto const encode = driver_entry_point<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
    check_driver(encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                 "cuTensorMapEncodeTiled");
    for (bool const cluster : {false, true}) {
      double const ms = time_of(cluster ? gather_rows<true> : gather_rows<false>, cluster, kRowThreads, kRowShared, map,
                                static_cast<int const*>(indices));
      std::printf("rows, %5d, %-7s: %.2f us a tile, %.2f TB/s delivered\n", count, cluster ? "cluster" : "alone",
                  1e3 * ms / kTiles, 1e-9 * blocks * kTiles * kTileBytes / ms);
    }
    HTREE_CUDA_CHECK(cudaFree(indices));
    HTREE_CUDA_CHECK(cudaFree(data));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) blocks = std::atoi(argv[1]);
  parents();
  rows();
  return 0;
}

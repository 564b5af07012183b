// Selection of one layer by the whole cluster: the top_k candidates of highest importance, the rightmost among them, ties to the
// lower position. Importances stay where they were computed. Every round, each CTA counts those of its part that may be the
// threshold into 256 bins and hands the counts to all others, so that all find the bin that holds it; the first round has
// an eighth of a power of two a bin, the next ones a 256th of the bin before. Rounds end when a bin is selected whole, which
// takes two or three, or holds equal importances alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "layer.cuh"
#include "score.cuh"

namespace htree_cuda::sm90::htree_decode {

// Importances begin .. begin + range may be the threshold. In the first round, all: bins are eighths of powers of two from
// 2^-27 on, and the end bins hold what lies outside.
struct Range {
  static constexpr uint32_t kFirstBin = (127 - 27) << 3;
  static constexpr int kFirstShift = 20;
  static constexpr uint32_t kInfinity = 0x7f800000u;

  uint32_t begin = 0;
  uint32_t range = kInfinity;
  bool first = true;

  __device__ __forceinline__ int shift() const { return max(24 - __clz(range), 0); }
  __device__ __forceinline__ bool holds(uint32_t x) const { return x - begin <= range; }
  __device__ __forceinline__ uint32_t bin(uint32_t x) const {
    if (!first) return (x - begin) >> shift();
    uint32_t const eighth = x >> kFirstShift;
    return eighth <= kFirstBin ? 0u : min(eighth - kFirstBin, kBins - 1u);
  }
  __device__ __forceinline__ void narrow(uint32_t bin) {
    if (first) {
      begin = bin == 0 ? 0u : (kFirstBin + bin) << kFirstShift;
      range = bin == 0 ? ((kFirstBin + 1) << kFirstShift) - 1 : bin == kBins - 1 ? kInfinity - begin : (1u << kFirstShift) - 1;
    } else {
      int const bits = shift();
      begin += bin << bits;
      range = (1u << bits) - 1;
    }
    first = false;
  }
};

// The counts of a round, of all parts: two bins a word.
template <class Cfg>
__device__ __forceinline__ uint32_t* histograms_of(Smem<Cfg>& smem, int parts, int round, int part) {
  return smem.layers.histograms + (round % 2 * parts + part) * (kBins / 2);
}

// The bin that holds the k-th largest, from the counts of all parts, to smem.threshold. Threads 0 .. 127 have two bins each,
// the largest first.
template <class Cfg>
__device__ __forceinline__ void find_bin(Smem<Cfg>& smem, int parts, int round, uint32_t k) {
  static_assert(Cfg::kThreads >= kBins / 2);
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  constexpr int kSumming = kBins / 2 / 32;  // warps
  int const word = kBins / 2 - 1 - static_cast<int>(threadIdx.x);
  uint32_t two = 0;
  uint32_t inclusive = 0;
  if (warp < kSumming) {
#pragma unroll 4
    for (int p = 0; p < parts; ++p) two += histograms_of(smem, parts, round, p)[word];
    inclusive = (two & 0xffffu) + (two >> 16);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      uint32_t const before = __shfl_up_sync(0xffffffffu, inclusive, d);
      if (lane >= d) inclusive += before;
    }
    if (lane == 31) smem.bin_sums[warp] = inclusive;
  }
  __syncthreads();
  if (warp < kSumming) {
    uint32_t passed = inclusive - (two & 0xffffu) - (two >> 16);
#pragma unroll 1
    for (int w = 0; w < warp; ++w) passed += smem.bin_sums[w];
    uint32_t const upper = two >> 16;
    uint32_t const lower = two & 0xffffu;
    if (passed < k && k <= passed + upper) smem.threshold = {2u * word + 1u, k - passed, upper};
    passed += upper;
    if (passed < k && k <= passed + lower) smem.threshold = {2u * word, k - passed, lower};
  }
  __syncthreads();
}

// Bits of the words before a word; all lanes of a warp.
__device__ __forceinline__ uint32_t bits_before(uint32_t const* words, int count, int lane) {
  uint32_t const bits = lane < count ? __popc(words[lane]) : 0;
  uint32_t inclusive = bits;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    uint32_t const before = __shfl_up_sync(0xffffffffu, inclusive, d);
    if (lane >= d) inclusive += before;
  }
  return inclusive - bits;
}

// Leaves the expanded candidates of the part in smem.expanded, and the parents of the next layer's blocks in `nodes` of the CTA
// that has them. More than top_k candidates exist. smem.layers.importance is read; the CTA's barrier after it was written is here.
template <class Cfg>
__device__ __forceinline__ void select_layer(Layer const& layer, Smem<Cfg>& smem, int top_k, int part, int parts,
                                             std::int32_t* nodes) {
  int const lane = threadIdx.x % 32;
  int const count = layer.part_candidates();
  int const candidates = kSiblings * (layer.last - layer.first);
  uint32_t k = top_k - 1;
  Range range;
  Digit found;
  int round = 0;
#pragma unroll 1
  while (true) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins / 4; i += Cfg::kThreads) smem.layers.histogram[i] = uint4{};
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += Cfg::kThreads) {
      uint32_t const x = smem.layers.importance[i];
      if (range.holds(x)) atomicAdd(reinterpret_cast<uint32_t*>(smem.layers.histogram) + range.bin(x), 1u);
    }
    __syncthreads();
    // Four bins of 16 bits at a time, to every CTA.
    uint32_t const own = ptx::shared_address(histograms_of(smem, parts, round, part));
#pragma unroll 1
    for (int i = threadIdx.x; i < kBins / 4 * parts; i += Cfg::kThreads) {
      uint4 const four = smem.layers.histogram[i % (kBins / 4)];
      ptx::store_cluster_8B(ptx::map_to_rank(own + i % (kBins / 4) * 8, i / (kBins / 4)),
                            {__uint_as_float(four.x | four.y << 16), __uint_as_float(four.z | four.w << 16)});
    }
    barriers::cluster_sync();
    find_bin(smem, parts, round, k);
    found = smem.threshold;
    range.narrow(found.bin);
    k = found.room;
    if (found.room == found.count || range.range == 0) break;
    ++round;
  }

  // Candidates above the bin are selected, and the bin's own: all of them, or as many of the lowest positions as fit.
  bool const ties = found.room != found.count;
  int const words = max(candidates / 32 + candidates % 32 / 16, 1);
  uint32_t room = 0;  // for equal ones of this part
  if (ties) {         // the same in every CTA
    uint32_t before = 0;
#pragma unroll 1
    for (int p = 0; p < part; ++p) {
      before += histograms_of(smem, parts, round, p)[found.bin / 2] >> found.bin % 2 * 16 & 0xffffu;
    }
    room = found.room > before ? found.room - before : 0;
#pragma unroll 1
    for (int w = threadIdx.x / 32; w < words; w += Cfg::kWarps) {
      int const i = 32 * w + lane;
      uint32_t const equal = __ballot_sync(0xffffffffu, i < count && smem.layers.importance[i] == range.begin);
      if (lane == 0) smem.equal[w] = equal;
    }
    __syncthreads();
  }
  uint32_t const equal_before = ties ? bits_before(smem.equal, words, lane) : 0;
#pragma unroll 1
  for (int w = threadIdx.x / 32; w < words; w += Cfg::kWarps) {
    int const i = 32 * w + lane;
    uint32_t const x = i < count ? smem.layers.importance[i] : 0;
    bool selected = i < count && x >= range.begin;
    uint32_t const first = __shfl_sync(0xffffffffu, equal_before, w);
    if (ties && selected && x == range.begin) {
      selected = first + __popc(smem.equal[w] & ((1u << lane) - 1u)) < room;
    }
    selected |= layer.last == layer.blocks && kSiblings * layer.first + i == layer.n - 1;  // the rightmost
    uint32_t const word = __ballot_sync(0xffffffffu, selected);
    if (lane == 0) smem.expanded[w] = word;
  }
  __syncthreads();

  // The rank of a node says whose it is: it becomes the parent of that block of the next layer.
  uint32_t const before = bits_before(smem.expanded, words, lane);
  uint32_t const total = __shfl_sync(0xffffffffu, before + (lane < words ? __popc(smem.expanded[lane < words ? lane : 0]) : 0), words - 1);
  if (static_cast<int>(threadIdx.x) < parts) {
    ptx::store_cluster_4B(ptx::map_to_rank(ptx::shared_address(&smem.counts[part]), threadIdx.x), total);
  }
  barriers::cluster_sync();
  uint32_t base = 0;
#pragma unroll 1
  for (int p = 0; p < part; ++p) base += smem.counts[p];
  int const share = top_k / parts;
  uint32_t const to = ptx::shared_address(nodes);
#pragma unroll 1
  for (int w = threadIdx.x / 32; w < words; w += Cfg::kWarps) {
    uint32_t const word = smem.expanded[w];
    uint32_t const rank = base + __shfl_sync(0xffffffffu, before, w) + __popc(word & ((1u << lane) - 1u));
    if ((word >> lane & 1u) && rank < static_cast<uint32_t>(top_k)) {
      int const i = 32 * w + lane;
      int const node = layer.first_node(layer.first + i / kSiblings) + i % kSiblings;
      ptx::store_cluster_4B(ptx::map_to_rank(to + rank % share * 4, rank / share), static_cast<uint32_t>(node));
    }
  }
  barriers::cluster_sync();
}

}  // namespace htree_cuda::sm90::htree_decode

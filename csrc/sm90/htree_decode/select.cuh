// Selection of one layer by the whole cluster: the top_k candidates of highest importance, the rightmost among them, ties to the
// lower position. Importances stay where they were computed. Every round, each CTA counts those of its own that may be the
// threshold into 256 bins and hands the counts to all others, so that all find the bin that holds it; the first round has
// a 64th of a power of two a bin near the mean, the next ones a 256th of the bin before. Rounds end when a bin is selected whole, which
// takes two or three, or holds equal importances alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/barriers.cuh"
#include "device/ptx.cuh"
#include "layer.cuh"
#include "softmax.cuh"

namespace htree_cuda::sm90::htree_decode {

// The counts of a round, of all CTAs: two bins a word.
template <class Cfg>
__device__ __forceinline__ uint32_t* histograms_of(Smem<Cfg>& smem, int ctas, int round, int cta) {
  return smem.histograms + (round % 2 * ctas + cta) * (kBins / 2);
}

// The bin that holds the k-th largest, from the counts of all CTAs, to smem.threshold. Four warps look for it, two bins a lane,
// the largest first. What lies in the CTAs before this one is added up beside it, 16 bits up: a layer has at most 8,192
// candidates.
template <class Cfg>
__device__ __forceinline__ void find_bin(Smem<Cfg>& smem, int cta, int ctas, int warp, int round, uint32_t k) {
  static_assert(kBins == 2 * 32 * kBinWarps && kBinWarps <= Cfg::kWarps && tree::kMaxTopK * kSiblings < 1 << 16);
  if (warp < kBinWarps) {
    int const lane = lane_of_warp();
    int const two = kBins / 2 - 1 - thread_of_cta(warp);
    uint32_t counts = 0;
    uint32_t before = 0;  // likewise, in the CTAs before this one
#pragma unroll 4
    for (int p = 0; p < ctas; ++p) {
      uint32_t const x = histograms_of(smem, ctas, round, p)[two];
      if (p < cta) before += x;
      counts += x;
    }
    auto const total = [](uint32_t two_counts) { return (two_counts & 0xffffu) + (two_counts >> 16); };
    uint32_t const own = total(counts) + (total(before) << 16);
    uint32_t passed = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      uint32_t const less = __shfl_up_sync(kFullWarp, passed, d);
      if (lane >= d) passed += less;
    }
    if (lane == 31) smem.counted[warp] = passed;
    meet_bin_warps(smem, warp);
    passed -= own;
#pragma unroll
    for (int w = 0; w < kBinWarps - 1; ++w) {
      if (w < warp) passed += smem.counted[w];
    }
    uint32_t above = passed & 0xffffu;
    uint32_t above_before = passed >> 16;
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      uint32_t const count = counts >> 16 * i & 0xffffu;
      uint32_t const count_before = before >> 16 * i & 0xffffu;
      if (above < k && k <= above + count) smem.threshold = {2u * two + i, k - above, count, above_before, count_before};
      above += count;
      above_before += count_before;
    }
  }
  __syncthreads();
}

// How many bits are set in the words before a word, by all lanes of a warp: a lane counts those before word kOfLane * lane.
template <int kMaxWords>
struct BitsBefore {
  static constexpr int kOfLane = kMaxWords / 32;
  uint32_t const* words;
  uint32_t before;

  __device__ __forceinline__ BitsBefore(uint32_t const* words_, int count, int lane) : words(words_) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      int const w = kOfLane * lane + i;
      if (w < count) bits += __popc(words[w]);
    }
    uint32_t inclusive = bits;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      uint32_t const less = __shfl_up_sync(kFullWarp, inclusive, d);
      if (lane >= d) inclusive += less;
    }
    before = inclusive - bits;
  }

  __device__ __forceinline__ uint32_t word(int w) const {
    uint32_t bits = __shfl_sync(kFullWarp, before, w / kOfLane);
#pragma unroll
    for (int i = 0; i < kOfLane - 1; ++i) {
      if (i < w % kOfLane) bits += __popc(words[w / kOfLane * kOfLane + i]);
    }
    return bits;
  }
};

// Takes the expanded candidates of the CTA from smem.attended and out of P, and leaves the parents of the next layer's blocks in `nodes` of the CTA
// that has them. More than top_k candidates exist. smem.importance is read, and smem.histogram in the first round; the
// CTA's barrier after both were written is here.
template <class Cfg>
__device__ __forceinline__ void select_layer(Args const& args, Layer const& layer, Smem<Cfg>& smem, int warp,
                                             std::int32_t* nodes) {
  int const cta = cta_index();
  int const ctas = Split(args).ctas();
  int const top_k = args.top_k;
  int const lane = lane_of_warp();
  int const count = layer.candidates_of_cta();
  int const candidates = kSiblings * (layer.last - layer.first);
  uint32_t k = top_k - 1;
  Range range(layer.fine);
  Digit found;
  uint32_t base = 0;  // selected candidates of the CTAs before this one
  int round = 0;
#pragma unroll 1
  while (true) {
    if (round > 0) {
#pragma unroll 1
      for (int i = thread_of_cta(warp); i < kBins / 4; i += Cfg::kThreads) smem.histogram[i] = uint4{};
      __syncthreads();
#pragma unroll 1
      for (int i = thread_of_cta(warp); i < count; i += Cfg::kThreads) {
        uint32_t const x = smem.importance[i];
        if (range.holds(x)) atomicAdd(reinterpret_cast<uint32_t*>(smem.histogram) + range.bin(x), 1u);
      }
    }
    __syncthreads();
    // Eight bins of 16 bits at a time, to every CTA.
    Message const message = round % 2 ? Message::kOddCounts : Message::kEvenCounts;
    uint32_t const own = ptx::shared_address(histograms_of(smem, ctas, round, cta));
#pragma unroll 1
    for (int i = thread_of_cta(warp); i < kBins / 8 * ctas; i += Cfg::kThreads) {
      int const eight = i % (kBins / 8);
      uint4 const low = smem.histogram[2 * eight];
      uint4 const high = smem.histogram[2 * eight + 1];
      ptx::store_async(ptx::map_to_rank(own + eight * 16, i / (kBins / 8)),
                       uint4{low.x | low.y << 16, low.z | low.w << 16, high.x | high.y << 16, high.z | high.w << 16},
                       ptx::map_to_rank(inbox(smem, message), i / (kBins / 8)));
    }
    receive<Cfg>(args, smem, message, warp);
    find_bin(smem, cta, ctas, warp, round, k);
    found = smem.threshold;
    range.narrow(found.bin);
    k = found.room;
    base += found.above_before;
    if (found.room == found.count || range.range == 0) break;
    ++round;
  }

  // Candidates above the bin are selected, and the bin's own: all of them, or as many of the lowest positions as fit.
  bool const ties = found.room != found.count;
  int const words = max(candidates / 32 + candidates % 32 / 16, 1);
  uint32_t const taken = min(found.count_before, found.room);  // of the bin, by the CTAs before this one
  uint32_t const room = found.room - taken;                    // for equal ones of this CTA
  base += taken;
  if (ties) {  // the same in every CTA
#pragma unroll 1
    for (int w = warp; w < words; w += Cfg::kWarps) {
      int const i = 32 * w + lane;
      uint32_t const equal = __ballot_sync(kFullWarp, i < count && smem.importance[i] == range.begin);
      if (lane == 0) smem.equal[w] = equal;
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int w = warp; w < words; w += Cfg::kWarps) {
    int const i = 32 * w + lane;
    uint32_t const x = i < count ? smem.importance[i] : 0;
    bool selected = i < count && x >= range.begin;
    if (ties) {
      uint32_t const first = BitsBefore<Cfg::kMaxWords>(smem.equal, words, lane).word(w);
      if (selected && x == range.begin) selected = first + __popc(smem.equal[w] & ((1u << lane) - 1u)) < room;
    }
    selected |= layer.last == layer.blocks && kSiblings * layer.first + i == layer.n - 1;  // the rightmost
    uint32_t const word = __ballot_sync(kFullWarp, selected);
    if (lane == 0) smem.expanded[w] = word;
  }
  __syncthreads();

  // The rank of a node says whose it is: it becomes the parent of that block of the next layer.
  BitsBefore<Cfg::kMaxWords> const before(smem.expanded, words, lane);
  int const share = top_k / ctas;
  uint32_t const to = ptx::shared_address(nodes);
#pragma unroll 1
  for (int w = warp; w < words; w += Cfg::kWarps) {
    uint32_t const word = smem.expanded[w];
    uint32_t const rank = base + before.word(w) + __popc(word & ((1u << lane) - 1u));
    if ((word >> lane & 1u) && rank < static_cast<uint32_t>(top_k)) {
      int const i = 32 * w + lane;
      int const node = layer.first_node(layer.first + i / kSiblings) + i % kSiblings;
      ptx::store_async(ptx::map_to_rank(to + rank % share * 4, rank / share), static_cast<uint32_t>(node),
                       ptx::map_to_rank(inbox(smem, Message::kNodes), rank / share));
    }
    if (word >> lane & 1u) {
      int const i = 32 * w + lane;
      float* const p = smem.scores(args);
#pragma unroll 1
      for (int head = 0; head < args.G; ++head) {
        p[4 * score_place(args, i / kSiblings, head, i % kSiblings / 4) + i % 4] = 0.0f;
      }
    }
    if (lane < 2 && 32 * w + kSiblings * lane < candidates) smem.attended[2 * w + lane] &= ~(word >> kSiblings * lane);
  }
  __syncthreads();  // what is attended
  receive<Cfg>(args, smem, Message::kNodes, warp);
}

}  // namespace htree_cuda::sm90::htree_decode

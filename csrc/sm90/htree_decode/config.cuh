// Data sheet of the decode kernel: one query of one sequence, all heads of a KV head, over a cached tree.
//
//   part          one of 4, 8 or 16 (parts_of) equal shares of a layer's blocks of 16 candidates, by rank. Parts follow
//                 from the position, top_k and the group alone, so a query has the same bits in every call
//   cluster       its CTAs serve one (query, KV head), from the entry layer down to the tokens, in one launch. A CTA scores
//                 and attends one part, or several where a call has many queries (launch.cuh): what a layer costs whatever
//                 its size, messages and the rounds of a selection, is then shared by more blocks
//   stream        every eighth block of a part, scored by one warp; 16 rows of keys go from global memory to registers,
//                 16 bytes a lane
//   slot          every second block of a part, attended by four warps: half of the dimensions of every second of them, each
//   products      mma.sync m16n8k8 in tf32: bf16 and fp16 are exact in it, and rotated operands keep 11 bits without a
//                 scale. S^T = K q^T and O^T = V^T P^T with heads as columns
//   rotation      <R(q, n-1), R(k, 16 j + c)> = <R(q, n-1-16 j), R(k, c)>: a lane's two rows of keys always have the same
//                 c; the query rotates in its registers from one block of the stream to the next
//   scores        stay in shared memory and become P there, relative to the part's maximum of each head: keys are read
//                 once, and there is one exponential a candidate and head
//   exchange      through the cluster's shared memory (exchange.cuh): (maximum, sum) of every part; histograms of
//                 importances, from which each CTA finds the same threshold; nodes, by the CTA that selected them to the one
//                 that expands them; outputs, to the CTA that adds them
//   registers     128 a thread with 8 heads or fewer (two CTAs of 8 warps an SM, or one of 16), up to 255 above (one of 8)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"
#include "device/sm90.cuh"
#include "args.cuh"
#include "layer.cuh"
#include "split.cuh"
#include "tree/geometry.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr int kHeads = 16;  // at most

// kHalves_: rotated pairs are the halves of K, else what Args::pairing says.
template <class Element_, int kK_, int kV_, int kHeadTiles_, bool kHalves_, bool kLarge_>
struct Config {
  using Element = Element_;  // __nv_bfloat16 or __half
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kHeadTiles = kHeadTiles_;        // of 8 heads
  static constexpr bool kHalves = kHalves_;
  static constexpr int kTileHeads = 8 * kHeadTiles;
  static constexpr int kPairs = kK / 8;                 // rotated pairs of a row that a lane holds
  static constexpr int kKeyChunks = kK / 32;            // 16-byte chunks of a row of keys that a lane holds
  static constexpr int kSideTiles = kV / 32;            // tiles of 16 dimensions in a half of O^T
  static constexpr bool kLarge = kLarge_;               // a CTA that has its SM alone
  static constexpr int kWarps = kLarge ? 16 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = kHeadTiles == 1 && !kLarge ? 2 : 1;
  static constexpr int kRotationStride = kK / 2 + 8;    // float2 of a row in shared memory: two rows do not meet in a bank
  static constexpr int kOutputStride = kV + 4;          // floats of a head's outputs in a state: heads do not meet in a bank
  static constexpr int kMaxBlocks = kLarge ? 256 : 64;  // of a CTA, in a layer
  static constexpr int kMaxWords = kMaxBlocks / 2;      // of 32 candidates
  static_assert(kK % 64 == 0 && kV % 64 == 0);
};

inline constexpr int kBins = 256;  // of a histogram of importances
inline constexpr int kBinWarps = 4;  // that look for the threshold's

// What a round of the selection has found: the bin that holds the threshold.
struct Digit {
  uint32_t bin;
  uint32_t room;          // of its candidates, how many are selected
  uint32_t count;         // how many there are
  uint32_t above_before;  // of the CTAs before this one: candidates above the bin, of those that the round has counted
  uint32_t count_before;  // likewise, in the bin
};

// What is sent between the CTAs of a cluster.
enum class Message : int { kSums, kNodes, kEvenCounts, kOddCounts, kOutputs };
inline constexpr int kMessages = 5;

template <class Cfg>
struct Smem {
  float4 rotations[(kSiblings + 1) * Cfg::kRotationStride / 2];  // positions 0 .. 15, and a stream's step between blocks
  uint4 query[Cfg::kTileHeads * Cfg::kK / 8];                    // the heads as given
  uint4 histogram[kBins / 4];                                    // of the CTA's importances
  alignas(16) uint32_t histograms[2 * kMaxParts * (kBins / 2)];  // of every CTA, two bins a word; two rounds, alternating
  uint32_t importance[Cfg::kMaxBlocks * kSiblings];
  float2 part_sums[kMaxParts * kHeads];              // maximum and sum of the scores of each part
  // The next five describe the CTA's parts in the layer that is attended.
  float maxima[kMaxPartsOfCta * kStreams * kHeads];  // of the scores of each stream
  float sums[kMaxPartsOfCta * kStreams * kHeads];    // of P of each stream
  float part_maxima[kMaxPartsOfCta * kHeads];
  float importance_factors[kMaxPartsOfCta * kHeads]; // by which P becomes the probability in the layer
  float2 factors[kMaxPartsOfCta * kHeads];           // of what was attended before, and of what this layer adds
  // The next two describe the CTA's parts over all layers attended up to now.
  float references[kMaxPartsOfCta * kHeads];         // states are relative to exp2 of this
  float slot_sums[kMaxPartsOfCta * kSlots * kHeads];
  std::uint64_t inboxes[kMessages];       // mbarriers
  // mbarriers at which all lanes of some warps meet: of a pair, and of those that look for a bin.
  std::uint64_t pairs[Cfg::kWarps / kPartners];
  std::uint64_t bin_warps;
  // Each thread's own: the parity that it awaits next, bit i of message i, then of its pair, then of the warps that look for a bin.
  uint32_t phases[Cfg::kThreads];
  uint32_t expanded[Cfg::kMaxWords];           // bit i % 32 of word i / 32: candidate i of the CTA is expanded
  uint32_t equal[Cfg::kMaxWords];              // likewise, its importance is the threshold
  std::uint16_t attended[Cfg::kMaxBlocks];     // bit c: candidate c of a block of the CTA is attended
  std::int32_t nodes[2 * Cfg::kMaxBlocks];     // parents of the CTA's blocks, in this layer and in the next, alternating
  // Where the CTA's candidates lie, in this layer and in the next, alternating: rows of the cache's tensors, of which no GPU
  // holds 2^32.
  uint4 rows[2 * Cfg::kMaxBlocks * kSiblings / 4];
  Digit threshold;
  uint32_t counted[kBinWarps];  // candidates of a warp's bins; 16 bits up, of those before this CTA
  Unit unit;
  Layer layers[2];  // this one and the next, alternating
  // As much as the call needs:
  //   outputs of parts   [parts][heads][dimensions that this CTA adds], from all CTAs at the end
  //   states             [parts of the CTA][slots][heads][kOutputStride], what was attended so far
  //   scores             [blocks of the CTA][heads][16], then P
  float4 tail[1];

  __device__ __forceinline__ float* outputs() { return reinterpret_cast<float*>(tail); }
  __device__ __forceinline__ float* states(Args const& args) {
    return outputs() + (args.G * Cfg::kV << args.log2_parts_of_cta);
  }
  __device__ __forceinline__ float* scores(Args const& args) {
    return states(args) + (kSlots * args.G * Cfg::kOutputStride << args.log2_parts_of_cta);
  }
};

inline constexpr int kMaxSharedBytesOfTwo = 233472 / 2 - 1024;  // where two CTAs share an SM

template <class Cfg>
constexpr int shared_bytes(int top_k, int G, int parts_of_cta) {
  int const of_part = Cfg::kV + kSlots * Cfg::kOutputStride + top_k / parts_of(top_k, G) * kSiblings;
  return static_cast<int>(offsetof(Smem<Cfg>, tail)) + parts_of_cta * G * of_part * 4;
}

template <class Cfg>
constexpr bool fits(int top_k, int G, int parts_of_cta) {
  return parts_of_cta * top_k / parts_of(top_k, G) <= Cfg::kMaxBlocks &&
         shared_bytes<Cfg>(top_k, G, parts_of_cta) <= (Cfg::kBlocksPerSM == 2 ? kMaxSharedBytesOfTwo : kMaxSharedBytes);
}

}  // namespace htree_cuda::sm90::htree_decode

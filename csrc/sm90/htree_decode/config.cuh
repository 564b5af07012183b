// Data sheet of the decode kernel: one query of one sequence, all heads of a KV head, over a cached tree.
//
//   part          one of 4, 8 or 16 (parts_of) equal shares of a layer's blocks of 16 candidates, by rank. Parts follow
//                 from the position, top_k and the group alone, so a query has the same bits in every call
//   cluster       its CTAs serve one (query, KV head), from the entry layer down to the tokens, in one launch. A CTA scores
//                 and attends one part, or two where a call fills the GPU more than once (parts_of_cta): a wave then serves
//                 twice as many queries, whose selections take hardly longer
//   warp          every eighth block of the part, from the warp's own number on; 16 rows of keys go
//                 from global memory to registers, 16 bytes a lane, prefetched to L2 when a layer begins
//   products      mma.sync m16n8k8 in tf32: bf16 and fp16 are exact in it, and rotated operands keep 11 bits without a
//                 scale. S = q K^T with heads as rows; O^T = V^T P^T with heads as columns, so that P is an operand where
//                 it was computed
//   rotation      <R(q, n-1), R(k, 16 j + c)> = <R(q, n-1-16 j), R(k, c)>: a lane's two rows of keys always have the same
//                 c; the query rotates in place from one block of the warp to the next
//   scores        of a selecting layer stay in shared memory, where the lane that computed them reads them again, so keys
//                 are read once
//   exchange      through the cluster's shared memory (exchange.cuh): (maximum, sum) of every part; histograms of
//                 importances, from which each CTA finds the same threshold; nodes, by the CTA that selected them to the one
//                 that expands them; outputs, to the CTA that adds them
//   registers     128 a thread with 8 heads or fewer (two CTAs of 8 warps an SM), up to 255 above (one)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device/ptx.cuh"
#include "args.cuh"
#include "layer.cuh"
#include "split.cuh"
#include "tree/geometry.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr int kHeads = 16;  // at most

// kHalves_: rotated pairs are the halves of K, else what Args::pairing says.
template <class Element_, int kK_, int kV_, int kHeadTiles_, bool kHalves_, int kPartsOfCta_>
struct Config {
  using Element = Element_;  // __nv_bfloat16 or __half
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kHeadTiles = kHeadTiles_;        // of 8 heads
  static constexpr bool kHalves = kHalves_;
  static constexpr int kTileHeads = 8 * kHeadTiles;
  static constexpr int kPartsOfCta = kPartsOfCta_;
  static constexpr bool kCompact = kPartsOfCta > 1;     // outputs of kCompactHeads heads alone are kept
  static constexpr int kMaxHeads = kCompact ? kCompactHeads : kTileHeads;
  static constexpr int kPairs = kK / 8;                 // rotated pairs of a row that a lane holds
  static constexpr int kKeyChunks = kK / 32;            // 16-byte chunks of a row of keys that a lane holds
  static constexpr int kValueChunks = kV / 64;          // likewise of a row of values
  static constexpr int kDimTiles = kV / 16;             // tiles of 16 dimensions of O^T
  static constexpr int kQueryVectors = kHeadTiles * kPairs / 2;  // float4 of a lane's query in shared memory
  // fp16 operands are rounded, and other pairs are looked up, which takes registers that eight warps do not have.
  static constexpr int kWarps =
      kHeadTiles == 1 && kK == 128 && (std::is_same_v<Element, __half> || !kHalves) ? 6 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = kHeadTiles == 1 ? 2 : 1;
  static constexpr int kRotationStride = kK / 2 + 8;    // float2 of a row in shared memory: two rows do not meet in a bank
  static constexpr int kStateLanes = kCompact ? 16 : 32;
  static constexpr int kStateVectors = kHeadTiles * (kDimTiles + 1) * kStateLanes;  // float4 of a warp's State in shared memory
  static constexpr int kOutputVectors = kPartsOfCta * kTileHeads * kV / 4;          // that a CTA adds
  static constexpr int kFirstScore = kOutputVectors + kPartsOfCta * kWarps * kStateVectors;  // in Smem::tail
  static_assert(kK % 64 == 0 && kV % 64 == 0);
  static_assert(kPartsOfCta == 1 || (kPartsOfCta <= kMaxPartsOfCta && kHeadTiles == 1));
};

// The lane's number; with two parts a CTA it is read where it is used, because registers are scarce.
template <class Cfg>
__device__ __forceinline__ int lane_of() {
  return static_cast<int>(Cfg::kPartsOfCta == 1 ? threadIdx.x % 32 : ptx::lane_index());
}

inline constexpr int kBins = 256;  // of a histogram of importances
inline constexpr int kMaxBlocks = kMaxPartsOfCta * tree::kMaxTopK / kMaxParts;  // of a CTA, in a layer
static_assert(kMaxBlocks >= kMaxPartsOfCta * 128 / 8 && kMaxBlocks >= kMaxPartsOfCta * 64 / 4);
inline constexpr int kMaxWords = kMaxBlocks / 2;  // of 32 candidates
static_assert(kMaxWords <= 32, "a warp counts the bits of all of them");

__host__ __device__ constexpr int score_lanes(int G) { return 4 * (G < 8 ? G : 8); }

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

// While layers are scored and attended.
template <class Cfg>
struct LayerSmem {
  union {
    float4 queries[Cfg::kWarps * Cfg::kQueryVectors * 32];  // until all CTAs have their scores
    struct {
      uint32_t histograms[2 * kMaxParts * (kBins / 2)];  // of every CTA, two bins a word; two rounds, alternating
      uint32_t importance[kMaxBlocks * kSiblings];
    };
  };
};

// When warps merge their outputs.
template <class Cfg>
struct MergeSmem {
  float4 out[Cfg::kWarps * Cfg::kTileHeads * Cfg::kV / 4];
};

template <class Cfg>
struct Smem {
  float4 rotations[(kSiblings + 1) * Cfg::kRotationStride / 2];  // positions 0 .. 15, and a warp's step between blocks
  uint4 query[Cfg::kTileHeads * Cfg::kK / 8];                    // the heads as given
  uint4 histogram[kBins / 4];                                    // of the CTA's importances
  float2 part_sums[kMaxParts * kHeads];                          // maximum and sum of the scores of each part
  float2 warp_sums[Cfg::kPartsOfCta * Cfg::kWarps * kHeads];
  float2 merged_sums[kHeads];
  std::uint64_t inboxes[kMessages];       // mbarriers
  uint32_t phases[Cfg::kThreads];         // each thread's own: bit i is the parity of message i that it awaits next
  uint32_t bin_sums[4];                   // of 64 bins each, of all CTAs, and 16 bits up of the CTAs before this one
  uint32_t expanded[kMaxWords];           // bit i % 32 of word i / 32: candidate i of the CTA is expanded
  uint32_t equal[kMaxWords];              // likewise, its importance is the threshold
  std::int32_t nodes[2 * kMaxBlocks];     // parents of the CTA's blocks, in this layer and in the next, alternating
  int part_ends[Cfg::kWarps];             // of the part that each warp scores, where a CTA has two
  std::int64_t rows[kMaxBlocks];          // the first row of each of the CTA's blocks
  Digit threshold;
  Unit unit;
  Layer layer;
  union {
    LayerSmem<Cfg> layers;
    MergeSmem<Cfg> merge;
  };
  // As much as the call needs:
  //   outputs of parts   [parts][heads][dimensions that this CTA adds], from all CTAs at the end
  //   states             [parts of the CTA][warps][kStateVectors], the State of each warp between its attend passes
  //   scores             [blocks of the CTA][score_lanes][head tiles]
  float4 tail[1];
};

inline constexpr int kMaxSharedBytes = 232448;
inline constexpr int kMaxSharedBytesOfTwo = 233472 / 2 - 1024;  // where two CTAs share an SM

template <class Cfg>
constexpr int shared_bytes(int top_k, int G) {
  int const scores = Cfg::kPartsOfCta * top_k / parts_of(top_k, G) * score_lanes(G) * Cfg::kHeadTiles;
  return static_cast<int>(offsetof(Smem<Cfg>, tail)) + (Cfg::kFirstScore + scores) * 16;
}

// The largest calls fit.
template <class Cfg>
constexpr bool fits() {
  int const limit = Cfg::kBlocksPerSM == 2 ? kMaxSharedBytesOfTwo : kMaxSharedBytes;
  return shared_bytes<Cfg>(tree::kMaxTopK, Cfg::kMaxHeads) <= limit;
}

}  // namespace htree_cuda::sm90::htree_decode

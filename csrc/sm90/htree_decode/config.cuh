// Data sheet of the decode kernel: one query of one sequence, all heads of a KV head, over a cached tree.
//
//   cluster       4, 8 or 16 CTAs (parts_of) serve one (query, KV head), from the entry layer down to the tokens, in one
//                 launch
//   part          an equal share of a layer's blocks of 16 candidates, by rank: what a CTA scores and attends. Parts follow
//                 from the position, top_k and the group alone, so a query has the same bits in every call
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

#include "args.cuh"
#include "layer.cuh"
#include "tree/geometry.cuh"

namespace htree_cuda::sm90::htree_decode {

inline constexpr int kMaxParts = 16;
inline constexpr int kHeads = 16;  // at most

// CTAs of a cluster. With 4, a warp has two blocks of a layer where top_k is 64: fewer CTAs spend their time on what every
// CTA does, which costs a call of one sequence little where two CTAs share an SM.
__host__ __device__ constexpr int parts_of(int top_k, int G) { return top_k > 128 ? 16 : top_k > 64 || G > 8 ? 8 : 4; }

// kHalves_: rotated pairs are the halves of K, else what Args::pairing says.
template <class Element_, int kK_, int kV_, int kHeadTiles_, bool kHalves_>
struct Config {
  using Element = Element_;  // __nv_bfloat16 or __half
  static constexpr int kK = kK_;
  static constexpr int kV = kV_;
  static constexpr int kHeadTiles = kHeadTiles_;        // of 8 heads
  static constexpr bool kHalves = kHalves_;
  static constexpr int kTileHeads = 8 * kHeadTiles;
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
  static_assert(kK % 64 == 0 && kV % 64 == 0);
};

inline constexpr int kBins = 256;  // of a histogram of importances
inline constexpr int kMaxPartBlocks = tree::kMaxTopK / kMaxParts;
static_assert(kMaxPartBlocks >= 128 / 8 && kMaxPartBlocks >= 64 / 4);
inline constexpr int kMaxPartWords = kMaxPartBlocks / 2;  // of 32 candidates
static_assert(kMaxPartWords <= 32, "a warp counts the bits of all of them");

__host__ __device__ constexpr int max_part_blocks(int top_k, int G) { return top_k / parts_of(top_k, G); }
__host__ __device__ constexpr int score_lanes(int G) { return 4 * (G < 8 ? G : 8); }

// What a round of the selection has found: the bin that holds the threshold.
struct Digit {
  uint32_t bin;
  uint32_t room;          // of its candidates, how many are selected
  uint32_t count;         // how many there are
  uint32_t above_before;  // of the parts before this one: candidates above the bin, of those that the round has counted
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
      uint32_t histograms[2 * kMaxParts * (kBins / 2)];  // of every part, two bins a word; two rounds, alternating
      uint32_t importance[kMaxPartBlocks * kSiblings];
    };
  };
  float4 scores[1];  // [blocks of a part][score_lanes][head tiles], as many as the call needs
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
  float4 outputs_of_parts[Cfg::kTileHeads * Cfg::kV / 4];        // [parts][heads][dimensions that this CTA adds]
  uint4 histogram[kBins / 4];                                    // of the part's importances
  float2 part_sums[kMaxParts * kHeads];                          // maximum and sum of the scores of each part
  float2 warp_sums[Cfg::kWarps * kHeads];
  float2 merged_sums[kHeads];
  std::uint64_t inboxes[kMessages];       // mbarriers
  uint32_t phases[Cfg::kThreads];         // each thread's own: bit i is the parity of message i that it awaits next
  uint32_t bin_sums[4];                   // of 64 bins each, of all parts, and 16 bits up of the parts before this one
  uint32_t expanded[kMaxPartWords];       // bit i % 32 of word i / 32: candidate i of the part is expanded
  uint32_t equal[kMaxPartWords];          // likewise, its importance is the threshold
  std::int32_t nodes[2 * kMaxPartBlocks]; // parents of the part's blocks, in this layer and in the next, alternating
  Digit threshold;
  Unit unit;
  Layer layer;
  float4 outputs[Cfg::kWarps * Cfg::kHeadTiles * (Cfg::kDimTiles + 1) * 32];  // the State of each warp between its attend passes
  union {
    LayerSmem<Cfg> layers;
    MergeSmem<Cfg> merge;
  };
};

inline constexpr int kMaxSharedBytes = 232448;

template <class Cfg>
int shared_bytes(int top_k, int G) {
  int const scores = max_part_blocks(top_k, G) * score_lanes(G) * Cfg::kHeadTiles - 1;
  int const layers = static_cast<int>(offsetof(Smem<Cfg>, layers) + sizeof(LayerSmem<Cfg>)) + scores * 16;
  static_assert(Cfg::kHeadTiles == 1 || sizeof(Smem<Cfg>) + 1024 * 32 <= kMaxSharedBytes);
  return layers > static_cast<int>(sizeof(Smem<Cfg>)) ? layers : static_cast<int>(sizeof(Smem<Cfg>));
}

}  // namespace htree_cuda::sm90::htree_decode

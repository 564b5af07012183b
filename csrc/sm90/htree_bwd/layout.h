// Data that the kernels of the backward share: the tree, a chunk of queries, the reverse index and packed operands.
//
// The backward works on chunks: some queries of one head (b, h_kv), or all queries of several heads. A query of a chunk
// is a row, and the rows of a head are padded to a multiple of 32. A KV block is 16 sibling nodes, the children of one
// parent.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "namespaces.h"
#include "params.h"
#include "tree/geometry.cuh"
#include "tree/rope.cuh"
#include "tree/row_scale.cuh"

namespace htree_cuda::sm90::htree_bwd {

using namespace host;
using namespace device;
using namespace tree;

inline constexpr int kMaxGroupHeads = 16;  // query heads of a KV head: the rows of a matrix product

// Rows that a query takes of the 16 of a product in selected layers. Groups of 8 and 4 heads, or fewer, leave room for
// a second query, or three more.
__host__ __device__ constexpr int unit_heads(int group) { return group > 8 ? 16 : group > 4 ? 8 : 4; }

inline constexpr int kWordBlocks = 16;     // neighbouring KV blocks that share a word of the reverse index
inline constexpr int kCtaQueries = 8;      // neighbouring queries of a CTA of the dq kernels
inline constexpr int kRowStep = 32;        // rows come in multiples of it

struct Tree {
  int layers;
  int top_k;
  std::int64_t N[kMaxLayers];  // nodes of each layer, the bottom first
  int kv_blocks[kMaxLayers];   // ceil(N / 16)
  int words[kMaxLayers];       // of a row in the reverse index: ceil(kv_blocks / 16)
};

struct Chunk {
  std::int64_t first_head;   // b * H_kv + h_kv
  int heads;
  std::int64_t first_query;  // of the call
  int queries;               // rows that exist
  int rows;                  // of each head, padded
  std::int64_t q_start;      // position of the call's first query

  __host__ __device__ std::int64_t position(int row) const { return q_start + first_query + row; }
};

// The reverse index, for each layer l a table layer[l] of words [heads, words[l], rows]. Bit p of the lower half
// says that the row visits KV block 16 word + p of layer l, because it selected the block's parent. The upper half is
// the rank of the first of these blocks among the row's blocks. A word counts only for rows whose entry layer is above
// l: in its entry layer a row visits the blocks 0, 1, 2, ..., and above it nothing is a leaf. So there are tables for
// the layers below the highest entry layer of the call.
struct ReverseIndex {
  std::uint32_t* layer[kMaxLayers];
};

// Rows of a chunk whose entry layer is `layer`.
struct EntryRows {
  int begin;
  int end;

  __host__ __device__ EntryRows(Chunk const& chunk, int layer, int top_k)
      : begin(layer == 0 ? 0 : row_at(chunk, static_cast<std::int64_t>(top_k) << (kLog2Siblings * layer))),
        end(row_at(chunk, static_cast<std::int64_t>(top_k) << (kLog2Siblings * (layer + 1)))) {}
  __host__ __device__ EntryRows(int begin, int end) : begin(begin), end(end) {}

private:
  static __host__ __device__ int row_at(Chunk const& chunk, std::int64_t position) {
    std::int64_t const row = position - chunk.position(0);
    return static_cast<int>(row < 0 ? 0 : row < chunk.queries ? row : chunk.queries);
  }
};

// The first of the rows of an entry layer that visits a node of that layer; rows.end where none does. Row 0 stands at
// `origin`.
__host__ __device__ inline int first_visiting_row(std::int64_t origin, int layer, EntryRows const& rows, int node) {
  std::int64_t const late = (static_cast<std::int64_t>(node) << (kLog2Siblings * layer)) - origin;
  std::int64_t const row = late < rows.begin ? rows.begin : late;
  return static_cast<int>(row < rows.end ? row : rows.end);
}

// ---- lists of visits -----------------------------------------------------------------------------------------------

// The rows of a range that visit a KV block, ascending, eight bytes each: the row; the position n - 1 - 16 rank of the
// row as the block sees it in the upper half of the second word, and in the lower half the children that the row does not
// attend, because it expanded them or because they lie past it. A list is filled to whole packs: the last visit is
// repeated with all children masked, and kRepeated is set.
inline constexpr std::uint32_t kRepeated = 1u << 31;
inline constexpr int kListUnit = 4;  // lists begin at multiples of so many visits: 32 bytes

// Visits that the lists of a layer have room for: all that there are, and what fills the last unit of each list.
constexpr std::int64_t list_capacity(std::int64_t visits, std::int64_t lists) {
  return visits + lists * (kListUnit - 1);
}

// Ranges of the rows of a chunk, of equally many: while work items of one range run, its queries stay in the L2 cache.
inline constexpr int kMaxRanges = 8;

// A list is cut into segments of about equally many visits, a work item of dkdv_selected each, so that no block keeps a
// warp busy for long: about `wanted` visits, or more where kMaxSegments are not enough.
inline constexpr int kMaxSegments = 4;
inline constexpr int kItemGroups = kMaxRanges * kMaxSegments;  // of a layer: items of a range and of the same segment of lists
static_assert(kItemGroups == 32);  // a lane each

// The counter of a KV block's sums counts kMaxSegments for each range, so that a segment knows what lies before it from the
// ranges alone: the last segment of a list counts for those that the list does not have. A list without visits is an item
// as well, save in the last range, which nobody waits for.
struct SegmentOrder {
  int before;  // the counter when the segment is added
  int counts;  // what it adds to the counter

  static constexpr int kPacksBits = 24;
  // In a word with the number of packs.
  __host__ __device__ constexpr std::uint32_t packed(std::uint32_t packs) const {
    return packs | static_cast<std::uint32_t>(before) << kPacksBits | static_cast<std::uint32_t>(counts - 1) << 29;
  }
  static __host__ __device__ constexpr int packs_of(std::uint32_t word) { return static_cast<int>(word & ((1u << kPacksBits) - 1u)); }
  static __host__ __device__ constexpr SegmentOrder of(std::uint32_t word) {
    return {static_cast<int>(word >> kPacksBits & 31u), static_cast<int>(word >> 29) + 1};
  }
};
static_assert((kMaxRanges * kMaxSegments - 1) < 32 && kMaxSegments <= 8);

struct ListSegments {
  std::uint32_t count;   // one where there are no visits
  std::uint32_t visits;  // of each but the last, whole units

  __device__ __forceinline__ ListSegments(std::uint32_t all, std::uint32_t wanted) {
    std::uint32_t const about = min(max((all + wanted / 2) / wanted, 1u), static_cast<std::uint32_t>(kMaxSegments));
    visits = ((all + about - 1) / about + kListUnit - 1) / kListUnit * kListUnit;
    count = all == 0 ? 1 : (all + visits - 1) / visits;
  }
};

// ---- operands of selected layers ---------------------------------------------------------------------------------

// A KV block, and the heads of a query, as operands of matrix products: a header of float32, 16 rows of K in fp16 and
// 16 rows of V in the dtype. Rows are swizzled: 16-byte chunk i of row c lies at chunk i ^ (c % 8). Row scales of keys
// and queries (tree/row_scale.cuh) are taken back by `inverse` and by `unit`:
//   KV blocks  inverse[16] | keys, rotated by their place among the siblings | values
//   queries    unit[heads], lse2[heads], delta[heads] | q, not rotated | dout; heads: unit_heads of the group
// with s * log2(e) = product * inverse of the key * 2^-kHeadroom * unit, lse2 = lse * log2(e) and
// delta = <dout, out> - dlse.
inline constexpr int kHeadroom = row_scale::kHeadroom;
inline constexpr int kBlockHeader = kSiblings * 4;

__host__ __device__ constexpr std::int64_t operand_bytes(std::int64_t K, std::int64_t V, std::int64_t rows = 16) {
  return rows * 2 * (K + V);
}

// A query has unit_heads rows, and so many numbers of each kind in its header. Before the header of a small group's
// query are bytes that nobody reads, so that its rows lie at multiples of 128 bytes, the lines that copies read.
__host__ __device__ constexpr int query_header(int heads) { return 3 * heads * 4; }
__host__ __device__ constexpr int query_begin(int heads) { return heads < 16 ? 128 - query_header(heads) : 0; }
__host__ __device__ constexpr std::int64_t query_bytes(std::int64_t K, std::int64_t V, int heads) {
  return query_begin(heads) + query_header(heads) + operand_bytes(K, V, heads);
}

// What dkdv_selected hands over to dq_gather for a row and a KV block that it visits: dS = P (dP - delta) in bf16, zeros
// where the row does not attend. A row has top_k places a layer; its last block, the one of rank top_k - 1, has place 0.
// Two places lie together, so that a thread of dq_gather finds both in 16 bytes: [top_k / 2][heads][4][2][2][2] holds
// child 8 b + 2 a + c of place 2 i + j at [i][head][a][j][b][c].
__host__ __device__ constexpr std::int64_t ds_bytes(int heads) { return heads * kSiblings * 2; }

// Warps of a CTA of dq_gather that hold queries, four of groups of 4 heads or two of 8: with the one that copies at most
// four for each scheduler, and the queries are whole fours.
__host__ __device__ constexpr int gather_warps(int heads) { return heads == 8 ? 14 : 15; }

// ---- operands of entry layers ------------------------------------------------------------------------------------

// In its entry layer a query visits the KV blocks 0, 1, 2, ..., so that a candidate's position is the index of its
// node. Keys are rotated by that index and queries by their own position, once. 64 nodes (four KV blocks) or 64 query
// heads (four rows of 16, or 8 or 16 of small groups) are one tile of operands for WGMMA:
//   KV tiles     inverse[64] | K / 64 panels of keys in fp16 | V / 64 panels of values
//   query tiles  unit[64], lse2[64], delta[64] | K / 64 panels of q in fp16 | V / 64 panels of dout
// A panel is 64 rows of 64 elements, 128 bytes each, in the 128-byte swizzle: 16-byte chunk i of row c lies at i ^ (c %
// 8). Row heads * i + g of a query tile is head g of its i-th query, heads being unit_heads of the group. Every tile is complete: nodes that do not exist are
// zeros, and so are queries and heads, whose lse2 is +inf. A query tile has room for its dq of the entry layer, float32
// [64, K], which takes the place of the panels.
inline constexpr int kTileRows = 64;
inline constexpr int kTileBlocks = kTileRows / kSiblings;
__host__ __device__ constexpr int tile_queries(int heads) { return kTileRows / heads; }
inline constexpr int kPanelBytes = kTileRows * 128;
inline constexpr int kKvTileHeader = kTileRows * 4;
inline constexpr int kQueryTileHeader = 3 * kTileRows * 4;
inline constexpr int kItemTiles = 2;  // KV tiles that a CTA of dkdv_entry works on at a time
inline constexpr int kItemNodes = kItemTiles * kTileRows;

__host__ __device__ constexpr std::int64_t panels_bytes(std::int64_t K, std::int64_t V) {
  return kTileRows * 2 * (K + V);
}
__host__ __device__ constexpr std::int64_t kv_tile_bytes(std::int64_t K, std::int64_t V) {
  return kKvTileHeader + panels_bytes(K, V);
}
__host__ __device__ constexpr std::int64_t query_tile_bytes(std::int64_t K, std::int64_t V) {
  return kQueryTileHeader + (panels_bytes(K, V) > kTileRows * 4 * K ? panels_bytes(K, V) : kTileRows * 4 * K);
}

}  // namespace htree_cuda::sm90::htree_bwd

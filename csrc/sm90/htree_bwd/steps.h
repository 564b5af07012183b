// What the backward of htree attention asks of its memory-bound helpers (sm90/htree_bwd/pack), and the data that they
// share with its matrix kernels (sm90/htree_bwd).
//
// The backward works on chunks: some queries of one head (b, h_kv), or all queries of several heads. A query of a chunk
// is a row; rows are padded to a multiple of 32.
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
inline constexpr int kGroupParents = 8;    // neighbouring parents that share the queries which visit them
inline constexpr int kGroupQueries = 8;    // neighbouring queries that share the parents which they visit
inline constexpr int kRowStep = 32;        // rows come in multiples of it

struct Tree {
  int layers;
  int top_k;
  std::int64_t N[kMaxLayers];  // nodes of each layer, the bottom first
  int parents[kMaxLayers];     // blocks of 16 candidates: ceil(N / 16)
  int groups[kMaxLayers];      // ceil(parents / 8)
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

// visits.layer[l]: [heads, groups[l], rows]. Bit p of the low byte: the row visits parent 8 group + p of layer l, that is,
// it selected this node of layer l + 1; from bit 8 on: the rank, among the row's parents, of the first of them. Only of
// rows whose first layer (tree/geometry.cuh) is above l: in its first layer a row visits the parents 0, 1, 2, ..., and
// above it nothing is a leaf. So there are tables below the highest first layer of the call.
struct Visits {
  std::uint32_t* layer[kMaxLayers];
};

// Rows of a chunk whose first layer is `layer`.
struct FirstRows {
  int begin;
  int end;

  __host__ __device__ FirstRows(Chunk const& chunk, int layer, int top_k)
      : begin(layer == 0 ? 0 : row_at(chunk, static_cast<std::int64_t>(top_k) << (kLog2Siblings * layer))),
        end(row_at(chunk, static_cast<std::int64_t>(top_k) << (kLog2Siblings * (layer + 1)))) {}

private:
  static __host__ __device__ int row_at(Chunk const& chunk, std::int64_t position) {
    std::int64_t const row = position - chunk.position(0);
    return static_cast<int>(row < 0 ? 0 : row < chunk.queries ? row : chunk.queries);
  }
};

// A layer's children of a parent, and the heads of a query, as matrix operands: a header of float32, 16 rows of K in
// fp16 and 16 rows of V in the dtype. Rows are swizzled: 16-byte chunk i of row c lies at chunk i ^ (c % 8). Rows of
// keys and queries are normalised by an exact power of two, their `inverse`.
//   nodes    inverse[16] | keys, rotated by their place among the siblings | values
//   queries  unit[16], lse2[16], delta[16] | q, not rotated | dout
// with s * log2(e) = product * inverse of the key * 2^-kHeadroom * unit, lse2 = lse * log2(e) and
// delta = <dout, out> - dlse.
inline constexpr int kHeadroom = row_scale::kHeadroom;
inline constexpr int kNodeHeader = kSiblings * 4;
inline constexpr int kQueryHeader = 3 * kMaxGroupHeads * 4;

__host__ __device__ constexpr std::int64_t operand_bytes(std::int64_t K, std::int64_t V) { return 16 * 2 * (K + V); }

// In its first layer a query visits the parents 0, 1, 2, ..., so that a candidate's position is its node's index: keys rotate
// by that and queries by their own position, once, and 64 nodes (four parents) or 64 query heads (four rows of 16) are
// one tile of operands for WGMMA:
//   nodes    inverse[64] | K / 64 panels of keys in fp16 | V / 64 panels of values
//   queries  unit[64], lse2[64], delta[64] | K / 64 panels of q in fp16 | V / 64 panels of dout
// A panel is 64 rows of 64 elements, 128 bytes each, in the 128-byte swizzle: 16-byte chunk i of row c lies at i ^ (c % 8).
// Row 16 i + g of a tile of queries is head g of its i-th query. Every tile is complete: nodes that do not exist are
// zeros, and so are queries and heads, whose lse2 is +inf.
// A tile of queries has room for its share of dq, which takes the place of the panels: float32 [64, K].
inline constexpr int kTileRows = 64;
inline constexpr int kTileParents = kTileRows / kSiblings;
inline constexpr int kTileQueries = kTileRows / kMaxGroupHeads;
inline constexpr int kPanelBytes = kTileRows * 128;
inline constexpr int kNodeTileHeader = kTileRows * 4;
inline constexpr int kQueryTileHeader = 3 * kTileRows * 4;

__host__ __device__ constexpr std::int64_t panels_bytes(std::int64_t K, std::int64_t V) { return kTileRows * 2 * (K + V); }
__host__ __device__ constexpr std::int64_t node_tile_bytes(std::int64_t K, std::int64_t V) {
  return kNodeTileHeader + panels_bytes(K, V);
}
__host__ __device__ constexpr std::int64_t query_tile_bytes(std::int64_t K, std::int64_t V) {
  return kQueryTileHeader + (panels_bytes(K, V) > kTileRows * 4 * K ? panels_bytes(K, V) : kTileRows * 4 * K);
}

// [B, n, heads, dim] by strides in elements.
struct Source {
  void const* in;
  std::int64_t stride_b;
  std::int64_t stride_n;
  std::int64_t stride_h;
  std::int64_t stride_d;
  bool vectors;  // 16 bytes may be read at once
};

struct PackNodes {
  Source k;                // a layer's nodes
  Source v;
  char* packed;            // [heads, parents, kNodeHeader + operand_bytes]; by_node: [heads, tiles, node_tile_bytes]
  bool by_node;            // tiles of a first layer
  bool as_inputs;          // keys are rounded to the dtype, else to fp16
  std::int64_t first_head;
  std::int64_t blocks;     // heads * parents
  int parents;             // by_node: those of whole tiles
  std::int64_t N;
  int H_kv;
  int K;
  int V;
  float2 const* rotations;
};

void pack_nodes(PackNodes const& args, DType dtype, cudaStream_t stream);

struct PackQueries {
  Chunk chunk;
  Source q;
  Source dout;
  Source out;
  float const* lse;        // [B, T_q, H] contiguous
  float const* dlse;       // [B, T_q, H] by strides
  std::int64_t dlse_stride_b;
  std::int64_t dlse_stride_t;
  std::int64_t dlse_stride_h;
  char* packed;            // [heads, rows, kQueryHeader + operand_bytes]
  char* tiles;             // [heads, rows / 4, query_tile_bytes]
  Tree tree;
  float2 const* rotations;     // [positions, K / 2]
  std::int64_t T_q;
  int H_kv;
  int G;
  int K;
  int V;
  float scale_log2;        // scale * log2(e)
};

void pack_queries(PackQueries const& args, DType dtype, cudaStream_t stream);

struct Index {
  Chunk chunk;
  Tree tree;
  int layers;                     // of which there are visits
  Visits visits;                  // zero beforehand
  std::int32_t const* selection;  // [layers - 1, B, T_q, H_kv, top_k]
  std::int64_t B;
  std::int64_t T_q;
  int H_kv;
};

// The reverse index: who visits which parent, as which rank. Whatever the lists hold, what is written are parents that
// exist, ascending.
void index_visits(Index const& args, cudaStream_t stream);

// Gradients of the tokens: the sum over a token's ancestors, each divided by what it shares.
struct Distribute {
  Tree tree;
  float const* sums;              // [heads, node rows, dim]
  std::int64_t node_rows;         // of a head: 16 * the sum of parents
  std::int64_t begin[kMaxLayers];  // first row of each layer
  void* out;                      // [B, T, H_kv, dim] contiguous
  std::int64_t first_head;
  int heads;
  int H_kv;
  int dim;
};

void distribute(Distribute const& args, DType dtype, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_bwd

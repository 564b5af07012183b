// What the backward needs of its memory-bound kernels around the products: operands packed, gradients distributed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "sm90/htree_bwd/args.h"
#include "sm90/htree_bwd/layout.h"
#include "sm90/htree_bwd/sequences/layout.h"

namespace htree_cuda::sm90::htree_bwd::pack {

// A tensor [B, n, heads, dim] by strides in elements.
struct Source {
  void const* in;
  std::int64_t stride_b;
  std::int64_t stride_n;
  std::int64_t stride_h;
  std::int64_t stride_d;
  bool vectors;  // 16 bytes may be read at once
};

struct PackKv {
  Source k;                 // the nodes of one layer
  Source v;
  char* packed;             // [heads, blocks_per_head, kBlockHeader + operand_bytes]; in_tiles: [heads, tiles, kv_tile_bytes]
  char* keys;               // [heads, blocks_per_head, 16, K] in bf16, swizzled: keys once more; or null
  bool in_tiles;            // KV tiles of an entry layer, else operands of a selected layer
  bool as_inputs;           // keys are rounded to the dtype, else to fp16
  std::int64_t first_head;
  std::int64_t blocks;      // heads * blocks_per_head
  int blocks_per_head;      // in_tiles: of whole tiles
  std::int64_t N;
  int H_kv;
  int K;
  int V;
  float2 const* rotations;  // [positions, K / 2]
  // Sequences of different lengths: blocks are those of all sequences, N bounds the nodes that are packed of each.
  Sequence const* sequences;  // [sequence_count], or null
  std::int32_t sequence_count;
  int layer;
  int log2_from;            // sequences have room from 2^log2_from tokens on
  bool batch;               // of layer 0: a sequence has a row of the batch; else sequences lie one behind another
};

void pack_kv(PackKv const& args, DType dtype, cudaStream_t stream);

struct PackQueries {
  Chunk chunk;
  int begin;                // the rows of this launch
  int end;
  Source q;
  Source dout;
  Source out;
  float const* lse;         // [B, T_q, H] contiguous
  float const* dlse;        // [B, T_q, H] by strides
  std::int64_t dlse_stride_b;
  std::int64_t dlse_stride_t;
  std::int64_t dlse_stride_h;
  char* packed;             // [heads, rows, query_bytes]
  char* tiles;              // [heads, rows / tile_queries, query_tile_bytes]
  Tree tree;
  float2 const* rotations;  // [positions, K / 2]
  std::int64_t T_q;
  int H_kv;
  int G;
  int K;
  int V;
  float scale_log2;         // scale * log2(e)
  sequences::Tables sequences;  // row tiles alone; T_q is 0 in a pack, and so are strides of batches
};

void pack_queries(PackQueries const& args, DType dtype, cudaStream_t stream);

// Adds what work items of dkdv_entry have left in entry_sums to dk and dv, segments of the rows in ascending order.
void add_segments(Args const& args, int K, int V, cudaStream_t stream);

// Gradients of the tokens: every ancestor's sum, divided by the number of its children at each step down.
struct Distribute {
  Tree tree;
  float const* sums;               // [heads, node rows, dim]
  std::int64_t node_rows;          // of a head: 16 times its KV blocks in all layers
  std::int64_t begin[kMaxLayers];  // first node row of each layer
  void* out;                       // [B, T, H_kv, dim] contiguous
  bool float32;                    // `out` is float32, else of the dtype
  bool add;                        // float32 is added to instead of written
  std::int64_t first_head;
  int heads;
  int H_kv;
  int dim;
  std::int64_t tokens;             // rows of `out` of a head, all batches: B * T, or of a pack
  Sequence const* sequences;       // [sequence_count], or null
  std::int32_t sequence_count;
  PackPart const* part;  // with `sequences`: the tokens that are written
};

void distribute(Distribute const& args, DType dtype, cudaStream_t stream);

}  // namespace htree_cuda::sm90::htree_bwd::pack

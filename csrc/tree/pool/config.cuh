// Data sheet of the tree pooling kernel.
//
//   CTA           kThreads threads = slots x columns: a column is one access (kAccess bytes) of one head, `columns`
//                 of them (a power of two <= 32) lie side by side, and thread (slot, column) pools the nodes
//                 slot, slot + slots, ... of the CTA's tile
//   tile          `nodes` nodes of the first fused layer, their columns; the children come straight from global
//                 memory into registers, kBatch accesses in flight per thread
//   fused layers  a CTA holds whole subtrees, so it pools the layers above its own nodes too, out of shared memory:
//                 for r = 16, two layers a launch (256 tokens a CTA), one launch up to max_top_nodes * 256 tokens
//   shared memory two buffers of pooled nodes that alternate: nodes + nodes / r rows of `columns` accesses, <= 48 KB
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>

#include "host/math.h"
#include "tree/geometry.cuh"

namespace htree_cuda::tree::pool {

using namespace host;

constexpr int kThreads = 256;
constexpr int kMinBlocksPerSM = 3;
constexpr int kMaxColumns = 32;
constexpr int kMaxNodes = kThreads;             // one column: 256 slots
constexpr int kMaxFused = 1 + log2_floor(kMaxNodes);  // r = 2

constexpr int kVectorBytes = 16;

template <class Element_, int kVec_>
struct Config {
  using Element = Element_;
  static constexpr int kVec = kVec_;                              // elements of one access
  static constexpr int kAccess = kVec * int(sizeof(Element));     // bytes of one access
  static constexpr int kBatch = 8;                                // children in flight per thread
  static_assert(kAccess == kVectorBytes || kVec == 1, "an access is 16 bytes or one element");
};

// One tensor of a launch. Strides and offsets count elements.
template <class Element>
struct Job {
  Element const* in;      // layer `first` of [B, N_first, H_kv, dim]
  std::int64_t stride_b;
  std::int64_t stride_t;
  std::int64_t stride_h;
  Element* tree;          // [B, H_kv, M, dim] contiguous
  std::int64_t tree_stride_h;  // M * dim
  int dim;
  int columns_per_head;   // dim / kVec
  int column_groups;      // ceil(H_kv * columns_per_head / columns); 0: no such job
};

template <class Element>
struct Args {
  Job<Element> jobs[2];
  std::int64_t B;
  std::int64_t tiles;                      // ceil(N_{first+1} / nodes)
  std::int64_t N[kMaxFused + 1];           // nodes of layers first, first + 1, ..., first + fused
  std::int64_t tree_node[kMaxFused + 1];   // where those layers begin in the tree; entry 0 is unused
  int H_kv;
  int log2_r;
  int log2_columns;
  int log2_nodes;
  int fused;                               // layers that this launch pools
  // Sequences of different lengths: N bounds theirs, and `tiles` are those of all sequences.
  Sequence const* sequences;               // [sequence_count], or null
  std::int32_t sequence_count;
  int first;                               // the layer that jobs read
  int log2_from[kMaxFused + 1];            // sequences have room in a layer from 2^log2_from tokens on
  bool packed;                             // of layer 0: a pack, else rows of a batch
};

}  // namespace htree_cuda::tree::pool

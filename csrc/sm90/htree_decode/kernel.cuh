// The decode kernel: a cluster descends the tree for one query of one KV head, from its entry layer down to the tokens.
//
//   for every layer
//     score          keys of the CTA's parts -> scores in shared memory                                     score.cuh
//     exponentiate   scores -> P                                                                          softmax.cuh
//     above the tokens
//       share_sums          (maximum, sum) of the parts to all CTAs                                       softmax.cuh
//       score_importance    importances                                                                   softmax.cuh
//       select_layer   rounds of counting, whose counts go to all CTAs; nodes to those that expand them     select.cuh
//     attend         values of what is not expanded                                                        attend.cuh
//   share_outputs, write_output   outputs to the CTAs that add them                                          merge.cuh
//
// What CTAs send each other is in exchange.cuh.
//
// All layers run the same instructions: a query passes each loop a few times only, and what it waits for most where there are
// two loops instead of one is instructions that the SM has to fetch.
#pragma once

#include "device/barriers.cuh"
#include "host/launch_overlapped.cuh"
#include "attend.cuh"
#include "merge.cuh"
#include "score.cuh"
#include "select.cuh"

namespace htree_cuda::sm90::htree_decode {


// A layer of which the query expands all nodes: 0 .. count - 1.
template <class Cfg>
__device__ __forceinline__ void write_whole_layer(Args const& args, Smem<Cfg> const& smem, int layer, int count) {
  if (layer > args.selection_layers) return;
  std::int32_t* const to = smem.unit.selection(args, layer);
#pragma unroll 1
  for (int i = threadIdx.x; i < args.top_k; i += Cfg::kThreads) to[i] = i < count ? i : -1;
}

// The CTA's share of a selected list.
template <class Cfg>
__device__ __forceinline__ void write_nodes(Args const& args, Smem<Cfg> const& smem, int layer, std::int32_t const* nodes,
                                            int warp) {
  if (layer > args.selection_layers) return;
  int const share = args.top_k / Split(args).ctas();
  std::int32_t* const to = smem.unit.selection(args, layer) + cta_index() * share;
#pragma unroll 1
  for (int i = thread_of_cta(warp); i < share; i += Cfg::kThreads) to[i] = nodes[i];
}

// A query that does not exist, or whose cache has overflowed.
template <class Cfg>
__device__ __forceinline__ void write_nothing(Args const& args, Smem<Cfg> const& smem, bool overflowed) {
  float const x = overflowed ? __int_as_float(0x7fffffff) : 0.0f;
  int const cta = cta_index();
  int const ctas = Split(args).ctas();
  std::int64_t const first_head = smem.unit.first_head(args);
  auto* const out = static_cast<typename Cfg::Element*>(args.out) + first_head * Cfg::kV;
#pragma unroll 1
  for (int i = cta * Cfg::kThreads + threadIdx.x; i < args.G * Cfg::kV; i += ctas * Cfg::kThreads) {
    out[i] = static_cast<typename Cfg::Element>(x);
  }
  if (cta != 0) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < args.G; i += Cfg::kThreads) args.lse[first_head + i] = overflowed ? x : kMasked;
#pragma unroll 1
  for (int layer = 1; layer <= args.selection_layers; ++layer) write_whole_layer<Cfg>(args, smem, layer, 0);
}

// Chunk i of a head: of first elements of pairs, in the second half of second ones.
template <class Cfg>
__device__ __forceinline__ uint4 query_chunk(Args const& args, typename Cfg::Element const* head, int i) {
  if constexpr (Cfg::kHalves) return load_query_chunk(head, i, args.q_vectors);
  constexpr int kHalf = Cfg::kK / 16;
  int2 const chunks = pair_chunks(args.pairing, i % kHalf, 2 * kHalf);
  if (!args.pairing.interleaved) return load_query_chunk(head, i < kHalf ? chunks.x : chunks.y, args.q_vectors);
  uint4 x = load_query_chunk(head, chunks.x, args.q_vectors);
  uint4 y = load_query_chunk(head, chunks.y, args.q_vectors);
  separate_pairs(x, y);
  return i < kHalf ? x : y;
}

// What every layer needs: rotations by positions 0 .. 15 and by a stream's step, and the query's heads as they are.
template <class Cfg>
__device__ __forceinline__ void load_constants(Args const& args, Smem<Cfg>& smem, Unit const& unit) {
  constexpr int kRow = Cfg::kK / 4;  // float4 of a row
  constexpr int kVectors = (kSiblings + 1) * kRow;
  constexpr int kEach = (kVectors + Cfg::kThreads - 1) / Cfg::kThreads;
  auto const row_of = [](int i) { return i / kRow < kSiblings ? i / kRow : kSiblings * kStreams; };
  float4 x[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    int const i = min(static_cast<int>(threadIdx.x) + n * Cfg::kThreads, kVectors - 1);
    x[n] = __ldg(reinterpret_cast<float4 const*>(args.rotations) + row_of(i) * kRow + i % kRow);
  }
  auto const* const q = static_cast<typename Cfg::Element const*>(args.q) + unit.b * args.q_stride_b +
                        unit.j * args.q_stride_t + static_cast<std::int64_t>(unit.h) * args.G * args.q_stride_h;
#pragma unroll 1
  for (int i = threadIdx.x; i < Cfg::kTileHeads * (Cfg::kK / 8); i += Cfg::kThreads) {
    int const head = i / (Cfg::kK / 8);
    smem.query[i] = head < args.G ? query_chunk<Cfg>(args, q + head * args.q_stride_h, i % (Cfg::kK / 8)) : uint4{};
  }
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    int const i = min(static_cast<int>(threadIdx.x) + n * Cfg::kThreads, kVectors - 1);
    // Four lanes that read what each has of a row find it side by side.
    int const in_row = i % kRow;
    int const place = (in_row / 16 * 4 + in_row % 4) * 4 + in_row / 4 % 4;
    float const factor = i / kRow < kSiblings ? kUnbias<typename Cfg::Element> : 1.0f;
    smem.rotations[i / kRow * (Cfg::kRotationStride / 2) + place] = {x[n].x * factor, x[n].y * factor, x[n].z * factor,
                                                                     x[n].w * factor};
  }
}

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, Cfg::kBlocksPerSM)
    htree_decode_kernel(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) char shared_memory[];
  auto& smem = *reinterpret_cast<Smem<Cfg>*>(shared_memory);
  int const warp = threadIdx.x / 32;
  // What needs no global memory may run while the grid before ends.
  smem.phases[threadIdx.x] = 0;
  if (threadIdx.x == 0) open_inboxes(args, smem);
  barriers::cluster_arrive();  // everybody's inboxes are open when all have waited, below
  clear_states<Cfg>(args, smem);
  wait_for_previous_grid();

  {
    uint32_t const unit_index = blockIdx.x / static_cast<uint32_t>(Split(args).ctas());
    Unit unit;
    unit.h = static_cast<int>(unit_index % static_cast<uint32_t>(args.cache.H_kv));
    uint32_t const query = unit_index / static_cast<uint32_t>(args.cache.H_kv);
    unit.j = static_cast<int>(query % static_cast<uint32_t>(args.T_q));
    unit.b = static_cast<int>(query / static_cast<uint32_t>(args.T_q));
    int const wanted = args.seqused_q == nullptr ? args.T_q : args.seqused_q[unit.b];
    int const tokens = args.cache.lengths[unit.b];
    bool const overflowed = args.cache.overflowed[unit.b] != 0;
    load_constants(args, smem, unit);
    int const queries = min(max(wanted, 0), args.T_q);
    std::int64_t const t = min(max(tokens, 0), args.cache.max_tokens) - queries + unit.j;
    unit.t = t;
    if (threadIdx.x == 0) smem.unit = unit;
    __syncthreads();
    if (unit.j >= queries || t < 0 || overflowed) {  // the same in all CTAs of the cluster
      write_nothing<Cfg>(args, smem, overflowed && unit.j < queries);
      barriers::cluster_wait();
      return;
    }
  }

  if (cta_index() == 0) {
#pragma unroll 1
    for (int layer = tree::entry_layer(smem.unit.t, args.top_k) + 1; layer <= args.selection_layers; ++layer) {
      write_whole_layer<Cfg>(args, smem, layer, static_cast<int>(smem.unit.t >> (kLog2Siblings * layer)) + 1);
    }
  }
  // The first time there is no layer yet but the next.
#pragma unroll 1
  for (int l = tree::entry_layer(smem.unit.t, args.top_k) + 1; l >= 0; --l) {
    Layer const& layer = smem.layers[l & 1];
    Layer& next = smem.layers[l & 1 ^ 1];
    bool const exists = l <= tree::entry_layer(smem.unit.t, args.top_k);
    if (exists) {
      score<Cfg>(args, layer, smem, warp);
      if (layer.parents == nullptr) barriers::cluster_wait();  // in the entry layer
      __syncthreads();
      exponentiate<Cfg>(args, layer, smem, warp);
      if (l > 0) share_sums<Cfg>(args, smem, warp);
    }
    if (l > 0) {
      if (thread_of_cta(warp) == Cfg::kThreads - 1) {
        next = Layer(args.cache, smem.unit, l - 1, args.top_k, smem.nodes + (l & 1) * Cfg::kMaxBlocks,
                     (l & 1 ^ 1) * (Cfg::kMaxBlocks * kSiblings / 4), Split(args), cta_index());
        next.fine = Range::fine_of(static_cast<float>(args.G) / static_cast<float>(next.n));
      }
      if (exists) {
        receive<Cfg>(args, smem, Message::kSums, warp);
        score_importance<Cfg>(args, layer, smem, warp);
        select_layer<Cfg>(args, layer, smem, warp, smem.nodes + (l & 1) * Cfg::kMaxBlocks);
        write_nodes<Cfg>(args, smem, l, smem.nodes + (l & 1) * Cfg::kMaxBlocks, warp);
      } else {
        __syncthreads();
      }
      prefetch_rotations<Cfg>(args, next, warp);
      find_rows<Cfg>(args, smem, next, warp);
      __syncthreads();
    } else {
      __syncthreads();  // what is attended
    }
    if (!exists) continue;
    attend<Cfg>(args, layer, smem, warp);
    __syncthreads();  // scores take the place of what was attended
  }
  share_outputs<Cfg>(args, smem, warp);
  receive<Cfg>(args, smem, Message::kOutputs, warp);
  write_output<Cfg>(args, smem, smem.unit.first_head(args), warp);
}

}  // namespace htree_cuda::sm90::htree_decode

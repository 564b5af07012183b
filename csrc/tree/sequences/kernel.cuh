// Lengths to sequences and query tiles. The first kernel is one CTA that goes through the sequences 1024 at a time,
// because where a sequence's tiles begin is a sum over those before it; 4,096 sequences are four rounds. The second one
// finds the sequence of each tile and of each row of q by bisection, and writes what padding gets.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/sm90.cuh"
#include "host/launch_overlapped.cuh"
#include "namespaces.h"
#include "tree/sequences.h"

namespace htree_cuda::tree::sequences {

using namespace host;
using namespace device;

inline constexpr int kThreads = 1024;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kFillThreads = 256;

// Inclusive scan over the CTA; every thread calls it. `scratch` may be used again behind the next call.
template <class Combine>
__device__ __forceinline__ std::int64_t scan(std::int64_t x, std::int64_t (&scratch)[kWarps], Combine const& combine) {
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    std::int64_t const before = __shfl_up_sync(kFullWarp, x, lanes);
    if (lane >= lanes) x = combine(before, x);
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = x;
  __syncthreads();
  for (int w = 0; w < warp; ++w) x = combine(scratch[w], x);
  return x;
}

__device__ __forceinline__ std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

static __global__ void __launch_bounds__(kThreads) sequences_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  __shared__ std::int64_t scratch[5][kWarps];
  __shared__ std::int64_t totals[5];
  SequencesParams const& lengths = args.lengths;
  bool const packed = lengths.cu_seqlens_k != nullptr;
  auto const largest = [](std::int64_t a, std::int64_t b) { return a < b ? b : a; };
  auto const sum = [](std::int64_t a, std::int64_t b) { return a + b; };
  std::int64_t carry_q = 0;  // of a pack: the largest entry so far
  std::int64_t carry_k = 0;
  std::int64_t tiles = 0;
  std::int64_t early_tiles = 0;
  std::int64_t bottom_tiles = 0;
  for (std::int64_t base = 0; base < lengths.count; base += kThreads) {
    std::int64_t const i = base + threadIdx.x;
    bool const exists = i < lengths.count;
    std::int64_t first_q = 0, used_q = 0, key = 0, keys = 0, start = 0;
    if (packed) {
      std::int64_t const q = exists ? clamp(lengths.cu_seqlens_q[i], 0, lengths.total_q) : 0;
      std::int64_t const k = exists ? clamp(lengths.cu_seqlens_k[i], 0, lengths.total_k) : 0;
      first_q = largest(carry_q, scan(q, scratch[0], largest));
      key = largest(carry_k, scan(k, scratch[1], largest));
      if (exists) {
        used_q = clamp(clamp(lengths.cu_seqlens_q[i + 1], 0, lengths.total_q) - first_q, 0, args.max_q);
        keys = clamp(clamp(lengths.cu_seqlens_k[i + 1], 0, lengths.total_k) - key, 0, args.max_k);
      }
      start = keys - used_q;
      if (threadIdx.x == kThreads - 1) totals[0] = first_q, totals[1] = key;
    } else if (exists) {
      used_q = lengths.seqused_q == nullptr ? args.max_q : clamp(lengths.seqused_q[i], 0, args.max_q);
      keys = lengths.seqused_k == nullptr ? args.max_k : clamp(lengths.seqused_k[i], 0, args.max_k);
      key = i * args.max_k;
      start = keys - used_q;
      if (lengths.q_start != nullptr) {
        std::int64_t const given = lengths.q_start_64 ? static_cast<std::int64_t const*>(lengths.q_start)[i]
                                                      : static_cast<std::int32_t const*>(lengths.q_start)[i];
        start = clamp(given, -(1ll << 32), 1ll << 32);
      }
    }
    std::int64_t const missing = clamp(-start, 0, used_q);  // queries before the first key
    std::int64_t const end = keys - start < used_q ? keys - start : used_q;
    std::int64_t const count = end > missing ? end - missing : 0;
    std::int64_t const together = args.tile_queries * args.round;
    std::int64_t const all = (count + together - 1) / together * args.round;
    std::int64_t const before = clamp(args.early_end - start - missing, 0, count);  // queries
    std::int64_t const early = before == count ? all : before / together * args.round;
    std::int64_t const bottom = (before + together - 1) / together * args.round;
    std::int64_t const own = all - early;
    std::int64_t const behind = tiles + scan(own, scratch[2], sum);
    std::int64_t const early_behind = early_tiles + scan(early, scratch[3], sum);
    std::int64_t const bottom_behind = bottom_tiles + scan(bottom, scratch[4], sum);
    if (threadIdx.x == kThreads - 1) totals[2] = behind, totals[3] = early_behind, totals[4] = bottom_behind;
    if (exists) {
      std::int64_t const row = first_q + missing;
      args.sequences[i] = {static_cast<std::int32_t>(key),   static_cast<std::int32_t>(keys),
                           static_cast<std::int32_t>(row),   static_cast<std::int32_t>(count),
                           static_cast<std::int32_t>(count > 0 ? start + missing : 0),
                           static_cast<std::int32_t>(behind - own)};
      if (args.early != nullptr) {
        args.early[i] = {static_cast<std::int32_t>(early), static_cast<std::int32_t>(early_behind - early),
                         static_cast<std::int32_t>(bottom_behind - bottom)};
      }
    }
    __syncthreads();
    if (packed) carry_q = totals[0], carry_k = totals[1];
    tiles = totals[2];
    early_tiles = totals[3];
    bottom_tiles = totals[4];
    __syncthreads();
  }
  if (threadIdx.x == 0 && args.late_tiles != nullptr) *args.late_tiles = static_cast<std::int32_t>(tiles);
}

// The tile that begins with query `first` of a sequence.
__device__ __forceinline__ TileEntry tile_entry(Sequence const& sequence, std::int32_t own, std::int32_t first) {
  return {sequence.t + first, sequence.row + first, sequence.key, own * 16 + min(sequence.count - first, kQueryTile)};
}

__device__ __forceinline__ void store(TileEntry* to, TileEntry const& entry) {
  *reinterpret_cast<int4*>(to) = {entry.t, entry.row, entry.key, entry.sequence_count};
}

__device__ __forceinline__ void fill_bottom_entry(Args const& args, std::int32_t N, std::int64_t place) {
  TileEntry entry{};
  if (N > 0) {
    std::int32_t const own = sequence_at(N, place, [&](std::int32_t i) { return args.early[i].bottom; });
    Sequence const sequence = args.sequences[own];
    std::int64_t const in_sequence = place - args.early[own].bottom;
    std::int64_t const set = in_sequence / args.round * args.round * kQueryTile;
    std::int64_t const first = in_sequence * kQueryTile;
    bool const has = sequence.t + set < args.early_end && first < sequence.count;
    if (has) entry = tile_entry(sequence, own, static_cast<std::int32_t>(first));
  }
  store(args.bottom_entries + place, entry);
}

// A warp for each row of q, after a thread for each tile and for each of those with a query at the bottom.
static __global__ void __launch_bounds__(kFillThreads) fill_kernel(const __grid_constant__ Args args, unsigned tile_ctas) {
  wait_for_previous_grid();
  SequencesParams const& lengths = args.lengths;
  std::int32_t const N = static_cast<std::int32_t>(lengths.count);
  if (blockIdx.x < tile_ctas) {
    std::int64_t const tile = static_cast<std::int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
    if (tile >= args.tile_count + args.bottom_count) return;
    if (tile >= args.tile_count) {
      fill_bottom_entry(args, N, tile - args.tile_count);
      return;
    }
    TileEntry entry{};
    if (N > 0) {
      std::int32_t const late = *args.late_tiles;
      bool const early = tile >= late;
      std::int64_t const place = early ? tile - late : tile;
      std::int32_t const own = sequence_at(
          N, place, [&](std::int32_t i) { return early ? args.early[i].first : args.sequences[i].tile; });
      Sequence const sequence = args.sequences[own];
      EarlyTiles const of_early = args.early[own];
      std::int64_t const first = (place - (early ? of_early.first : sequence.tile - of_early.count)) * kQueryTile;
      bool const has = !early || place - of_early.first < of_early.count;
      if (has && first < sequence.count) entry = tile_entry(sequence, own, static_cast<std::int32_t>(first));
    }
    store(args.tiles + tile, entry);
    return;
  }
  std::int64_t const row = static_cast<std::int64_t>(blockIdx.x - tile_ctas) * (kFillThreads / 32) + threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  if (row >= lengths.total_q) return;
  if (!lengths.first_part && row < lengths.cu_seqlens_q[0]) return;
  if (!lengths.last_part && row >= lengths.cu_seqlens_q[N]) return;
  if (N > 0) {
    bool const packed = lengths.cu_seqlens_k != nullptr;
    std::int32_t const own = packed ? sequence_at(N, row, [&](std::int32_t i) { return args.sequences[i].row; })
                                    : static_cast<std::int32_t>(row / args.max_q);
    std::int64_t const in_sequence = (packed ? row : row % args.max_q) - args.sequences[own].row;
    if (in_sequence >= 0 && in_sequence < args.sequences[own].count) return;
  }
  auto* const out = reinterpret_cast<uint4*>(static_cast<char*>(args.out) + row * args.out_row_bytes);
  for (std::int64_t i = lane; i < args.out_row_bytes / 16; i += 32) out[i] = {0, 0, 0, 0};
  if (args.lse != nullptr) {
    for (int h = lane; h < args.H; h += 32) args.lse[row * args.H + h] = __int_as_float(0xff800000);
  }
  if (args.selection == nullptr) return;
  for (std::int64_t l = 0; l < args.selection_layers; ++l) {
    std::int32_t* const nodes = args.selection + (l * lengths.total_q + row) * args.selection_row;
    for (std::int64_t i = lane; i < args.selection_row; i += 32) nodes[i] = -1;
  }
}

}  // namespace htree_cuda::tree::sequences

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
inline constexpr int kLog2TileTokens = 6;
static_assert(1 << kLog2TileTokens == kTileBlocks * kSiblings);

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

// What is before the sequences of a round, and behind them.
struct Totals {
  std::int64_t q;      // of a pack: the largest entry so far
  std::int64_t k;
  std::int64_t tiles;
  std::int64_t early;
  std::int64_t bottom;
  std::int64_t taken;  // sequences of the part
  bool open;           // whether there was room for all of the round
};

static __global__ void __launch_bounds__(kThreads) sequences_kernel(const __grid_constant__ Args args) {
  wait_for_previous_grid();
  __shared__ std::int64_t scratch[6][kWarps];
  __shared__ Totals totals;
  __shared__ std::int64_t origin_k;  // the first token of the part
  SequencesParams const& lengths = args.lengths;
  bool const packed = lengths.cu_seqlens_k != nullptr;
  auto const largest = [](std::int64_t a, std::int64_t b) { return a < b ? b : a; };
  auto const sum = [](std::int64_t a, std::int64_t b) { return a + b; };
  bool const later_part = packed && lengths.part > 0;
  std::int64_t const first = later_part ? args.part->next : 0;
  std::int64_t const all = packed ? lengths.all_count : lengths.count;
  Totals before = {later_part ? args.part->q_end : 0, later_part ? args.part->k_end : 0, 0, 0, 0, 0, true};
  std::int64_t const q_begin = before.q;
  std::int64_t const k_begin = before.k;
  while (before.open && first + before.taken < all) {
    std::int64_t const i = before.taken + threadIdx.x;  // in the part
    bool const given = first + i < all;
    bool exists = given && i < lengths.count;
    std::int64_t first_q = 0, used_q = 0, key = 0, keys = 0, start = 0;
    if (packed) {
      std::int32_t const* const cu_q = lengths.cu_seqlens_q + first + i;
      std::int32_t const* const cu_k = lengths.cu_seqlens_k + first + i;
      std::int64_t const q = given ? clamp(cu_q[0], 0, lengths.total_q) : 0;
      std::int64_t const k = given ? clamp(cu_k[0], 0, lengths.total_k) : 0;
      first_q = largest(before.q, scan(q, scratch[0], largest));
      key = largest(before.k, scan(k, scratch[1], largest));
      if (given) {
        used_q = clamp(clamp(cu_q[1], 0, lengths.total_q) - first_q, 0, args.max_q);
        keys = clamp(clamp(cu_k[1], 0, lengths.total_k) - key, 0, args.max_k);
      }
      start = keys - used_q;
      if (i == 0) origin_k = key;
      __syncthreads();
      // Where a sequence behind this one would begin. It grows with i, so that the sequences with room come first.
      exists = exists && ((key - origin_k + keys) >> kLog2TileTokens) + i + 1 <= args.tile_room;
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
    if (!exists) used_q = keys = 0;
    std::int64_t const missing = clamp(-start, 0, used_q);  // queries before the first key
    std::int64_t const end = keys - start < used_q ? keys - start : used_q;
    std::int64_t const count = end > missing ? end - missing : 0;
    std::int64_t const together = args.tile_queries * args.round;
    std::int64_t const tiles = (count + together - 1) / together * args.round;
    std::int64_t const early_queries = clamp(args.early_end - start - missing, 0, count);
    std::int64_t const early = early_queries == count ? tiles : early_queries / together * args.round;
    std::int64_t const bottom = (early_queries + together - 1) / together * args.round;
    std::int64_t const own = tiles - early;
    std::int64_t const behind = before.tiles + scan(own, scratch[2], sum);
    std::int64_t const early_behind = before.early + scan(early, scratch[3], sum);
    std::int64_t const bottom_behind = before.bottom + scan(bottom, scratch[4], sum);
    if (exists) {
      std::int64_t const row = first_q + missing;
      args.sequences[i] = {static_cast<std::int32_t>(key),
                           static_cast<std::int32_t>(packed ? key - origin_k : key),
                           static_cast<std::int32_t>(keys),
                           static_cast<std::int32_t>(row),
                           static_cast<std::int32_t>(count),
                           static_cast<std::int32_t>(count > 0 ? start + missing : 0),
                           static_cast<std::int32_t>(behind - own)};
      if (args.early != nullptr) {
        args.early[i] = {static_cast<std::int32_t>(early), static_cast<std::int32_t>(early_behind - early),
                         static_cast<std::int32_t>(bottom_behind - bottom)};
      }
    }
    // The first thread without a sequence has what is before the next part; where all have one, the last has it.
    std::int64_t const taken = before.taken + scan(exists ? 1 : 0, scratch[5], sum);
    bool const last = exists ? threadIdx.x == kThreads - 1 : taken == i;
    if (last) totals = {first_q, key, behind, early_behind, bottom_behind, taken, exists};
    __syncthreads();
    before = totals;
  }
  bool const ended = first + before.taken >= all;  // the rows behind the last sequence belong to its part
  if (ended) before.q = lengths.total_q, before.k = lengths.total_k;
  for (std::int64_t i = before.taken + threadIdx.x; i < lengths.count; i += kThreads) {
    args.sequences[i] = {static_cast<std::int32_t>(before.k), static_cast<std::int32_t>(before.taken > 0 ? before.k - origin_k : 0), 0,
                         static_cast<std::int32_t>(before.q), 0, 0, static_cast<std::int32_t>(before.tiles)};
    if (args.early != nullptr) {
      args.early[i] = {0, static_cast<std::int32_t>(before.early), static_cast<std::int32_t>(before.bottom)};
    }
  }
  if (threadIdx.x != 0) return;
  *args.part = {static_cast<std::int32_t>(first + before.taken), static_cast<std::int32_t>(q_begin), static_cast<std::int32_t>(before.q),
                static_cast<std::int32_t>(k_begin), static_cast<std::int32_t>(before.k)};
  if (args.late_tiles != nullptr) *args.late_tiles = static_cast<std::int32_t>(before.tiles);
}

// The tile that begins with query `first` of a sequence.
__device__ __forceinline__ TileEntry tile_entry(Sequence const& sequence, std::int32_t own, std::int32_t first) {
  return {sequence.t + first, sequence.row + first, sequence.before, own * 16 + min(sequence.count - first, kQueryTile)};
}

__device__ __forceinline__ void store(TileEntry* to, TileEntry const& entry) {
  *reinterpret_cast<int4*>(to) = {entry.t, entry.row, entry.before, entry.sequence_count};
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
  if (lengths.cu_seqlens_q != nullptr && (row < args.part->q_begin || row >= args.part->q_end)) return;
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

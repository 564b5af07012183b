// What the launchers of the htree forward and backward refuse; `op` is the one that was called.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "math.h"
#include "mixed_dims.h"
#include "params.h"
#include "part.h"
#include "tree/geometry.cuh"

namespace htree_cuda::host {

// Whether sequences have lengths of their own, which only the device knows.
inline bool has_sequences(ForwardParams const& p) { return p.sequences.count >= 0; }

// Whether the sequences lie one behind another, so that only their total is known.
inline bool is_packed(ForwardParams const& p) { return has_sequences(p) && p.sequences.cu_seqlens_k != nullptr; }

// The bottom of the tree has room for its KV tiles of 64 tokens and for so many that sequences do not fill. A pack of more
// sequences is computed in parts, one after the other in the same workspace, which therefore depends on totals and maxima
// alone. Which sequences a part has is found on the device (tree/sequences): as many as there is room for.
inline constexpr std::int64_t kTileTokens = tree::kTileBlocks * tree::kSiblings;

inline std::int64_t bottom_room(ForwardParams const& p) {
  constexpr std::int64_t kMinRoom = 256;
  std::int64_t const eighth = p.sequences.total_k / (8 * kTileTokens);
  return (eighth < kMinRoom ? kMinRoom : eighth) + 1;
}

// KV tiles that a part of a pack may take. Every sequence takes one at least.
inline std::int64_t tile_room(ForwardParams const& p) { return p.sequences.total_k / kTileTokens + bottom_room(p); }

// With how many sequences the room of a layer is counted (tree/geometry.cuh).
inline std::int64_t sequences_of_room(ForwardParams const& p, int log2_from) {
  if (!is_packed(p)) return tree::sequences_with_room(p.sequences.total_k, p.sequences.count, log2_from);
  return log2_from == 0 ? bottom_room(p) : p.sequences.total_k >> log2_from;
}

// Parts of a call, at most. A part ends before the sequence that it has no room for. So two parts one behind the other
// take more tiles together than there are, and one alone takes all but those of a sequence of the maximal length.
inline std::int64_t parts_of(ForwardParams const& p) {
  if (!is_packed(p) || p.sequences.count == 0) return 1;
  std::int64_t const room = tile_room(p);
  std::int64_t const all = p.sequences.total_k / kTileTokens + p.sequences.count;
  if (all <= room) return 1;
  std::int64_t const longest = ceil_div(p.T < p.sequences.total_k ? p.T : p.sequences.total_k, kTileTokens);
  std::int64_t const by_pairs = 2 * (all / room) + 1;
  std::int64_t const by_longest = ceil_div(all, room - longest);
  return by_pairs < by_longest ? by_pairs : by_longest;
}

// Calls `of(part)` for each part of a call, as params of its own.
template <class Of>
void for_parts(ForwardParams const& p, Of const& of) {
  ForwardParams part = p;
  SequencesParams& s = part.sequences;
  s.all_count = p.sequences.count;
  std::int64_t const parts = parts_of(p);
  if (parts > 1 && tile_room(p) < s.count) s.count = tile_room(p);
  for (s.part = 0; s.part < parts; ++s.part) of(part);
}

// bytes(part) of any part, which all have the same workspace.
template <class Bytes>
std::int64_t workspace_of_parts(ForwardParams const& p, Bytes const& bytes) {
  std::int64_t result = 0;
  for_parts(p, [&](ForwardParams const& part) {
    if (part.sequences.part == 0) result = bytes(part);
  });
  return result;
}

}  // namespace htree_cuda::host

namespace htree_cuda::host::tree_args {

[[noreturn]] inline void reject(char const* op, std::string const& what) {
  throw std::invalid_argument(std::string(op) + ": " + what);
}

inline bool aligned(void const* pointer, std::int64_t bytes) {
  return misalignment(pointer, bytes) == 0;
}

inline void check(char const* op, ForwardParams const& p) {
  auto const number = [](std::int64_t x) { return std::to_string(x); };
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) reject(op, "dtype must be bf16 or fp16");
  SequencesParams const& s = p.sequences;
  if (s.count >= 0) {
    std::int64_t const most = std::numeric_limits<std::int32_t>::max();
    if (p.T < 1 || p.T > most || p.T_q < 0 || p.T_q > most || s.count < 1 || s.count >= most / 16 || s.total_q < 0 ||
        s.total_q > most || s.total_k < 1 || s.total_k > most || p.q_start != 0) {
      reject(op, "sequences of different lengths need N in 1 .. 2^27 - 1, total_k in 1 .. 2^31 - 1 and total_q below "
                 "2^31, got N " + number(s.count) + ", total_k " + number(s.total_k) + ", total_q " + number(s.total_q));
    }
    if ((s.cu_seqlens_q == nullptr) != (s.cu_seqlens_k == nullptr)) reject(op, "one of two cu_seqlens is missing");
  } else if (p.B < 0 || p.T < 1 || p.T > std::numeric_limits<std::int32_t>::max() || p.T_q < 0 || p.q_start < 0 ||
      p.q_start + p.T_q > p.T) {
    reject(op, "needs B >= 0, T in 1 .. 2^31 - 1 and queries within it, got B " + number(p.B) + ", T " + number(p.T) +
                   ", T_q " + number(p.T_q) + ", q_start " + number(p.q_start));
  }
  if (p.H_kv < 1 || p.G < 1 || p.G > 16) {
    reject(op, "G must be 1 .. 16, H_kv >= 1, got " + number(p.G) + ", " + number(p.H_kv));
  }
  if ((p.K != 64 && p.K != 128) || (p.V != 64 && p.V != 128)) {
    reject(op, "K and V must be 64 or 128, got " + number(p.K) + " and " + number(p.V));
  }
  if (!kMixedDims && p.K != p.V) {
    reject(op, "K and V must be equal in a library that was built without HTREE_CUDA_MIXED_DIMS=1, got " + number(p.K) + " and " +
                   number(p.V));
  }
  if (!is_power_of_two(p.top_k) || p.top_k < tree::kMinTopK || p.top_k > tree::kMaxTopK) {
    reject(op, "top_k must be a power of two in 16 .. 512, got " + number(p.top_k));
  }
}

// A run's queries over the keys of another one, and with its workspace.
inline ForwardParams with_keys_of(ForwardParams const& first, ForwardParams const& run) {
  ForwardParams result = first;
  result.q = run.q;
  result.q_stride_b = run.q_stride_b, result.q_stride_t = run.q_stride_t, result.q_stride_h = run.q_stride_h;
  result.out = run.out;
  result.lse = run.lse;
  result.selection = run.selection;
  result.given = run.given;
  result.T_q = run.T_q;
  result.q_start = run.q_start;
  return result;
}

inline void check_runs(char const* op, Runs<ForwardParams> const& runs) {
  if (runs.count < 1) reject(op, "a call has one run of queries at least, got " + std::to_string(runs.count));
  for (ForwardParams const& run : runs) {
    check(op, run);
    if (runs.count > 1 && (run.B != 1 || run.T_q < 2 || has_sequences(run))) {
      reject(op, "several runs of queries need B 1, two queries in each and no lengths, got B " + std::to_string(run.B) + ", T_q " +
                     std::to_string(run.T_q));
    }
  }
}

inline void check_workspace(char const* op, ForwardParams const& p, std::int64_t bytes) {
  if (p.workspace == nullptr || p.workspace_bytes < bytes || !aligned(p.workspace, 256)) {
    reject(op, "the workspace must have " + std::to_string(bytes) + " bytes, 256-byte aligned, got " +
                   std::to_string(p.workspace_bytes));
  }
}

}  // namespace htree_cuda::host::tree_args

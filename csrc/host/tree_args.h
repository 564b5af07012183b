// What the launchers of the htree forward and backward refuse; `op` is the one that was called.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "math.h"
#include "mixed_dims.h"
#include "params.h"
#include "tree/geometry.cuh"

namespace htree_cuda::host {

// Whether sequences have lengths of their own, which only the device knows.
inline bool has_sequences(ForwardParams const& p) { return p.sequences.count >= 0; }

// A pack of many sequences is computed in parts, one after the other in the same workspace: at the bottom every sequence
// has a KV tile of 64 nodes at least, so that a part has as many sequences as all tokens fill tiles. The workspace then
// does not grow with the number of sequences.
inline std::int64_t sequences_of_part(ForwardParams const& p) {
  constexpr std::int64_t kMinSequences = 256;
  std::int64_t const count = p.sequences.count;
  if (!has_sequences(p) || p.sequences.cu_seqlens_k == nullptr || count == 0) return count;
  std::int64_t const tiles = p.sequences.total_k / (tree::kTileBlocks * tree::kSiblings);
  std::int64_t const parts = ceil_div(count, tiles < kMinSequences ? kMinSequences : tiles);
  return ceil_div(count, parts);
}

inline bool has_parts(ForwardParams const& p) { return sequences_of_part(p) != p.sequences.count; }

// Calls `of(part)` for each part of a call, as params of its own; the call itself where it has one.
template <class Of>
void for_parts(ForwardParams const& p, Of const& of) {
  if (!has_parts(p)) return of(p);
  std::int64_t const most = sequences_of_part(p);
  for (std::int64_t first = 0; first < p.sequences.count; first += most) {
    ForwardParams part = p;
    part.sequences.cu_seqlens_q += first;
    part.sequences.cu_seqlens_k += first;
    part.sequences.count = p.sequences.count - first < most ? p.sequences.count - first : most;
    part.sequences.first_part = first == 0;
    part.sequences.last_part = first + most >= p.sequences.count;
    of(part);
  }
}

// The largest of the parts' workspaces, where workspace(part) is the bytes of one: of a whole part or of the last.
template <class Bytes>
std::int64_t workspace_of_parts(ForwardParams const& p, Bytes const& bytes) {
  std::int64_t const most = sequences_of_part(p);
  ForwardParams part = p;
  part.sequences.count = most;
  std::int64_t const whole = bytes(part);
  if (most == p.sequences.count) return whole;
  part.sequences.count = (p.sequences.count - 1) % most + 1;
  std::int64_t const last = bytes(part);
  return whole < last ? last : whole;
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

inline void check_workspace(char const* op, ForwardParams const& p, std::int64_t bytes) {
  if (p.workspace == nullptr || p.workspace_bytes < bytes || !aligned(p.workspace, 256)) {
    reject(op, "the workspace must have " + std::to_string(bytes) + " bytes, 256-byte aligned, got " +
                   std::to_string(p.workspace_bytes));
  }
}

}  // namespace htree_cuda::host::tree_args

// Selected layers rotate a query in place, from block to block.
//
// The RoPE position of a selected block follows from its rank, so the query rotates by 16 positions between two blocks.
// The rotation is a product: the two elements of a pair are neighbours in the rotated rows, so eight columns rotate by
// an 8 x 8 matrix, one mma.sync m16n8k8 with fp16 sums, which are operands as they come. The matrices for 16 positions
// stay in registers. Every `restart_period` ranks of its own a query restarts from its unrotated self and a table,
// before the rounding of the steps adds up to a bf16 error.
//
// In half-selected layers keys are rotated by node index. What lies between query and key then changes only where the
// query leaves a block out: it rotates by 16 positions for each block left out, to later positions, and restarts after
// restart_period of them.
#pragma once

#include "load_query.cuh"
#include "smem.cuh"

namespace htree_cuda::sm90::htree_fwd {

// The query as the block at hand sees it.
template <class Cfg>
__device__ __forceinline__ auto& rotated(State<Cfg>& s) {
  if constexpr (Cfg::kReadsValues) {
    return s.q;
  } else {
    return s.rope.rotated;
  }
}

// Where this thread keeps its part of the unrotated query: beside O there are no registers for it. Addresses that are
// needed every few ranks alone are computed there, because registers are scarcer than instructions.
template <class Cfg>
__device__ __forceinline__ uint32_t saved_query(State<Cfg> const& s) {
  return s.rope.shared + s.warp * (Cfg::kSteps * 512) + ptx::lane_index() * 16;
}

// The address to which the rotations are fetched from which the query restarts, while the ranks before that pass.
template <class Cfg>
__device__ __forceinline__ uint32_t fetched_rotation(State<Cfg> const& s) {
  return s.rope.shared + Cfg::kRotationOffset + s.warp * Cfg::kRotationBytes;
}

// Half-selected layers keep the position where the query restarts next in shared memory.
template <class Cfg>
__device__ __forceinline__ uint32_t restart_address(State<Cfg> const& s) {
  return fetched_rotation(s) + Cfg::kColumnsBytes;
}

template <class Cfg>
__device__ __forceinline__ int kept_restart(State<Cfg> const& s) {
  return static_cast<int>(ptx::load_shared_4B(restart_address(s)));
}

template <class Cfg>
__device__ __forceinline__ void keep_restart(State<Cfg> const& s, int position) {
  __syncwarp();
  if (ptx::lane_index() == 0) ptx::store_shared_4B(restart_address(s), static_cast<uint32_t>(position));
  __syncwarp();
}

// Fetches the rotations of the rank that many further on, or in half-selected layers of the position where the query
// restarts next.
template <class Cfg>
__device__ __forceinline__ void fetch_rotation(State<Cfg> const& s, int ranks) {
  int const position = Cfg::kHalfSelected ? kept_restart(s) : s.position - ranks * kSiblings;
  int const lane = static_cast<int>(ptx::lane_index());
  bool const exists = Cfg::kHalfSelected ? position < own<Cfg>(s.args).restarts : position >= 0;
  if (exists && lane < Cfg::kColumnsBytes / 16) {
    ptx::copy_async_16B(fetched_rotation(s) + lane * 16,
                        own<Cfg>(s.args).restart_rotations + (position * (Cfg::kK / 4) + lane), 0);
  }
  ptx::copy_async_commit();
}

// Goes on by whole periods of a split query, which other consumers take.
template <class Cfg>
__device__ __forceinline__ void skip_periods(State<Cfg>& s, int periods) {
  s.position -= periods * s.args.restart_period * kSiblings;
  s.cursor += periods * s.args.restart_period;
}

// Sets k-step kk of the rotated query to q rotated by two matrices, one for each of its tiles.
template <class Cfg>
__device__ __forceinline__ void rotate_by(State<Cfg>& s, int kk, uint32_t const (&q)[4], uint32_t low, uint32_t high) {
  auto& to = reinterpret_cast<uint32_t(&)[4]>(rotated(s)[kk]);
  ptx::multiply_fp16(to[0], to[1], q[0], q[1], low);
  ptx::multiply_fp16(to[2], to[3], q[2], q[3], high);
}

// Rotates k-step kk of the query to its next rank.
template <class Cfg>
__device__ __forceinline__ void rotate_step(State<Cfg>& s, int kk) {
  rotate_by(s, kk, reinterpret_cast<uint32_t const(&)[4]>(rotated(s)[kk]), s.rope.step[2 * kk],
            s.rope.step[2 * kk + 1]);
}

template <class Cfg>
__device__ __forceinline__ void restart_rotation(State<Cfg>& s) {
  ptx::copy_async_wait<0>();
  __syncwarp();
  int const lane = static_cast<int>(ptx::lane_index());
  bool const holds = lane % 4 == lane / 8;
  uint32_t const columns = fetched_rotation(s) + (holds ? lane / 4 * Cfg::kColumnBytes : Cfg::kZerosOffset);
#pragma unroll
  for (int i = 0; i < Cfg::kK / 32; ++i) {
    uint4 const x = ptx::load_shared_16B(columns + i * 16);
    uint32_t const matrices[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int kk = 2 * i; kk < 2 * i + 2; ++kk) {
      uint32_t q[4];
      if constexpr (Cfg::kReadsValues) {
        uint4 const words = ptx::load_shared_16B(saved_query(s) + kk * 512);
        q[0] = words.x, q[1] = words.y, q[2] = words.z, q[3] = words.w;
      } else {
#pragma unroll
        for (int word = 0; word < 4; ++word) q[word] = reinterpret_cast<uint32_t const&>(s.q[kk][word]);
      }
      rotate_by(s, kk, q, matrices[2 * kk % 4], matrices[2 * kk % 4 + 1]);
    }
  }
  __syncwarp();
  if constexpr (Cfg::kHalfSelected) keep_restart(s, kept_restart(s) + s.args.restart_period * kSiblings);
  fetch_rotation(s, s.args.restart_period * (split(s) ? Cfg::kConsumers : 1));
  s.rope.left = s.args.restart_period;
}

// Restarts the query where it restarts last before `steps` further steps, and leaves in `steps` how many remain.
template <class Cfg>
__device__ __forceinline__ void rotate_far(State<Cfg>& s, int& steps) {
  steps -= s.rope.left;
  if (steps >= s.args.restart_period) {
    int const rest = steps % s.args.restart_period;
    keep_restart(s, kept_restart(s) + (steps - rest) * kSiblings);
    steps = rest;
    ptx::copy_async_wait<0>();
    __syncwarp();
    fetch_rotation(s, 0);
  }
  restart_rotation(s);
}

template <class Cfg>
__device__ __forceinline__ void rotate_over_gap(State<Cfg>& s, uint32_t stage, uint32_t query_mask) {
  int steps = static_cast<int>((query_mask & Cfg::kGapMask) >> Cfg::kSlotBits);
  if (steps == static_cast<int>(Cfg::kMaxGap)) {
    // The last of the top_k blocks is the query's own.
    if (split(s) && !takes_rank(s, s.args.top_k - 1 - (s.position >> kLog2Siblings))) {
      skip_periods(s, Cfg::kConsumers - 1);
    }
    uint32_t const block = ptx::load_shared_4B(Ring<Cfg>::node(stage, query_mask & Cfg::kSlotMask));
    steps = (s.position + static_cast<int>(block) * kSiblings - kept_restart(s)) / kSiblings + s.rope.left;
  }
  if (steps >= s.rope.left) rotate_far(s, steps);
#pragma unroll 1
  for (; steps > 0; --steps) {
#pragma unroll
    for (int kk = 0; kk < Cfg::kSteps; ++kk) rotate_step(s, kk);
    s.rope.left -= 1;
  }
}

// Rotates the query to the first block of `query_mask`.
template <class Cfg>
__device__ __forceinline__ void rotate_to(State<Cfg>& s, uint32_t stage, uint32_t query_mask) {
  if constexpr (Cfg::kHalfSelected) {
    if (query_mask & Cfg::kGapMask) rotate_over_gap(s, stage, query_mask);
  } else if (s.rope.left <= 0) {
    if (split(s) && s.rope.left == 0) skip_periods(s, Cfg::kConsumers - 1);
    restart_rotation(s);
  }
}

template <class Cfg>
__device__ __forceinline__ void advance_rank(State<Cfg>& s) {
  s.position -= kSiblings;
  s.cursor += 1;
  if constexpr (!Cfg::kHalfSelected) s.rope.left -= 1;
}

// Whether the block that waits is the query's last.
template <class Cfg>
__device__ __forceinline__ bool was_last(State<Cfg> const& s) { return s.position < 0; }

// Before the first block: the matrices of a step, the unrotated query, and the first rotations.
template <class Cfg>
__device__ __forceinline__ void begin_rotation(State<Cfg>& s, Ring<Cfg> const& ring) {
  s.rope.shared = ring.stages - Cfg::kRingOffset;
  s.rope.fragment_lane = ptx::opaque(s.lane * 16);
  if (!s.active) return;
  int const g = s.lane / 4;
  bool const holds = s.lane % 4 == g / 2;
#pragma unroll
  for (int i = 0; i < Cfg::kK / 32; ++i) {
    uint4 const x = __ldg(reinterpret_cast<uint4 const*>(s.args.step_rotation + g * (Cfg::kK / 32) + i));
    uint32_t const words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      s.rope.step[4 * i + tile] = !holds ? 0u : Cfg::kHalfSelected ? words[tile] : rope::inverse_column(words[tile], g);
    }
  }
  uint32_t const zeros = fetched_rotation(s) + Cfg::kZerosOffset;
  if (s.lane < 4) ptx::store_shared_16B(zeros + s.lane * 16, {0, 0, 0, 0});
  if constexpr (Cfg::kHalfSelected) keep_restart(s, s.position);
  if (split(s)) skip_periods(s, s.warp);
  if constexpr (Cfg::kReadsValues) {
    uint32_t const saved = saved_query(s);
#pragma unroll
    for (int kk = 0; kk < Cfg::kSteps; ++kk) {
      auto const& x = reinterpret_cast<uint32_t const(&)[4]>(s.q[kk]);
      ptx::store_shared_16B(saved + kk * 512, {x[0], x[1], x[2], x[3]});
    }
  }
  fetch_rotation(s, 0);
  if constexpr (Cfg::kHalfSelected) restart_rotation(s);
}

}  // namespace htree_cuda::sm90::htree_fwd

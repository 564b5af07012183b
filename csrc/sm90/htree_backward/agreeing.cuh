// dk and dv of nodes as blocks of rows that agree on their parents reach them, in one layer below their first: a CTA keeps q, or
// dout, of a block in shared memory; a warp takes four parents at a time, adds up what the block's rows give one of them, and
// adds that to the sums of all rows, atomically: in which order is not determined.
//
// Weights are those of the queries kernel, which left P and dS of each pair in global memory (device/backward_steps.h): what
// is left is to turn q and a product, dk += dS^T q in some CTAs and dv += P^T dout in others. So there is room for twice the
// rows, of which a parent has more visitors, and for twice the warps. As in nodes.cuh dk adds up in the frame of the place among
// the siblings.
//
// q or dout arrive once, at a barrier; what belongs to a pair by cp.async, in slots of its warp, kSlots - 1 pairs ahead.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "operands.cuh"

namespace htree_cuda::gradient {

// A CTA's work: dk or dv, a block of rows, and every slices-th unit of four parents.
struct Block {
  bool keys;
  int head;
  int first;  // row
  int rows;   // that exist
  int slice;
  int slices;

  __device__ Block(Args const& args, int item) {
    Step const& step = args.step;
    int const blocks = (step.rows + kBlockRows - 1) / kBlockRows;
    int const of_keys = args.chunk.heads * blocks * step.key_slices;
    keys = item < of_keys;  // first: they take longer
    if (!keys) item -= of_keys;
    slices = keys ? step.key_slices : step.value_slices;
    slice = item % slices;
    item /= slices;
    head = item / blocks;
    first = step.first_row + item % blocks * kBlockRows;
    rows = min(min(step.first_row + step.rows, args.chunk.queries) - first, kBlockRows);
  }
};

// Shared memory; a warp's slots and list are its own.
template <class Cfg>
struct BlockStore {
  uint32_t shared;

  __device__ uint32_t rows() const { return shared; }
  __device__ uint32_t slots(int warp) const {
    return shared + kBlockRows * Cfg::kRowBytes + warp * Cfg::kSlots * Cfg::kSlotBytes;
  }
  __device__ uint32_t list(int warp) const { return slots(Cfg::kWarps) + warp * Cfg::kListBytes; }
  __device__ uint32_t arrived() const { return list(Cfg::kWarps); }  // barrier: q or dout
  __device__ uint32_t next_unit() const { return arrived() + 8; }
};

// The visits of a warp's units, unit by unit, parent by parent, in the order of the rows. A lane knows of two rows.
class Walk {
public:
  // An entry of the list: the position of the query as the parent sees it, the row in the block, and the parent in its unit.
  static constexpr int kPositionBits = 13;
  static constexpr int kRowBits = 6;
  static_assert(kMaxTopK * kSiblings <= 1 << kPositionBits && kBlockRows <= 1 << kRowBits);

  // A visit to come, or none.
  struct Visit {
    uint32_t pair;
    uint32_t position;
    uint32_t what;  // the parent and the row
  };
  static constexpr uint32_t kNone = ~0u;        // where there is no further visit
  static constexpr uint32_t kBefore = ~0u - 1;  // the first

  __device__ Walk(Args const& args, Block const& block, uint32_t list, uint32_t next_unit)
      : args_(args), block_(block), list_(list), next_unit_(next_unit), at_(list), end_(list) {
    // Pairs of a row follow each other as ranks do, and positions fall by 16 from rank to rank.
    last_pair_ =
        pair_at(args, block.head, block.first) + static_cast<uint32_t>(args.tree.top_k - 1 - args.step.ranks_begin);
    fetch();
  }

  // False where there is none.
  __device__ __forceinline__ bool next(Visit& visit) {
    if (at_ == end_ && !refill()) return false;
    uint32_t const entry = ptx::load_shared_4B(at_);
    at_ += 4;
    visit.position = entry & ((1u << kPositionBits) - 1u);
    visit.what = (entry >> kPositionBits) + unit_;
    uint32_t const row = visit.what & ((1u << kRowBits) - 1u);
    visit.pair = row * (args_.step.ranks_end - args_.step.ranks_begin) + last_pair_ - visit.position / kSiblings;
    return true;
  }

private:
  // The next unit that nobody of the CTA has taken, and the words of this lane's rows of it.
  __device__ __forceinline__ void fetch() {
    int const lane = threadIdx.x % 32;
    int next = 0;
    if (lane == 0) next = ptx::add_shared(next_unit_, 1);
    coming_ = block_.slice + block_.slices * __shfl_sync(kFullWarp, next, 0);
    std::uint32_t const* const words =
        entry_of(args_, args_.step.layers_begin, block_.head, coming_ * kUnitParents / kGroupParents, block_.first);
    bool const there = exists(coming_);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words_[i] = there && lane + 32 * i < block_.rows ? __ldg(words + lane + 32 * i) : 0;
    }
  }

  // Whether the last row's rightmost parent, or one after it, lies in the unit.
  __device__ __forceinline__ bool exists(uint32_t unit) const {
    std::int64_t const last = args_.chunk.position(block_.first + block_.rows - 1);
    return unit <= static_cast<uint32_t>(last >> (kLog2Siblings * (args_.step.layers_begin + 1))) / kUnitParents;
  }

  // The list of the next unit that somebody visits.
  __device__ __forceinline__ bool refill() {
    uint32_t const lane = threadIdx.x % 32;
    at_ = end_ = list_;
    while (end_ == list_) {
      if (!exists(coming_)) return false;
      uint32_t const unit = coming_;
      unit_ = unit * kUnitParents << kRowBits;
      uint32_t const shift = unit * kUnitParents % kGroupParents;
      uint32_t own[2], word[2], entry[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        own[i] = ranked_within(words_[i], args_.step.ranks_begin, args_.step.ranks_end) >> shift;
        uint32_t const rank =
            ((words_[i] & ~kAgrees) >> kGroupParents) + __popc(words_[i] & ((1u << shift) - 1u));
        word[i] = words_[i] >> shift;
        uint32_t const row = lane + 32 * i;
        uint32_t const node =
            static_cast<uint32_t>(args_.chunk.position(block_.first) + row) >> (kLog2Siblings * args_.step.layers_begin);
        entry[i] = row << kPositionBits | (kSiblings * (args_.tree.top_k - 1 - rank) + node % kSiblings);
      }
      fetch();
      __syncwarp();  // the list has been read
#pragma unroll
      for (int p = 0; p < kUnitParents; ++p) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          bool const visits = (own[i] >> p & 1u) != 0;
          unsigned const visitors = __ballot_sync(kFullWarp, visits);
          if (visits) ptx::store_shared_4B(end_ + 4 * __popc(visitors & ((1u << lane) - 1u)), entry[i]);
          entry[i] += (1u << (kPositionBits + kRowBits)) - kSiblings * (word[i] >> p & 1u);
          end_ += 4 * __popc(visitors);
        }
      }
      __syncwarp();
    }
    return true;
  }

  Args const& args_;
  Block const& block_;
  uint32_t const list_;
  uint32_t const next_unit_;
  uint32_t at_;   // the entry at hand
  uint32_t end_;  // of the list
  uint32_t last_pair_;
  uint32_t coming_;
  uint32_t words_[2];
  uint32_t unit_ = 0;  // of the list: its first parent, as in `what`
};

// dk, if kKeys, or dv, of one parent at a time.
template <class Cfg, bool kKeys>
class Sums {
  using Element = typename Cfg::Element;
  static constexpr int kDim = kKeys ? Cfg::kK : Cfg::kV;
  static constexpr int kRowBytes = 16 * 2 * kDim;  // 16 heads

public:
  __device__ Sums(Args const& args, Block const& block, BlockStore<Cfg> const& store, int warp)
      : args_(args),
        block_(block),
        store_(store),
        slots_(store.slots(warp)),
        row_lane_(store.rows() + matrix_lane<true>(threadIdx.x % 32, 2 * kDim)) {
    clear(sums_);
  }

  __device__ void run(Walk& walk) {
    uint32_t what[Cfg::kSlots];
#pragma unroll
    for (int i = 0; i < Cfg::kSlots - 1; ++i) what[i] = Walk::kBefore;
    barriers::mbarrier_wait(store_.arrived(), 0, "htree_backward agreeing: rows");
    uint32_t slot = slots_;
    uint32_t before = slots_ + (Cfg::kSlots - 1) * Cfg::kSlotBytes;
    while (what[0] != Walk::kNone) {
      ptx::copy_async_wait<Cfg::kSlots - 2>();
      __syncwarp();  // all have read the slot before, and what they copied to this one is there
      what[Cfg::kSlots - 1] = send(walk, before);
      if (what[0] != Walk::kBefore) take(what[0], slot);
      before = slot;
      slot = slot == slots_ + (Cfg::kSlots - 1) * Cfg::kSlotBytes ? slots_ : slot + Cfg::kSlotBytes;
#pragma unroll
      for (int i = 0; i < Cfg::kSlots - 1; ++i) what[i] = what[i + 1];
    }
    if (parent_ >= 0) add_sums();
  }

private:
  // The next visit's pair to a slot: a group of copies, empty where there is none.
  __device__ __forceinline__ uint32_t send(Walk& walk, uint32_t slot) {
    Walk::Visit visit;
    bool const exists = walk.next(visit);
    if (exists) {
      uint32_t const lane = threadIdx.x % 32;
      uint32_t const to = slot + lane * 16;
      char const* const pair = args_.pairs + static_cast<std::int64_t>(visit.pair) * kPairBytes + lane * 16;
      ptx::copy_async_16B(to, pair + (kKeys ? kPairScale / 2 : 0), 0);
      if constexpr (kKeys) {  // and turns, and the scale
        constexpr uint32_t kTurnLanes = Cfg::kTurnsBytes / 16;
        char const* const turns = reinterpret_cast<char const*>(args_.column_turns) +
                                  static_cast<std::int64_t>(visit.position) * Cfg::kTurnsBytes + lane * 16;
        char const* const tail = lane < kTurnLanes ? turns : pair + kPairScale - kTurnLanes * 16;
        if (lane <= kTurnLanes) ptx::copy_async_16B(to + kPairScale / 2, tail, 0);
      }
    }
    ptx::copy_async_commit();
    return exists ? visit.what : Walk::kNone;
  }

  __device__ __forceinline__ void take(uint32_t what, uint32_t slot) {
    uint32_t const lane = threadIdx.x % 32;
    uint32_t weights[4];
    ptx::load_matrix_x4_transposed(weights, slot + lane / 8 % 2 * 256 + lane / 16 * 128 + lane % 8 * 16);
    int const parent = static_cast<int>(what >> Walk::kRowBits);
    Steps const rows(row_lane_ + (what & ((1u << Walk::kRowBits) - 1u)) * kRowBytes);
    if constexpr (kKeys) {
      float const scale = ptx::load_shared_float(slot + kPairScale / 2 + Cfg::kTurnsBytes);
      if (parent != parent_) {
        if (parent_ >= 0) add_sums();
        scale_ = scale;
      } else if (scale != scale_) {
        fit(scale, weights);
      }
      parent_ = parent;
      add_keys(rows, weights, slot + kPairScale / 2 + lane / 4 * (kDim / 4));
    } else {
      if (parent != parent_ && parent_ >= 0) add_sums();
      parent_ = parent;
      add_values(rows, weights);
    }
  }

  // The smaller of both scales is that of the sums from here on.
  __device__ __forceinline__ void fit(float scale, uint32_t (&weights)[4]) {
    if (scale < scale_) {
      float const factor = scale * inverse_of(scale_);
#pragma unroll
      for (int tile = 0; tile < kDim / 8; ++tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[tile][e] *= factor;
      }
      scale_ = scale;
    } else {
      half2 const factor = __float2half2_rn(scale_ * inverse_of(scale));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        half2& x = reinterpret_cast<half2&>(weights[i]);
        x = __hmul2(x, factor);
      }
    }
  }

  __device__ __forceinline__ void add_keys(Steps const& rows, uint32_t const (&weights)[4], uint32_t turns_lane) {
    constexpr int kHalf = kDim / 32;
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
      uint32_t lo[4], hi[4];
      ptx::load_matrix_x4_transposed(lo, rows[kk]);
      ptx::load_matrix_x4_transposed(hi, rows[kk + kHalf]);
      float2 const words = ptx::load_shared_8B(turns_lane + 8 * kk);
      half2 const turns[2] = {reinterpret_cast<half2 const&>(words.x), reinterpret_cast<half2 const&>(words.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) turn(lo[i], hi[i], turns[i / 2]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mma_fp16(sums_[2 * kk + i], weights, lo[2 * i], lo[2 * i + 1]);
        ptx::mma_fp16(sums_[2 * (kk + kHalf) + i], weights, hi[2 * i], hi[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void add_values(Steps const& rows, uint32_t const (&weights)[4]) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t b[4];
      ptx::load_matrix_x4_transposed(b, rows[step]);
      Pairs<Element>::mma(sums_[2 * step], weights, b[0], b[1]);
      Pairs<Element>::mma(sums_[2 * step + 1], weights, b[2], b[3]);
    }
  }

  static __device__ __forceinline__ void turn(uint32_t& lo, uint32_t& hi, half2 turn) {
    half2& x = reinterpret_cast<half2&>(lo);
    half2& y = reinterpret_cast<half2&>(hi);
    half2 const cosine = __low2half2(turn);
    half2 const sine = __high2half2(turn);
    half2 const before = x;
    x = __hfma2(y, __hneg2(sine), __hmul2(x, cosine));
    y = __hfma2(before, sine, __hmul2(y, cosine));
  }

  // The block's sums of a parent to those of all rows, dk turned back from the place of each child.
  __device__ __forceinline__ void add_sums() {
    std::int64_t const node = block_.head * args_.node_rows + args_.begin[args_.step.layers_begin] +
                              static_cast<std::int64_t>(parent_) * kSiblings;
    int const column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const child = threadIdx.x % 32 / 4 + 8 * i;
      float* const to = (kKeys ? args_.dk : args_.dv) + (node + child) * kDim + column;
      if constexpr (kKeys) {
        float const scale = kUnitScale * inverse_of(scale_);
        float4 const* const turns = reinterpret_cast<float4 const*>(args_.turns + child * (kDim / 2) + column);
        constexpr int kHalf = kDim / 16;
        constexpr int kAtOnce = 4;
        float4 of_child[kAtOnce];  // (cos, sin) of two neighbouring pairs
#pragma unroll
        for (int tile = 0; tile < kHalf; ++tile) {
          if (tile % kAtOnce == 0) {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) of_child[j] = __ldg(turns + 4 * (tile + j));
          }
          float4 const& two = of_child[tile % kAtOnce];
          float2 const lo = {sums_[tile][2 * i] * scale, sums_[tile][2 * i + 1] * scale};
          float2 const hi = {sums_[tile + kHalf][2 * i] * scale, sums_[tile + kHalf][2 * i + 1] * scale};
          ptx::add_global_8B(to + 8 * tile, {lo.x * two.x + hi.x * two.y, lo.y * two.z + hi.y * two.w});
          ptx::add_global_8B(to + 8 * tile + kDim / 2, {hi.x * two.x - lo.x * two.y, hi.y * two.z - lo.y * two.w});
        }
      } else {
#pragma unroll
        for (int tile = 0; tile < kDim / 8; ++tile) {
          ptx::add_global_8B(to + 8 * tile, {sums_[tile][2 * i], sums_[tile][2 * i + 1]});
        }
      }
    }
    clear(sums_);
  }

  Args const& args_;
  Block const& block_;
  BlockStore<Cfg> const& store_;
  uint32_t const slots_;
  uint32_t const row_lane_;  // this lane's row of the first of q or dout
  int parent_ = -1;
  float scale_ = kFirstScale;  // of dS in the sums
  float sums_[kDim / 8][4];    // [columns], rows are children
};

template <class Cfg>
__device__ void run_agreeing(Args const& args, uint32_t shared, int warp) {
  Block const block(args, static_cast<int>(blockIdx.x));
  if (block.rows <= 0 || !agrees(args, args.step.layers_begin, block.head, block.first)) return;
  BlockStore<Cfg> const store{shared};
  if (threadIdx.x == 0) {
    barriers::mbarrier_init(store.arrived(), 1);
    barriers::mbarrier_init_fence();
    ptx::store_shared_4B(store.next_unit(), 0);
  }
  __syncthreads();
  if (warp == 0) {
    int const lane = threadIdx.x % 32;
    int const bytes = block.keys ? 16 * Cfg::kKeyRowBytes : 16 * Cfg::kValueRowBytes;
    char const* const queries =
        args.queries + (static_cast<std::int64_t>(block.head) * args.chunk.rows + block.first) * Cfg::kQueryBytes +
        kQueryHeader + (block.keys ? 0 : 16 * Cfg::kKeyRowBytes);
    if (lane == 0) barriers::mbarrier_arrive_expect_bytes(store.arrived(), block.rows * bytes);
    __syncwarp();
    for (int row = lane; row < block.rows; row += 32) {
      ptx::bulk_load(store.rows() + row * bytes, queries + row * Cfg::kQueryBytes, bytes, store.arrived());
    }
    __syncwarp();
  }
  Walk walk(args, block, store.list(warp), store.next_unit());
  if (block.keys) {
    Sums<Cfg, true>(args, block, store, warp).run(walk);
  } else {
    Sums<Cfg, false>(args, block, store, warp).run(walk);
  }
}

}  // namespace htree_cuda::gradient

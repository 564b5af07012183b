// dk and dv of selected layers: dkdv_selected. A warp holds a KV block and multiplies with the queries that visit it.
// The grid is persistent: a warp gets its work items, a block and a segment of the rows, from a counter, so that no
// warp waits for another one's block. What is added to a sum, and in which order, follows from shapes and lists alone.
//
// Since <R(q, n - 1), R(k, 16 j + c)> = <R(q, n - 1 - 16 j), R(k, c)> for a block of rank j, scores and gradients need
// the keys rotated by their place c alone. So dk is summed over all queries in that frame and rotated back once, in the
// end.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "args.h"
#include "device/barriers.cuh"
#include "device/pairs.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "host/launch_overlapped.cuh"
#include "operands.cuh"
#include "ordered_sum.cuh"
#include "reverse_index/lookup.cuh"
#include "traits.cuh"
#include "weights.cuh"

namespace htree_cuda::sm90::htree_bwd {

// What a warp works on: one KV block and one segment of the rows.
struct WorkItem {
  int layer;
  int head;
  int block;
  int first;            // the first row
  int end;              // past the last row
  int segments_before;  // segments of the block that are added before this one; negative where no row visits the block

  static __device__ WorkItem at(Args const& args, int index) {
    // Opaque, because the compiler would otherwise keep it in a register that the products need.
    int layer = static_cast<int>(ptx::opaque(static_cast<uint32_t>(args.max_entry))) - 1;
    while (layer > 0 && index >= args.first_item[layer - 1]) --layer;
    index -= args.first_item[layer];
    int const block = args.tree.kv_blocks[layer] - 1 - index % args.tree.kv_blocks[layer];
    index /= args.tree.kv_blocks[layer];
    int const segment = index % args.segments[layer];
    int const head = index / args.segments[layer];
    // No row visits a block of tokens after its own, nor is this a selected layer of rows before top_k parents exist.
    std::int64_t const late =
        (static_cast<std::int64_t>(max(block, args.tree.top_k)) << (kLog2Siblings * (layer + 1))) -
        args.chunk.position(0);
    int const reached =
        static_cast<int>(min(max(late, std::int64_t(0)), static_cast<std::int64_t>(args.chunk.queries)));
    int const first = segment * args.segment_rows[layer];
    int const end = min(first + args.segment_rows[layer], args.chunk.queries);
    int const segments_before = max(first, reached) < end ? segment - reached / args.segment_rows[layer] : -1;
    return {layer, head, block, max(first, reached / kRowStep * kRowStep), end, segments_before};
  }
};

// A warp's own part of shared memory: slots, the values that registers do not hold, the list of visits, the progress of
// a work item, an mbarrier a slot, and the inverse row scales of the keys. The warp arrives once at the barrier of a
// slot, with the bytes of the copies; the barrier makes a query and its rotation visible.
template <class Cfg>
struct WarpStorage {
  uint32_t begin;

  __device__ uint32_t slot(uint32_t i) const { return begin + i * Cfg::Slot::kBytes; }
  __device__ uint32_t values() const { return begin + Cfg::kSlots * Cfg::Slot::kBytes; }
  __device__ uint32_t list() const { return values() + Cfg::kValuesBytes; }
  __device__ uint32_t full(uint32_t i) const { return progress() + Cfg::kProgressBytes + 8 * i; }
  __device__ uint32_t progress() const { return list() + Cfg::kListBytes; }
  __device__ uint32_t inverse() const { return full(Cfg::kSlots); }
};

// A work item and the row to look at next. They wait in shared memory, because the products need the registers.
struct Progress {
  WorkItem item;
  int next;

  __device__ __forceinline__ static Progress loaded(uint32_t shared) {
    uint4 const x = ptx::load_shared_16B(shared);
    uint4 const y = ptx::load_shared_16B(shared + 16);
    return {WorkItem{static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z), static_cast<int>(y.x),
                 static_cast<int>(x.w), static_cast<int>(y.y)},
            static_cast<int>(y.x)};
  }
  __device__ __forceinline__ void store(uint32_t shared) const {
    ptx::store_shared_16B(shared, {static_cast<uint32_t>(item.layer), static_cast<uint32_t>(item.head),
                                   static_cast<uint32_t>(item.block), static_cast<uint32_t>(item.end)});
    ptx::store_shared_16B(shared + 16,
                          {static_cast<uint32_t>(next), static_cast<uint32_t>(item.segments_before), 0u, 0u});
  }
};

// A warp and its KV block, for one work item.
template <class Cfg>
class DkDvSelectedWarp {
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kHalf = kK / 32;
  static constexpr int kHeld = Cfg::kHeldValues;

public:
  __device__ DkDvSelectedWarp(Args const& args, WarpStorage<Cfg> const& store, RingPosition<Cfg::kSlots>& at,
                              WorkItem const& item)
      : args_(args), store_(store), at_(at), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4) {
    word_ = word_of(item, item.first + lane_);
    load(item);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) clear(dk_[step]);
    clear(dv_);
  }

  __device__ void run(WorkItem const& item) {
    look_for_visits({item, item.first});
    waiting_ = store_.slot(at_.slot);
    bool const any = done_ != found_;
    while (done_ != found_) {
      add_visit();
      ++done_;
      at_ = at_.ahead(1);
      if (done_ >= look_at_) look_for_visits(Progress::loaded(store_.progress()));
    }
    StepAddresses const douts(waiting_ + ldmatrix_offset<true>(lane_, Cfg::Slot::kValueRowBytes));
#pragma unroll
    for (int step = 0; step < kV / 16; ++step) add_values(douts, step);
    finish(Progress::loaded(store_.progress()).item, any);
  }

private:
  // ---- the queries that visit the block ----------------------------------------------------------------------------

  // The word of a row in the reverse index.
  __device__ __forceinline__ uint32_t word_of(WorkItem const& item, int row) const {
    if (row >= item.end) return 0;
    return __ldg(reverse_index::word_at(args_, item.layer, item.head, item.block / kWordBlocks, row));
  }

  static __device__ __forceinline__ uint32_t own_bit(WorkItem const& item) { return 1u << (item.block % kWordBlocks); }

  // Appends the visits of the next 32 rows to the list.
  __device__ __forceinline__ void scan(Progress& progress) {
    WorkItem const& item = progress.item;
    int const row = progress.next + lane_;
    uint32_t const word = word_;
    progress.next += 32;
    word_ = word_of(item, row + 32);
    bool const visits = row < item.end && (word & own_bit(item)) != 0;
    unsigned const visitors = __ballot_sync(kFullWarp, visits);
    if (visits) {
      int const rank = static_cast<int>(word >> kWordBlocks) + __popc(word & (own_bit(item) - 1u));
      int const position =
          candidates_in_selected(args_.chunk.position(row), item.layer, args_.tree.top_k) - 1 - kSiblings * rank;
      uint32_t const masked =
          reverse_index::Expanded(args_, item.layer, item.head).of_block(args_, item.block, row) |
          reverse_index::causal_mask(position);
      uint32_t const entry = entry_at(found_ + __popc(visitors & ((1u << lane_) - 1u)));
      ptx::store_shared_4B(entry, row);
      ptx::store_shared_4B(entry + 4, static_cast<uint32_t>(position) << 16 | (masked & 0xffffu));
    }
    found_ += __popc(visitors);
  }

  // Moves on to the first of the next eight times 32 rows in which some row visits the block.
  __device__ __forceinline__ void skip(Progress& progress) {
    WorkItem const& item = progress.item;
    uint32_t words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = word_of(item, progress.next + 32 * i + lane_);
    uint32_t empty = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) empty = (words[i] & own_bit(item)) != 0 ? 0 : empty + 1;
    empty = __reduce_min_sync(kFullWarp, empty);
    if (empty == 0) return;
    progress.next += 32 * empty;
    word_ = word_of(item, progress.next + lane_);
  }

  __device__ __forceinline__ uint32_t entry_at(int i) const {
    return store_.list() + static_cast<uint32_t>(i) % Cfg::kListEntries * 8;
  }

  // Looks for visits until the list holds enough for all slots, and fills the free slots: all but the one whose values
  // wait. The next look comes when half of the list has been used.
  __device__ __forceinline__ void look_for_visits(Progress progress) {
    bool first = true;
    while (progress.next < progress.item.end && found_ - done_ <= Cfg::kListEntries - 32) {
      if (!first) skip(progress);
      first = false;
      scan(progress);
      if (found_ - done_ >= Cfg::kSlots) break;
    }
    __syncwarp();  // The list is written, and the progress that is overwritten here has been read.
    if (lane_ == 0) progress.store(store_.progress());
    __syncwarp();
    look_at_ = progress.next < progress.item.end ? found_ - (Cfg::kListEntries - 32) : INT_MAX;
#pragma unroll 1
    while (sent_ < min(found_, done_ + Cfg::kSlots - 1)) send(progress.item.head);
  }

  // Copies the query of the next visit, and its rotation, to their slot.
  __device__ __forceinline__ void send(int head) {
    uint32_t const entry = entry_at(sent_);
    uint32_t const row = ptx::load_shared_4B(entry);
    uint32_t const place = ptx::load_shared_4B(entry + 4);
    uint32_t const i = at_.ahead(sent_ - done_).slot;
    uint32_t const slot = store_.slot(i);
    uint32_t const full = store_.full(i);
    rope::FragmentRotations const* const rotations = args_.fragment_rotations + (place >> 16) * (kK / 8);
    char const* const query =
        args_.queries + (static_cast<std::int64_t>(head) * args_.chunk.rows + row) * Cfg::Slot::kQueryBytes;
    if (ptx::elect()) {
      barriers::mbarrier_arrive_expect_bytes(full, Cfg::Slot::kQueryBytes + Cfg::kRotationsBytes);
      ptx::bulk_load(slot, rotations, Cfg::kRotationsBytes, full);
      ptx::bulk_load(slot + Cfg::Slot::kQueryOffset, query, Cfg::Slot::kQueryBytes, full);
    }
    __syncwarp();
    ++sent_;
  }

  // ---- products --------------------------------------------------------------------------------------------------

  // Two neighbouring elements of a row: columns 16 step + 8 part + 2 tq + {0, 1}.
  __device__ __forceinline__ uint32_t word(char const* rows, int row_bytes, int row, int step, int part) const {
    return __ldg(reinterpret_cast<uint32_t const*>(rows + row * row_bytes + (((2 * step + part) ^ (row % 8)) << 4) +
                                                   4 * tq_));
  }

  // Loads keys and values of the block to registers, and what these do not hold to shared memory.
  __device__ __forceinline__ void load(WorkItem const& item) {
    char const* const packed =
        args_.kv_blocks[item.layer] +
        (static_cast<std::int64_t>(item.head) * args_.tree.kv_blocks[item.layer] + item.block) * Cfg::Slot::kBlockBytes;
    char const* const keys = packed + kBlockHeader;
    char const* const values = keys + 16 * Cfg::Slot::kKeyRowBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = g_ + 8 * i;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int step = 0; step < kK / 16; ++step) {
          keys_[step][2 * part + i] = word(keys, Cfg::Slot::kKeyRowBytes, row, step, part);
        }
#pragma unroll
        for (int step = 0; step < kHeld; ++step) {
          values_[step][2 * part + i] = word(values, Cfg::Slot::kValueRowBytes, row, step, part);
        }
      }
    }
    __syncwarp();
    if (lane_ < kSiblings) {
      ptx::store_shared_4B(store_.inverse() + 4 * lane_, __ldg(reinterpret_cast<uint32_t const*>(packed) + lane_));
    }
    if constexpr (Cfg::kValuesBytes > 0) {  // The last 128 bytes of each row go to shared memory.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const chunk = 32 * i + lane_;
        char const* const half = values + (chunk / 8 + 1) * Cfg::Slot::kValueRowBytes - 128;
        ptx::store_shared_16B(store_.values() + 16 * chunk, __ldg(reinterpret_cast<uint4 const*>(half) + chunk % 8));
      }
    }
    __syncwarp();
  }

  // One visit. Rows of the results are children, g and g + 8 in this thread, and columns are heads.
  __device__ __forceinline__ void add_visit() {
    uint32_t const slot = store_.slot(at_.slot);
    barriers::mbarrier_wait(store_.full(at_.slot), at_.parity, "dkdv_selected: full");
    uint32_t const masked = ptx::load_shared_4B(entry_at(done_) + 4);
    float raw[2][4], dp[2][4];
    uint32_t rotated[kK / 16][4];
    products(slot, raw, dp, rotated);
    waiting_ = slot;
    float ds[2][4];
    uint32_t scaled[2][2];  // [children][heads]
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t const header = slot + Cfg::Slot::kQueryOffset + tile * 32 + tq_ * 8;
      float2 const unit = ptx::load_shared_8B(header);
      float2 const lse2 = ptx::load_shared_8B(header + 4 * kMaxGroupHeads);
      float2 const delta = ptx::load_shared_8B(header + 8 * kMaxGroupHeads);
      float2 const size = {unit.x * kHeadroomFactor, unit.y * kHeadroomFactor};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const inverse = ptx::load_shared_float(store_.inverse() + 4 * (g_ + 8 * i));
        bool const attends = !(masked >> (g_ + 8 * i) & 1u);
        Weights const x =
            weights(raw[tile][2 * i], inverse, unit.x, lse2.x, dp[tile][2 * i], delta.x, size.x);
        Weights const y =
            weights(raw[tile][2 * i + 1], inverse, unit.y, lse2.y, dp[tile][2 * i + 1], delta.y, size.y);
        uint32_t const p = Pairs<Element>::pack(x.p, y.p);
        p_[2 * tile + i] = attends ? p : 0;
        ds[tile][2 * i] = x.ds;
        ds[tile][2 * i + 1] = y.ds;
        uint32_t const both = Pairs<__half>::pack(x.ds * weight_scale_[i], y.ds * weight_scale_[i]);
        scaled[i][tile] = attends ? both : 0;
      }
    }
    bool const overflow = overflows(scaled[0][0], scaled[0][1], scaled[1][0], scaled[1][1]);
    if (__any_sync(kFullWarp, overflow)) recompute(ds, masked, scaled);
    __syncwarp();  // The slot whose values waited before has been read and is free.
    if (sent_ < found_) send(ptx::load_shared_4B(store_.progress() + 4));
    // dk has columns of K as rows: the weights of a thread for a child are then a B fragment, and transposed q is an A
    // fragment, without a move between registers.
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::mma_fp16(dk_[step][i], rotated[step], scaled[i][0], scaled[i][1]);
    }
  }

  // Computes the scaled weights once more, after the scale fell because a weight would overflow.
  __device__ __forceinline__ void recompute(float (&ds)[2][4], uint32_t masked, uint32_t (&scaled)[2][2]) {
    float largest[2] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bool const attends = !(masked >> (g_ + 8 * (e / 2)) & 1u);
        ds[tile][e] = attends ? ds[tile][e] : 0.0f;
        largest[e / 2] = fmaxf(largest[e / 2], fabsf(ds[tile][e]));
      }
    }
    lower_scale(weight_scale_, largest, [&](float const (&factor)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float const of_child = of_column(factor[i], e);
#pragma unroll
          for (int step = 0; step < kK / 16; ++step) {
            dk_[step][i][e] *= of_child;
            dk_[step][i][2 + e] *= of_child;
          }
        }
      }
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        scaled[i][tile] =
            Pairs<__half>::pack(ds[tile][2 * i] * weight_scale_[i], ds[tile][2 * i + 1] * weight_scale_[i]);
      }
    }
  }

  // dv += P^T dO of the visit that waits, for 16 columns.
  __device__ __forceinline__ void add_values(StepAddresses const& douts, int step) {
    uint32_t b[4];
    ptx::load_matrix_x4_transposed(b, douts[step] + Cfg::Slot::kValueOffset);
    Pairs<Element>::mma(dv_[2 * step], p_, b[0], b[1]);
    Pairs<Element>::mma(dv_[2 * step + 1], p_, b[2], b[3]);
  }

  // The number of child 2 tq + e, from a thread that holds the row of that child.
  __device__ __forceinline__ float of_column(float of_row, int e) const {
    return __shfl_sync(kFullWarp, of_row, (2 * tq_ + e) * 4);
  }

  // Scores and dP, and between their chains of products those of dv of the visit before. `rotated` becomes the rotated
  // q, transposed, as dk needs it.
  __device__ __forceinline__ void products(uint32_t slot, float (&raw)[2][4], float (&dp)[2][4],
                                           uint32_t (&rotated)[kK / 16][4]) {
    StepAddresses const waiting(waiting_ + ldmatrix_offset<true>(lane_, Cfg::Slot::kValueRowBytes));
    StepAddresses const queries(slot + ldmatrix_offset<false>(lane_, Cfg::Slot::kKeyRowBytes));
    StepAddresses const douts(slot + ldmatrix_offset<false>(lane_, Cfg::Slot::kValueRowBytes));
    StepAddresses const values(store_.values() + ldmatrix_offset<true>(lane_, 128));
    clear(raw);
    clear(dp);
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        ptx::load_matrix_x4(rotated[step], queries[step] + Cfg::Slot::kRowsOffset);
      }
      uint4 const rotations = ptx::load_shared_16B(slot + kk * 64 + tq_ * 16);
      rotate_columns<false>(rotated[kk], rotated[kk + kHalf],
                            reinterpret_cast<rope::FragmentRotations const&>(rotations));
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        ptx::mma_fp16(raw[0], keys_[step], rotated[step][0], rotated[step][1]);
        ptx::mma_fp16(raw[1], keys_[step], rotated[step][2], rotated[step][3]);
      }
#pragma unroll
      for (int step = kk * kV / 16 / kHalf; step < (kk + 1) * kV / 16 / kHalf; ++step) {
        add_values(waiting, step);
        uint32_t a[4], b[4];
        if (step < kHeld) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = values_[step % kHeld][i];
        } else {
          ptx::load_matrix_x4(a, values[step % 4]);
        }
        ptx::load_matrix_x4(b, douts[step] + Cfg::Slot::kValueOffset);
        Pairs<Element>::mma(dp[0], a, b[0], b[1]);
        Pairs<Element>::mma(dp[1], a, b[2], b[3]);
      }
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          rotated[step][2 * tile] = ptx::transpose_matrix(rotated[step][2 * tile]);
          rotated[step][2 * tile + 1] = ptx::transpose_matrix(rotated[step][2 * tile + 1]);
        }
      }
    }
  }

  // Adds the sums of this item to those of the block, in the order of the segments.
  __device__ __forceinline__ void finish(WorkItem const& item, bool any) {
    int* const segments_added =
        args_.segments_added + (item.head * args_.node_rows + args_.begin[item.layer]) / kSiblings + item.block;
    wait_for_segments(segments_added, item.segments_before, lane_);
    if (any) add_sums(item);
    count_segment(segments_added, lane_);
  }

  __device__ __forceinline__ void add_sums(WorkItem const& item) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const child = 8 * i + 2 * tq_ + e;
        float const scale = kUnitScale * inverse_of(of_column(weight_scale_[i], e));
        float* const to = sums_of(item, child, kK, args_.dk) + g_;
        float2 const* const rotations = args_.rotations + child * (kK / 2) + g_;
#pragma unroll
        for (int kk = 0; kk < kHalf; ++kk) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            int const column = 16 * kk + 8 * j;
            float2 const x = __ldg(rotations + column);
            float const lo = dk_[kk][i][2 * j + e] * scale;
            float const hi = dk_[kk + kHalf][i][2 * j + e] * scale;
            atomicAdd(to + column, lo * x.x + hi * x.y);
            atomicAdd(to + column + kK / 2, hi * x.x - lo * x.y);
          }
        }
      }
      float* const to = sums_of(item, 8 * i + g_, kV, args_.dv) + 2 * tq_;
#pragma unroll
      for (int tile = 0; tile < kV / 8; ++tile) {
        atomicAdd(to + 8 * tile, dv_[tile][2 * i]);
        atomicAdd(to + 8 * tile + 1, dv_[tile][2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ float* sums_of(WorkItem const& item, int child, int dim, float* sums) const {
    std::int64_t const row = item.block * static_cast<std::int64_t>(kSiblings) + child;
    return sums + (item.head * args_.node_rows + args_.begin[item.layer] + row) * dim;
  }

  Args const& args_;
  WarpStorage<Cfg> const store_;
  RingPosition<Cfg::kSlots>& at_;  // the slot of the visit at hand
  int const lane_;
  int const g_;
  int const tq_;
  uint32_t word_;  // of the row that this lane looks at next
  float weight_scale_[2] = {kInitialScale, kInitialScale};
  uint32_t keys_[kK / 16][4];
  uint32_t values_[kHeld][4];
  float dk_[kK / 16][2][4];  // [steps of 16 columns of K][eights of children]; rows are columns of K
  float dv_[kV / 8][4];
  // Counts of visits: found and put on the list, copied to a slot, done. look_at_ is the count of done visits at which
  // the list has room again. dO of the last visit done waits in its slot, at waiting_, for the products of the next
  // visit.
  int found_ = 0;
  int sent_ = 0;
  int done_ = 0;
  int look_at_ = 0;
  uint32_t waiting_;
  uint32_t p_[4] = {};
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) dkdv_selected_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  uint32_t const shared = align_shared<Cfg>(shared_memory);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  wait_for_previous_grid();

  WarpStorage<Cfg> const store{shared + warp * Cfg::kWarpBytes};
  int const lane = threadIdx.x % 32;
  if (lane < Cfg::kSlots) barriers::mbarrier_init(store.full(lane), 1);
  barriers::mbarrier_init_fence();
  __syncwarp();
  RingPosition<Cfg::kSlots> at;
  for (;;) {
    int next = 0;
    if (lane == 0) next = atomicAdd(args.next_item, 1);
    next = __shfl_sync(kFullWarp, next, 0);
    if (next >= args.items) return;
    WorkItem const item = WorkItem::at(args, next);
    if (item.segments_before >= 0) DkDvSelectedWarp<Cfg>(args, store, at, item).run(item);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

// dk and dv of nodes as the queries whose first layer is above theirs reach them: a warp holds a parent and takes the
// queries that visit it. A persistent grid: warps get their units, a parent and a segment of the rows, from a counter, so
// that none waits for another's; what is added to a sum, and in which order, follows from shapes and lists alone.
//
// With R(q, n - 1 - 16 j) for a parent of rank j, scores and gradients need the keys rotated by their place alone, so
// dk adds up in that frame over all queries and rotations back once in the end.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "operands.cuh"

namespace htree_cuda::sm90::htree_bwd {

// What a warp works on: one parent and one segment of the rows.
struct Unit {
  int layer;
  int head;
  int parent;
  int first;    // row
  int end;
  int earlier;  // segments of the parent that somebody may visit and that are added before this one; negative: nobody

  static __device__ Unit numbered(Args const& args, int unit) {
    // Opaque: it would be kept in a register that the products need.
    int layer = static_cast<int>(ptx::opaque(static_cast<uint32_t>(args.highest))) - 1;
    while (layer > 0 && unit >= args.first_unit[layer - 1]) --layer;
    unit -= args.first_unit[layer];
    int const parent = args.tree.parents[layer] - 1 - unit % args.tree.parents[layer];
    unit /= args.tree.parents[layer];
    int const segment = unit % args.segments[layer];
    int const head = unit / args.segments[layer];
    // No row visits a parent of later tokens than its own, nor one of its first layer.
    std::int64_t const late =
        (static_cast<std::int64_t>(max(parent, args.tree.top_k)) << (kLog2Siblings * (layer + 1))) - args.chunk.position(0);
    int const reached =
        static_cast<int>(min(max(late, std::int64_t(0)), static_cast<std::int64_t>(args.chunk.queries)));
    int const first = segment * args.segment_rows[layer];
    int const end = min(first + args.segment_rows[layer], args.chunk.queries);
    int const earlier = max(first, reached) < end ? segment - reached / args.segment_rows[layer] : -1;
    return {layer, head, parent, max(first, reached / kRowStep * kRowStep), end, earlier};
  }
};

// A warp's own part of shared memory: slots; values that registers do not hold; the list of visits; the state of a
// unit; a barrier a slot, at which its warp arrives once, and the bytes, and which makes a query and its rotations visible;
// scales of the keys.
template <class Cfg>
struct Store {
  uint32_t begin;

  __device__ uint32_t slot(uint32_t i) const { return begin + i * Cfg::kSlotBytes; }
  __device__ uint32_t values() const { return begin + Cfg::kSlots * Cfg::kSlotBytes; }
  __device__ uint32_t list() const { return values() + Cfg::kValuesBytes; }
  __device__ uint32_t full(uint32_t i) const { return progress() + Cfg::kProgressBytes + 8 * i; }
  __device__ uint32_t progress() const { return list() + Cfg::kListBytes; }
  __device__ uint32_t inverse() const { return full(Cfg::kSlots); }  // of the keys
};

// A unit and the row to look at next: in shared memory, because registers are few while products are at work.
struct Progress {
  Unit unit;
  int next;

  __device__ __forceinline__ static Progress loaded(uint32_t shared) {
    uint4 const x = ptx::load_shared_16B(shared);
    uint4 const y = ptx::load_shared_16B(shared + 16);
    return {Unit{static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z), static_cast<int>(y.x),
                 static_cast<int>(x.w), static_cast<int>(y.y)},
            static_cast<int>(y.x)};
  }
  __device__ __forceinline__ void store(uint32_t shared) const {
    ptx::store_shared_16B(shared, {static_cast<uint32_t>(unit.layer), static_cast<uint32_t>(unit.head),
                                   static_cast<uint32_t>(unit.parent), static_cast<uint32_t>(unit.end)});
    ptx::store_shared_16B(shared + 16, {static_cast<uint32_t>(next), static_cast<uint32_t>(unit.earlier), 0u, 0u});
  }
};

template <class Cfg>
class Parent {
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kHalf = kK / 32;
  static constexpr int kHeld = Cfg::kHeldValues;

public:
  __device__ Parent(Args const& args, Store<Cfg> const& store, RingPosition<Cfg::kSlots>& at, Unit const& unit)
      : args_(args), store_(store), at_(at), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4) {
    word_ = word_of(unit, unit.first + lane_);
    load(unit);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) clear(dk_[step]);
    clear(dv_);
  }

  __device__ void run(Unit const& unit) {
    look({unit, unit.first});
    waiting_ = store_.slot(at_.slot);
    bool const any = taken_ != found_;
    while (taken_ != found_) {
      take();
      ++taken_;
      at_ = at_.ahead(1);
      if (taken_ >= look_at_) look(Progress::loaded(store_.progress()));
    }
    Steps const douts(waiting_ + matrix_lane<true>(lane_, Cfg::kValueRowBytes));
#pragma unroll
    for (int step = 0; step < kV / 16; ++step) add_values(douts, step);
    finish(Progress::loaded(store_.progress()).unit, any);
  }

private:
  // ---- who visits ------------------------------------------------------------------------------------------------

  // A row's word of the index.
  __device__ __forceinline__ uint32_t word_of(Unit const& unit, int row) const {
    if (row >= unit.end) return 0;
    return __ldg(entry_of(args_, unit.layer, unit.head, unit.parent / kGroupParents, row));
  }

  static __device__ __forceinline__ uint32_t own_bit(Unit const& unit) { return 1u << (unit.parent % kGroupParents); }

  // Appends those of the next 32 rows that visit the parent.
  __device__ __forceinline__ void scan(Progress& progress) {
    Unit const& unit = progress.unit;
    int const row = progress.next + lane_;
    uint32_t const word = word_;
    progress.next += 32;
    word_ = word_of(unit, row + 32);
    bool const visits = row < unit.end && (word & own_bit(unit)) != 0;
    unsigned const visitors = __ballot_sync(kFullWarp, visits);
    if (visits) {
      int const rank = static_cast<int>(word >> kGroupParents) + __popc(word & (own_bit(unit) - 1u));
      int const position =
          candidates_in_selected(args_.chunk.position(row), unit.layer, args_.tree.top_k) - 1 - kSiblings * rank;
      uint32_t const masked =
          Below(args_, unit.layer, unit.head).expanded(args_, unit.parent, row) | causal_mask(position);
      uint32_t const entry = entry_at(found_ + __popc(visitors & ((1u << lane_) - 1u)));
      ptx::store_shared_4B(entry, row);
      ptx::store_shared_4B(entry + 4, static_cast<uint32_t>(position) << 16 | (masked & 0xffffu));
    }
    found_ += __popc(visitors);
  }

  // To the first of the next eight times 32 rows in which somebody visits the parent.
  __device__ __forceinline__ void skip(Progress& progress) {
    Unit const& unit = progress.unit;
    uint32_t words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = word_of(unit, progress.next + 32 * i + lane_);
    uint32_t empty = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) empty = (words[i] & own_bit(unit)) != 0 ? 0 : empty + 1;
    empty = __reduce_min_sync(kFullWarp, empty);
    if (empty == 0) return;
    progress.next += 32 * empty;
    word_ = word_of(unit, progress.next + lane_);
  }

  __device__ __forceinline__ uint32_t entry_at(int i) const {
    return store_.list() + static_cast<uint32_t>(i) % Cfg::kListEntries * 8;
  }

  // Looks further until the list holds enough for all slots, and fills those that are free: all but one, whose values wait.
  // The list has room again when half of it is done with.
  __device__ __forceinline__ void look(Progress progress) {
    bool first = true;
    while (progress.next < progress.unit.end && found_ - taken_ <= Cfg::kListEntries - 32) {
      if (!first) skip(progress);
      first = false;
      scan(progress);
      if (found_ - taken_ >= Cfg::kSlots) break;
    }
    __syncwarp();  // the list is written, what is stored here is read
    if (lane_ == 0) progress.store(store_.progress());
    __syncwarp();
    look_at_ = progress.next < progress.unit.end ? found_ - (Cfg::kListEntries - 32) : INT_MAX;
#pragma unroll 1
    while (sent_ < min(found_, taken_ + Cfg::kSlots - 1)) send(progress.unit.head);
  }

  // The next visit to its slot.
  __device__ __forceinline__ void send(int head) {
    uint32_t const entry = entry_at(sent_);
    uint32_t const row = ptx::load_shared_4B(entry);
    uint32_t const place = ptx::load_shared_4B(entry + 4);
    uint32_t const i = at_.ahead(sent_ - taken_).slot;
    uint32_t const slot = store_.slot(i);
    uint32_t const full = store_.full(i);
    rope::FragmentRotations const* const rotations = args_.fragment_rotations + (place >> 16) * (kK / 8);
    char const* const query =
        args_.queries + (static_cast<std::int64_t>(head) * args_.chunk.rows + row) * Cfg::kQueryBytes;
    if (ptx::elect()) {
      barriers::mbarrier_arrive_expect_bytes(full, Cfg::kQueryBytes + Cfg::kRotationsBytes);
      ptx::bulk_load(slot, rotations, Cfg::kRotationsBytes, full);
      ptx::bulk_load(slot + Cfg::kQueryOffset, query, Cfg::kQueryBytes, full);
    }
    __syncwarp();
    ++sent_;
  }

  // ---- products --------------------------------------------------------------------------------------------------

  // Two elements of row i's step: columns 16 step + 8 part + 2 tq + {0, 1}.
  __device__ __forceinline__ uint32_t word(char const* rows, int row_bytes, int row, int step, int part) const {
    return __ldg(reinterpret_cast<uint32_t const*>(rows + row * row_bytes + (((2 * step + part) ^ (row % 8)) << 4) +
                                                   4 * tq_));
  }

  __device__ __forceinline__ void load(Unit const& unit) {
    char const* const node =
        args_.nodes[unit.layer] +
        (static_cast<std::int64_t>(unit.head) * args_.tree.parents[unit.layer] + unit.parent) * Cfg::kNodeBytes;
    char const* const keys = node + kNodeHeader;
    char const* const values = keys + 16 * Cfg::kKeyRowBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = g_ + 8 * i;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int step = 0; step < kK / 16; ++step) {
          keys_[step][2 * part + i] = word(keys, Cfg::kKeyRowBytes, row, step, part);
        }
#pragma unroll
        for (int step = 0; step < kHeld; ++step) {
          values_[step][2 * part + i] = word(values, Cfg::kValueRowBytes, row, step, part);
        }
      }
    }
    __syncwarp();
    if (lane_ < kSiblings) {
      ptx::store_shared_4B(store_.inverse() + 4 * lane_, __ldg(reinterpret_cast<uint32_t const*>(node) + lane_));
    }
    if constexpr (Cfg::kValuesBytes > 0) {  // the last 128 bytes of each row
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const chunk = 32 * i + lane_;
        char const* const half = values + (chunk / 8 + 1) * Cfg::kValueRowBytes - 128;
        ptx::store_shared_16B(store_.values() + 16 * chunk, __ldg(reinterpret_cast<uint4 const*>(half) + chunk % 8));
      }
    }
    __syncwarp();
  }

  // Rows of what follows are children (g, g + 8), columns heads.
  __device__ __forceinline__ void take() {
    uint32_t const slot = store_.slot(at_.slot);
    barriers::mbarrier_wait(store_.full(at_.slot), at_.parity, "htree_bwd nodes: full");
    uint32_t const masked = ptx::load_shared_4B(entry_at(taken_) + 4);
    float raw[2][4], dp[2][4];
    uint32_t rotated[kK / 16][4];
    products(slot, raw, dp, rotated);
    waiting_ = slot;
    float ds[2][4];
    uint32_t scaled[2][2];  // [children][heads]
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t const header = slot + Cfg::kQueryOffset + tile * 32 + tq_ * 8;
      float2 const unit = ptx::load_shared_8B(header);
      float2 const lse2 = ptx::load_shared_8B(header + 4 * kMaxGroupHeads);
      float2 const delta = ptx::load_shared_8B(header + 8 * kMaxGroupHeads);
      float2 const size = {unit.x * kHeadroomFactor, unit.y * kHeadroomFactor};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const inverse = ptx::load_shared_float(store_.inverse() + 4 * (g_ + 8 * i));
        bool const open = !(masked >> (g_ + 8 * i) & 1u);
        Weights const x =
            weights(raw[tile][2 * i], inverse, unit.x, lse2.x, dp[tile][2 * i], delta.x, size.x);
        Weights const y =
            weights(raw[tile][2 * i + 1], inverse, unit.y, lse2.y, dp[tile][2 * i + 1], delta.y, size.y);
        uint32_t const p = Pairs<Element>::pack(x.p, y.p);
        p_[2 * tile + i] = open ? p : 0;
        ds[tile][2 * i] = x.ds;
        ds[tile][2 * i + 1] = y.ds;
        uint32_t const both = Pairs<__half>::pack(x.ds * weight_scale_[i], y.ds * weight_scale_[i]);
        scaled[i][tile] = open ? both : 0;
      }
    }
    if (__any_sync(kFullWarp, leave(scaled[0][0], scaled[0][1], scaled[1][0], scaled[1][1]))) fit(ds, masked, scaled);
    __syncwarp();  // what waited before is read
    if (sent_ < found_) send(ptx::load_shared_4B(store_.progress() + 4));
    // dk by columns of K: a thread's weights for a child are then a B fragment, and transposed q an A fragment, without a
    // move.
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::mma_fp16(dk_[step][i], rotated[step], scaled[i][0], scaled[i][1]);
    }
  }

  // Weights that leave the range make the scale fall.
  __device__ __forceinline__ void fit(float (&ds)[2][4], uint32_t masked, uint32_t (&scaled)[2][2]) {
    float largest[2] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bool const open = !(masked >> (g_ + 8 * (e / 2)) & 1u);
        ds[tile][e] = open ? ds[tile][e] : 0.0f;
        largest[e / 2] = fmaxf(largest[e / 2], fabsf(ds[tile][e]));
      }
    }
    fit_scale(weight_scale_, largest, [&](float const (&factor)[2]) {
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

  // Of the visit that waits.
  __device__ __forceinline__ void add_values(Steps const& douts, int step) {
    uint32_t b[4];
    ptx::load_matrix_x4_transposed(b, douts[step] + Cfg::kValueOffset);
    Pairs<Element>::mma(dv_[2 * step], p_, b[0], b[1]);
    Pairs<Element>::mma(dv_[2 * step + 1], p_, b[2], b[3]);
  }

  // Of child 2 tq + e, from the threads that have its row.
  __device__ __forceinline__ float of_column(float of_row, int e) const {
    return __shfl_sync(kFullWarp, of_row, (2 * tq_ + e) * 4);
  }

  // Scores and dP, and beside their chains of products those of dv of the visit before; rotated: q for dk, transposed.
  __device__ __forceinline__ void products(uint32_t slot, float (&raw)[2][4], float (&dp)[2][4],
                                           uint32_t (&rotated)[kK / 16][4]) {
    Steps const waiting(waiting_ + matrix_lane<true>(lane_, Cfg::kValueRowBytes));
    Steps const queries(slot + matrix_lane<false>(lane_, Cfg::kKeyRowBytes));
    Steps const douts(slot + matrix_lane<false>(lane_, Cfg::kValueRowBytes));
    Steps const values(store_.values() + matrix_lane<true>(lane_, 128));
    clear(raw);
    clear(dp);
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        ptx::load_matrix_x4(rotated[step], queries[step] + Cfg::kRowsOffset);
      }
      uint4 const rotations = ptx::load_shared_16B(slot + kk * 64 + tq_ * 16);
      rotation_columns<false>(rotated[kk], rotated[kk + kHalf], reinterpret_cast<rope::FragmentRotations const&>(rotations));
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
        ptx::load_matrix_x4(b, douts[step] + Cfg::kValueOffset);
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

  // Segments are added in ascending order, so that sums repeat bitwise. Those before were begun before.
  __device__ __forceinline__ void finish(Unit const& unit, bool any) {
    int* const done =
        args_.done + (unit.head * args_.node_rows + args_.begin[unit.layer]) / kSiblings + unit.parent;
    if (lane_ == 0) {
      while (atomicAdd(done, 0) != unit.earlier) __nanosleep(200);
    }
    __syncwarp();
    if (any) add_sums(unit);
    __threadfence();
    __syncwarp();
    if (lane_ == 0) atomicAdd(done, 1);
  }

  __device__ __forceinline__ void add_sums(Unit const& unit) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const child = 8 * i + 2 * tq_ + e;
        float const scale = kUnitScale * inverse_of(of_column(weight_scale_[i], e));
        float* const to = sums_of(unit, child, kK, args_.dk) + g_;
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
      float* const to = sums_of(unit, 8 * i + g_, kV, args_.dv) + 2 * tq_;
#pragma unroll
      for (int tile = 0; tile < kV / 8; ++tile) {
        atomicAdd(to + 8 * tile, dv_[tile][2 * i]);
        atomicAdd(to + 8 * tile + 1, dv_[tile][2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ float* sums_of(Unit const& unit, int child, int dim, float* sums) const {
    std::int64_t const row = unit.parent * static_cast<std::int64_t>(kSiblings) + child;
    return sums + (unit.head * args_.node_rows + args_.begin[unit.layer] + row) * dim;
  }

  Args const& args_;
  Store<Cfg> const store_;
  RingPosition<Cfg::kSlots>& at_;  // of the visit at hand
  int const lane_;
  int const g_;
  int const tq_;
  uint32_t word_;  // of the row to look at next
  float weight_scale_[2] = {kFirstScale, kFirstScale};
  uint32_t keys_[kK / 16][4];
  uint32_t values_[kHeld][4];
  float dk_[kK / 16][2][4];  // [columns of K][children], the columns being the rows of a result
  float dv_[kV / 8][4];
  // Visits: on the list, sent, done with; of the last one the values wait in their slot for the next one's products. As
  // many as are done with when the list has room.
  int found_ = 0;
  int sent_ = 0;
  int taken_ = 0;
  int look_at_ = 0;
  uint32_t waiting_;
  uint32_t p_[4] = {};
};

template <class Cfg>
__device__ void run_nodes(Args const& args, uint32_t shared, int warp) {
  Store<Cfg> const store{shared + warp * Cfg::kWarpBytes};
  int const lane = threadIdx.x % 32;
  if (lane < Cfg::kSlots) barriers::mbarrier_init(store.full(lane), 1);
  barriers::mbarrier_init_fence();
  __syncwarp();
  RingPosition<Cfg::kSlots> at;
  for (;;) {
    int next = 0;
    if (lane == 0) next = atomicAdd(args.next_unit, 1);
    next = __shfl_sync(kFullWarp, next, 0);
    if (next >= args.units) return;
    Unit const unit = Unit::numbered(args, next);
    if (unit.earlier >= 0) Parent<Cfg>(args, store, at, unit).run(unit);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

// dk and dv of selected layers: dkdv_selected. A warp holds a KV block and multiplies with the queries that visit it.
// Groups of 8 and 4 heads fill the 16 rows of a product with two and four of them, a pack, whichever these are: the
// reverse index lists them, and they need not be neighbours. With bf16 a pack leaves its dS for dq_gather.
// The grid is persistent: a warp gets its work items, a block and a segment of its visits, from a counter, so that no
// warp waits for another one's block. What is added to a sum, and in which order, follows from shapes and lists alone.
//
// Since <R(q, n - 1), R(k, 16 j + c)> = <R(q, n - 1 - 16 j), R(k, c)> for a block of rank j, scores and gradients need
// the keys rotated by their place c alone. So dk is summed over all queries in that frame and rotated back once, in the
// end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "args.h"
#include "device/barriers.cuh"
#include "device/pairs.cuh"
#include "device/ptx.cuh"
#include "host/launch_overlapped.cuh"
#include "operands.cuh"
#include "ordered_sum.cuh"
#include "selected_work.cuh"
#include "traits.cuh"
#include "weights.cuh"

namespace htree_cuda::sm90::htree_bwd {

// A warp and its KV block, for one work item.
template <class Cfg>
class DkDvSelectedWarp {
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kHalf = kK / 32;
  static constexpr int kHeld = Cfg::kHeldValues;
  static constexpr int kQueries = Cfg::kQueries;
  static constexpr int kHeads = Cfg::kHeads;
  // Offsets of rows and of dout are multiples of 64, or of 128 where an exclusive or makes addresses.
  static constexpr int kRowsOffset = Cfg::kKeysBegin + Cfg::kHeaderRoom;
  static constexpr int kDoutOffset = Cfg::kOneRing ? Cfg::kQuerySlotBytes : 0;
  static constexpr int kBatch = Cfg::kListEntries / 2;  // visits that are copied at a time
  static constexpr int kBatchPacks = kBatch / kQueries;
  static constexpr int kMasks = kQueries == 1 ? 1 : 2;  // of a thread's columns, by eights
  static constexpr int kAhead = Cfg::kSlots - 1;        // packs that are copied ahead: all slots but that whose values wait
  // The first pack of a batch of visits is sent when these have been copied: see fetch and run.
  static_assert(Cfg::kCopiesInBulk || 2 * kAhead <= kBatchPacks);

public:
  __device__ DkDvSelectedWarp(Args const& args, WarpStorage<Cfg> const& store, PackPosition<Cfg>& at,
                              StoredItem const& stored)
      : args_(args), store_(store), at_(at), lane_(threadIdx.x % 32), g_(lane_ / 4), tq_(lane_ % 4) {
    packs_ = stored.list.packs;
    if (lane_ == 0) stored.store(store_.item());
    fetch(stored, 0);
    fetch(stored, 1);
    ptx::copy_async_commit();
    load(stored.item);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) clear(dk_[step]);
    clear(dv_);
  }

  // There is one pack at least. Returns the number of the next item.
  __device__ int run() {
    waiting_ = store_.dout_slot(at_.dout_slot());
    if constexpr (!Cfg::kCopiesInBulk) wait_for_copies<0>();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) send();
#pragma unroll 1
    while (done_ != packs_) {
      add_visits();
      ++done_;
      at_.advance();
      if (done_ % kBatchPacks == 0) {
        fetch(StoredItem::loaded(store_.item()), done_ / kBatchPacks + 1);
        if constexpr (Cfg::kCopiesInBulk) ptx::copy_async_commit();  // else with the next pack
      }
    }
    StepAddresses const douts = rows<true, Cfg::kValueRowBytes, Cfg::kValueStride>(waiting_);
#pragma unroll
    for (int step = 0; step < kV / 16; ++step) add_values(douts, step);
    return finish(StoredItem::loaded(store_.item()).item);
  }

private:
  // ---- the queries that visit the block ----------------------------------------------------------------------------

  // Copies the next 32 visits to the half of the ring whose visits have been multiplied.
  __device__ __forceinline__ void fetch(StoredItem const& stored, int batch) {
    int const i = batch * kBatch + 2 * lane_;
    if (lane_ < kBatch / 2 && i < stored.list.packs * kQueries) {
      uint2 const* const visits = args_.visits[stored.item.layer] + static_cast<std::int64_t>(stored.list.first) * kListUnit;
      ptx::copy_async_16B(entry_at(i), visits + i, 0);
    }
  }

  // Waits for the copies of all lanes but those of the latest kPending groups.
  template <int kPending>
  __device__ __forceinline__ void wait_for_copies() const {
    ptx::copy_async_wait<kPending>();
    __syncwarp();
  }

  __device__ __forceinline__ uint32_t entry_at(int i) const {
    return store_.list() + static_cast<uint32_t>(i) % Cfg::kListEntries * 8;
  }

  __device__ __forceinline__ uint2 load_entry(int i) const {
    uint32_t const entry = entry_at(i);
    return {ptx::load_shared_4B(entry), ptx::load_shared_4B(entry + 4)};
  }

  // Copies the queries of the next pack, and their rotations, to their slots, where there is another pack.
  __device__ __forceinline__ void send() {
    if (sent_ < packs_) {
      int const head = static_cast<int>(ptx::load_shared_4B(store_.item() + 4));
      if constexpr (Cfg::kCopiesInBulk) {
        send_in_bulk(head);
      } else {
        send_by_lanes(head);
      }
      ++sent_;
    }
    // A group is committed in any case, so that as many groups are younger than a pack's.
    if constexpr (!Cfg::kCopiesInBulk) ptx::copy_async_commit();
  }

  __device__ __forceinline__ char const* query_of(int head, uint2 entry) const {
    constexpr int kBytes = static_cast<int>(query_bytes(kK, kV, kHeads));
    return args_.queries + (static_cast<std::int64_t>(head) * args_.chunk.rows + entry.x) * kBytes + query_begin(kHeads);
  }
  __device__ __forceinline__ rope::FragmentRotations const* rotations_of(uint2 entry) const {
    return args_.fragment_rotations + ((entry.y & ~kRepeated) >> 16) * (kK / 8);
  }

  __device__ __forceinline__ void send_in_bulk(int head) {
    if (sent_ % kBatchPacks == 0) {  // The first pack of a batch, which was copied long before, save the first two.
      wait_for_copies<0>();
    }
    uint32_t const i = at_.query_slot(sent_ - done_);
    uint32_t const full = store_.full(i);
    if (ptx::elect()) {
      barriers::mbarrier_arrive_expect_bytes(full, kHeads * (Cfg::kKeyRowBytes + Cfg::kValueRowBytes) + Cfg::kHeaderBytes + Cfg::kRotationsBytes);
    }
    uint2 const entry = load_entry(sent_);
    if (ptx::elect()) {
      uint32_t const slot = store_.query_slot(i);
      uint32_t const dout = store_.dout_slot(at_.dout_slot(sent_ - done_));
      constexpr int kKeyBytes = Cfg::kHeaderBytes + kHeads * Cfg::kKeyRowBytes;
      ptx::bulk_load(slot, rotations_of(entry), Cfg::kRotationsBytes, full);
      char const* const query = query_of(head, entry);
      ptx::bulk_load(header_of(slot, 0), query, kKeyBytes, full);
      ptx::bulk_load(dout, query + kKeyBytes, kHeads * Cfg::kValueRowBytes, full);
    }
    __syncwarp();
  }

  // Each query has as many lanes, which copy neighbouring chunks of 16 bytes.
  __device__ __forceinline__ void send_by_lanes(int head) const {
    constexpr int kLanes = 32 / kQueries;
    int const query = lane_ / kLanes;
    uint32_t const chunk = lane_ % kLanes * 16;
    uint2 const entry = load_entry(sent_ * kQueries + query);
    uint32_t const slot = store_.query_slot(at_.query_slot(sent_ - done_));
    auto const copy = [&](uint32_t to, void const* from, auto bytes) {
#pragma unroll
      for (int done = 0; done < bytes; done += 16 * kLanes) {
        if (done + 16 * kLanes <= bytes || chunk < bytes - done) {
          ptx::copy_async_16B(to + chunk + done, static_cast<char const*>(from) + chunk + done, 0);
        }
      }
    };
    using std::integral_constant;
    char const* const from = query_of(head, entry);
    constexpr int kKeyBytes = kHeads * Cfg::kKeyRowBytes;
    uint32_t const header = header_of(slot, query);
    copy(header, from, integral_constant<int, Cfg::kHeaderBytes>{});
    copy(header + Cfg::kHeaderBytes, from + Cfg::kHeaderBytes, integral_constant<int, kKeyBytes>{});
    copy(store_.dout_slot(at_.dout_slot(sent_ - done_)) + query * Cfg::kValueStride, from + Cfg::kHeaderBytes + kKeyBytes,
         integral_constant<int, kHeads * Cfg::kValueRowBytes>{});
    copy(slot + query * Cfg::kRotationsBytes, rotations_of(entry), integral_constant<int, Cfg::kRotationsBytes>{});
  }

  // ---- who has which rows of a pack --------------------------------------------------------------------------------

  static __device__ __forceinline__ uint32_t header_of(uint32_t slot, int query) {
    return slot + Cfg::kKeysBegin + query * Cfg::kKeyStride + Cfg::kHeaderRoom - Cfg::kHeaderBytes;
  }

  // The query of the columns 2 tq and 2 tq + 1 of a tile, and of row or column g of it.
  __device__ __forceinline__ int query_of_columns(int tile) const {
    return kQueries == 1 ? 0 : kQueries == 2 ? tile : 2 * tile + tq_ / 2;
  }
  __device__ __forceinline__ int query_of_row(int tile) const {
    return kQueries == 1 ? 0 : kQueries == 2 ? tile : 2 * tile + g_ / 4;
  }

  // Returns this lane's addresses for ldmatrix of the 16 rows of a pack, kStride bytes from query to query.
  template <bool kRowsFirst, int kRowBytes, int kStride>
  __device__ __forceinline__ StepAddresses rows(uint32_t base) const {
    if constexpr (kQueries == 1) return StepAddresses(base + ldmatrix_offset<kRowsFirst>(lane_, kRowBytes));
    int const id = lane_ / 8;
    int const row = lane_ % 8 + (kRowsFirst ? id % 2 : id / 2) * 8;
    uint32_t const line = base + row / kHeads * kStride + row % kHeads * kRowBytes;
    uint32_t const chunk = ((kRowsFirst ? id / 2 : id % 2) ^ (row % kHeads)) << 4;
    if constexpr (kHeads == 8) return StepAddresses(line + chunk);
    return StepAddresses(line, chunk);
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
        (static_cast<std::int64_t>(item.head) * args_.tree.kv_blocks[item.layer] + item.block) * Cfg::kBlockBytes;
    char const* const keys = packed + kBlockHeader;
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
      ptx::store_shared_4B(store_.inverse() + 4 * lane_, __ldg(reinterpret_cast<uint32_t const*>(packed) + lane_));
    }
    if constexpr (Cfg::kValuesBytes > 0) {  // The last bytes of each row go to shared memory.
      constexpr int kChunks = Cfg::kSharedValues / 16;
#pragma unroll
      for (int i = 0; i < kChunks / 2; ++i) {
        int const chunk = 32 * i + lane_;
        char const* const row = values + (chunk / kChunks + 1) * Cfg::kValueRowBytes - Cfg::kSharedValues;
        ptx::store_shared_16B(store_.values() + 16 * chunk,
                              __ldg(reinterpret_cast<uint4 const*>(row) + chunk % kChunks));
      }
    }
    __syncwarp();
  }

  // One pack of visits. Rows of the results are children, g and g + 8 in this thread, and columns are heads.
  __device__ __forceinline__ void add_visits() {
    uint32_t const slot = store_.query_slot(at_.query_slot());
    // Where there is one ring, addresses of q serve dO, too.
    uint32_t const dout = Cfg::kOneRing ? slot : store_.dout_slot(at_.dout_slot());
    if constexpr (Cfg::kCopiesInBulk) {
      barriers::mbarrier_wait(store_.full(at_.query_slot()), at_.parity(), "dkdv_selected: full");
    } else {
      wait_for_copies<kAhead - 1>();
    }
    float raw[2][4], dp[2][4];
    uint32_t rotated[kK / 16][4];
    products(slot, dout, raw, dp, rotated);
    waiting_ = dout + kDoutOffset;
    uint32_t masked[kMasks];
#pragma unroll
    for (int tile = 0; tile < kMasks; ++tile) {
      masked[tile] = ptx::load_shared_4B(entry_at(done_ * kQueries + query_of_columns(tile)) + 4);
    }
    float ds[2][4];
    uint32_t scaled[2][2];  // [children][heads]
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t const header = header_of(slot, query_of_columns(tile)) + (tile * 8 + 2 * tq_) % kHeads * 4;
      float2 const unit = ptx::load_shared_8B(header);
      float2 const lse2 = ptx::load_shared_8B(header + 4 * kHeads);
      float2 const delta = ptx::load_shared_8B(header + 8 * kHeads);
      float2 const size = {unit.x * kHeadroomFactor, unit.y * kHeadroomFactor};
      [[maybe_unused]] uint32_t for_dq[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const inverse = ptx::load_shared_float(store_.inverse() + 4 * (g_ + 8 * i));
        bool const attends = !(masked[tile % kMasks] >> (g_ + 8 * i) & 1u);
        Weights const x = weights(raw[tile][2 * i], inverse, unit.x, lse2.x, dp[tile][2 * i], delta.x, 1.0f);
        Weights const y = weights(raw[tile][2 * i + 1], inverse, unit.y, lse2.y, dp[tile][2 * i + 1], delta.y, 1.0f);
        uint32_t const p = Pairs<Element>::pack(x.p, y.p);
        p_[2 * tile + i] = attends ? p : 0;
        if constexpr (Cfg::kStoresDs) {
          uint32_t const pair = Pairs<__nv_bfloat16>::pack(x.ds, y.ds);
          for_dq[i] = attends ? pair : 0;
        }
        ds[tile][2 * i] = x.ds * size.x;
        ds[tile][2 * i + 1] = y.ds * size.y;
        uint32_t const both =
            Pairs<__half>::pack(ds[tile][2 * i] * weight_scale_[i], ds[tile][2 * i + 1] * weight_scale_[i]);
        scaled[i][tile] = attends ? both : 0;
      }
      if constexpr (Cfg::kStoresDs) store_ds(tile, for_dq);
    }
    bool const overflow = overflows(scaled[0][0], scaled[0][1], scaled[1][0], scaled[1][1]);
    if (__any_sync(kFullWarp, overflow)) recompute(ds, masked, scaled);
    __syncwarp();  // The slots of this q and of the dO that waited before have been read and are free.
    send();
    // dk has columns of K as rows: the weights of a thread for a child are then a B fragment, and transposed q is an A
    // fragment, without a move between registers.
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::mma_fp16(dk_[step][i], rotated[step], scaled[i][0], scaled[i][1]);
    }
  }

  // Hands dS of the eight columns of a tile over to dq_gather. Transposed, a thread has four children of one head.
  __device__ __forceinline__ void store_ds(int tile, uint32_t const (&ds)[2]) const {
    uint2 const words = {ptx::transpose_matrix(ds[0]), ptx::transpose_matrix(ds[1])};
    uint32_t const layer = ptx::load_shared_4B(store_.item());
    uint32_t const head = ptx::load_shared_4B(store_.item() + 4);
    uint2 const entry = load_entry(done_ * kQueries + query_of_row(tile));
    // Rows of a chunk and their places are fewer than 2^32.
    uint32_t const place = (head * args_.chunk.rows + entry.x) * args_.tree.top_k + (entry.y >> (16 + kLog2Siblings));
    char* const to = args_.ds[layer] + static_cast<std::int64_t>(place / 2) * (2 * ds_bytes(kHeads)) +
                     (g_ % kHeads * 4 + tq_) * 16 + place % 2 * 8;
    if (!(entry.y & kRepeated)) *reinterpret_cast<uint2*>(to) = words;
  }

  // Computes the scaled weights once more, after the scale fell because a weight would overflow.
  __device__ __forceinline__ void recompute(float (&ds)[2][4], uint32_t const (&masked)[kMasks],
                                            uint32_t (&scaled)[2][2]) {
    float largest[2] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bool const attends = !(masked[tile % kMasks] >> (g_ + 8 * (e / 2)) & 1u);
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

  // Adds P^T dO of the visit that waits to 16 columns of dv.
  __device__ __forceinline__ void add_values(StepAddresses const& douts, int step) {
    uint32_t b[4];
    ptx::load_matrix_x4_transposed(b, douts[step]);
    Pairs<Element>::mma(dv_[2 * step], p_, b[0], b[1]);
    Pairs<Element>::mma(dv_[2 * step + 1], p_, b[2], b[3]);
  }

  // The number of child 2 tq + e, from a thread that holds the row of that child.
  __device__ __forceinline__ float of_column(float of_row, int e) const {
    return __shfl_sync(kFullWarp, of_row, (2 * tq_ + e) * 4);
  }

  // Scores and dP, and between their chains of products those of dv of the visit before. `rotated` becomes the rotated
  // q, transposed, as dk needs it.
  __device__ __forceinline__ void products(uint32_t slot, uint32_t dout, float (&raw)[2][4], float (&dp)[2][4],
                                           uint32_t (&rotated)[kK / 16][4]) {
    StepAddresses const waiting = rows<true, Cfg::kValueRowBytes, Cfg::kValueStride>(waiting_);
    StepAddresses const queries = rows<false, Cfg::kKeyRowBytes, Cfg::kKeyStride>(slot);
    StepAddresses const douts = rows<false, Cfg::kValueRowBytes, Cfg::kValueStride>(dout);
    StepAddresses const values(store_.values() + ldmatrix_offset<true>(lane_, Cfg::kSharedValues));
    clear(raw);
    clear(dp);
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        ptx::load_matrix_x4(rotated[step], queries[step] + kRowsOffset);
      }
      uint4 rotations;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        if (tile < kMasks) {
          rotations = ptx::load_shared_16B(slot + query_of_row(tile) * Cfg::kRotationsBytes + kk * 64 + tq_ * 16);
        }
        rotate_tile(rotated[kk], rotated[kk + kHalf], tile,
                    reinterpret_cast<rope::FragmentRotations const&>(rotations));
      }
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
          ptx::load_matrix_x4(a, values[step % (Cfg::kSharedValues / 32 > 0 ? Cfg::kSharedValues / 32 : 1)]);
        }
        ptx::load_matrix_x4(b, douts[step] + kDoutOffset);
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

  // Adds the sums of this item to those of the block, in the order of the segments. Returns the number of the next item,
  // which comes while the sums are on their way.
  __device__ __forceinline__ int finish(WorkItem const& item) {
    int* const segments_added = segments_added_of(args_, item);
    wait_for_segments(segments_added, item.order.before, lane_);
    add_sums(item);
    int const next = lane_ == 0 ? atomicAdd(args_.next_item, 1) : 0;
    count_segment(segments_added, lane_, item.order.counts);
    return __shfl_sync(kFullWarp, next, 0);
  }

  __device__ __forceinline__ void add_sums(WorkItem const& item) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const scales[2] = {kUnitScale * inverse_of(of_column(weight_scale_[i], 0)),
                               kUnitScale * inverse_of(of_column(weight_scale_[i], 1))};
      int const child = 8 * i + 2 * tq_;
      float2 const* const rotations = args_.rotations + child * (kK / 2) + g_;
      // Transposed, a thread has four columns of one child, in the first or in the second half of the pairs.
      float* const keys = sums_of(item, child + g_ % 2, kK, args_.dk) + g_ / 4 * 4 + g_ / 2 % 2 * (kK / 2);
#pragma unroll
      for (int kk = 0; kk < kHalf; ++kk) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          int const column = 16 * kk + 8 * j;
          float of_lo[2], of_hi[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float2 const x = __ldg(rotations + e * (kK / 2) + column);
            float const lo = dk_[kk][i][2 * j + e] * scales[e];
            float const hi = dk_[kk + kHalf][i][2 * j + e] * scales[e];
            of_lo[e] = lo * x.x + hi * x.y;
            of_hi[e] = hi * x.x - lo * x.y;
          }
          ptx::reduce_add_16B_if(true, keys + column, transpose_four({of_lo[0], of_lo[1], of_hi[0], of_hi[1]}, g_));
        }
      }
      float* const values = sums_of(item, 8 * i + g_, kV, args_.dv) + 2 * tq_;
#pragma unroll
      for (int tile = 0; tile < kV / 8; tile += 2) {
        auto const of = [&](int which) { return float2{dv_[which][2 * i], dv_[which][2 * i + 1]}; };
        FourColumns const four = four_columns(values + 8 * tile, values + 8 * tile + 8, of(tile), of(tile + 1), tq_);
        ptx::reduce_add_16B_if(true, four.to, four.values);
      }
    }
  }

  __device__ __forceinline__ float* sums_of(WorkItem const& item, int child, int dim, float* sums) const {
    std::int64_t const row = item.block * static_cast<std::int64_t>(kSiblings) + child;
    return sums + (item.head * args_.node_rows + args_.begin[item.layer] + row) * dim;
  }

  Args const& args_;
  WarpStorage<Cfg> const store_;
  PackPosition<Cfg>& at_;  // the slots of the pack at hand
  int const lane_;
  int const g_;
  int const tq_;
  float weight_scale_[2] = {kInitialScale, kInitialScale};
  uint32_t keys_[kK / 16][4];
  uint32_t values_[kHeld][4];
  float dk_[kK / 16][2][4];  // [steps of 16 columns of K][eights of children]; rows are columns of K
  float dv_[kV / 8][4];
  // Packs of the item, packs copied to their slots and packs done. dO of the last pack done waits in its slot, at
  // waiting_, for the products of the next pack.
  int packs_;
  int sent_ = 0;
  int done_ = 0;
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
  if constexpr (Cfg::kCopiesInBulk) {
    if (lane < Cfg::kQuerySlots) barriers::mbarrier_init(store.full(lane), 1);
    barriers::mbarrier_init_fence();
    __syncwarp();
  }
  PackPosition<Cfg> at;
  int next = take_item(args, lane);
  while (true) {
    StoredItem const stored = StoredItem::listed(args, next, lane);
    if (stored.list.packs < 0) return;
    if (stored.list.packs > 0) {
      next = DkDvSelectedWarp<Cfg>(args, store, at, stored).run();
      continue;
    }
    wait_for_segments(segments_added_of(args, stored.item), stored.item.order.before, lane);
    count_segment(segments_added_of(args, stored.item), lane, stored.item.order.counts);
    next = take_item(args, lane);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

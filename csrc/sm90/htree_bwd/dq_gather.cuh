// dq of selected layers for groups of at most eight heads, in bf16: dq_gather. dkdv_selected has left dS of every row
// and KV block that it visits, in the order in which the row visits them, so that one product is left: dq += dS K. A
// warp has two or four neighbouring queries, whose heads are the columns of 16; it steps through the blocks that any of
// them visits, and columns of the others are zeros.
//
// A KV block of rank j adds R^-1(X, n - 1 - 16 j) to dq, where X = sum_c dS_c R(k_c, c). So sums are kept in the frame
// of the block at hand: before X is added they are rotated by -16 positions, in float32, and in the end by what is left.
//
//   barrier        who arrives                    who waits      what becomes visible, or free
//   full[stage]    producer, once, and the bytes  the consumers  up to four KV blocks of one layer, and the note on them
//   empty[stage]   each consumer warp, once       producer       the stage may be overwritten
//
// The stream ends with a stage that holds no block and says so. What a column holds follows from its own query alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "args.h"
#include "device/barriers.cuh"
#include "device/pairs.cuh"
#include "device/pipeline.cuh"
#include "device/ptx.cuh"
#include "host/launch_overlapped.cuh"
#include "operands.cuh"
#include "reverse_index/lookup.cuh"
#include "traits.cuh"

namespace htree_cuda::sm90::htree_bwd {

template <class Cfg>
struct GatherRing {
  uint32_t stages;
  uint32_t ds;
  uint32_t list;
  uint32_t notes;
  RingBarriers<Cfg::kStages> barriers;

  __device__ explicit GatherRing(uint32_t shared)
      : stages(shared),
        ds(stages + Cfg::kStages * Cfg::kStageBytes),
        list(ds + Cfg::kDsBytes),
        notes(list + Cfg::kListBytes),
        barriers{notes + Cfg::kStages * Cfg::kNoteBytes, notes + Cfg::kStages * (Cfg::kNoteBytes + 8)} {}

  __device__ uint32_t stage(uint32_t i) const { return stages + i * Cfg::kStageBytes; }
  // A note: four bytes of query mask for each of the four slots, the same of the queries from 32 on, then the layer.
  __device__ uint32_t note(uint32_t i) const { return notes + i * Cfg::kNoteBytes; }
};

// The rows of a CTA, neighbours of one head.
template <class Cfg>
struct GatherCta {
  int head;
  int first;
  int queries;  // rows that exist; negative where the CTA has none
  sequences::Rows const* rows;  // with sequences of different lengths, else null

  __device__ __forceinline__ explicit GatherCta(Args const& args) {
    // `ctas` counts the CTAs of one head.
    bool const of_sequences = args.sequences.any();
    int const ctas = of_sequences ? args.sequences.gather_ctas : (args.chunk.queries + args.gather_rows - 1) / args.gather_rows;
    head = static_cast<int>(blockIdx.x) / ctas;
    int const cta = ctas - 1 - static_cast<int>(blockIdx.x) % ctas;
    rows = nullptr;
    if (of_sequences) {
      rows = args.sequences.gather + cta;
      sequences::Rows const own = sequences::Tables::load(rows);
      first = own.first;
      queries = own.count;
    } else {
      first = cta * args.gather_rows;
      queries = min(args.chunk.queries - first, args.gather_rows);
    }
  }

  // Past the last row that is a query of the CTA.
  __device__ __forceinline__ int end() const { return first + queries; }

  __device__ __forceinline__ std::int64_t position(Args const& args, int row) const {
    return args.sequences.any() ? __ldg(&rows->t) + (row - first) : args.chunk.position(row);
  }
  // The first KV block of a layer, of the CTA's head.
  __device__ __forceinline__ std::int64_t block_begin(Args const& args, int layer) const {
    std::int64_t const block = static_cast<std::int64_t>(head) * args.tree.kv_blocks[layer];
    if (args.sequences.any()) return block + sequences::first_block(__ldg(&rows->before), __ldg(&rows->sequence), layer, args.tree.top_k);
    return block;
  }
  // The place of a row's query among the rows of q.
  __device__ __forceinline__ std::int64_t query(Args const& args, std::int64_t b, int row) const {
    if (args.sequences.any()) return __ldg(&rows->sequence) * args.T_q + __ldg(&rows->query) + (row - first);
    return b * args.T_q + args.chunk.first_query + row;
  }
};

// The producer, a warp. A lane looks at eight KV blocks at a time, half a word, for all queries of the CTA.
template <class Cfg>
class GatherProducer {
public:
  __device__ GatherProducer(Args const& args, GatherRing<Cfg> const& ring)
      : args_(args), ring_(ring), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    GatherCta<Cfg> const cta(args_);
    for (int layer = args_.max_entry - 1; layer >= 0 && cta.queries > 0; --layer) {
      // The queries for which this is a selected layer are the last ones, since positions ascend.
      int begin = 0;
      while (begin < cta.queries && layer >= entry_layer(cta.position(args_, cta.first + begin), args_.tree.top_k)) {
        ++begin;
      }
      if (begin == cta.queries) continue;
      std::int64_t const reach =
          cta.position(args_, cta.first + cta.queries - 1) >> (kLog2Siblings * (layer + 1));
      int const lanes = static_cast<int>(reach / kLaneBlocks) + 1;
      char const* const keys =
          args_.keys[layer] + cta.block_begin(args_, layer) * Cfg::kBlockBytes;
      for (int base = 0; base < lanes; base += 32) {
        uint2 masks[kLaneBlocks] = {};
        if (base + lane_ < lanes) find(cta, layer, (base + lane_) / 2, begin, masks);
        append(masks, (base + lane_) * kLaneBlocks);
        send(layer, keys);
      }
      if (found_ > 0) stage(0, found_, layer, keys);
      found_ = 0;
    }
    ring_.barriers.wait_empty(at_, "dq_gather producer: empty");
    if (lane_ != 0) return;
    ptx::store_shared_4B(ring_.note(at_.slot) + 32, ~0u);
    barriers::mbarrier_arrive(ring_.barriers.full_at(at_.slot));
  }

private:
  static constexpr int kLaneBlocks = kWordBlocks / 2;

  // The query masks of the lane's KV blocks, the lower or upper ones of a word.
  __device__ __forceinline__ void find(GatherCta<Cfg> const& cta, int layer, int word, int begin,
                                       uint2 (&masks)[kLaneBlocks]) const {
    std::uint32_t const* const index = reverse_index::word_at(args_, layer, cta.head, word, cta.first);
    int const first_bit = lane_ % 2 * kLaneBlocks;
#pragma unroll
    for (int four = 0; four < Cfg::kRows / 4; ++four) {
      if (4 * four >= cta.queries) break;
      uint32_t bits[2] = {};  // byte p: which of the four queries visit block p
      uint4 const x = __ldg(reinterpret_cast<uint4 const*>(index) + four);
      uint32_t const visited[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t const visits = 4 * four + i >= begin && 4 * four + i < cta.queries ? visited[i] >> first_bit : 0;
        bits[0] |= reverse_index::spread_four(visits) << i;
        bits[1] |= reverse_index::spread_four(visits >> 4) << i;
      }
#pragma unroll
      for (int p = 0; p < kLaneBlocks; ++p) {
        uint32_t const queries = bits[p / 4] >> (p % 4 * 8) & 0xfu;
        (four < 8 ? masks[p].x : masks[p].y) |= queries << (four % 8 * 4);
      }
    }
  }

  __device__ uint32_t entry_at(int i) const { return ring_.list + i * 16; }

  // Every lane appends its blocks that some query visits, behind those of the lanes before it.
  __device__ __forceinline__ void append(uint2 const (&masks)[kLaneBlocks], int first_block) {
    int count = 0;
#pragma unroll
    for (int p = 0; p < kLaneBlocks; ++p) count += (masks[p].x | masks[p].y) != 0;
    int end = count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      int const before = __shfl_up_sync(kFullWarp, end, d);
      if (lane_ >= d) end += before;
    }
    int place = found_ + end - count;
    found_ += __shfl_sync(kFullWarp, end, 31);
#pragma unroll
    for (int p = 0; p < kLaneBlocks; ++p) {
      if ((masks[p].x | masks[p].y) == 0) continue;
      ptx::store_shared_16B(entry_at(place), {masks[p].x, masks[p].y, static_cast<uint32_t>(first_block + p), 0u});
      ++place;
    }
    __syncwarp();
  }

  // Sends all whole stages and moves the rest to the front of the list.
  __device__ __forceinline__ void send(int layer, char const* keys) {
    int sent = 0;
    for (; found_ - sent >= Cfg::kStageSlots; sent += Cfg::kStageSlots) stage(sent, Cfg::kStageSlots, layer, keys);
    if (sent == 0) return;
    found_ -= sent;
    uint4 rest{};
    if (lane_ < found_) rest = ptx::load_shared_16B(entry_at(sent + lane_));
    __syncwarp();
    if (lane_ < found_) ptx::store_shared_16B(entry_at(lane_), rest);
    __syncwarp();
  }

  __device__ __forceinline__ void stage(int first, int count, int layer, char const* keys) {
    ring_.barriers.wait_empty(at_, "dq_gather producer: empty");
    uint4 entry{};
    if (lane_ < count) entry = ptx::load_shared_16B(entry_at(first + lane_));
    uint32_t const note = ring_.note(at_.slot);
    if (lane_ < Cfg::kStageSlots) {
      ptx::store_shared_4B(note + 4 * lane_, entry.x);
      ptx::store_shared_4B(note + 16 + 4 * lane_, entry.y);
    }
    if (lane_ == 0) ptx::store_shared_4B(note + 32, static_cast<uint32_t>(layer));
    __syncwarp();
    uint32_t const full = ring_.barriers.full_at(at_.slot);
    if (lane_ == 0) barriers::mbarrier_arrive_expect_bytes(full, count * Cfg::kBlockBytes);
    __syncwarp();
    if (lane_ < count) {
      ptx::bulk_load(ring_.stage(at_.slot) + lane_ * Cfg::kBlockBytes,
                     keys + static_cast<std::int64_t>(entry.z) * Cfg::kBlockBytes, Cfg::kBlockBytes, full);
    }
    at_ = at_.ahead(1);
  }

  Args const& args_;
  GatherRing<Cfg> const& ring_;
  int const lane_;
  int found_ = 0;  // entries of the list
  RingPosition<Cfg::kStages> at_;
};

// A consumer warp and its queries. Rows of the sums are columns of K, 16 a tile, g and g + 8 in this thread; their
// columns are heads, eight a tile: of two queries where a query has four, else of one.
template <class Cfg>
class GatherConsumer {
  static constexpr int kK = Cfg::kK;
  static constexpr int kSteps = kK / 16;  // tiles of 16 columns of K
  static constexpr int kHalf = kK / 32;
  static constexpr int kFirstSheared = 1;  // of kHalf: the first columns rotate fastest
  static constexpr int kQueries = Cfg::kQueries;
  static constexpr int kHeads = Cfg::kHeads;
  static constexpr int kTwoPlaces = 2 * static_cast<int>(ds_bytes(kHeads));
  static constexpr int kSlots = Cfg::kDsSlots;

public:
  __device__ GatherConsumer(Args const& args, GatherRing<Cfg> const& ring, int warp)
      : args_(args),
        cta_(args),
        warp_(warp),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        tq_(lane_ % 4),
        ds_ring_(ring.ds + (warp * 2 * kSlots * 32 + lane_) * 16),
        key_lane_(ptx::opaque(ldmatrix_offset<false>(lane_, 2 * kK))) {
    bool small = true;
#pragma unroll
    for (int lo = 0; lo < kHalf; ++lo) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        step_[lo][i] = __ldg(args.rotations + kSiblings * (kK / 2) + 16 * lo + 8 * i + g_);
        small = small && (lo < kFirstSheared || step_[lo][i].x >= -0.5f);
      }
    }
    shears_ = __all_sync(kFullWarp, small);
#pragma unroll
    for (int lo = kFirstSheared; lo < kHalf; ++lo) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (shears_) step_[lo][i].x = -step_[lo][i].y / (1.0f + step_[lo][i].x);
      }
    }
    clear(sums_[0]);
    clear(sums_[1]);
  }

  __device__ void run(GatherRing<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    int layer = layer_of(ring, at);
    while (layer >= 0) {
      begin(layer);
      int next;
#pragma unroll 1
      do {
        if (shears_) {
          add_stage<true>(ring, at);
        } else {
          add_stage<false>(ring, at);
        }
        barriers::release(ring.barriers.empty_at(at.slot));
        at = at.ahead(1);
        next = layer_of(ring, at);
      } while (next == layer);
      layer = next;
    }
    finish();
  }

private:
  // The layer of the next stage, once it is there; negative behind the last one.
  __device__ __forceinline__ int layer_of(GatherRing<Cfg> const& ring, RingPosition<Cfg::kStages> at) const {
    ring.barriers.wait_full(at, "dq_gather consumer: full");
    return static_cast<int>(ptx::load_shared_4B(ring.note(at.slot) + 32));
  }

  template <bool kShears>
  __device__ __forceinline__ void add_stage(GatherRing<Cfg> const& ring, RingPosition<Cfg::kStages> at) {
    uint32_t own = own_visits(ring.note(at.slot));
#pragma unroll 1
    while (own != 0) {
      uint32_t const bit = static_cast<uint32_t>(__ffs(own) - 1) & ~3u;
      add_block<kShears>(ring.stage(at.slot) + bit * (Cfg::kBlockBytes / 4), own >> bit & 0xfu);
      own &= ~(0xfu << bit);
    }
  }

  // The row of a query of the warp, and the queries of the columns 2 tq and 2 tq + 1 and of column g of a tile.
  __device__ __forceinline__ int row_of(int query) const { return cta_.first + warp_ * kQueries + query; }
  __device__ __forceinline__ int query_of_columns(int tile) const { return kHeads == 4 ? 2 * tile + tq_ / 2 : tile; }
  __device__ __forceinline__ int query_of_column_g(int tile) const { return kHeads == 4 ? 2 * tile + g_ / 4 : tile; }

  // Bit 4 j + i: query i of the warp visits the block in slot j.
  __device__ __forceinline__ uint32_t own_visits(uint32_t note) const {
    int const bit = warp_ * kQueries;
    uint4 const x = ptx::load_shared_16B(note + bit / 32 * 16);
    uint32_t const words[Cfg::kStageSlots] = {x.x, x.y, x.z, x.w};
    uint32_t own = 0;
#pragma unroll
    for (int slot = 0; slot < Cfg::kStageSlots; ++slot) {
      own |= (words[slot] >> (bit % 32) & ((1u << kQueries) - 1u)) << (4 * slot);
    }
    return own;
  }

  // Rotates the sums of a tile's columns by a position, or back.
  template <bool kBack>
  __device__ __forceinline__ void rotate(int tile, int position) {
    float2 const* const rotations = args_.rotations + static_cast<std::int64_t>(position) * (kK / 2) + g_;
#pragma unroll
    for (int lo = 0; lo < kHalf; ++lo) {
#pragma unroll
      for (int i = 0; i < 2; ++i) rotate_rows<kBack>(true, tile, lo, i, __ldg(rotations + 16 * lo + 8 * i));
    }
  }

  template <bool kBack>
  __device__ __forceinline__ void rotate_rows(bool rotates, int tile, int lo, int i, float2 rotation) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = sums_[tile][lo][2 * i + e];
      float& y = sums_[tile][lo + kHalf][2 * i + e];
      if constexpr (kBack) {
        ptx::rotate_where(rotates, y, x, rotation.x, rotation.y);
      } else {
        ptx::rotate_where(rotates, x, y, rotation.x, rotation.y);
      }
    }
  }

  // rotate_rows<true> by -tan(angle / 2) and the sine.
  __device__ __forceinline__ void shear_rows(bool rotates, int tile, int lo, int i, float2 shears) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      ptx::shear_where(rotates, sums_[tile][lo + kHalf][2 * i + e], sums_[tile][lo][2 * i + e], shears.x, shears.y);
    }
  }

  template <bool kShears>
  __device__ __forceinline__ void step_back(bool steps, int tile) {
#pragma unroll
    for (int lo = 0; lo < kHalf; ++lo) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (kShears && lo >= kFirstSheared) {
          shear_rows(steps, tile, lo, i, step_[lo][i]);
        } else {
          rotate_rows<true>(steps, tile, lo, i, step_[lo][i]);
        }
      }
    }
  }

  // Rotates the sums of a tile's columns from the frame of the last block back to that of their own query. What the query
  // has taken of its places says how many blocks there were.
  __device__ __forceinline__ void rotate_to_origin(int tile) {
    uint32_t const left = __shfl_sync(kFullWarp, places_left_[tile], 4 * (2 * tq_));
    if (last_[tile] >= 0) rotate<true>(tile, last_[tile] + kSiblings * (1 - args_.tree.top_k + static_cast<int>(left)));
  }

  // A layer begins. Sums of the layers before go to the frame that a block of rank -1 would have.
  __device__ __forceinline__ void begin(int layer) {
    ptx::copy_async_wait<0>();
    std::int64_t const row = static_cast<std::int64_t>(cta_.head) * args_.chunk.rows + row_of(query_of_column_g(0));
    ds_of_row_ = args_.ds[layer] + row * args_.tree.top_k * (kTwoPlaces / 2) + (g_ % kHeads * 4 + tq_) * 16;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      rotate_to_origin(tile);
      last_[tile] = -1;
      int const row = row_of(query_of_columns(tile));
      if (selects(row, layer)) {
        last_[tile] = candidates_in_selected(cta_.position(args_, row), layer, args_.tree.top_k) - 1;
        rotate<false>(tile, last_[tile] + kSiblings);
      }
      places_left_[tile] = 0;
      if (selects(row_of(query_of_column_g(tile)), layer)) {
        places_left_[tile] = args_.tree.top_k;
#pragma unroll
        for (uint32_t i = 1; i < kSlots; ++i) fetch(tile, args_.tree.top_k / 2 - i);
      }
    }
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
  }

  __device__ __forceinline__ bool selects(int row, int layer) const {
    return row < cta_.end() && layer < entry_layer(cta_.position(args_, row), args_.tree.top_k);
  }

  __device__ __forceinline__ uint32_t ds_slot(int tile, uint32_t two) const {
    return ds_ring_ + tile * kSlots * (32 * 16) + two % kSlots * (32 * 16);
  }

  // Copies dS of two places of column g's query to this thread's ring; a row has at least 16 places.
  __device__ __forceinline__ void fetch(int tile, uint32_t two) {
    ptx::copy_async_16B(ds_slot(tile, two), ds_of_row_ + two * kTwoPlaces + tile * kTileQueriesHere * args_.tree.top_k * (kTwoPlaces / 2), 0);
  }

  // dS of the next block of column g's query. With its first place of two the slot that was used before is filled: so
  // what is fetched waits for 2 (kSlots - 1) - 1 blocks of that query at least, and a group is committed each time.
  __device__ __forceinline__ uint2 take_ds(int tile) {
    uint32_t const place = --places_left_[tile];
    if (place % 2 != 0 && place / 2 >= kSlots - 1) fetch(tile, place / 2 - (kSlots - 1));
    float2 const words = ptx::load_shared_8B(ds_slot(tile, place / 2) + place % 2 * 8);
    return {__float_as_uint(words.x), __float_as_uint(words.y)};
  }

  template <bool kShears>
  __device__ __forceinline__ void add_block(uint32_t slot, uint32_t visits) {
    StepAddresses const rows(slot + key_lane_);
    bool const some[2] = {(visits & kVisitsOfTile) != 0, (visits >> kTileQueriesHere & kVisitsOfTile) != 0};
    uint2 ds[2] = {};
    // From the first query of these columns on.
    uint32_t const visits_g = visits >> query_of_column_g(0);
    uint32_t const visits_columns = visits >> query_of_columns(0);
    ptx::copy_async_wait<2 * (kSlots - 1) - 2>();
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      // A list that no forward wrote may visit more blocks than there are places.
      if ((visits_g >> tile * kTileQueriesHere & 1u) && places_left_[tile] != 0) ds[tile] = take_ds(tile);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (some[tile]) step_back<kShears>(visits_columns >> tile * kTileQueriesHere & 1u, tile);
    }
    ptx::copy_async_commit();
    __syncwarp();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t keys[4];
      ptx::load_matrix_x4_transposed(keys, rows[step]);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        if (some[tile]) ptx::mma_bf16(sums_[tile][step], keys, ds[tile].x, ds[tile].y);
      }
    }
  }

  // Writes dq: these sums plus dq of the entry layer, times the softmax scale.
  __device__ __forceinline__ void finish() {
    std::int64_t const bh = args_.chunk.first_head + cta_.head;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      rotate_to_origin(tile);
      int const row = row_of(query_of_columns(tile));
      int const head = (8 * tile + 2 * tq_) % kHeads;
      std::int64_t const entry = static_cast<std::int64_t>(cta_.head) * args_.chunk.rows + min(row, args_.chunk.rows - 1);
      float const* const share = entry_share<kK, Cfg::kV>(args_, entry) + head * kK + g_;
      int const row_g = row_of(query_of_column_g(tile));
      int const head_g = g_ % kHeads;
      std::int64_t const query = cta_.query(args_, bh / args_.H_kv, row_g);
      std::int64_t const out = ((query * args_.H_kv + bh % args_.H_kv) * args_.G + head_g) * kK + 2 * tq_;
      bool const exists = row_g < cta_.end() && head_g < args_.G;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float const* const at = share + 16 * step + 8 * i;
          uint32_t const pair =
              Pairs<__nv_bfloat16>::pack((sums_[tile][step][2 * i] + __ldg(at)) * args_.scale,
                                         (sums_[tile][step][2 * i + 1] + __ldg(at + kK)) * args_.scale);
          uint32_t const words = ptx::transpose_matrix(pair);
          if (exists) {
            *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args_.dq_of(row_g)) + out + 16 * step + 8 * i) = words;
          }
        }
      }
    }
  }

  static constexpr int kTileQueriesHere = kQueries / 2;  // queries of a tile of eight columns
  static constexpr uint32_t kVisitsOfTile = (1u << kTileQueriesHere) - 1u;

  Args const& args_;
  GatherCta<Cfg> const cta_;
  int const warp_;
  int const lane_;
  int const g_;
  int const tq_;
  float2 step_[kHalf][2];         // the rotation by 16 positions; of sheared columns -tan(angle / 2) and the sine
  bool shears_;                   // whether no angle of those columns is near half a circle
  float sums_[2][kSteps][4];
  int last_[2] = {-1, -1};        // the last candidate of the query of the columns, in the layer at hand; negative: none
  uint32_t const ds_ring_;        // shared address of this thread's part
  char const* ds_of_row_;         // dS of the query of column g of the first tile, in the layer at hand
  uint32_t places_left_[2] = {};  // of that query
  uint32_t const key_lane_;       // where this thread's addresses in a block begin
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) dq_gather_kernel(const __grid_constant__ Args args) {
  extern __shared__ char shared_memory[];
  uint32_t const shared = align_shared<Cfg>(shared_memory);
  int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  wait_for_previous_grid();
  GatherRing<Cfg> const ring(shared);
  if (threadIdx.x == 0) {
    ring.barriers.init(1, Cfg::kConsumers);
    barriers::mbarrier_init_fence();
  }
  __syncthreads();
  if (warp == Cfg::kConsumers) {
    GatherProducer<Cfg>(args, ring).run();
  } else {
    GatherConsumer<Cfg>(args, ring, warp).run(ring);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

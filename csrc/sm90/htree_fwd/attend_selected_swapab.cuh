// Values in a selected layer for groups of 8 heads or fewer: two neighbouring queries a warp, with 4 heads or fewer four. At the
// bottom, where nothing is expanded.
//
// The children of a parent are the rows of its products and the heads of queries their columns: scores are keys times the rotated
// queries, S^T = K q^T, and what is added is O^T = V^T P^T, m16n8k16 both. The 8 columns of a product are a unit, of one query or
// two; a warp has two units, which share what is read of shared memory. A unit multiplies where one of its queries takes the parent:
// P of the other is zero then, and it does not rotate. In fragments of products lane 4 g + t has children g and g + 8 of columns
// 2 t and 2 t + 1; movmatrix brings P where it is an operand. In fragments of queries it has column g: so a lane may have one query of
// a unit there and the other one here.
//
// A query rotates from rank to rank by packed arithmetic, two pairs of elements at a time, by what all read of shared memory; it begins
// anew from itself every few ranks of its own, as in rotating.cuh.
//
// Whatever is decided for a query follows from its own data: a vote that another one asked for leads to the same bits.
#pragma once

#include "device/pairs.cuh"
#include "consumer.cuh"
#include "query.cuh"

namespace htree_cuda::sm90::htree_fwd {

template <class Cfg>
class SelectedAttendSwapAB : public Query<Cfg> {
  using Base = Query<Cfg>;
  using Element = typename Cfg::Element;
  using Base::active_;
  using Base::args_;
  using Base::g_;
  using Base::groups_;
  using Base::kInfinity;
  using Base::kK;
  using Base::kNear;
  using Base::kNoLeaf;
  using Base::kPerUnit;
  using Base::kSlack;
  using Base::kSteps;
  using Base::kUnitHeads;
  using Base::kV;
  using Base::lane_;
  using Base::o_;
  using Base::position;
  using Base::q_;
  using Base::tq_;
  using Base::unit_;
  using Base::warp_;
  static constexpr int kTiles = kV / 16;
  static constexpr uint32_t kFragmentBytes = 512;
  static constexpr int kBoth = 3;  // of sets of units, bit i: unit i
  // Of words of query_masks: a bit for each query, those of a unit side by side.
  static constexpr uint32_t kOfSlot = Cfg::kQueriesPerWarp == 4 ? 0x01010101u : 0x0101u;
  static constexpr int kUnitBits = Cfg::kQueryBits * kPerUnit;
  static constexpr uint32_t kOfUnit = (1u << kUnitBits) - 1;

public:
  __device__ SelectedAttendSwapAB(Args const& args, Ring<Cfg> const& ring)
      : Base(args), shared_(ring.stages - Cfg::kRingOffset), fragment_lane_(ptx::opaque(lane_ * 16)) {
    if (!active_) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        auto const& x = reinterpret_cast<uint32_t const(&)[4]>(q_[step]);
        ptx::store_shared_8B(saved_query(i) + step * 256, {x[2 * i], x[2 * i + 1]});
      }
      fetch_rotation(i, 0, true);
    }
    begin_columns(0);
    begin_columns(1);
  }

  __device__ void run(Ring<Cfg> const& ring) {
    RingPosition<Cfg::kStages> at;
    Ring<Cfg> const own(ptx::opaque(ring.stages));
    uint32_t next_query_mask = 0;  // of the stage behind the one at hand, which says so: there nobody waits for it
    if (groups_ > 0 && active_) {
      own.barriers.wait_full(at, "htree_fwd consumer: full");
      next_query_mask = ptx::load_shared_4B(own.mask(own.stage(at.slot), warp_));
    }
#pragma unroll 1
    for (int groups = groups_; groups > 0; --groups) {
      own.barriers.wait_full(at, "htree_fwd consumer: full");
      uint32_t const stage = own.stage(at.slot);
      uint32_t query_mask = next_query_mask;
      if (active_) next_query_mask = ptx::load_shared_4B(own.next_mask(stage, warp_));
#pragma unroll 1
      while (query_mask != 0) {
        uint32_t slots = query_mask | query_mask >> Cfg::kQueryBits;
        if constexpr (Cfg::kQueriesPerWarp == 4) slots |= slots >> 2 * Cfg::kQueryBits;
        int const slot = __ffs(slots & ((1u << Cfg::kQueryBits) - 1)) - 1;
        uint32_t const query_masks = query_mask >> slot & kOfSlot;
        query_mask &= ~(kOfSlot << slot);
        uint32_t const units[2] = {query_masks & kOfUnit, query_masks >> kUnitBits};
        rotate_to(units);
        uint32_t const address = stage + slot * Cfg::kSlotBytes;
        if (kPerUnit > 1 && query_masks == kOfSlot) {
          add<kBoth, true>(address, units);
        } else if (units[0] != 0 && units[1] != 0) {
          add<kBoth>(address, units);
        } else if (units[0] != 0) {
          add<1>(address, units);
        } else {
          add<2>(address, units);
        }
      }
      __syncwarp();
      if (lane_ == 0) barriers::mbarrier_arrive(stage + Cfg::kEmptyOffset);
      at = at.ahead(1);
    }
    if (!active_) return;
    if (*args_.has_nonfinite_v != 0) propagate_nan();
    write_result(0);
    write_result(1);
  }

private:
  // Of a unit, what this thread knows of the query and the heads of its columns 2 tq and 2 tq + 1, as Query does of rows.
  struct Columns {
    float unit[2];
    float max[2];
    float reference[2];
    float sum[2];  // of this thread's children
    int position;  // where a unit has several queries
  };

  // Which query of a unit this thread's column of the query is, and which its columns of products are.
  __device__ __forceinline__ int of_rows() const { return kPerUnit == 1 ? 0 : g_ / kUnitHeads; }
  __device__ __forceinline__ int of_columns() const { return kPerUnit == 1 ? 0 : 2 * tq_ / kUnitHeads; }
  __device__ __forceinline__ uint32_t query_of_columns(int i) const { return Base::first_query() + i * kPerUnit + of_columns(); }
  __device__ __forceinline__ bool works(uint32_t query) const {
    QueryBlock const block = Base::own_block();
    std::int64_t const q = block.first + query;
    return (Base::block() >= 0) & (q < args_.blocks.T_q) & htree_fwd::works<Cfg>(args_, args_.blocks.q_start + q);
  }
  __device__ __forceinline__ int column_position(int i) const {
    return kPerUnit == 1 ? position(i) : columns_[i].position;
  }
  __device__ __forceinline__ int head_of_column(int e) const { return (2 * tq_ + e) % kUnitHeads; }
  // kAll: it is known that all queries of the warp do.
  template <bool kAll = false>
  static __device__ __forceinline__ bool takes(uint32_t unit, int query) {
    return kAll || kPerUnit == 1 || (unit >> query * Cfg::kQueryBits & 1u) != 0;
  }

  static __device__ __forceinline__ constexpr bool has(int units, int i) { return units >> i & 1; }

  __device__ __forceinline__ auto& out(int i, int tile) { return o_[i * kTiles + tile]; }

  static __device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lanes));
    return x;
  }

  static __device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(kFullWarp, x, lanes);
    return x;
  }

  // The state that the layer above left: rows of O^T are columns of its fragments.
  __device__ __forceinline__ void begin_columns(int i) {
    Columns& columns = columns_[i];
    QueryBlock const block = Base::own_block();
    std::int64_t const t = args_.blocks.q_start + block.first + query_of_columns(i);
    bool const works = this->works(query_of_columns(i));
    columns.position = works ? candidates_of<Cfg>(args_, t) - 1 : -1;
    std::int64_t const row = Base::block() * kBlockQueries + query_of_columns(i);
    // One address, and constants.
    float const* const o = ptx::opaque(reinterpret_cast<float const*>(args_.state_out + row * (kV / 8) * 32) +
                                       16 * head_of_column(0) + 4 * (g_ / 2) + g_ % 2);
    float2 const* const sums = ptx::opaque(args_.state_sum + row * 16 + head_of_column(0));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      columns.unit[e] = __shfl_sync(kFullWarp, unit_[i], 4 * (2 * tq_ + e));
      float2 const state = works ? sums[e] : float2{kNoLeaf, 0.0f};
      columns.max[e] = state.x;
      columns.sum[e] = g_ == 0 ? state.y : 0.0f;
      refer(columns, e);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          out(i, tile)[2 * half + e] = works ? o[(2 * tile + half) * 128 + e * 16] : 0.0f;
        }
      }
    }
  }

  static __device__ __forceinline__ void refer(Columns& columns, int e) {
    float const exponent = columns.max[e] * columns.unit[e];
    columns.reference[e] = fabsf(exponent) <= kNear ? exponent : Base::not_a_number();
  }

  // ---- rotating

  __device__ __forceinline__ uint32_t saved_query(int i) const {
    return shared_ + warp_ * (kSteps * 512) + i * (kSteps * 256) + ptx::lane_index() * 8;
  }
  // Of the query of this thread's column.
  __device__ __forceinline__ uint32_t fetched_rotation(int i) const {
    return shared_ + Cfg::kRotationOffset + warp_ * Cfg::kRotationBytes + (i * kPerUnit + of_rows()) * Cfg::kPackedBytes;
  }

  // Those from which a query of unit i restarts that many ranks further are under way while the ranks before it pass; the lanes
  // that have its columns copy them.
  __device__ __forceinline__ void fetch_rotation(int i, int ranks, bool wanted) const {
    int const from = position(i) - ranks * kSiblings;
    int const lane = static_cast<int>(ptx::lane_index()) % (32 / kPerUnit);
    if (wanted && from >= 0 && lane < Cfg::kPackedBytes / 16) {
      ptx::copy_async_16B(fetched_rotation(i) + lane * 16,
                          reinterpret_cast<char const*>(own<Cfg>(args_).packed_restart_rotations) +
                              static_cast<std::int64_t>(from) * Cfg::kPackedBytes + lane * 16, 0);
    }
    ptx::copy_async_commit();
  }

  // The elements x and y of two pairs, from a position to one further by the angles of these, backwards where sin is negated.
  static __device__ __forceinline__ void rotate(half2 c, half2 s, half2& x, half2& y) {
    half2 const sx = __hmul2(s, x);
    x = __hfma2(c, x, __hneg2(__hmul2(s, y)));
    y = __hfma2(c, y, sx);
  }

  // Whether the query of this thread's column rotates anew at the parent at hand, its first of top_k or a period later: both are powers
  // of two, and the period is no longer than that (launch.cu).
  __device__ __forceinline__ bool restarts(int i) const {
    return (((position(i) >> kLog2Siblings) + 1) & (args_.restart_period - 1)) == 0;
  }

  // Before a parent that these queries take.
  __device__ __forceinline__ void rotate_to(uint32_t const (&units)[2]) {
    if constexpr (kPerUnit == 1) {
      if (units[0] != 0 && restarts(0)) restart_rotation<0>(true);
      if (units[1] != 0 && restarts(1)) restart_rotation<1>(true);
    } else {
      bool const anew[2] = {restarts(0) && takes(units[0], of_rows()), restarts(1) && takes(units[1], of_rows())};
      if (!__any_sync(kFullWarp, anew[0] || anew[1])) return;
      if (__any_sync(kFullWarp, anew[0])) restart_rotation<0>(anew[0]);
      if (__any_sync(kFullWarp, anew[1])) restart_rotation<1>(anew[1]);
    }
  }

  template <int i>
  __device__ __forceinline__ void restart_rotation(bool anew) {
    ptx::copy_async_wait<0>();
    uint32_t const rotations = fetched_rotation(i) + static_cast<uint32_t>(tq_) * (kSteps * 8);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      if (step % 4 == 0) __syncwarp();  // loads of all steps at once have no registers
      uint4 const words = ptx::load_shared_16B(rotations + step * 8);
      half2 const(&of)[4] = reinterpret_cast<half2 const(&)[4]>(words);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        float2 const saved = ptx::load_shared_8B(saved_query(i) + (step + next) * 256);
        half2 x = reinterpret_cast<half2 const&>(saved.x);
        half2 y = reinterpret_cast<half2 const&>(saved.y);
        rotate(of[2 * next], of[2 * next + 1], x, y);
        if (kPerUnit > 1 && !anew) continue;
        q_[step + next][2 * i] = x;
        q_[step + next][2 * i + 1] = y;
      }
    }
    __syncwarp();
    fetch_rotation(i, args_.restart_period, anew);
  }

  // ---- a parent

  __device__ __forceinline__ void load_fragment(uint32_t (&a)[4], uint32_t address) const {
    uint4 const x = ptx::load_shared_16B(address + fragment_lane_);
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  }

  static __device__ __forceinline__ bool overflows(float const (&x)[4]) {
    return !(ptx::max_or_nan(ptx::max_or_nan(x[0], x[1]), ptx::max_or_nan(x[2], x[3])) <= kSlack);
  }

  // P of a parent, rounded to the dtype, as operand B, and its sums.
  static __device__ __forceinline__ void exponentiate(float const (&x)[4], uint32_t (&p)[2], float (&sum)[2]) {
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) y[e] = ptx::exp2_movable(x[e]);
    sum[0] = y[0] + y[2];
    sum[1] = y[1] + y[3];
    p[0] = ptx::transpose_matrix(Pairs<Element>::pack(y[0], y[1]));
    p[1] = ptx::transpose_matrix(Pairs<Element>::pack(y[2], y[3]));
  }

  // Again, from raw scores, in which keys may have scales of their own: the same bits, unless a score of the query exceeds a maximum
  // by more than kSlack, which raises it and rescales what was summed up to then. Children behind the rightmost candidate take no
  // part, nor does a query that does not take the parent.
  __device__ __forceinline__ void recompute(int i, bool taken, uint32_t scales, float (&raw)[4], uint32_t (&p)[2],
                                                float (&sum)[2]) {
    Columns& columns = columns_[i];
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int const child = g_ + e / 2 * 8;
      raw[e] *= row_scale::own_scale(ptx::load_shared_float(scales + child * 4));
      if (!taken || child > column_position(i)) raw[e] = -kInfinity;
      x[e] = taken ? fmaf(raw[e], columns.unit[e % 2], -columns.reference[e % 2]) : -kInfinity;
    }
    // Of the lanes that have columns of the same query.
    constexpr uint32_t kLanes = kPerUnit == 1 ? kFullWarp : 0x33333333u;
    uint32_t const asking = __ballot_sync(kFullWarp, overflows(x));
    if (asking != 0) {
      bool const query_mask = (asking & kLanes << 2 * of_columns()) != 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float const largest = column_max(fmaxf(raw[e], raw[2 + e]));
        if (query_mask && (largest - columns.max[e]) * columns.unit[e] > kSlack) {
          float const factor = ptx::exp2_movable((columns.max[e] - largest) * columns.unit[e]);
          columns.max[e] = largest;
          refer(columns, e);
          columns.sum[e] *= factor;
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            out(i, tile)[e] *= factor;
            out(i, tile)[2 + e] *= factor;
          }
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (query_mask) x[e] = (raw[e] - columns.max[e % 2]) * columns.unit[e % 2];
      }
    }
    __syncwarp();
    exponentiate(x, p, sum);
  }

  // The parent in `slot`, for units that have queries which take it.
  template <int kUnits, bool kAll = false>
  __device__ __forceinline__ void add(uint32_t slot, uint32_t const (&query_masks)[2]) {
    float const scale = fabsf(ptx::load_shared_float(slot + Cfg::kScaleOffset));
    float products[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t keys[4];
      load_fragment(keys, slot + Cfg::kKeyOffset + step * kFragmentBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        auto const& q = reinterpret_cast<uint32_t const(&)[4]>(q_[step]);
        if (has(kUnits, i)) ptx::mma_fp16(products[i], keys, q[2 * i], q[2 * i + 1]);
      }
    }
    uint32_t p[2][2];
    float sum[2][2];
    bool again = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has(kUnits, i)) continue;
      Columns const& columns = columns_[i];
      bool const taken = takes<kAll>(query_masks[i], of_columns());
      float const factor[2] = {scale * columns.unit[0], scale * columns.unit[1]};
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] = fmaf(products[i][e], factor[e % 2], -columns.reference[e % 2]);
        if (!taken) x[e] = -kInfinity;
      }
      again = again | overflows(x) | (taken & (column_position(i) < kSiblings));
      exponentiate(x, p[i], sum[i]);
    }
    rotate_on<kUnits, kAll>(query_masks);
    if (__any_sync(kFullWarp, again)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (has(kUnits, i)) {
          recompute(i, takes<kAll>(query_masks[i], of_columns()), slot + Cfg::kScaleOffset, products[i], p[i], sum[i]);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t values[4];
      load_fragment(values, slot + Cfg::kValueOffset + tile * kFragmentBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (has(kUnits, i)) Pairs<Element>::mma(out(i, tile), values, p[i][0], p[i][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!has(kUnits, i)) continue;
      columns_[i].sum[0] += sum[i][0];
      columns_[i].sum[1] += sum[i][1];
      if constexpr (kPerUnit > 1) columns_[i].position -= takes<kAll>(query_masks[i], of_columns()) ? kSiblings : 0;
      (i == 0 ? Base::position_ : Base::second_position_.value) -= takes<kAll>(query_masks[i], of_rows()) ? kSiblings : 0;
    }
  }

  // To the next rank, sixteen positions back; who does not take the parent stays.
  template <int kUnits, bool kAll>
  __device__ __forceinline__ void rotate_on(uint32_t const (&query_masks)[2]) {
    uint32_t const rotations = shared_ + Cfg::kStepOffset + static_cast<uint32_t>(tq_) * Cfg::kStepBytes;
    bool const rotated[2] = {takes<kAll>(query_masks[0], of_rows()), takes<kAll>(query_masks[1], of_rows())};
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint4 const words = ptx::load_shared_16B(rotations + step * 8);
      half2 const(&of)[4] = reinterpret_cast<half2 const(&)[4]>(words);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        half2(&q)[4] = q_[step + next];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!has(kUnits, i)) continue;
          half2 x = q[2 * i], y = q[2 * i + 1];
          rotate(of[2 * next], __hneg2(of[2 * next + 1]), x, y);
          q[2 * i] = rotated[i] ? x : q[2 * i];
          q[2 * i + 1] = rotated[i] ? y : q[2 * i + 1];
        }
      }
    }
  }

  // ---- the end

  // Without branches, those of && too: lanes meet to sum and to transpose.
  __device__ __forceinline__ void write_result(int i) {
    constexpr float kLogTwo = 0.693147180559945309f;
    Columns& columns = columns_[i];
    // Where the queries are is looked up again, see first_head_of.
    uint32_t const query = ptx::opaque(query_of_columns(i));
    bool const works = this->works(query);
    std::int64_t const first = Base::first_head_of(query);
    float inverse[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      columns.sum[e] = column_sum(columns.sum[e]);
      inverse[e] = 1.0f / columns.sum[e];
      int const head = head_of_column(e);
      ptx::store_global_if(works & (g_ == e) & (head < args_.G), args_.lse + first + head,
                           infinite_to_nan(fmaf(columns.max[e], columns.unit[e] * kLogTwo, log2f(columns.sum[e]) * kLogTwo)));
    }
    int const g = static_cast<int>(ptx::lane_index()) / 4;
    int const head = g % kUnitHeads;
    uint32_t const query_of_row = Base::first_query() + i * kPerUnit + g / kUnitHeads;
    bool const row_works = this->works(query_of_row);
    std::int64_t const out = Base::first_head_of(query_of_row) + head;
    uint32_t* const row = reinterpret_cast<uint32_t*>(static_cast<Element*>(args_.out) + out * kV) + tq_;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const(&o)[4] = this->out(i, tile);
        uint32_t const word = ptx::transpose_matrix(Pairs<Element>::pack(
            infinite_to_nan(o[2 * half] * inverse[0]), infinite_to_nan(o[2 * half + 1] * inverse[1])));
        ptx::store_global_4B_if(row_works & (head < args_.G), row + 8 * tile + 4 * half, word);
      }
    }
  }

  // See Consumer::propagate_nan.
  __device__ __forceinline__ void propagate_nan() {
    std::int64_t const list = static_cast<std::int64_t>(block_of_warp<Cfg>(args_, 0)) * kBlockQueries * args_.top_k;
    int const count = args_.union_count[block_of_warp<Cfg>(args_, 0)];
    int rank[Cfg::kQueriesPerWarp] = {};
#pragma unroll 1
    for (int entry = 0; entry < count; ++entry) {
      uint32_t const query_masks =
          static_cast<uint32_t>(mask_of_entry<Cfg>(args_, static_cast<uint32_t>(list) + entry) >> Cfg::kQueriesPerWarp * warp_);
      char const* const block = Base::packed_parents() + own<Cfg>(args_).union_nodes[list + entry] * args_.block_bytes;
      bool const negative = *reinterpret_cast<int const*>(block) < 0;
#pragma unroll
      for (int query = 0; query < Cfg::kQueriesPerWarp; ++query) {
        if ((query_masks >> query & 1u) == 0) continue;
        if (negative) propagate_nan(query, rank[query]);
        rank[query] += 1;
      }
    }
  }

  // `query`: of the warp.
  __device__ __forceinline__ void propagate_nan(int query, int rank) {
    QueryBlock const block = Base::own_block();
    std::int64_t const in_block = Base::first_query() + query;
    std::int64_t const parent = args_.parents[(Base::block() * kBlockQueries + in_block) * args_.top_k + rank];
    int const last = candidates_of<Cfg>(args_, args_.blocks.q_start + block.first + in_block) - 1;
    int const children = rank == last / kSiblings ? last % kSiblings + 1 : kSiblings;
    tree::pack::Source const& values = args_.values;
    Element const* const rows = static_cast<Element const*>(values.in) + block.bh / args_.H_kv * values.stride_b +
                                parent * kSiblings * values.stride_n + block.bh % args_.H_kv * values.stride_h + g_;
    bool const query_mask = of_columns() == query % kPerUnit;
#pragma unroll 1
    for (int child = 0; child < children; ++child) {
      Element const* const row = rows + child * values.stride_n;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!query_mask || isfinite(static_cast<float>(row[16 * tile + 8 * half]))) continue;
          if (query / kPerUnit == 0) out(0, tile)[2 * half] = out(0, tile)[2 * half + 1] = Base::not_a_number();
          if (query / kPerUnit == 1) out(1, tile)[2 * half] = out(1, tile)[2 * half + 1] = Base::not_a_number();
        }
      }
    }
  }

  uint32_t const shared_;
  uint32_t const fragment_lane_;
  Columns columns_[2];
};

}  // namespace htree_cuda::sm90::htree_fwd

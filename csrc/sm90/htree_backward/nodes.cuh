// dk and dv of every layer's nodes: a warp holds a parent and takes the queries that visit it, in an order that follows
// from shapes alone.
//
// With R(q, n - 1 - 16 j) for a parent of rank j, scores and gradients need the keys turned by their place alone, so
// dk adds up in that frame over all queries and turns back once in the end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "operands.cuh"

namespace htree_cuda::gradient {

// What a CTA works on.
struct Piece {
  int layer;
  int head;
  int group;
  int segment;
  int first;  // row
  int end;

  __device__ explicit Piece(Args const& args) {
    int block = blockIdx.x;
    layer = 0;
    while (block >= args.first_block[layer + 1]) ++layer;
    block -= args.first_block[layer];
    group = args.tree.groups[layer] - 1 - block % args.tree.groups[layer];
    block /= args.tree.groups[layer];
    segment = block % args.segments[layer];
    head = block / args.segments[layer];
    first = segment * args.segment_rows[layer];
    end = min(first + args.segment_rows[layer], args.chunk.queries);
  }

  __device__ int parents(Args const& args) const {
    return min(args.tree.parents[layer] - group * kGroupParents, kGroupParents);
  }
};

template <class Cfg>
__device__ void produce_queries(Args const& args, Ring<Cfg> const& ring) {
  int const lane = threadIdx.x % 32;
  Piece const piece(args);
  int const parents = piece.parents(args);
  if (lane == 0) barriers::mbarrier_arrive_expect_bytes(ring.resident_barrier, parents * Cfg::kNodeBytes);
  __syncwarp();
  if (lane < parents) {
    std::int64_t const parent = static_cast<std::int64_t>(piece.head) * args.tree.parents[piece.layer] +
                                piece.group * kGroupParents + lane;
    ptx::bulk_load(ring.resident_slot(lane) + Cfg::kNodeOffset, args.nodes[piece.layer] + parent * Cfg::kNodeBytes,
                   Cfg::kNodeBytes, ring.resident_barrier);
  }
  char const* const queries =
      args.queries + static_cast<std::int64_t>(piece.head) * args.chunk.rows * Cfg::kQueryBytes;
  auto const source = [&](Entry const& entry) {
    return queries + static_cast<std::int64_t>(entry.which) * Cfg::kQueryBytes;
  };
  Sender<Cfg> sender(ring);
  // Neighbouring queries like the same parents, which would keep one warp busy and the others waiting: rows that follow
  // one another are a 32nd of the segment apart.
  int const steps = (piece.end - piece.first + 31) / 32;
  for (int step = 0; step < steps; ++step) {
    int const row = piece.first + lane * steps + step;
    uint32_t visited = 0;
    int position = 0;
    if (row < piece.end) {
      Candidates const c = candidates(args.chunk.position(row), piece.layer, args.tree.layers, args.tree.top_k);
      if (works(piece.layer, c, args.tree.top_k)) {
        visited = piece.layer == args.tree.layers - 1
                      ? visits_at_top(c.parents, piece.group)
                      : __ldg(entry_of(args, piece.layer, piece.head, piece.group, row));
      }
      position = c.n - 1 - kSiblings * static_cast<int>(visited >> kGroupParents);
    }
    sender.append(visited != 0, [&](int) { return Entry{visited & 0xffu, row, position}; });
    sender.send(source);
  }
  sender.finish(source);
}

template <class Cfg>
class Parent {
  using Element = typename Cfg::Element;
  static constexpr int kK = Cfg::kK;
  static constexpr int kV = Cfg::kV;
  static constexpr int kHalf = kK / 32;
  // Steps of the values that stay in registers, as many as fit; the others are read for every query.
  static constexpr int kHeldValues = kK + kV == 256 ? 3 : kV / 16;

public:
  __device__ Parent(Args const& args, Ring<Cfg> const& ring, int warp)
      : args_(args),
        lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        tq_(lane_ % 4),
        warp_(warp),
        piece_(args),
        below_(args, piece_.layer, piece_.head),
        own_(ring.resident_slot(warp)) {
    exists_ = warp < piece_.parents(args);
    barriers::mbarrier_wait(ring.resident_barrier, 0, "htree_backward consumer: resident");
    if (exists_) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        inverse_[i] = __uint_as_float(ptx::load_shared_4B(own_ + Cfg::kNodeOffset + 4 * (g_ + 8 * i)));
      }
    }
    load(keys_, Steps(own_ + matrix_lane<true>(lane_, Cfg::kKeyRowBytes)), Cfg::kRowsOffset);
    load(values_, Steps(own_ + matrix_lane<true>(lane_, Cfg::kValueRowBytes)), Cfg::kValueOffset);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) clear(dk_[step]);
    clear(dv_);
  }

  __device__ void run(Ring<Cfg> const& ring) {
    receive(ring, warp_, [&](uint32_t slot, Entry const& entry) { take(slot, entry); });
    if (exists_) finish();
  }

private:
  template <int kSteps>
  __device__ __forceinline__ void load(uint32_t (&rows)[kSteps][4], Steps const& from, uint32_t offset) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[step][i] = 0;
      if (exists_) ptx::load_matrix_x4(rows[step], from[step] + offset);
    }
  }

  // Rows of what follows are children (g, g + 8), columns heads.
  __device__ __forceinline__ void take(uint32_t slot, Entry const& entry) {
    int const position = entry.detail - kSiblings * __popc(entry.takers & ((1u << warp_) - 1u));
    int const parent = piece_.group * kGroupParents + warp_;
    uint32_t const closed = below_.expanded(args_, parent, entry.which) | beyond(position);
    // The turns may come from L2: what does not need them goes first.
    PositionTurns<kK> const turns(args_.fragment_turns, position, tq_);
    float raw[2][4], dp[2][4];
    value_products(slot, dp);
    uint32_t turned[kK / 16][4];
    scores(slot, turns, raw, turned);
    uint32_t p[4];
    float ds[2][4];
    float largest[2] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t const header = slot + Cfg::kQueryOffset + tile * 32 + tq_ * 8;
      float2 const unit = ptx::load_shared_8B(header);
      float2 const lse2 = ptx::load_shared_8B(header + 4 * kMaxGroupHeads);
      float2 const delta = ptx::load_shared_8B(header + 8 * kMaxGroupHeads);
      float2 const size = {unit.x * kHeadroomFactor, unit.y * kHeadroomFactor};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        bool const open = !(closed >> (g_ + 8 * i) & 1u);
        Weights const x =
            weights(open, raw[tile][2 * i], inverse_[i], unit.x, lse2.x, dp[tile][2 * i], delta.x, size.x);
        Weights const y =
            weights(open, raw[tile][2 * i + 1], inverse_[i], unit.y, lse2.y, dp[tile][2 * i + 1], delta.y, size.y);
        p[2 * tile + i] = Pairs<Element>::pack(x.p, y.p);
        ds[tile][2 * i] = x.ds;
        ds[tile][2 * i + 1] = y.ds;
        largest[i] = fmaxf(largest[i], fmaxf(fabsf(x.ds), fabsf(y.ds)));
      }
    }
    add_dout(slot, p);
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
    add_queries(turned, ds);
  }

  // dk by columns of K: a thread's weights for a child are then a B fragment, and what the transposer returns an A
  // fragment, without a move.
  __device__ __forceinline__ void add_queries(uint32_t const (&turned)[kK / 16][4], float const (&ds)[2][4]) {
    uint32_t scaled[2][2];  // [children][heads]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        scaled[i][tile] =
            Pairs<__half>::pack(ds[tile][2 * i] * weight_scale_[i], ds[tile][2 * i + 1] * weight_scale_[i]);
      }
    }
    Transposer const transpose(lane_);
#pragma unroll
    for (int step = 0; step < kK / 16; ++step) {
      uint32_t a[2][2];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) transpose(a[tile], turned[step][2 * tile], turned[step][2 * tile + 1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mma_fp16(dk_[step][i], {a[0][0], a[0][1], a[1][0], a[1][1]}, scaled[i][0], scaled[i][1]);
      }
    }
  }

  // Of child 2 tq + e, from the threads that have its row.
  __device__ __forceinline__ float of_column(float of_row, int e) const {
    return __shfl_sync(kFullWarp, of_row, (2 * tq_ + e) * 4);
  }

  // turned: q, which dk takes too.
  __device__ __forceinline__ void scores(uint32_t slot, PositionTurns<kK> const& turns, float (&raw)[2][4],
                                         uint32_t (&turned)[kK / 16][4]) const {
    Steps const queries(slot + matrix_lane<false>(lane_, Cfg::kKeyRowBytes));
    clear(raw);
#pragma unroll
    for (int kk = 0; kk < kHalf; ++kk) {
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        ptx::load_matrix_x4(turned[step], queries[step] + Cfg::kRowsOffset);
      }
      turn_columns<false>(turned[kk], turned[kk + kHalf], turns[kk]);
#pragma unroll
      for (int step = kk; step < kK / 16; step += kHalf) {
        ptx::mma_fp16(raw[0], keys_[step], turned[step][0], turned[step][1]);
        ptx::mma_fp16(raw[1], keys_[step], turned[step][2], turned[step][3]);
      }
    }
  }

  __device__ __forceinline__ void value_products(uint32_t slot, float (&dp)[2][4]) const {
    Steps const values(own_ + matrix_lane<true>(lane_, Cfg::kValueRowBytes));
    Steps const douts(slot + matrix_lane<false>(lane_, Cfg::kValueRowBytes));
    clear(dp);
#pragma unroll
    for (int step = 0; step < kV / 16; ++step) {
      uint32_t a[4], b[4];
      if (step < kHeldValues) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = values_[step % kHeldValues][i];
      } else {
        ptx::load_matrix_x4(a, values[step] + Cfg::kValueOffset);
      }
      ptx::load_matrix_x4(b, douts[step] + Cfg::kValueOffset);
      Pairs<Element>::mma(dp[0], a, b[0], b[1]);
      Pairs<Element>::mma(dp[1], a, b[2], b[3]);
    }
  }

  __device__ __forceinline__ void add_dout(uint32_t slot, uint32_t const (&p)[4]) {
    Steps const douts(slot + matrix_lane<true>(lane_, Cfg::kValueRowBytes));
#pragma unroll
    for (int step = 0; step < kV / 16; ++step) {
      uint32_t b[4];
      ptx::load_matrix_x4_transposed(b, douts[step] + Cfg::kValueOffset);
      Pairs<Element>::mma(dv_[2 * step], p, b[0], b[1]);
      Pairs<Element>::mma(dv_[2 * step + 1], p, b[2], b[3]);
    }
  }

  // Segments are added in ascending order, so that sums repeat bit for bit. Those before began long before, for CTAs
  // begin in the order of their indices.
  __device__ __forceinline__ void finish() {
    int* const done = args_.done + (piece_.head * args_.node_rows + args_.begin[piece_.layer]) / kSiblings +
                      piece_.group * kGroupParents + warp_;
    if (lane_ == 0) {
      while (atomicAdd(done, 0) != piece_.segment) __nanosleep(200);
    }
    __syncwarp();
    add_sums();
    __threadfence();
    __syncwarp();
    if (lane_ == 0) atomicAdd(done, 1);
  }

  __device__ __forceinline__ void add_sums() const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const child = 8 * i + 2 * tq_ + e;
        float const scale = kUnitScale * inverse_of(of_column(weight_scale_[i], e));
        float* const to = sums_of(child, kK, args_.dk) + g_;
        float2 const* const turns = args_.turns + child * (kK / 2) + g_;
#pragma unroll
        for (int kk = 0; kk < kHalf; ++kk) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            int const column = 16 * kk + 8 * j;
            float2 const x = __ldg(turns + column);
            float const lo = dk_[kk][i][2 * j + e] * scale;
            float const hi = dk_[kk + kHalf][i][2 * j + e] * scale;
            atomicAdd(to + column, lo * x.x + hi * x.y);
            atomicAdd(to + column + kK / 2, hi * x.x - lo * x.y);
          }
        }
      }
      float* const to = sums_of(8 * i + g_, kV, args_.dv) + 2 * tq_;
#pragma unroll
      for (int tile = 0; tile < kV / 8; ++tile) {
        atomicAdd(to + 8 * tile, dv_[tile][2 * i]);
        atomicAdd(to + 8 * tile + 1, dv_[tile][2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ float* sums_of(int child, int dim, float* sums) const {
    std::int64_t const row = (piece_.group * kGroupParents + warp_) * static_cast<std::int64_t>(kSiblings) + child;
    return sums + (piece_.head * args_.node_rows + args_.begin[piece_.layer] + row) * dim;
  }

  Args const& args_;
  int const lane_;
  int const g_;
  int const tq_;
  int const warp_;
  Piece const piece_;
  Below const below_;
  uint32_t const own_;
  bool exists_;
  float inverse_[2];
  float weight_scale_[2] = {kFirstScale, kFirstScale};
  uint32_t keys_[kK / 16][4];
  uint32_t values_[kHeldValues][4];
  float dk_[kK / 16][2][4];  // [columns of K][children], the columns being the rows of a result
  float dv_[kV / 8][4];
};

}  // namespace htree_cuda::gradient

// The backward of htree attention: tree and packing for some heads, then every chunk of their queries, then the tokens'
// gradients.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "host/cuda_check.h"
#include "host/math.h"
#include "steps.h"
#include "tree/pack.h"
#include "host/tree_args.h"
#include "params.h"
#include "config.cuh"

namespace htree_cuda::sm90::htree_bwd {

template <class Cfg>
void launch(Args const& args, int blocks, cudaStream_t stream);  // instantiations/

namespace {

// What lives at once, besides the pooled tree and the tables: rows of one chunk of queries in half the
// bytes of q and out, but no less and no more than these, and what fills its last round; nodes and sums of
// as many heads as fit in kTreeBytes, of one head at least.
constexpr std::int64_t kMinChunkBytes = std::int64_t(64) << 20;
constexpr std::int64_t kMaxChunkBytes = std::int64_t(256) << 20;
constexpr std::int64_t kTreeBytes = std::int64_t(256) << 20;
// Rows that the queries kernels take at once on 132 SMs, eight a block: 3.3 rounds of blocks take the
// time of four. On any device, since sums are cut where a chunk ends.
constexpr std::int64_t kRoundRows = 132 * 8;
// A layer with fewer parents than this splits the rows: sixteen units of work for each warp of a large GPU.
constexpr std::int64_t kNodeUnits = 16384;
constexpr std::int64_t kMinSegmentRows = 256;
constexpr std::int64_t kMaxSegmentRows = 1024;
// In first layers a unit is kUnitTiles tiles of nodes and a segment: eight or so for each SM of a large GPU,
// since half of them lie before the first query that visits their nodes.
constexpr std::int64_t kTileUnits = 1056;

using host::tree_args::aligned;

constexpr char const* kOp = "backward";

std::int64_t round_up(std::int64_t x, std::int64_t step) { return ceil_div(x, step) * step; }

// The workspace in one walk: sizes when `base` is null, addresses otherwise.
struct Plan {
  Tree tree{};
  std::int64_t tree_begin[kMaxLayers] = {};  // layer l >= 1 in k_tree and v_tree
  std::int64_t M = 0;
  std::int64_t begin[kMaxLayers] = {};       // of a layer among a head's node rows
  std::int64_t node_rows = 0;
  std::int64_t positions = 0;
  std::int64_t heads = 0;  // at once
  std::int64_t rows = 0;   // of a head at once
  std::int64_t zeroed_bytes = 0;  // from `next_unit` on, before every chunk
  int segments[kMaxLayers] = {};
  int segment_rows[kMaxLayers] = {};
  int lowest = 0;   // first layers of the first and of the last query
  int highest = 0;
  int tiles[kMaxLayers] = {};
  int tile_segments[kMaxLayers] = {};
  int tile_segment_rows[kMaxLayers] = {};
  std::int64_t bytes = 0;

  float2* rotations = nullptr;
  rope::FragmentRotations* fragment_rotations = nullptr;
  char* k_tree = nullptr;
  char* v_tree = nullptr;
  char* nodes[kMaxLayers] = {};
  float* dk = nullptr;
  float* dv = nullptr;
  char* queries = nullptr;
  char* node_tiles[kMaxLayers] = {};
  char* query_tiles = nullptr;
  Visits visits{};
  int* next_unit = nullptr;
  int* next_tile_unit = nullptr;
  int* done = nullptr;
  int* tile_done = nullptr;

  Plan(ForwardParams const& p, char* base) {
    shape(p);
    std::int64_t const all_heads = p.B * p.H_kv;
    std::int64_t const node_bytes = kNodeHeader + operand_bytes(p.K, p.V);
    std::int64_t const query_bytes = kQueryHeader + operand_bytes(p.K, p.V);
    std::int64_t const tile_bytes = query_tile_bytes(p.K, p.V);
    std::int64_t row_bytes = query_bytes + tile_bytes / kTileQueries;
    for (int l = 0; l < highest; ++l) row_bytes += 4 * tree.groups[l];
    std::int64_t const input_bytes = 2 * all_heads * p.T_q * p.G * (p.K + p.V);
    std::int64_t const chunk_bytes = std::clamp(input_bytes / 2, kMinChunkBytes, kMaxChunkBytes);
    std::int64_t const head_bytes = node_rows / kSiblings * node_bytes + node_rows * (p.K + p.V) * 4;

    rows = round_up(p.T_q, kRowStep);
    heads = std::min({all_heads, kTreeBytes / head_bytes, chunk_bytes / (rows * row_bytes)});
    if (heads < 1) {
      heads = 1;
      rows = std::min(rows, round_up(chunk_bytes / row_bytes + 1, kRoundRows));
    }
    for (int l = 0; l < tree.layers; ++l) {
      std::int64_t const filling = kNodeUnits / (heads * tree.parents[l]);
      split(std::max(filling, ceil_div(rows, kMaxSegmentRows)), segments[l], segment_rows[l]);
    }
    for (int l = lowest; l <= highest; ++l) {
      split(kTileUnits / (heads * (tiles[l] / kUnitTiles)), tile_segments[l], tile_segment_rows[l]);
    }

    take(rotations, base, positions * (p.K / 2));
    take(fragment_rotations, base, positions * (p.K / 8));
    take(k_tree, base, all_heads * M * p.K * 2);
    take(v_tree, base, all_heads * M * p.V * 2);
    for (int l = 0; l < highest; ++l) take(nodes[l], base, heads * tree.parents[l] * node_bytes);
    for (int l = lowest; l <= highest; ++l) take(node_tiles[l], base, heads * tiles[l] * node_tile_bytes(p.K, p.V));
    take(dk, base, heads * node_rows * p.K);
    take(dv, base, heads * node_rows * p.V);
    take(queries, base, heads * rows * query_bytes);
    take(query_tiles, base, heads * rows / kTileQueries * tile_bytes);
    std::int64_t const before = bytes;
    take(next_unit, base, 1);
    take(next_tile_unit, base, 1);
    take(done, base, heads * node_rows / kSiblings);
    take(tile_done, base, heads * node_rows / kSiblings);
    for (int l = 0; l < highest; ++l) take(visits.layer[l], base, heads * rows * tree.groups[l]);
    zeroed_bytes = bytes - before;
  }

private:
  void shape(ForwardParams const& p) {
    tree.top_k = static_cast<int>(p.top_k);
    tree.N[0] = p.T;
    tree.layers = 1;
    while (tree.N[tree.layers - 1] > p.top_k * kSiblings) {
      tree.N[tree.layers] = ceil_div(tree.N[tree.layers - 1], kSiblings);
      tree_begin[tree.layers] = M;
      M += tree.N[tree.layers];
      ++tree.layers;
    }
    for (int l = 0; l < tree.layers; ++l) {
      tree.parents[l] = static_cast<int>(ceil_div(tree.N[l], kSiblings));
      tree.groups[l] = ceil_div(tree.parents[l], kGroupParents);
      begin[l] = node_rows;
      node_rows += std::int64_t(tree.parents[l]) * kSiblings;
    }
    lowest = entry_layer(p.q_start, tree.top_k);
    highest = entry_layer(p.q_start + p.T_q - 1, tree.top_k);
    for (int l = lowest; l <= highest; ++l) {
      int const candidates = std::min(tree.parents[l], tree.top_k);
      tiles[l] = kUnitTiles * static_cast<int>(ceil_div(candidates, kUnitTiles * kTileParents));
    }
    positions = std::max<std::int64_t>(std::min(p.T, p.top_k * kSiblings), kSiblings);
  }

  // Rows are split by shapes alone, so that sums do not depend on the device: into as many segments as fill it, and below
  // first layers none so long that a parent which every row visits is the last to end.
  void split(std::int64_t filling, int& segments, int& segment_rows) const {
    std::int64_t const wanted = std::max(std::min(filling, rows / kMinSegmentRows), std::int64_t(1));
    segment_rows = static_cast<int>(round_up(ceil_div(rows, wanted), kRowStep));
    segments = static_cast<int>(ceil_div(rows, segment_rows));
  }

  template <class T>
  void take(T*& pointer, char* base, std::int64_t count) {
    if (base != nullptr) pointer = reinterpret_cast<T*>(base + bytes);
    bytes += round_up(count * static_cast<std::int64_t>(sizeof(T)), 256);
  }
};

Source source(void const* in, std::int64_t stride_b, std::int64_t stride_n, std::int64_t stride_h,
              std::int64_t stride_d = 1) {
  bool const vectors =
      aligned(in, 16) && stride_b % 8 == 0 && stride_n % 8 == 0 && stride_h % 8 == 0 && stride_d == 1;
  return {in, stride_b, stride_n, stride_h, stride_d, vectors};
}

void pool(ForwardParams const& p, Plan const& plan, cudaStream_t stream) {
  if (plan.tree.layers == 1) return;
  TreePoolParams pool{};
  pool.k = {p.k, p.k_stride_b, p.k_stride_t, p.k_stride_h, plan.k_tree, p.K};
  pool.v = {p.v, p.v_stride_b, p.v_stride_t, p.v_stride_h, plan.v_tree, p.V};
  pool.B = p.B;
  pool.T = p.T;
  pool.H_kv = p.H_kv;
  pool.compression_rate = kSiblings;
  pool.layers = plan.tree.layers;
  pool.dtype = p.dtype;
  tree_pool(pool, stream);
}

void pack_tree(ForwardParams const& p, Plan const& plan, std::int64_t first_head, int heads, cudaStream_t stream) {
  for (int l = 0; l <= plan.highest; ++l) {
    PackNodes args{};
    if (l == 0) {
      args.k = source(p.k, p.k_stride_b, p.k_stride_t, p.k_stride_h);
      args.v = source(p.v, p.v_stride_b, p.v_stride_t, p.v_stride_h);
    } else {
      std::int64_t const first = plan.tree_begin[l];
      args.k = source(plan.k_tree + first * p.K * 2, p.H_kv * plan.M * p.K, p.K, plan.M * p.K);
      args.v = source(plan.v_tree + first * p.V * 2, p.H_kv * plan.M * p.V, p.V, plan.M * p.V);
    }
    args.as_inputs = l == 0;  // as in the forward
    args.first_head = first_head;
    args.N = plan.tree.N[l];
    args.H_kv = static_cast<int>(p.H_kv);
    args.K = static_cast<int>(p.K);
    args.V = static_cast<int>(p.V);
    args.rotations = plan.rotations;
    auto const pack = [&](bool by_node, char* packed, int parents) {
      args.by_node = by_node;
      args.packed = packed;
      args.parents = parents;
      args.blocks = std::int64_t(heads) * parents;
      pack_nodes(args, p.dtype, stream);
    };
    if (l < plan.highest) pack(false, plan.nodes[l], plan.tree.parents[l]);
    if (l >= plan.lowest) pack(true, plan.node_tiles[l], plan.tiles[l] * kTileParents);
  }
}

void pack_rows(BackwardParams const& params, Plan const& plan, Chunk const& chunk, cudaStream_t stream) {
  ForwardParams const& p = params.forward;
  std::int64_t const H = p.H_kv * p.G;
  PackQueries args{};
  args.chunk = chunk;
  args.q = source(p.q, p.q_stride_b, p.q_stride_t, p.q_stride_h);
  args.dout = source(params.dout, params.dout_stride_b, params.dout_stride_t, params.dout_stride_h,
                     params.dout_stride_v);
  args.out = source(p.out, p.T_q * H * p.V, H * p.V, p.V);
  args.lse = p.lse;
  args.dlse = params.dlse;
  args.dlse_stride_b = params.dlse_stride_b;
  args.dlse_stride_t = params.dlse_stride_t;
  args.dlse_stride_h = params.dlse_stride_h;
  args.packed = plan.queries;
  args.tiles = plan.query_tiles;
  args.tree = plan.tree;
  args.rotations = plan.rotations;
  args.T_q = p.T_q;
  args.H_kv = static_cast<int>(p.H_kv);
  args.G = static_cast<int>(p.G);
  args.K = static_cast<int>(p.K);
  args.V = static_cast<int>(p.V);
  args.scale_log2 = static_cast<float>(p.scale * 1.4426950408889634);
  pack_queries(args, p.dtype, stream);
}

void index(ForwardParams const& p, Plan const& plan, Chunk const& chunk, cudaStream_t stream) {
  HTREE_CUDA_CHECK(cudaMemsetAsync(plan.next_unit, 0, plan.zeroed_bytes, stream));
  if (plan.highest == 0) return;
  Index args{};
  args.chunk = chunk;
  args.tree = plan.tree;
  args.layers = plan.highest;
  args.visits = plan.visits;
  args.selection = p.selection;
  args.B = p.B;
  args.T_q = p.T_q;
  args.H_kv = static_cast<int>(p.H_kv);
  index_visits(args, stream);
}

int as_blocks(std::int64_t blocks) {
  if (blocks > std::numeric_limits<int>::max()) host::tree_args::reject(kOp, "B * H_kv * T is too large for one launch");
  return static_cast<int>(blocks);
}

int processors() {
  int device = 0;
  int count = 0;
  HTREE_CUDA_CHECK(cudaGetDevice(&device));
  HTREE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

template <class Element, int kK, int kV>
void multiply_of(Args const& args, int heads, cudaStream_t stream) {
  int const blocks = as_blocks(std::int64_t(heads) * args.chunk.rows / kGroupQueries);
  launch<Config<Element, kK, kV, Pass::kFirstNodes>>(args, processors(), stream);
  launch<Config<Element, kK, kV, Pass::kFirstQueries>>(args, blocks, stream);  // over the tiles of queries
  launch<Config<Element, kK, kV, Pass::kQueries>>(args, blocks, stream);
  if (args.units > 0) launch<Config<Element, kK, kV, Pass::kNodes>>(args, processors(), stream);
}

template <class Element>
void multiply(Args const& args, ForwardParams const& p, int heads, cudaStream_t stream) {
  if (p.K == 128) {
    p.V == 128 ? multiply_of<Element, 128, 128>(args, heads, stream)
               : multiply_of<Element, 128, 64>(args, heads, stream);
  } else {
    p.V == 128 ? multiply_of<Element, 64, 128>(args, heads, stream)
               : multiply_of<Element, 64, 64>(args, heads, stream);
  }
}

void run_chunk(BackwardParams const& params, Plan const& plan, Chunk const& chunk, cudaStream_t stream) {
  ForwardParams const& p = params.forward;
  pack_rows(params, plan, chunk, stream);
  index(p, plan, chunk, stream);

  Args args{};
  args.tree = plan.tree;
  args.chunk = chunk;
  args.visits = plan.visits;
  args.queries = plan.queries;
  args.fragment_rotations = plan.fragment_rotations;
  args.rotations = plan.rotations;
  args.scale = static_cast<float>(p.scale);
  args.dq = params.dq;
  args.T_q = p.T_q;
  args.H_kv = static_cast<int>(p.H_kv);
  args.G = static_cast<int>(p.G);
  args.node_rows = plan.node_rows;
  std::copy(std::begin(plan.begin), std::end(plan.begin), args.begin);
  args.dk = plan.dk;
  args.dv = plan.dv;
  args.next_unit = plan.next_unit;
  args.done = plan.done;
  args.tile_done = plan.tile_done;
  args.query_tiles = plan.query_tiles;
  args.next_tile_unit = plan.next_tile_unit;
  args.lowest = entry_layer(chunk.position(0), plan.tree.top_k);
  args.highest = entry_layer(chunk.position(chunk.queries - 1), plan.tree.top_k);
  for (int l = args.lowest; l <= args.highest; ++l) {
    args.node_tiles[l] = plan.node_tiles[l];
    args.tiles[l] = plan.tiles[l];
    args.tile_segments[l] = plan.tile_segments[l];
    args.tile_segment_rows[l] = plan.tile_segment_rows[l];
    args.first_tile_unit[l] = args.tile_units;
    args.tile_units = as_blocks(args.tile_units +
                                std::int64_t(chunk.heads) * (plan.tiles[l] / kUnitTiles) * plan.tile_segments[l]);
  }
  for (int l = args.highest - 1; l >= 0; --l) {
    args.nodes[l] = plan.nodes[l];
    args.segments[l] = plan.segments[l];
    args.segment_rows[l] = plan.segment_rows[l];
    args.first_unit[l] = args.units;
    args.units = as_blocks(args.units + std::int64_t(chunk.heads) * plan.tree.parents[l] * plan.segments[l]);
  }
  p.dtype == DType::kFloat16 ? multiply<__half>(args, p, chunk.heads, stream)
                             : multiply<__nv_bfloat16>(args, p, chunk.heads, stream);
}

void finish(BackwardParams const& params, Plan const& plan, std::int64_t first_head, int heads, cudaStream_t stream) {
  ForwardParams const& p = params.forward;
  auto const tokens = [&](float const* sums, void* out, std::int64_t dim) {
    Distribute args{};
    args.tree = plan.tree;
    args.sums = sums;
    args.node_rows = plan.node_rows;
    std::copy(std::begin(plan.begin), std::end(plan.begin), args.begin);
    args.out = out;
    args.first_head = first_head;
    args.heads = heads;
    args.H_kv = static_cast<int>(p.H_kv);
    args.dim = static_cast<int>(dim);
    distribute(args, p.dtype, stream);
  };
  tokens(plan.dk, params.dk, p.K);
  tokens(plan.dv, params.dv, p.V);
}

}  // namespace

}  // namespace htree_cuda::sm90::htree_bwd

namespace htree_cuda {

using namespace sm90::htree_bwd;

std::int64_t backward_workspace(ForwardParams const& p) {
  host::tree_args::check(kOp, p);
  return p.B * p.T_q == 0 ? 0 : Plan(p, nullptr).bytes;
}

void backward(BackwardParams const& params, void* stream) {
  ForwardParams const& p = params.forward;
  host::tree_args::check(kOp, p);
  cudaStream_t const s = static_cast<cudaStream_t>(stream);
  std::int64_t const all_heads = p.B * p.H_kv;
  if (p.B * p.T_q == 0) {
    HTREE_CUDA_CHECK(cudaMemsetAsync(params.dk, 0, all_heads * p.T * p.K * 2, s));
    HTREE_CUDA_CHECK(cudaMemsetAsync(params.dv, 0, all_heads * p.T * p.V * 2, s));
    return;
  }
  Plan const plan(p, static_cast<char*>(p.workspace));
  host::tree_args::check_workspace(kOp, p, plan.bytes);
  tree::pack::make_rotations(plan.rotations, plan.fragment_rotations, {}, plan.positions, static_cast<int>(p.K), p.rope_base, nullptr,
                      s);
  pool(p, plan, s);
  for (std::int64_t head = 0; head < all_heads; head += plan.heads) {
    int const heads = static_cast<int>(std::min(plan.heads, all_heads - head));
    pack_tree(p, plan, head, heads, s);
    HTREE_CUDA_CHECK(cudaMemsetAsync(plan.dk, 0, heads * plan.node_rows * p.K * sizeof(float), s));
    HTREE_CUDA_CHECK(cudaMemsetAsync(plan.dv, 0, heads * plan.node_rows * p.V * sizeof(float), s));
    // What whole chunks leave over comes first: where the call begins with its sequence, there is the least to do there.
    std::int64_t queries = (p.T_q - 1) % plan.rows + 1;
    for (std::int64_t first = 0; first < p.T_q; first += queries, queries = plan.rows) {
      int const rows = static_cast<int>(plan.rows);
      run_chunk(params, plan, {head, heads, first, static_cast<int>(queries), rows, p.q_start}, s);
    }
    finish(params, plan, head, heads, s);
  }
}

}  // namespace htree_cuda

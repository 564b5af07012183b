// The forward of htree attention: tree, packing, then every layer for one chunk of queries after another.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "host/cuda_check.h"
#include "host/math.h"
#include "tree/build_union.h"
#include "tree/pack.h"
#include "tree/select.h"
#include "host/tree_args.h"
#include "params.h"
#include "launch.h"

namespace htree_cuda::sm90::htree_fwd {

template <class Selected, class HalfSelected, class Entry>
void launch(Args const& args, Blocks const& blocks, cudaStream_t stream);  // instantiations/

namespace {

template <class Element, int K, int V, Pass P>
void launch_all(Args const& args, Blocks const& blocks, cudaStream_t stream) {
  using HalfSelected = std::conditional_t<std::is_same_v<Element, __half>, void, Config<Element, K, V, P, LayerKind::kHalfSelected>>;
  launch<Config<Element, K, V, P, LayerKind::kSelected>, HalfSelected, Config<Element, K, V, P, LayerKind::kEntry>>(args, blocks, stream);
}

template <int K>
void run_pass_of(Pass pass, Args const& args, Blocks const& blocks, DType dtype, int V, cudaStream_t stream) {
  auto const values = [&](auto element) {
    using Element = decltype(element);
    return V == 128 ? launch_all<Element, K, 128, Pass::kAttend>(args, blocks, stream)
                    : launch_all<Element, K, 64, Pass::kAttend>(args, blocks, stream);
  };
  switch (pass) {
    case Pass::kScore: return launch_all<void, K, 64, Pass::kScore>(args, blocks, stream);
    case Pass::kAttend: return dtype == DType::kFloat16 ? values(__half{}) : values(__nv_bfloat16{});
  }
}

}  // namespace

void run_pass(Pass pass, Args const& args, Blocks const& blocks, DType dtype, int K, int V, cudaStream_t stream) {
  K == 128 ? run_pass_of<128>(pass, args, blocks, dtype, V, stream)
           : run_pass_of<64>(pass, args, blocks, dtype, V, stream);
}

namespace {

// A copy whose lines of global memory are not those of shared memory is slower: a gather takes 3% longer
// (tests/hardware/gathers.cu).
constexpr std::int64_t kLineBytes = 128;

constexpr std::int64_t kMaxBlocks = std::numeric_limits<int>::max() / kBlockQueries;

// Rows of state, importance and lists that live between the kernels of a chunk of queries stay below a third of what q and
// out take, between these two; the tree (packed, and pooled in its own layout) and the tables come on top.
constexpr std::int64_t kMinChunkBytes = std::int64_t(192) << 20;
constexpr std::int64_t kMaxChunkBytes = std::int64_t(384) << 20;

std::int64_t chunk_bytes(ForwardParams const& p) {
  std::int64_t const ends = 2 * p.B * p.T_q * p.H_kv * p.G * (p.K + p.V);
  return std::clamp(ends / 3, kMinChunkBytes, kMaxChunkBytes);
}

using host::tree_args::aligned;

constexpr char const* kOp = "forward";

// Ranks that a query rotates through, or parents that it leaves out, before it restarts. Rounding adds up to 0.53 of the
// error that rounding bf16 operands makes, 0.83 where keys are rounded to bf16 too (the bottom), and 1.22 of that of fp16
// ones (tests/unit/test_rotation.py).
constexpr int kRestartPeriod = 16;
constexpr int kRestartPeriodFp16 = 1;
static_assert(kMinTopK % kRestartPeriod == 0);  // a walk of top_k ranks is whole periods: below_shared.cuh counts on it

int restart_period(ForwardParams const& p) { return p.dtype == DType::kFloat16 ? kRestartPeriodFp16 : kRestartPeriod; }

// A query walks a layer in that way where there are fewer parents up to its own: with 2 top_k it leaves out as many as it
// takes, and rotations as often as if it rotated at each. Not fp16 queries, which would restart at most of them without knowing
// where, and not at the bottom: keys are rounded to bf16 there, the backward's rotated by their place, and where logits are in the
// thousands its weights are only good if they are those that the forward has summed.
int half_selected_parents(ForwardParams const& p, Pass pass, int layer) {
  if (p.dtype == DType::kFloat16 || layer == 0) return 0;
  return static_cast<int>(pass == Pass::kScore ? p.top_k * 3 / 2 : p.top_k * 2);
}

// In any pass.
std::int64_t max_half_selected_parents(ForwardParams const& p) { return 2 * p.top_k; }

// Positions of the queries that walk layer l in a way, in a pass.
struct Positions {
  std::int64_t begin;
  std::int64_t end;

  Positions(ForwardParams const& p, Pass pass, LayerKind kind, int l) {
    auto const of_parents = [&](std::int64_t parents, int layer) { return parents << (kLog2Siblings * (layer + 1)); };
    std::int64_t const selected = of_parents(p.top_k, l);
    std::int64_t const sparse = of_parents(std::max<std::int64_t>(p.top_k, half_selected_parents(p, pass, l)), l);
    switch (kind) {
      case LayerKind::kEntry: begin = l == 0 ? 0 : of_parents(p.top_k, l - 1), end = selected; break;
      case LayerKind::kHalfSelected: begin = selected, end = sparse; break;
      case LayerKind::kSelected: begin = sparse, end = std::numeric_limits<std::int64_t>::max(); break;
    }
  }

  bool meet(std::int64_t from, std::int64_t to) const { return std::max(begin, from) < std::min(end, to); }
};

// Blocks of a layer, keys rotated for one of the walks; null where no query needs it.
struct Packed {
  char* blocks = nullptr;         // [B, H_kv, parents, block_bytes]
  std::int64_t nodes = 0;
  std::int64_t parents = 0;
};

// The workspace in one walk: sizes when `base` is null, addresses otherwise.
struct Plan {
  int layers = 0;
  std::int64_t N[kMaxLayers] = {};
  std::int64_t tree_begin[kMaxLayers] = {};  // layer l >= 1 in k_tree and v_tree
  std::int64_t M = 0;
  int last_entry_layer = 0;  // of the entry layers of the queries
  std::int64_t positions = 0;
  std::int64_t restarts = 0;    // positions at which a query restarts in a selected layer
  std::int64_t forwards = 0;  // and where it walks a dense one
  std::int64_t block_bytes = 0;
  std::int64_t width = 0;
  std::int64_t blocks_per_head = 0;
  std::int64_t blocks = 0;        // of the call
  std::int64_t chunk_blocks = 0;  // of a chunk
  std::int64_t lead_blocks = 0;   // of the first chunk, if they are others
  std::int64_t bytes = 0;

  float2* rotations = nullptr;
  rope::RotationColumns* restart_rotations = nullptr;
  rope::RotationColumns* forward_rotations = nullptr;
  rope::RotationColumns* step_rotation = nullptr;
  rope::PackedRotations* packed_restart_rotations = nullptr;
  rope::PackedRotations* packed_step_rotation = nullptr;
  int* has_nonfinite_v = nullptr;
  char* k_tree = nullptr;
  char* v_tree = nullptr;
  Packed first[kMaxLayers];  // LayerKind::kEntry: the nodes that may be candidates in a entry layer
  Packed half_selected[kMaxLayers];  // LayerKind::kHalfSelected: likewise
  Packed selected[kMaxLayers];  // LayerKind::kSelected: all nodes; none where `gathered` serves
  // LayerKind::kSelected where a layer has more parents than the lists of the call's blocks have room for: only what they name,
  // packed when they are known. The layers take turns.
  Packed gathered;
  bool has_gathered = false;
  std::int64_t list_room = 0;  // of one block
  float* importance = nullptr;
  std::uint16_t* expanded = nullptr;
  std::int32_t* nodes[2] = {};
  std::int32_t* union_nodes = nullptr;
  std::int32_t* union_places = nullptr;  // where `gathered` serves
  char* union_masks = nullptr;  // 16 bits for each block of the largest group that has a union
  std::int32_t* union_count = nullptr;
  float4* state_out = nullptr;
  float2* state_sum = nullptr;

  Plan(ForwardParams const& p, char* base) {
    N[0] = p.T;
    layers = 1;
    while (N[layers - 1] > p.top_k * kSiblings) {
      N[layers] = ceil_div(N[layers - 1], kSiblings);
      tree_begin[layers] = M;
      M += N[layers];
      ++layers;
    }
    last_entry_layer = entry_layer(p.q_start + p.T_q - 1, static_cast<int>(p.top_k));
    block_bytes = ceil_div(kSiblings * (4 + 2 * (p.K + p.V)), kLineBytes) * kLineBytes;
    positions = std::min(p.T, p.top_k * kSiblings);
    for (int l = 0; l < last_entry_layer; ++l) {
      if (kinds(p, LayerKind::kHalfSelected, l)) {
        // A block of queries may end in a layer's next parent, with one that walks it otherwise.
        positions = std::min<std::int64_t>(p.T, (max_half_selected_parents(p) + 1) * kSiblings);
        forwards = max_half_selected_parents(p) * kSiblings;
      }
      if (kinds(p, LayerKind::kSelected, l)) restarts = p.top_k * kSiblings;
    }
    // Below the top every layer that selects may have top_k * 16 candidates.
    std::int64_t const most = layers > 2 ? p.top_k * kSiblings : N[layers - 1];
    width = ceil_div(most, 2 * kSiblings) * 2 * kSiblings;  // the marks of two parents are read at once
    blocks_per_head = ceil_div(p.T_q, kBlockQueries);
    blocks = p.B * p.H_kv * blocks_per_head;

    std::int64_t const heads = p.B * p.H_kv;
    take(rotations, base, positions * (p.K / 2));
    take(restart_rotations, base, restarts * (p.K / 4));
    take(forward_rotations, base, forwards * (p.K / 4));
    take(step_rotation, base, p.K / 4);
    if (queries_of_selected(p, 0) > 1) {
      take(packed_restart_rotations, base, restarts * (p.K / 4));
      take(packed_step_rotation, base, p.K / 4);
    }
    take(has_nonfinite_v, base, 1);
    take(k_tree, base, heads * M * p.K * 2);
    take(v_tree, base, heads * M * p.V * 2);
    list_room = std::min<std::int64_t>(p.T_q, kBlockQueries) * p.top_k;
    std::int64_t const max_gathered = blocks_per_head * list_room;
    for (int l = 0; l <= last_entry_layer; ++l) {
      if (kinds(p, LayerKind::kEntry, l)) take_packed(first[l], std::min(N[l], p.top_k * kSiblings), kTileParents, heads, base);
      if (kinds(p, LayerKind::kHalfSelected, l)) {
        take_packed(half_selected[l], std::min<std::int64_t>(N[l], (max_half_selected_parents(p) + 1) * kSiblings), 1, heads, base);
      }
      if (!kinds(p, LayerKind::kSelected, l)) continue;
      if (max_gathered < ceil_div(N[l], kSiblings)) {
        has_gathered = true;
      } else {
        take_packed(selected[l], N[l], 1, heads, base);
      }
    }
    if (has_gathered) take_packed(gathered, max_gathered * kSiblings, 1, heads, base);
    chunk_blocks = std::min(blocks, kMaxBlocks);
    if (layers == 1) return;

    std::int64_t const tree_bytes = bytes;
    chunk_blocks = 1;
    take_chunk(p, nullptr);
    std::int64_t const block_size = bytes - tree_bytes;
    std::int64_t const wave = multiprocessors() * queries_of_entry(p.G, p.T_q);
    // A wave, if it may be: few heads have less of q and out, but four queries a warp.
    std::int64_t const room = std::max(chunk_bytes(p), std::min(wave * block_size, kMaxChunkBytes)) / block_size;
    chunk_blocks = std::min(blocks, std::max<std::int64_t>(room, 1));
    if (chunk_blocks < blocks && chunk_blocks > wave) chunk_blocks -= chunk_blocks % wave;  // whole waves
    // What whole waves leave over comes first where a sequence begins: there it has the least to do.
    if (blocks > wave && chunk_blocks >= wave && p.q_start < wave * kBlockQueries) lead_blocks = blocks % wave;
    bytes = tree_bytes;
    take_chunk(p, base);
  }

  // A warp's, and so the blocks of a CTA's, which have one union.
  static int queries_of_selected(ForwardParams const& p, int layer) {
    return htree_fwd::queries_of_selected(p.G, p.T_q, p.dtype, layer);
  }

private:
  // Whether a query of the call walks layer l so.
  static bool kinds(ForwardParams const& p, LayerKind kind, int l) {
    auto const meet = [&](Pass pass) { return Positions(p, pass, kind, l).meet(p.q_start, p.q_start + p.T_q); };
    return meet(Pass::kAttend) || (l > 0 && meet(Pass::kScore));
  }

  static std::int64_t multiprocessors() {
    int device = 0;
    int count = 0;
    HTREE_CUDA_CHECK(cudaGetDevice(&device));
    HTREE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }

  template <class T>
  void take(T*& pointer, char* base, std::int64_t count) {
    if (base != nullptr) pointer = reinterpret_cast<T*>(base + bytes);
    bytes += ceil_div(count * static_cast<std::int64_t>(sizeof(T)), 256) * 256;
  }

  void take_packed(Packed& packed, std::int64_t nodes, int together, std::int64_t heads, char* base) {
    packed.nodes = nodes;
    packed.parents = ceil_div(nodes, kSiblings * together) * together;
    take(packed.blocks, base, heads * packed.parents * block_bytes);
    // Where blocks are copied one by one, their keys begin a line, behind the scales.
    if (base != nullptr && together == 1) packed.blocks += kLineBytes - kSiblings * 4;
  }

  void take_chunk(ForwardParams const& p, char* base) {
    std::int64_t const rows = chunk_blocks * kBlockQueries;
    take(importance, base, rows * width);
    take(expanded, base, rows * (width / kSiblings));
    take(nodes[0], base, rows * p.top_k);
    take(nodes[1], base, rows * p.top_k);
    take(union_nodes, base, rows * p.top_k);
    if (has_gathered) take(union_places, base, rows * p.top_k);
    take(union_masks, base, rows * p.top_k * 2 * queries_of_selected(p, 0));
    take(union_count, base, chunk_blocks);
    take(state_out, base, rows * (p.V / 8) * 32);
    take(state_sum, base, rows * 16);
  }
};

tree::pack::Source source(void const* in, std::int64_t stride_b, std::int64_t stride_n, std::int64_t stride_h,
                       std::int64_t dim) {
  bool const vectors = aligned(in, 16) && stride_b % 8 == 0 && stride_n % 8 == 0 && stride_h % 8 == 0;
  return {in, stride_b, stride_n, stride_h, static_cast<int>(dim), vectors};
}

tree::pack::Source keys_of(ForwardParams const& p, Plan const& plan, int l) {
  if (l == 0) return source(p.k, p.k_stride_b, p.k_stride_t, p.k_stride_h, p.K);
  return source(plan.k_tree + plan.tree_begin[l] * p.K * 2, p.H_kv * plan.M * p.K, p.K, plan.M * p.K, p.K);
}

tree::pack::Source values_of(ForwardParams const& p, Plan const& plan, int l) {
  if (l == 0) return source(p.v, p.v_stride_b, p.v_stride_t, p.v_stride_h, p.V);
  return source(plan.v_tree + plan.tree_begin[l] * p.V * 2, p.H_kv * plan.M * p.V, p.V, plan.M * p.V, p.V);
}

tree::pack::Args pack_args(ForwardParams const& p, Plan const& plan, int l, Packed const& packed) {
  tree::pack::Args args{};
  args.k = keys_of(p, plan, l);
  args.v = values_of(p, plan, l);
  args.packed = packed.blocks;
  args.block_bytes = plan.block_bytes;
  args.parents_per_head = packed.parents;
  args.H_kv = static_cast<int>(p.H_kv);
  args.rotations = plan.rotations;
  args.as_inputs = l == 0;  // nothing is selected there
  args.has_nonfinite_v = plan.has_nonfinite_v;
  return args;
}

void build(ForwardParams const& p, Plan const& plan, cudaStream_t stream) {
  tree::pack::make_rotations(plan.rotations, nullptr,
                      {plan.restart_rotations, plan.restarts, plan.forward_rotations, plan.forwards, plan.step_rotation,
                       plan.packed_restart_rotations, plan.packed_step_rotation, restart_period(p)},
                      plan.positions, static_cast<int>(p.K), p.rope_base, plan.has_nonfinite_v, stream);
  if (plan.layers > 1) {
    TreePoolParams pool{};
    pool.k = {p.k, p.k_stride_b, p.k_stride_t, p.k_stride_h, plan.k_tree, p.K};
    pool.v = {p.v, p.v_stride_b, p.v_stride_t, p.v_stride_h, plan.v_tree, p.V};
    pool.B = p.B;
    pool.T = p.T;
    pool.H_kv = p.H_kv;
    pool.compression_rate = kSiblings;
    pool.layers = plan.layers;
    pool.dtype = p.dtype;
    tree_pool(pool, stream);
  }
  for (int l = 0; l < plan.layers; ++l) {
    for (Packed const* packed : {&plan.first[l], &plan.half_selected[l], &plan.selected[l]}) {
      if (packed->nodes == 0) continue;
      tree::pack::Args args = pack_args(p, plan, l, *packed);
      args.blocks = p.B * p.H_kv * packed->parents;
      args.N = packed->nodes;
      args.by_node = packed != &plan.selected[l];
      args.tiles = packed == &plan.first[l];
      args.operands_a = packed == &plan.selected[l] && Plan::queries_of_selected(p, l) > 1;
      tree::pack::tree_pack(args, p.dtype, stream);
    }
  }
}

// The parents that the lists of a chunk name, for those that walk layer l below their first.
void gather(ForwardParams const& p, Plan const& plan, tree::build_union::Args const& lists, int blocks, cudaStream_t stream) {
  int const l = lists.layer;
  tree::pack::Args args = pack_args(p, plan, l, plan.gathered);
  args.blocks = blocks * plan.list_room;
  args.N = plan.N[l];
  args.operands_a = Plan::queries_of_selected(p, l) > 1;
  args.lists = {plan.union_nodes, plan.union_places, plan.union_count, kBlockQueries * p.top_k, plan.list_room,
                lists.blocks,     lists.groups};
  tree::pack::tree_pack(args, p.dtype, stream);
}

// A scale of zero is the smallest: rows of q become zeros.
row_scale::ScoreScale score_scale(double scale) {
  int exponent = 0;
  double const mantissa = std::frexp(scale * 1.4426950408889634, &exponent);  // in [0.5, 1)
  if (mantissa == 0.0) return {1.0f, -1000};
  return {static_cast<float>(2.0 * mantissa), exponent - 1};
}

Args layer_args(ForwardParams const& p, Plan const& plan) {
  Args args{};
  args.block_bytes = plan.block_bytes;
  args.rotations = plan.rotations;
  args.step_rotation = plan.step_rotation;
  args.has_nonfinite_v = plan.has_nonfinite_v;
  args.q = p.q;
  args.q_half = p.dtype == DType::kFloat16;
  args.q_stride_b = p.q_stride_b;
  args.q_stride_t = p.q_stride_t;
  args.q_stride_h = p.q_stride_h;
  args.q_pairs = aligned(p.q, 4) && p.q_stride_b % 2 == 0 && p.q_stride_t % 2 == 0 && p.q_stride_h % 2 == 0;
  args.H_kv = static_cast<int>(p.H_kv);
  args.G = static_cast<int>(p.G);
  args.scale = score_scale(p.scale);
  args.strict_causal = p.strict_causal;
  args.restart_period = restart_period(p);
  args.split = p.T_q == 1;
  args.layers = plan.layers;
  args.top_k = static_cast<int>(p.top_k);
  args.expanded = plan.expanded;
  args.width = plan.width;
  args.importance = plan.importance;
  args.union_masks = plan.union_masks;
  args.union_count = plan.union_count;
  args.state_out = plan.state_out;
  args.state_sum = plan.state_sum;
  args.out = p.out;
  args.lse = p.lse;
  return args;
}

// Of blocks begin .. begin + blocks - 1 of the call, those of whose queries some walk layer l so. Where they are of several
// heads all are named if any is.
Some some_of(ForwardParams const& p, Plan const& plan, Pass pass, LayerKind kind, int l, std::int64_t begin,
                    int blocks) {
  Positions const positions(p, pass, kind, l);
  if (begin / plan.blocks_per_head != (begin + blocks - 1) / plan.blocks_per_head) {
    return {0, positions.meet(p.q_start, p.q_start + p.T_q) ? blocks : 0};
  }
  std::int64_t const first = p.q_start + begin % plan.blocks_per_head * kBlockQueries;
  std::int64_t const end = std::min(first + blocks * kBlockQueries, p.q_start + p.T_q);
  if (!positions.meet(first, end)) return {};
  int const from = static_cast<int>((std::max(positions.begin, first) - first) / kBlockQueries);
  int const to = static_cast<int>(ceil_div(std::min(positions.end, end) - first, std::int64_t(kBlockQueries)));
  return {from, to - from};
}

// Candidates in layer l, at most, of the queries of these blocks; the last one of them has the most.
std::int64_t max_candidates(ForwardParams const& p, Plan const& plan, int l, std::int64_t begin, int blocks) {
  std::int64_t const heads = begin / plan.blocks_per_head - (begin + blocks - 1) / plan.blocks_per_head;
  std::int64_t const end = heads != 0 ? p.T_q : (begin + blocks - 1) % plan.blocks_per_head * kBlockQueries + kBlockQueries;
  std::int64_t const t = p.q_start + std::min(end, p.T_q) - 1;
  int const top_k = static_cast<int>(p.top_k);
  return is_selected_layer(t, l, top_k) ? p.top_k * kSiblings : candidates_in_entry(t, l);
}

void run_chunk(ForwardParams const& p, Plan const& plan, std::int64_t begin, int blocks, cudaStream_t stream) {
  int const K = static_cast<int>(p.K);
  int const V = static_cast<int>(p.V);
  int most = 0;
  for (int l = 1; l <= plan.last_entry_layer; ++l) {
    if (some_of(p, plan, Pass::kAttend, LayerKind::kEntry, l, begin, blocks).count > 0) most = l;
  }
  Args args = layer_args(p, plan);
  args.blocks = {static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(plan.blocks_per_head), p.T_q, p.q_start};

  // Above the entry layers there is nothing to do but to name the nodes, all of them, if somebody asked.
  for (int l = p.selection == nullptr ? most : plan.layers - 1; l >= 0; --l) {
    std::int32_t* const above = plan.nodes[(l + 1) % 2];  // selected in layer l + 1
    args.layer = l;
    args.values = values_of(p, plan, l);
    args.parents = above;
    bool const gathers = plan.selected[l].nodes == 0;
    auto const set = [&](LayerKind kind, Packed const& packed) {
      KindArgs& own = args.kinds[static_cast<int>(kind)];
      own.packed = packed.blocks;
      own.parents_per_head = packed.parents;
      own.restart_rotations = kind == LayerKind::kHalfSelected ? plan.forward_rotations : plan.restart_rotations;
      own.restarts = kind == LayerKind::kHalfSelected ? plan.forwards : plan.restarts;
      own.union_nodes = kind == LayerKind::kSelected && gathers ? plan.union_places : plan.union_nodes;
    };
    set(LayerKind::kEntry, plan.first[l]);
    set(LayerKind::kHalfSelected, plan.half_selected[l]);
    set(LayerKind::kSelected, gathers ? plan.gathered : plan.selected[l]);
    KindArgs& selected = args.kinds[static_cast<int>(LayerKind::kSelected)];
    selected.groups = BlockGroups::of(args.blocks, 0, blocks, Plan::queries_of_selected(p, l));
    selected.packed_restart_rotations = plan.packed_restart_rotations;
    selected.packed_step_rotation = plan.packed_step_rotation;
    auto const pass = [&](Pass which) {
      if (l > most) return;
      auto const some = [&](LayerKind kind) { return some_of(p, plan, which, kind, l, begin, blocks); };
      args.half_selected_parents = half_selected_parents(p, which, l);
      run_pass(which, args, {some(LayerKind::kSelected), some(LayerKind::kHalfSelected), some(LayerKind::kEntry)}, p.dtype, K, V, stream);
    };
    if (l < most) {
      tree::build_union::Args unite{};
      unite.blocks = args.blocks;
      unite.layer = l;
      unite.layers = plan.layers;
      unite.top_k = args.top_k;
      unite.nodes = above;
      unite.union_nodes = plan.union_nodes;
      unite.union_masks = plan.union_masks;
      unite.union_count = plan.union_count;
      unite.groups = selected.groups;
      tree::build_union::build_union(unite, stream);
      // As many walk it so in a score pass as among values, or more.
      Pass const most_of = l > 0 ? Pass::kScore : Pass::kAttend;
      if (gathers && some_of(p, plan, most_of, LayerKind::kSelected, l, begin, blocks).count > 0) gather(p, plan, unite, blocks, stream);
    }
    if (l > 0) {
      pass(Pass::kScore);
      tree::select::Args select{};
      select.blocks = args.blocks;
      select.H_kv = args.H_kv;
      select.layer = l;
      select.layers = plan.layers;
      select.top_k = args.top_k;
      select.importance = plan.importance;
      select.width = plan.width;
      select.max_candidates = max_candidates(p, plan, l, begin, blocks);
      select.parents_in = above;
      select.nodes = plan.nodes[l % 2];
      select.expanded = plan.expanded;
      select.selection =
          p.selection == nullptr ? nullptr : p.selection + (l - 1) * p.B * p.T_q * p.H_kv * p.top_k;
      tree::select::select(select, blocks * kBlockQueries, stream);
    }
    pass(Pass::kAttend);
  }
}

}  // namespace

}  // namespace htree_cuda::sm90::htree_fwd

namespace htree_cuda {

using namespace sm90::htree_fwd;

std::int64_t forward_workspace(ForwardParams const& p) {
  host::tree_args::check(kOp, p);
  return p.B * p.T_q == 0 ? 0 : Plan(p, nullptr).bytes;
}

void forward(ForwardParams const& p, void* stream) {
  host::tree_args::check(kOp, p);
  if (p.B * p.T_q == 0) return;
  Plan const plan(p, static_cast<char*>(p.workspace));
  host::tree_args::check_workspace(kOp, p, plan.bytes);
  if (std::int64_t const past = misalignment(p.selection, 16); past != 0) {
    host::tree_args::reject(kOp, "selection must be 16-byte aligned, got an address " + std::to_string(past) +
                                  " bytes past a multiple of 16");
  }
  cudaStream_t const s = static_cast<cudaStream_t>(stream);
  build(p, plan, s);
  std::int64_t blocks = plan.lead_blocks > 0 ? plan.lead_blocks : plan.chunk_blocks;
  for (std::int64_t begin = 0; begin < plan.blocks; begin += blocks, blocks = plan.chunk_blocks) {
    blocks = std::min(blocks, plan.blocks - begin);
    run_chunk(p, plan, begin, static_cast<int>(blocks), s);
  }
}

}  // namespace htree_cuda

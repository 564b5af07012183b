// The forward of htree attention: tree, packing, then every layer for one chunk of queries after another (schedule.h).
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "host/cuda_check.h"
#include "host/mixed_dims.h"
#include "host/recording.h"
#include "host/side_stream.h"
#include "host/tree_args.h"
#include "launch.h"
#include "params.h"
#include "schedule.h"
#include "tree/build_union.h"
#include "tree/pack.h"
#include "tree/replay.h"
#include "tree/select.h"
#include "tree/sequences.h"

namespace htree_cuda::sm90::htree_fwd {

namespace {

constexpr char const* kOp = "forward";

tree::pack::Source source(void const* in, std::int64_t stride_b, std::int64_t stride_n, std::int64_t stride_h,
                          std::int64_t dim) {
  bool const vectors = tree_args::aligned(in, 16) && stride_b % 8 == 0 && stride_n % 8 == 0 && stride_h % 8 == 0;
  return {in, stride_b, stride_n, stride_h, static_cast<int>(dim), vectors};
}

// A scale of zero is the smallest: rows of q become zeros.
row_scale::ScoreScale score_scale(double scale) {
  int exponent = 0;
  double const mantissa = std::frexp(scale * kLog2E, &exponent);  // in [0.5, 1)
  if (mantissa == 0.0) return {1.0f, -1000};
  return {static_cast<float>(2.0 * mantissa), exponent - 1};
}

// The launch function of a variant. The variants are those of dispatch.h.
using Launch = void (*)(Args const&, Grid const&, LaneStream);

template <class Element, int kK, int kV, Pass kPass>
Launch launch_of(Variant variant) {
  constexpr Variant kOne = kVariants[0], kTwo = kVariants[1], kFour = kVariants[2];
  if (variant == kOne) return launch<Element, kK, kV, kPass, kOne.selected_queries, kOne.entry_queries>;
  return variant == kTwo ? launch<Element, kK, kV, kPass, kTwo.selected_queries, kTwo.entry_queries>
                         : launch<Element, kK, kV, kPass, kFour.selected_queries, kFour.entry_queries>;
}

// Takes the steps of schedule.h on a stream.
class Executor {
public:
  Executor(ForwardParams const& p, Workspace const& w, cudaStream_t stream) : p_(p), w_(w), stream_(stream) {}

  // What follows is of these queries.
  void set_run(ForwardParams const& run, Workspace const& w) {
    p_ = run;
    w_ = w;
  }

  void describe_sequences() {
    tree::sequences::Args args{};
    args.lengths = p_.sequences;
    args.max_q = p_.T_q;
    args.max_k = p_.T;
    args.tile_queries = kQueryTile;
    args.round = w_.tile_round;
    args.early_end = w_.layers > 1 ? p_.top_k * kSiblings : 0;
    args.early = w_.early_tiles;
    args.late_tiles = w_.late_tiles;
    args.part = w_.pack_part;
    args.tile_room = is_packed(p_) ? tile_room(p_) : 0;
    args.sequences = w_.sequences;
    args.tiles = w_.tile_entries;
    args.tile_count = w_.tiles_per_head;
    args.bottom_entries = w_.bottom_entries;
    args.bottom_count = w_.bottom_per_head;
    args.out = p_.out;
    args.out_row_bytes = 2 * p_.H_kv * p_.G * p_.V;
    args.lse = p_.lse;
    args.H = static_cast<int>(p_.H_kv * p_.G);
    args.selection = p_.selection;
    args.selection_layers = w_.layers - 1;
    args.selection_row = p_.H_kv * p_.top_k;
    tree::sequences::describe(args, stream_);
  }

  void make_rotations() {
    tree::pack::QueryRotations const of_queries{w_.restart_rotations,    w_.restarts,       w_.forward_rotations,
                                                w_.forward_restarts,     w_.step_rotation,  w_.packed_restart_rotations,
                                                w_.packed_step_rotation, restart_period(p_)};
    tree::pack::make_rotations(w_.rotations, nullptr, of_queries, w_.positions, static_cast<int>(p_.K),
                               {p_.rope_base, p_.inv_freq}, w_.has_nonfinite_v, stream_);
  }

  void pool() {
    TreePoolParams pool{};
    pool.k = {p_.k, p_.k_stride_b, p_.k_stride_t, p_.k_stride_h, w_.k_tree, p_.K};
    pool.v = {p_.v, p_.v_stride_b, p_.v_stride_t, p_.v_stride_h, w_.v_tree, p_.V};
    pool.B = p_.B;
    pool.T = p_.T;
    pool.H_kv = p_.H_kv;
    pool.compression_rate = kSiblings;
    pool.layers = w_.layers;
    pool.dtype = p_.dtype;
    if (has_sequences(p_)) {
      pool.B = 1;
      pool.sequences = w_.sequences;
      pool.sequence_count = p_.sequences.count;
      pool.total_k = p_.sequences.total_k;
      pool.top_k = static_cast<int>(p_.top_k);
      pool.packed = is_packed(p_);
    }
    tree_pool(pool, stream_);
  }

  void pack(int l, LayerKind kind) {
    Packed const& packed = w_.of(l, kind);
    tree::pack::Args args = pack_args(l, packed);
    args.log2_from = log2_room_from(kind == LayerKind::kEntry ? l : l + 1, static_cast<int>(p_.top_k));
    args.blocks = (has_sequences(p_) ? 1 : p_.B) * p_.H_kv * packed.blocks_per_head;
    args.N = packed.nodes;
    args.by_node = kind != LayerKind::kSelected;
    args.tiles = kind == LayerKind::kEntry;
    args.operands_a = kind == LayerKind::kSelected && queries_of_selected(p_) > 1;
    tree::pack::tree_pack(args, p_.dtype, stream_);
  }

  // Chunks of the second lane run on a stream beside the caller's.
  void fork() { side_.emplace(stream_); }
  void join() { side_->join(); }

  void build_union(Chunk const& chunk, int l) {
    Lane const& lane = w_.lanes[chunk.lane];
    tree::build_union::Args args{};
    args.tiles = query_tiles(p_, w_, chunk);
    args.layer = l;
    args.layers = w_.layers;
    args.top_k = static_cast<int>(p_.top_k);
    args.parents = w_.N[l + 1];
    args.nodes = selected_above(lane, l);
    args.union_nodes = lane.union_nodes;
    args.union_masks = lane.union_masks;
    args.union_count = lane.union_count;
    args.sets = union_sets(p_, w_, chunk, l);
    tree::build_union::build_union(args, stream_of(chunk));
  }

  // The blocks that the unions of a chunk name.
  void gather(Chunk const& chunk, int l) {
    Lane const& lane = w_.lanes[chunk.lane];
    tree::pack::Args args = pack_args(l, w_.gathered);
    args.blocks = chunk.count * w_.list_room;
    args.N = w_.N[l];
    args.operands_a = queries_of_selected(p_) > 1;
    args.lists = {lane.union_nodes, lane.union_places, lane.union_count, kQueryTile * p_.top_k, w_.list_room,
                  query_tiles(p_, w_, chunk), union_sets(p_, w_, chunk, l)};
    tree::pack::tree_pack(args, p_.dtype, stream_);
  }

  void launch(Chunk const& chunk, int l, Pass pass, Variant variant, TilesByKind const& tiles) {
    Args args = kernel_args(chunk, l, pass);
    Grid const grid = deal(args.tiles, variant, tiles, union_sets(p_, w_, chunk, l), args.kinds);
    launch_in(pass, variant)(args, grid, stream_of(chunk));
  }

  void select(Chunk const& chunk, int l) {
    Lane const& lane = w_.lanes[chunk.lane];
    tree::select::Args args{};
    args.tiles = query_tiles(p_, w_, chunk);
    args.H_kv = static_cast<int>(p_.H_kv);
    args.layer = l;
    args.layers = w_.layers;
    args.top_k = static_cast<int>(p_.top_k);
    args.importance = lane.importance;
    args.width = w_.width;
    args.max_candidates = max_candidates(chunk, l);
    args.parents_in = selected_above(lane, l);
    args.nodes = lane.nodes[l % 2];
    args.expanded = lane.expanded;
    args.selection = p_.selection == nullptr ? nullptr : p_.selection + (l - 1) * rows_of_call(p_) * p_.H_kv * p_.top_k;
    tree::select::select(args, chunk.count * kQueryTile, stream_of(chunk));
  }

  void replay(Chunk const& chunk, int l) {
    Lane const& lane = w_.lanes[chunk.lane];
    tree::replay::Args args{};
    args.tiles = query_tiles(p_, w_, chunk);
    args.H_kv = static_cast<int>(p_.H_kv);
    args.layer = l;
    args.layers = w_.layers;
    args.top_k = static_cast<int>(p_.top_k);
    args.given = p_.given + (l - 1) * rows_of_call(p_) * p_.H_kv * p_.top_k;
    args.parents_in = selected_above(lane, l);
    args.nodes = lane.nodes[l % 2];
    args.expanded = lane.expanded;
    args.width = w_.width;
    tree::replay::replay(args, chunk.count * kQueryTile, stream_of(chunk));
  }

private:
  LaneStream stream_of(Chunk const& chunk) const {
    return {chunk.lane == 0 ? stream_ : side_->stream(), w_.lane_count == 1};
  }

  static std::int32_t* selected_above(Lane const& lane, int l) { return lane.nodes[(l + 1) % 2]; }

  tree::pack::Source keys_of(int l) const {
    return in_sequences(l, l == 0 ? source(p_.k, p_.k_stride_b, p_.k_stride_t, p_.k_stride_h, p_.K)
                                  : source(w_.k_tree + w_.tree_begin[l] * p_.K * 2, p_.H_kv * w_.M * p_.K, p_.K,
                                           w_.M * p_.K, p_.K));
  }

  tree::pack::Source values_of(int l) const {
    return in_sequences(l, l == 0 ? source(p_.v, p_.v_stride_b, p_.v_stride_t, p_.v_stride_h, p_.V)
                                  : source(w_.v_tree + w_.tree_begin[l] * p_.V * 2, p_.H_kv * w_.M * p_.V, p_.V,
                                           w_.M * p_.V, p_.V));
  }

  tree::pack::Source in_sequences(int l, tree::pack::Source source) const {
    if (!has_sequences(p_) || (l == 0 && !is_packed(p_))) return source;
    source.stride_b = 0;
    source.begins = l == 0 ? tree::pack::Source::kTokens : l;
    source.log2_from = log2_room_from(l, static_cast<int>(p_.top_k));
    return source;
  }

  tree::pack::Args pack_args(int l, Packed const& packed) const {
    tree::pack::Args args{};
    args.k = keys_of(l);
    args.v = values_of(l);
    args.packed = packed.blocks;
    args.block_bytes = w_.block_bytes;
    args.blocks_per_head = packed.blocks_per_head;
    args.H_kv = static_cast<int>(p_.H_kv);
    args.rotations = w_.rotations;
    args.as_inputs = l == 0;  // nothing is selected there
    args.has_nonfinite_v = w_.has_nonfinite_v;
    args.sequences = has_sequences(p_) ? w_.sequences : nullptr;
    args.sequence_count = static_cast<std::int32_t>(p_.sequences.count);
    args.layer = l;
    return args;
  }

  // Candidates of a query in layer l, at most; the last query of the chunk has the most.
  std::int64_t max_candidates(Chunk const& chunk, int l) const {
    auto const of_position = [&](std::int64_t t) {
      return is_selected_layer(t, l, static_cast<int>(p_.top_k)) ? p_.top_k * kSiblings : candidates_in_entry(t, l);
    };
    if (has_sequences(p_)) return of_position(end_position(p_) - 1);
    std::int64_t const last = chunk.begin + chunk.count - 1;
    bool const one_head = chunk.begin / w_.tiles_per_head == last / w_.tiles_per_head;
    std::int64_t const end = one_head ? last % w_.tiles_per_head * kQueryTile + kQueryTile : p_.T_q;
    return of_position(p_.q_start + std::min(end, p_.T_q) - 1);
  }

  Args kernel_args(Chunk const& chunk, int l, Pass pass) const {
    Lane const& lane = w_.lanes[chunk.lane];
    Args args{};
    args.tiles = query_tiles(p_, w_, chunk);
    for (LayerKind kind : {LayerKind::kEntry, LayerKind::kSelected, LayerKind::kHalfSelected}) {
      bool const gathered = kind == LayerKind::kSelected && w_.gathers(l);
      bool const half = kind == LayerKind::kHalfSelected;
      Packed const& packed = gathered ? w_.gathered : w_.of(l, kind);
      KindArgs& own = args.kinds[static_cast<int>(kind)];
      own.packed = packed.blocks;
      own.blocks_per_head = packed.blocks_per_head;
      own.restart_rotations = half ? w_.forward_rotations : w_.restart_rotations;
      own.restarts = half ? w_.forward_restarts : w_.restarts;
      own.union_nodes = gathered ? lane.union_places : lane.union_nodes;
      own.packed_restart_rotations = w_.packed_restart_rotations;
      own.packed_step_rotation = w_.packed_step_rotation;
    }
    args.block_bytes = w_.block_bytes;
    args.values = values_of(l);
    args.sequences = w_.sequences;
    args.has_nonfinite_v = w_.has_nonfinite_v;
    args.rotations = w_.rotations;
    args.step_rotation = w_.step_rotation;
    args.q = p_.q;
    args.q_stride_b = is_packed(p_) ? 0 : p_.q_stride_b;
    args.q_stride_t = p_.q_stride_t;
    args.q_stride_h = p_.q_stride_h;
    args.q_half = p_.dtype == DType::kFloat16;
    args.q_pairs =
        tree_args::aligned(p_.q, 4) && p_.q_stride_b % 2 == 0 && p_.q_stride_t % 2 == 0 && p_.q_stride_h % 2 == 0;
    args.H_kv = static_cast<int>(p_.H_kv);
    args.G = static_cast<int>(p_.G);
    args.scale = score_scale(p_.scale);
    args.strict_causal = p_.strict_causal;
    args.restart_period = restart_period(p_);
    args.split = queries_of_call(p_) == 1;
    args.layer = l;
    args.layers = w_.layers;
    args.top_k = static_cast<int>(p_.top_k);
    args.half_selected_parents = half_selected_parents(p_, pass, l);
    args.parents = selected_above(lane, l);
    args.union_masks = lane.union_masks;
    args.union_count = lane.union_count;
    args.expanded = lane.expanded;
    args.width = w_.width;
    args.importance = lane.importance;
    args.state_out = lane.state_out;
    args.state_sum = lane.state_sum;
    args.out = p_.out;
    args.lse = p_.lse;
    args.attn_sink = p_.attn_sink;
    return args;
  }

  Launch launch_in(Pass pass, Variant variant) const {
    if (pass == Pass::kScore) {
      return p_.K == 128 ? launch_of<void, 128, 64, Pass::kScore>(variant)
                         : launch_of<void, 64, 64, Pass::kScore>(variant);
    }
    return dispatch_dims(p_.K, p_.V, [&](auto K, auto V) {
      constexpr int kK = decltype(K)::value;
      constexpr int kV = decltype(V)::value;
      return p_.dtype == DType::kFloat16 ? launch_of<__half, kK, kV, Pass::kAttend>(variant)
                                         : launch_of<__nv_bfloat16, kK, kV, Pass::kAttend>(variant);
    });
  }

  ForwardParams p_;
  Workspace w_;
  cudaStream_t const stream_;
  std::optional<SideStream> side_;
};

void check(ForwardParams const& p) {
  if (std::int64_t const past = misalignment(p.selection, 16); past != 0) {
    tree_args::reject(kOp, "selection must be 16-byte aligned, got an address " + std::to_string(past) +
                               " bytes past a multiple of 16");
  }
  if (p.selection != nullptr && p.given != nullptr) {
    tree_args::reject(kOp, "selection must be null where a selection is given");
  }
}

void launch_runs(Runs<ForwardParams> const& runs, PartParams const& part, cudaStream_t stream) {
  std::vector<ForwardParams> own;
  for (ForwardParams const& run : runs) own.push_back(tree_args::with_keys_of(*runs.first, run));
  Runs<ForwardParams> const all{own.data(), runs.count};
  Workspace const workspace(all, part, static_cast<char*>(runs.first->workspace), sm_count());
  tree_args::check_workspace(kOp, *runs.first, workspace.bytes);
  Executor executor(*all.first, workspace, stream);
  schedule(all, workspace, executor);
}

}  // namespace

}  // namespace htree_cuda::sm90::htree_fwd

namespace htree_cuda {

std::int64_t forward_workspace(ForwardParams const& p) { return forward_workspace(Runs<ForwardParams>{&p, 1}, {}); }

std::int64_t forward_workspace(Runs<ForwardParams> const& runs, PartParams const& part) {
  using namespace sm90::htree_fwd;
  tree_args::check_runs(kOp, runs);
  auto const bytes = [&](Runs<ForwardParams> const& own) { return Workspace(own, part, nullptr, sm_count()).bytes; };
  if (runs.count > 1) return bytes(runs);
  if (rows_of_call(*runs.first) == 0) return 0;
  return workspace_of_parts(*runs.first, [&](ForwardParams const& own) { return bytes({&own, 1}); });
}

void forward(ForwardParams const& p, void* stream) { forward(Runs<ForwardParams>{&p, 1}, {}, stream); }

void forward(Runs<ForwardParams> const& runs, PartParams const& part, void* stream) {
  using namespace sm90::htree_fwd;
  tree_args::check_runs(kOp, runs);
  for (ForwardParams const& run : runs) check(run);
  if (runs.count > 1) return launch_runs(runs, part, static_cast<cudaStream_t>(stream));
  ForwardParams const& p = *runs.first;
  if (rows_of_call(p) == 0) return;
  for_parts(p, [&](ForwardParams const& own) {
    Workspace const workspace({&own, 1}, part, static_cast<char*>(own.workspace), sm_count());
    tree_args::check_workspace(kOp, own, workspace.bytes);
    Executor executor(own, workspace, static_cast<cudaStream_t>(stream));
    schedule(own, workspace, executor);
  });
}

}  // namespace htree_cuda

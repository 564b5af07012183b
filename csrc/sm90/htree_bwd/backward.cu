// The backward of htree attention: launches the steps of schedule.h.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "host/cuda_check.h"
#include "host/recording.h"
#include "host/side_stream.h"
#include "host/tree_args.h"
#include "pack/pack.h"
#include "params.h"
#include "reverse_index/reverse_index.h"
#include "schedule.h"
#include "tree/pack.h"
#include "tree/sequences.h"

namespace htree_cuda::sm90::htree_bwd {
namespace {

constexpr char const* kOp = "backward";

pack::Source source(void const* in, std::int64_t stride_b, std::int64_t stride_n, std::int64_t stride_h,
                    std::int64_t stride_d = 1) {
  bool const chunks = stride_b % 8 == 0 && stride_n % 8 == 0 && stride_h % 8 == 0 && stride_d == 1;
  bool const vectors = chunks && host::tree_args::aligned(in, 16);
  return {in, stride_b, stride_n, stride_h, stride_d, vectors};
}

pack::Source behind(pack::Source source, std::int64_t rows) {
  source.in = static_cast<char const*>(source.in) - 2 * rows * source.stride_n;
  return source;
}

// Takes the steps of a call on a stream. Keys, and where their gradients go, are those of the first run.
struct Launcher {
  Runs<BackwardParams> const& runs;
  ForwardParams const& p;
  Workspace const& w;
  cudaStream_t stream;
  BackwardParams const& params = *runs.first;
  void* before_dkv = nullptr;
  Stretch stretch = {};
  std::optional<host::SideStream> side = {};

  void begin(Stretch const& next) { stretch = next; }

  // The runs that have rows of a chunk: use(run, offset, begin, end) of those rows, the last with what pads the chunk.
  // offset: rows of the stretch before the run.
  template <class Use>
  void for_runs(Chunk const& chunk, Use const& use) const {
    int const second = first_row_of_second(chunk);
    if (second > 0) use(runs.first[stretch.first], std::int64_t(0), 0, second);
    if (second < chunk.rows) use(runs.first[stretch.first + stretch.count - 1], stretch.before, second, chunk.rows);
  }

  // The first row of a chunk that is not of the first of two runs; of one run, row 0.
  int first_row_of_second(Chunk const& chunk) const {
    std::int64_t const rows = stretch.before - chunk.first_query;
    return rows >= chunk.queries ? chunk.rows : static_cast<int>(std::max(rows, std::int64_t(0)));
  }

  // In a pack no row belongs to a batch.
  std::int64_t batch(std::int64_t stride) const { return is_packed() ? 0 : stride; }
  bool is_packed() const { return host::is_packed(p); }

  void describe_sequences() {
    tree::sequences::Args args{};
    args.lengths = p.sequences;
    args.max_q = p.T_q;
    args.max_k = p.T;
    args.tile_queries = w.row_tile;
    args.round = 1;
    args.part = w.pack_part;
    args.tile_room = is_packed() ? host::tile_room(p) : 0;
    args.sequences = w.sequences;
    args.out = params.dq;
    args.out_row_bytes = 2 * p.H_kv * p.G * p.K;
    tree::sequences::describe(args, stream);
    sequences::TilesArgs const tiles{w.sequences, static_cast<std::int32_t>(p.sequences.count), w.row_tile, w.row_tiles,
                                     w.chunks() * (w.rows / w.row_tile)};
    sequences::fill_row_tiles(tiles, stream);
  }

  void describe_chunk(Chunk const& chunk) {
    sequences::ChunkArgs args{};
    args.sequences = w.sequences;
    args.count = static_cast<std::int32_t>(p.sequences.count);
    args.row_tile = w.row_tile;
    args.tile_queries = tile_queries(unit_heads(static_cast<int>(p.G)));
    args.gather_rows = w.gather_rows;
    args.top_k = w.tree.top_k;
    args.max_entry = w.max_entry;
    args.first_row = chunk.first_query;
    args.rows = chunk.rows;
    std::copy(std::begin(w.tile_segment_rows), std::end(w.tile_segment_rows), args.tile_segment_rows);
    std::copy(std::begin(w.range_rows), std::end(w.range_rows), args.range_rows);
    args.begins = w.stream_begins;
    args.ends = w.stream_ends;
    std::int64_t const at = w.tables_of(chunk);
    args.gather = w.gather + at * w.gather_ctas;
    args.gather_ctas = w.gather_ctas;
    args.entry = w.entry + at * w.entry_room;
    args.entry_room = w.entry_room;
    args.lists = w.list_work + at * w.list_room;
    args.list_room = w.list_room;
    args.counts = w.counts + at;
    sequences::describe_chunk(args, stream);
  }

  void make_rotations() {
    tree::pack::make_rotations(w.rotations, w.fragment_rotations, {}, w.positions, static_cast<int>(p.K),
                               {p.rope_base, p.inv_freq}, nullptr, stream);
  }

  void pool() {
    TreePoolParams pool{};
    pool.k = {p.k, p.k_stride_b, p.k_stride_t, p.k_stride_h, w.k_tree, p.K};
    pool.v = {p.v, p.v_stride_b, p.v_stride_t, p.v_stride_h, w.v_tree, p.V};
    pool.B = p.B;
    pool.T = p.T;
    pool.H_kv = p.H_kv;
    pool.compression_rate = kSiblings;
    pool.layers = w.tree.layers;
    pool.dtype = p.dtype;
    if (has_sequences(p)) {
      pool.B = 1;
      pool.sequences = w.sequences;
      pool.sequence_count = p.sequences.count;
      pool.total_k = p.sequences.total_k;
      pool.top_k = w.tree.top_k;
      pool.packed = is_packed();
    }
    tree_pool(pool, stream);
  }

  void pack_kv(int l, bool in_tiles, std::int64_t first_head, int heads) {
    pack::PackKv args{};
    if (l == 0) {
      args.k = source(p.k, p.k_stride_b, p.k_stride_t, p.k_stride_h);
      args.v = source(p.v, p.v_stride_b, p.v_stride_t, p.v_stride_h);
    } else {
      std::int64_t const first = w.tree_begin[l];
      args.k = source(w.k_tree + first * p.K * 2, p.H_kv * w.M * p.K, p.K, w.M * p.K);
      args.v = source(w.v_tree + first * p.V * 2, p.H_kv * w.M * p.V, p.V, w.M * p.V);
    }
    args.in_tiles = in_tiles;
    args.packed = in_tiles ? w.kv_tiles[l] : w.kv_blocks[l];
    args.keys = in_tiles ? nullptr : w.keys[l];
    args.blocks_per_head = in_tiles ? w.tiles[l] * kTileBlocks : w.tree.kv_blocks[l];
    args.blocks = std::int64_t(heads) * args.blocks_per_head;
    args.as_inputs = l == 0;  // the forward rounds the keys of the bottom in the same way
    args.first_head = first_head;
    args.N = w.tree.N[l];
    if (has_sequences(p)) {
      if (in_tiles) args.N = std::min(args.N, p.top_k * kSiblings);
      args.sequences = w.sequences;
      args.sequence_count = static_cast<std::int32_t>(p.sequences.count);
      args.layer = l;
      args.log2_from = log2_room_from(l, w.tree.top_k);
      args.batch = l == 0 && !is_packed();
    }
    args.H_kv = static_cast<int>(p.H_kv);
    args.K = static_cast<int>(p.K);
    args.V = static_cast<int>(p.V);
    args.rotations = w.rotations;
    pack::pack_kv(args, p.dtype, stream);
  }

  void clear_sums(int heads) {
    HTREE_CUDA_CHECK(cudaMemsetAsync(w.dk, 0, heads * w.node_rows * p.K * sizeof(float), beside()));
    HTREE_CUDA_CHECK(cudaMemsetAsync(w.dv, 0, heads * w.node_rows * p.V * sizeof(float), beside()));
  }

  void pack_queries(Chunk const& chunk) {
    std::int64_t const H = w.row_heads * p.G;
    pack::PackQueries args{};
    args.chunk = chunk;
    args.packed = w.queries;
    args.tiles = w.query_tiles;
    args.tree = w.tree;
    args.rotations = w.rotations;
    args.sequences = tables(w, chunk);
    args.T_q = batch(p.T_q);
    args.H_kv = static_cast<int>(w.row_heads);
    args.G = static_cast<int>(p.G);
    args.K = static_cast<int>(p.K);
    args.V = static_cast<int>(p.V);
    args.scale_log2 = static_cast<float>(p.scale * kLog2E);
    for_runs(chunk, [&](BackwardParams const& run, std::int64_t offset, int begin, int end) {
      ForwardParams const& own = run.forward;
      args.begin = begin;
      args.end = end;
      args.q = behind(source(own.q, batch(own.q_stride_b), own.q_stride_t, own.q_stride_h), offset);
      args.dout = behind(source(run.dout, batch(run.dout_stride_b), run.dout_stride_t, run.dout_stride_h, run.dout_stride_v),
                         offset);
      args.out = behind(source(own.out, batch(own.T_q * H * p.V), H * p.V, p.V), offset);
      args.lse = own.lse - offset * H;
      args.dlse = run.dlse - offset * run.dlse_stride_t;
      args.dlse_stride_b = batch(run.dlse_stride_b);
      args.dlse_stride_t = run.dlse_stride_t;
      args.dlse_stride_h = run.dlse_stride_h;
      pack::pack_queries(args, p.dtype, stream);
    });
  }

  // Counters of work items and segments are zeroed with the tables of the index.
  void build_index(Chunk const& chunk) {
    HTREE_CUDA_CHECK(cudaMemsetAsync(w.next_item, 0, w.zeroed_bytes, stream));
    if (w.max_entry == 0) return;
    reverse_index::BuildArgs args{};
    args.chunk = chunk;
    args.tree = w.tree;
    args.layers = w.max_entry;
    args.index = w.index;
    args.T_q = batch(p.T_q);
    args.H_kv = static_cast<int>(w.selection_heads);
    args.sequences = tables(w, chunk);
    for_runs(chunk, [&](BackwardParams const& run, std::int64_t offset, int begin, int end) {
      args.begin = begin;
      args.end = end;
      args.selection = run.forward.selection - offset * w.selection_heads * p.top_k;
      args.rows_of_q = has_sequences(p) ? p.sequences.total_q : p.B * run.forward.T_q;
      reverse_index::build(args, stream);
    });
  }

  void list_visits(Args args) {
    args.G = static_cast<int>(p.G);
    // The number of lists of sequences is known on the device: CTAs take them one after the other.
    if (has_sequences(p)) args.list_ctas = std::min(args.list_ctas, reverse_index::kListCtasOfSm * sm_count());
    reverse_index::list_visits(args, stream);
  }

  void multiply(Rule const& rule, Args args) {
    args.scale = static_cast<float>(p.scale);
    std::int64_t const row_bytes = 2 * w.row_heads * p.G * p.K;
    args.dq_before = runs.first[stretch.first].dq;
    args.dq = static_cast<char*>(runs.first[stretch.first + stretch.count - 1].dq) - stretch.before * row_bytes;
    args.dq_begin = first_row_of_second(args.chunk);
    args.T_q = batch(p.T_q);
    args.H_kv = static_cast<int>(w.row_heads);
    args.G = static_cast<int>(p.G);
    std::int64_t const rows = std::int64_t(args.chunk.heads) * args.chunk.rows;
    bool const persistent = rule.ctas == Ctas::kPersistent;
    int const ctas = persistent ? sm_count() : static_cast<int>(grid_blocks(kOp, rows, kCtaQueries));
    variant_of(p).launch(rule.kernel, args, ctas, rule.order == Order::kBesideSelected ? beside() : stream);
  }

  cudaStream_t beside() const { return side ? side->stream() : stream; }
  void fork() { side.emplace(stream); }
  void join() {
    side->join();
    side.reset();
  }

  void add_segments(Args const& args) {
    pack::add_segments(args, static_cast<int>(p.K), static_cast<int>(p.V), stream);
  }

  void distribute(std::int64_t first_head, int heads) {
    if (before_dkv != nullptr) HTREE_CUDA_CHECK(cudaStreamWaitEvent(beside(), static_cast<cudaEvent_t>(before_dkv), 0));
    before_dkv = nullptr;
    auto const tokens = [&](float const* sums, void* out, std::int64_t dim) {
      pack::Distribute args{};
      args.tree = w.tree;
      args.sums = sums;
      args.node_rows = w.node_rows;
      std::copy(std::begin(w.begin), std::end(w.begin), args.begin);
      args.out = out;
      args.float32 = params.float32;
      args.add = params.add;
      args.first_head = first_head;
      args.heads = heads;
      args.H_kv = static_cast<int>(p.H_kv);
      args.dim = static_cast<int>(dim);
      if (has_sequences(p)) {
        args.tokens = p.sequences.total_k;
        args.sequences = w.sequences;
        args.sequence_count = static_cast<std::int32_t>(p.sequences.count);
        args.part = w.pack_part;
      }
      pack::distribute(args, p.dtype, beside());
    };
    tokens(w.dk, params.dk, p.K);
    tokens(w.dv, params.dv, p.V);
  }
};


void check(Runs<ForwardParams> const& runs, PartParams const& part) {
  host::tree_args::check_runs(kOp, runs);
  ForwardParams const& p = *runs.first;
  bool const some_heads = part.H_kv > 0;
  if (part.queries < 0 || part.H_kv < 0 || (some_heads && (p.B != 1 || p.H_kv > part.H_kv || has_sequences(p)))) {
    host::tree_args::reject(kOp, "a part of a call has no fewer than 0 queries, and where it has some of the KV heads, B 1 and "
                                 "sequences of one length, got " + std::to_string(part.queries) + " queries, " +
                                     std::to_string(p.H_kv) + " of " + std::to_string(part.H_kv) + " heads and B " +
                                     std::to_string(p.B));
  }
  if (part.selection_H_kv != 0 && (!some_heads || part.selection_H_kv < p.H_kv)) {
    host::tree_args::reject(kOp, "rows of the selection have the " + std::to_string(p.H_kv) + " heads of the part of a call, got " +
                                     std::to_string(part.selection_H_kv) + " of " + std::to_string(part.H_kv));
  }
}

// Without a query there is nothing to compute.
bool is_empty(Runs<ForwardParams> const& runs) {
  return std::all_of(runs.begin(), runs.end(), [](ForwardParams const& p) {
    return has_sequences(p) ? p.sequences.total_q * p.T_q == 0 : p.B * p.T_q == 0;
  });
}

std::vector<ForwardParams> forwards_of(Runs<BackwardParams> const& runs) {
  std::vector<ForwardParams> result;
  for (BackwardParams const& run : runs) result.push_back(host::tree_args::with_keys_of(runs.first->forward, run.forward));
  return result;
}

}  // namespace
}  // namespace htree_cuda::sm90::htree_bwd

namespace htree_cuda {

std::int64_t backward_workspace(ForwardParams const& p) { return backward_workspace(Runs<ForwardParams>{&p, 1}, {}); }

std::int64_t backward_workspace(Runs<ForwardParams> const& runs, PartParams const& part) {
  using namespace sm90::htree_bwd;
  check(runs, part);
  if (is_empty(runs)) return 0;
  if (runs.count > 1) return Workspace(runs, part, nullptr).bytes;
  return host::workspace_of_parts(*runs.first, [&](ForwardParams const& own) { return Workspace({&own, 1}, part, nullptr).bytes; });
}

void backward(BackwardParams const& params, void* stream) { backward(Runs<BackwardParams>{&params, 1}, {}, stream); }

void backward(Runs<BackwardParams> const& runs, PartParams const& part, void* stream) {
  using namespace sm90::htree_bwd;
  std::vector<ForwardParams> const forwards = forwards_of(runs);
  Runs<ForwardParams> const all{forwards.data(), runs.count};
  check(all, part);
  BackwardParams const& params = *runs.first;
  ForwardParams const& p = params.forward;
  cudaStream_t const s = static_cast<cudaStream_t>(stream);
  if (is_empty(all)) {
    if (part.before_dkv != nullptr) HTREE_CUDA_CHECK(cudaStreamWaitEvent(s, static_cast<cudaEvent_t>(part.before_dkv), 0));
    std::int64_t const queries = has_sequences(p) ? p.sequences.total_q : 0;  // padding, where no sequence may have any
    if (queries > 0) HTREE_CUDA_CHECK(cudaMemsetAsync(params.dq, 0, queries * p.H_kv * p.G * p.K * 2, s));
    if (params.float32 && params.add) return;
    std::int64_t const rows = p.H_kv * (has_sequences(p) ? p.sequences.total_k : p.B * p.T);
    HTREE_CUDA_CHECK(cudaMemsetAsync(params.dk, 0, rows * p.K * (params.float32 ? 4 : 2), s));
    HTREE_CUDA_CHECK(cudaMemsetAsync(params.dv, 0, rows * p.V * (params.float32 ? 4 : 2), s));
    return;
  }
  auto const launch = [&](Runs<ForwardParams> const& own) {
    Workspace const w(own, part, static_cast<char*>(own.first->workspace));
    host::tree_args::check_workspace(kOp, *own.first, w.bytes);
    Launcher launcher{runs, *own.first, w, s};
    launcher.before_dkv = part.before_dkv;
    schedule(*own.first, w, launcher);
  };
  if (runs.count > 1) return launch(all);
  host::for_parts(p, [&](ForwardParams const& own) { launch({&own, 1}); });
}

}  // namespace htree_cuda

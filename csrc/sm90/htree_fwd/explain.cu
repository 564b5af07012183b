// What a forward call would launch: the steps of schedule.h, counted instead of taken. Needs no GPU.
#include <string>

#include "host/launch_rows.h"
#include "host/mixed_dims.h"
#include "host/tree_args.h"
#include "params.h"
#include "schedule.h"

namespace htree_cuda::sm90::htree_fwd {
namespace {

constexpr char const* kKinds[kLayerKinds] = {"entry", "selected", "half-selected"};

constexpr int kFirstOfChunk = 3;  // the first step that a chunk repeats

using Row = host::LaunchRow;

// Counts what forward.cu's Executor launches.
class Counter {
public:
  Counter(ForwardParams const& p, Workspace const& w) : p_(p), w_(w) {}

  void describe_sequences() {
    at("sequences", -1, w_.layers, "", "fill_kernel", "", "sequences and query tiles, from lengths on the device").launches += 2;
  }

  void make_rotations() {
    at("rotations", 0, w_.layers, "", "rotations_kernel", "", "tables of cos and sin").launches += 1;
  }

  void pool() {
    at("pool", 1, w_.layers, "", "tree_pool_kernel", "", "means of 16 children, two layers a launch").launches +=
        w_.layers / 2;
  }

  void pack(int l, LayerKind kind) {
    char const* const reason = kind == LayerKind::kEntry ? "tiles of 4 blocks for WGMMA, keys rotated by node index"
                               : kind == LayerKind::kSelected
                                   ? "single blocks for mma.sync, keys rotated by place"
                                   : "single blocks for mma.sync, keys rotated by node index";
    at("pack", 2, l, kKinds[static_cast<int>(kind)], "tree_pack_kernel", "a KV block a warp", reason).launches += 1;
  }

  void fork() {}  // launches nothing
  void join() {}

  void build_union(Chunk const& chunk, int l) {
    std::int64_t const tiles = queries_of_selected(p_);
    Row& row = at("union", 3, l, "", "build_union_kernel", std::to_string(12 * tiles) + " queries",
                  "the blocks that a tile's queries selected, each once");
    row.launches += 1;
    row.ctas += union_sets(p_, w_, chunk, l).count(query_tiles(p_, w_, chunk));
  }

  void gather(Chunk const&, int l) {
    at("gather", 4, l, "selected", "tree_pack_kernel", "a KV block a warp",
       "few queries: only the blocks that they selected are packed").launches += 1;
  }

  void launch(Chunk const& chunk, int l, Pass pass, Variant variant, TilesByKind const& tiles) {
    KindArgs kinds[kLayerKinds] = {};
    Grid const grid = deal(query_tiles(p_, w_, chunk), variant, tiles, union_sets(p_, w_, chunk, l), kinds);
    count(l, pass, variant, LayerKind::kSelected, grid.half_selected_cta);
    count(l, pass, variant, LayerKind::kHalfSelected, grid.entry_cta - grid.half_selected_cta);
    count(l, pass, variant, LayerKind::kEntry, grid.ctas - grid.entry_cta);
  }

  void select(Chunk const& chunk, int l) {
    Row& row = at("select", 6, l, "", "select_kernel", "a query", "the most important candidates, top_k of them");
    row.launches += 1;
    row.ctas += chunk.count * kQueryTile;
  }

  void replay(Chunk const& chunk, int l) {
    Row& row = at("replay", 6, l, "", "replay_kernel", "8 queries", "the nodes that the caller gave");
    row.launches += 1;
    row.ctas += ceil_div(chunk.count * kQueryTile, 8);
  }

  // Rows in the order in which a call runs them: the packing of all layers, then for every chunk from the highest layer
  // down.
  template <class Sink>
  void each(Sink const& sink) {
    for (Row const& row : rows_) {
      if (row.step < kFirstOfChunk) sink(row);
    }
    for (int layer = w_.layers - 1; layer >= 0; --layer) {
      for (int step = kFirstOfChunk; step < 8; ++step) {
        for (Row const& row : rows_) {
          if (row.layer == layer && row.step == step) sink(row);
        }
      }
    }
  }

private:
  Row& at(char const* phase, int step, int layer, char const* kind, std::string const& kernel, std::string const& tile,
          char const* reason) {
    return rows_.at(phase, step, layer, kind, kernel, tile, reason);
  }

  void count(int l, Pass pass, Variant variant, LayerKind kind, std::uint32_t ctas) {
    if (ctas == 0) return;
    bool const entry = kind == LayerKind::kEntry;
    int const queries = entry ? variant.entry_queries : variant.selected_queries;
    bool const score = pass == Pass::kScore;
    std::string const dims = score ? std::to_string(p_.K) : std::to_string(p_.K) + " x " + std::to_string(p_.V);
    std::string const dtype = score ? "" : p_.dtype == DType::kFloat16 ? "fp16, " : "bf16, ";
    std::string const kernel = std::string("htree_fwd_kernel<") + dtype + dims + (score ? ", score, " : ", attend, ") +
                               std::to_string(variant.selected_queries) + ", " + std::to_string(variant.entry_queries) +
                               ">";
    std::string const tile = std::to_string(kQueryTile * queries) + " queries x " + std::to_string(p_.G) +
                             " heads, " + std::to_string(queries) + " a warp, " +
                             (entry         ? "WGMMA"
                              : queries > 1 ? "mma.sync, swap A/B"
                                            : "mma.sync");
    Row& row = at(score ? "score" : "attend", score ? 5 : 7, l, kKinds[static_cast<int>(kind)], kernel, tile,
                  rule_of(pass, p_.dtype, p_.G, queries_of_call(p_)).reason);
    if (row.launches == 0) {
      Positions const positions(p_, pass, kind, l);
      row.first_query = std::max(positions.begin, p_.q_start);
      row.end_query = std::min(positions.end, p_.q_start + p_.T_q);
      std::int64_t pairs = (row.end_query - row.first_query) * p_.top_k;
      if (entry) {
        pairs = 0;
        for (std::int64_t t = row.first_query; t < row.end_query; ++t) pairs += (t >> (kLog2Siblings * (l + 1))) + 1;
      }
      row.pairs = pairs * p_.B * p_.H_kv;
    }
    row.launches += 1;
    row.ctas += ctas;
  }

  ForwardParams const& p_;
  Workspace const& w_;
  host::LaunchRows rows_;
};

}  // namespace
}  // namespace htree_cuda::sm90::htree_fwd

namespace htree_cuda {

void explain_forward(ForwardParams const& p, int processors, LaunchSink sink, void* context) {
  using namespace sm90::htree_fwd;
  tree_args::check("explain_forward", p);
  if (p.B * p.T_q == 0) return;
  Workspace const workspace({&p, 1}, {}, nullptr, processors);
  Counter counter(p, workspace);
  schedule(p, workspace, counter);
  counter.each([&](auto const& row) { host::tell(row, row.step < 2 ? -1 : row.layer, sink, context); });
}

}  // namespace htree_cuda

// What a backward call would launch: the steps of schedule.h, counted instead of taken. Needs no GPU.
#include <algorithm>
#include <string>

#include "host/launch_rows.h"
#include "host/tree_args.h"
#include "params.h"
#include "schedule.h"

namespace htree_cuda::sm90::htree_bwd {
namespace {

using Row = host::LaunchRow;

// Pairs of a query (one KV head) and a KV block in one sweep, and the positions of the queries that make them.
struct Sweep {
  std::int64_t first = 0;
  std::int64_t end = 0;
  std::int64_t pairs = 0;

  void add(std::int64_t from, std::int64_t to, std::int64_t count) {
    if (from >= to) return;
    first = pairs == 0 ? from : std::min(first, from);
    end = std::max(end, to);
    pairs += count;
  }
};

// Counts what backward.cu's Launcher launches.
class Counter {
public:
  Counter(ForwardParams const& p, Workspace const& w, int sms) : p_(p), w_(w), sms_(sms) {
    std::int64_t const call_end = p.q_start + p.T_q;
    for (int l = w.min_entry; l <= w.max_entry; ++l) {
      std::int64_t const from = std::max(p.q_start, l == 0 ? 0 : p.top_k << (kLog2Siblings * l));
      std::int64_t const to = std::min(call_end, p.top_k << (kLog2Siblings * (l + 1)));
      std::int64_t blocks = 0;
      for (std::int64_t t = from; t < to; ++t) blocks += (t >> (kLog2Siblings * (l + 1))) + 1;
      entry_.add(from, to, blocks);
      if (l > 0) selected_.add(from, to, (to - from) * l * p.top_k);
    }
  }

  void begin(Stretch const&) {}
  void describe_sequences() {}
  void describe_chunk(Chunk const&) {}

  void make_rotations() {
    at("rotations", -1, "", "rotations_kernel", "", "tables of cos and sin").launches += 1;
  }

  void pool() {
    at("pool", -1, "", "tree_pool_kernel", "", "means of 16 children, two layers a launch").launches += w_.tree.layers / 2;
  }

  void pack_kv(int l, bool in_tiles, std::int64_t, int heads) {
    Row& row = at("pack", l, in_tiles ? "entry" : "selected", "pack_kv_kernel", "8 KV blocks, a warp each",
                  in_tiles ? "tiles of 4 blocks for WGMMA, keys rotated by node index"
                           : "single blocks for mma.sync, keys rotated by place");
    row.launches += 1;
    row.ctas += ceil_div(std::int64_t(heads) * (in_tiles ? w_.tiles[l] * kTileBlocks : w_.tree.kv_blocks[l]), 8);
  }

  void clear_sums(int) {}

  void pack_queries(Chunk const& chunk) {
    count_rows("pack", "pack_queries_kernel", "q, dout, lse and <dout, out> of a chunk as operands", chunk);
  }

  void build_index(Chunk const& chunk) {
    if (w_.max_entry > 0) count_rows("index", "reverse_index_kernel", "the queries that visit a KV block", chunk);
  }

  void list_visits(Args const& args) {
    Row& row = at("index", -1, "", "visit_lists_kernel", "16 KV blocks and a range of the rows",
                  "for each KV block the list of the queries that visit it");
    row.launches += 1;
    row.ctas += args.list_ctas;
  }

  void multiply(Rule const& rule, Args const& args) {
    bool const entry = rule.kernel == Kernel::kDqEntry || rule.kernel == Kernel::kDkDvEntry;
    bool const dq = rule.kernel != Kernel::kDkDvEntry && rule.kernel != Kernel::kDkDvSelected;
    std::string const kernel = std::string(rule.name) + "_kernel<" + (p_.dtype == DType::kFloat16 ? "fp16, " : "bf16, ") +
                               std::to_string(p_.K) + " x " + std::to_string(p_.V) + ">";
    Row& row = at(dq ? "dq" : "dkdv", -1, entry ? "entry" : "selected", kernel, rule.tile, rule.reason);
    Sweep const& sweep = entry ? entry_ : selected_;
    row.launches += 1;
    std::int64_t const pack = kMaxGroupHeads / unit_heads(static_cast<int>(p_.G));  // queries in 16 rows
    std::int64_t const queries = rule.kernel == Kernel::kDqSelected ? kCtaQueries
                                 : rule.ctas == Ctas::kGather       ? args.gather_rows
                                                                    : kCtaQueries * pack;
    std::int64_t const rows = rule.ctas == Ctas::kGather ? args.chunk.queries : args.chunk.rows;
    row.ctas += rule.ctas == Ctas::kPersistent ? sms_ : args.chunk.heads * ceil_div(rows, queries);
    row.first_query = sweep.first;
    row.end_query = sweep.end;
    row.pairs = sweep.pairs * p_.B * p_.H_kv;
  }

  void fork() {}
  void join() {}

  void add_segments(Args const&) {
    at("sums", -1, "entry", "add_segments_kernel", "", "adds the sums of the segments of the rows, in their order").launches += 1;
  }

  void distribute(std::int64_t, int) {
    at("distribute", -1, "", "distribute_kernel", "", "a node's sum goes to its children in equal parts; dk, then dv")
        .launches += 2;
  }

  host::LaunchRows const& rows() const { return rows_; }

private:
  Row& at(char const* phase, int layer, char const* kind, std::string const& kernel, char const* tile,
          char const* reason) {
    return rows_.at(phase, 0, layer, kind, kernel, tile, reason);
  }

  void count_rows(char const* phase, char const* kernel, char const* reason, Chunk const& chunk) {
    Row& row = at(phase, -1, "", kernel, "8 queries, a warp each", reason);
    row.launches += 1;
    row.ctas += ceil_div(std::int64_t(chunk.heads) * chunk.rows, 8);
    row.first_query = p_.q_start;
    row.end_query = p_.q_start + p_.T_q;
  }

  ForwardParams const& p_;
  Workspace const& w_;
  int const sms_;
  Sweep entry_;
  Sweep selected_;
  host::LaunchRows rows_;
};

}  // namespace
}  // namespace htree_cuda::sm90::htree_bwd

namespace htree_cuda {

void explain_backward(ForwardParams const& p, int processors, LaunchSink sink, void* context) {
  using namespace sm90::htree_bwd;
  explain_backward(p, {}, processors, sink, context);
}

void explain_backward(ForwardParams const& p, PartParams const& part, int processors, LaunchSink sink, void* context) {
  using namespace sm90::htree_bwd;
  host::tree_args::check("explain_backward", p);
  if (p.B * p.T_q == 0) return;
  Workspace const workspace({&p, 1}, part, nullptr);
  Counter counter(p, workspace, processors);
  schedule(p, workspace, counter);
  for (auto const& row : counter.rows()) host::tell(row, row.layer, sink, context);
}

}  // namespace htree_cuda

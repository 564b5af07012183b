// The kernels of a call, counted instead of launched: what explain_forward and explain_backward tell. A row for each
// kernel, layer and layer kind.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "params.h"

namespace htree_cuda::host {

struct LaunchRow {
  char const* phase;
  int step;   // the order within a layer; 0 where rows stay in the order of their first launch
  int layer;  // -1: all layers together
  char const* kind;
  std::string kernel;
  std::string tile;
  char const* reason;
  std::int64_t launches = 0;
  std::int64_t ctas = 0;
  std::int64_t first_query = 0;  // positions; both are 0 where the work is not by query
  std::int64_t end_query = 0;
  std::int64_t pairs = 0;
};

// Rows in the order of the first launch of each.
class LaunchRows {
public:
  LaunchRow& at(char const* phase, int step, int layer, char const* kind, std::string const& kernel,
                std::string const& tile, char const* reason) {
    for (LaunchRow& row : rows_) {
      if (row.step == step && row.layer == layer && row.kind == kind && row.kernel == kernel) return row;
    }
    rows_.push_back({phase, step, layer, kind, kernel, tile, reason});
    return rows_.back();
  }

  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }

private:
  std::vector<LaunchRow> rows_;
};

inline void tell(LaunchRow const& row, int layer, LaunchSink sink, void* context) {
  LaunchInfo info{};
  info.phase = row.phase;
  info.layer = layer;
  info.kind = row.kind;
  info.kernel = row.kernel.c_str();
  info.tile = row.tile.c_str();
  info.reason = row.reason;
  info.launches = row.launches;
  info.ctas = row.ctas;
  info.first_query = row.first_query;
  info.end_query = row.end_query;
  info.pairs = row.pairs;
  sink(context, info);
}

}  // namespace htree_cuda::host

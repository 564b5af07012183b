// The helpers of the forward that have no binding of their own, for tests of one of them alone.
#include <exception>
#include <string>

#include "../../csrc/device/forward_steps.h"

// selecting::select on one block of 12 queries of one head, in memory of the caller. Returns what went wrong.
extern "C" __attribute__((visibility("default"))) char const* emulator_select(
    long long T_q, long long q_start, int layer, int layers, int top_k, float const* importance, long long width,
    std::int32_t const* parents, std::int32_t* nodes, std::uint16_t* closed, std::int32_t* selection) {
  static thread_local std::string error;
  htree_cuda::selecting::Args args{};
  args.blocks = {0, 1, T_q, q_start};
  args.H_kv = 1;
  args.layer = layer;
  args.layers = layers;
  args.top_k = top_k;
  args.importance = importance;
  args.width = width;
  args.parents_in = parents;
  args.nodes = nodes;
  args.closed = closed;
  args.selection = selection;
  try {
    htree_cuda::selecting::select(args, htree_cuda::kBlockQueries, nullptr);
    error.clear();
  } catch (std::exception const& x) {
    error = x.what();
  }
  return error.c_str();
}

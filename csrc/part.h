// Calls of the htree forward and backward that compute a part of a larger one, as the calls of a rank of context
// parallelism do. Their chunks have the room that those of the larger one have, and not that of so small a call.
#pragma once

#include <cstdint>

#include "params.h"

namespace htree_cuda {

// Zeros: the call is no part of another.
struct PartParams {
  std::int64_t queries = 0;  // of a sequence in the larger call
  std::int64_t H_kv = 0;     // of the larger call, for the backward: rows of out, lse, selection and dq have so many KV heads,
                             // of which those of this call are neighbours; pointers are to the first of these. B is 1 then
  std::int64_t selection_H_kv = 0;  // of the rows of the selection, where these differ from the other rows'
  void* before_dkv = nullptr;       // an event, or null, behind which the backward reads and writes dk and dv: the end of its
                                    // first chunk of KV heads, whose sums it has until then in its workspace
};

// Queries of one sequence in runs: a run is queries with consecutive positions in tensors of its own, and all runs see the
// keys of the first one. What the others say of keys, values and options is not looked at, nor is their workspace. More
// than one: B is 1, each has two queries at least, and no lengths are given.
template <class Params>
struct Runs {
  Params const* first = nullptr;
  std::int64_t count = 0;

  Params const* begin() const { return first; }
  Params const* end() const { return first + count; }
};

// As the functions of params.h.
HTREE_CUDA_API std::int64_t forward_workspace(Runs<ForwardParams> const& runs, PartParams const& part);
HTREE_CUDA_API void forward(Runs<ForwardParams> const& runs, PartParams const& part, void* stream);
HTREE_CUDA_API std::int64_t backward_workspace(Runs<ForwardParams> const& runs, PartParams const& part);
HTREE_CUDA_API void backward(Runs<BackwardParams> const& runs, PartParams const& part, void* stream);
HTREE_CUDA_API void explain_backward(ForwardParams const& params, PartParams const& part, int processors, LaunchSink sink,
                                     void* context);

}  // namespace htree_cuda

// Launches of the kernels that groups of at most eight heads have for themselves: all but dq_selected. The files in instantiations/ have one
// dtype and one K each.
#pragma once

#include <type_traits>

#include "dkdv_entry.cuh"
#include "dkdv_selected.cuh"
#include "dq_entry.cuh"
#include "dq_gather.cuh"
#include "host/launch_overlapped.cuh"
#include "launch.h"

namespace htree_cuda::sm90::htree_bwd {

template <class Element, int K, int V, int kHeads, bool kSequences>
void launch_unit(Kernel kernel, Args const& args, int ctas, cudaStream_t stream) {
  auto const launch = [&](auto traits, void (*of)(Args), int count) {
    using Traits = decltype(traits);
    launch_overlapped(of, count, Traits::kThreads, Traits::kSharedBytes, stream, args);
  };
  auto const of_rows = [&](int rows) { return args.chunk.heads * ((args.chunk.rows + rows - 1) / rows); };
  using DkDvEntry = DkDvEntryTraits<Element, K, V, kHeads, kSequences>;
  using DqEntry = DqEntryTraits<Element, K, V, kHeads, kSequences>;
  using DkDvSelected = DkDvSelectedTraits<Element, K, V, kHeads, kSequences>;
  switch (kernel) {
    case Kernel::kDkDvEntry: return launch(DkDvEntry{}, dkdv_entry_kernel<DkDvEntry>, ctas);
    case Kernel::kDqEntry: return launch(DqEntry{}, dq_entry_kernel<DqEntry>, of_rows(DqEntry::kRows));
    case Kernel::kDkDvSelected: return launch(DkDvSelected{}, dkdv_selected_kernel<DkDvSelected>, ctas);
    case Kernel::kDqSelected: return;
    case Kernel::kDqGather:
      if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        using DqGather = DqGatherTraits<K, V, kHeads, kSequences>;
        int const count = kSequences ? args.chunk.heads * args.sequences.gather_ctas : of_rows(DqGather::kRows);
        launch(DqGather{}, dq_gather_kernel<DqGather>, count);
      }
  }
}

template <class Element, int K, int V, bool kSequences>
void launch_small_group(Kernel kernel, Args const& args, int ctas, cudaStream_t stream) {
  if (unit_heads(args.G) == 8) return launch_unit<Element, K, V, 8, kSequences>(kernel, args, ctas, stream);
  launch_unit<Element, K, V, 4, kSequences>(kernel, args, ctas, stream);
}

}  // namespace htree_cuda::sm90::htree_bwd

// Launches of the four matrix kernels. The files in instantiations/ have one dtype and one K each.
#pragma once

#include "dkdv_entry.cuh"
#include "dkdv_selected.cuh"
#include "dq_entry.cuh"
#include "dq_selected.cuh"
#include "host/launch_overlapped.cuh"
#include "launch.h"

namespace htree_cuda::sm90::htree_bwd {

template <class Traits>
void launch(void (*kernel)(Args), Args const& args, int ctas, cudaStream_t stream) {
  launch_overlapped(kernel, ctas, Traits::kThreads, Traits::kSharedBytes, stream, args);
}

template <class Element, int K, int V, bool kSequences>
void launch_kernel(Kernel kernel, Args const& args, int ctas, cudaStream_t stream) {
  using DqEntry = DqEntryTraits<Element, K, V, kMaxGroupHeads, kSequences>;
  using DkDvEntry = DkDvEntryTraits<Element, K, V, kMaxGroupHeads, kSequences>;
  using DqSelected = DqSelectedTraits<Element, K, V, kSequences>;
  using DkDvSelected = DkDvSelectedTraits<Element, K, V, kMaxGroupHeads, kSequences>;
  bool const small = unit_heads(args.G) < kMaxGroupHeads;
  if (small && kernel != Kernel::kDqSelected) {
    return launch_small_group<Element, K, V, kSequences>(kernel, args, ctas, stream);
  }
  switch (kernel) {
    case Kernel::kDqGather: return;
    case Kernel::kDkDvEntry: return launch<DkDvEntry>(dkdv_entry_kernel<DkDvEntry>, args, ctas, stream);
    case Kernel::kDqEntry: return launch<DqEntry>(dq_entry_kernel<DqEntry>, args, ctas, stream);
    case Kernel::kDqSelected: return launch<DqSelected>(dq_selected_kernel<DqSelected>, args, ctas, stream);
    case Kernel::kDkDvSelected:
      return launch<DkDvSelected>(dkdv_selected_kernel<DkDvSelected>, args, ctas, stream);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

// Launches of the matrix kernels. The files in instantiations/ have one dtype and one K each.
#pragma once

#include <type_traits>

#include "dkdv_entry.cuh"
#include "dkdv_selected.cuh"
#include "dq_entry.cuh"
#include "dq_gather.cuh"
#include "dq_selected.cuh"
#include "host/launch_overlapped.cuh"
#include "launch.h"

namespace htree_cuda::sm90::htree_bwd {

template <class Traits>
void launch(void (*kernel)(Args), Args const& args, int ctas, cudaStream_t stream) {
  launch_overlapped(kernel, ctas, Traits::kThreads, Traits::kSharedBytes, stream, args);
}

// Launches a kernel for groups whose queries take kHeads rows of a product.
template <class Element, int K, int V, int kHeads>
void launch_unit(Kernel kernel, Args const& args, int ctas, cudaStream_t stream) {
  using DkDvEntry = DkDvEntryTraits<Element, K, V, kHeads>;
  using DqEntry = DqEntryTraits<Element, K, V, kHeads>;
  using DqSelected = DqSelectedTraits<Element, K, V>;
  using DkDvSelected = DkDvSelectedTraits<Element, K, V, kHeads>;
  auto const of_rows = [&](int rows) { return args.chunk.heads * ((args.chunk.rows + rows - 1) / rows); };
  switch (kernel) {
    case Kernel::kDkDvEntry: return launch<DkDvEntry>(dkdv_entry_kernel<DkDvEntry>, args, ctas, stream);
    case Kernel::kDqEntry: return launch<DqEntry>(dq_entry_kernel<DqEntry>, args, of_rows(DqEntry::kRows), stream);
    case Kernel::kDqSelected: return launch<DqSelected>(dq_selected_kernel<DqSelected>, args, ctas, stream);
    case Kernel::kDkDvSelected:
      return launch<DkDvSelected>(dkdv_selected_kernel<DkDvSelected>, args, ctas, stream);
    case Kernel::kDqGather:
      if constexpr (kHeads < kMaxGroupHeads && std::is_same_v<Element, __nv_bfloat16>) {
        using DqGather = DqGatherTraits<K, V, kHeads>;
        bool const of_sequences = args.sequences.any();
        int const of_queries = (args.chunk.queries + args.gather_rows - 1) / args.gather_rows;
        int const count = args.chunk.heads * (of_sequences ? args.sequences.gather_ctas : of_queries);
        launch<DqGather>(dq_gather_kernel<DqGather>, args, count, stream);
      }
  }
}

template <class Element, int K, int V>
void launch_kernel(Kernel kernel, Args const& args, int ctas, cudaStream_t stream) {
  switch (unit_heads(args.G)) {
    case 4: return launch_unit<Element, K, V, 4>(kernel, args, ctas, stream);
    case 8: return launch_unit<Element, K, V, 8>(kernel, args, ctas, stream);
    default: launch_unit<Element, K, V, kMaxGroupHeads>(kernel, args, ctas, stream);
  }
}

}  // namespace htree_cuda::sm90::htree_bwd

// The launchers of kernel families that this build leaves out (HTREE_CUDA_FAMILIES): each says so when it is called.
#include <stdexcept>
#include <string>

#include "params.h"
#include "part.h"

namespace htree_cuda {

namespace {

[[noreturn, maybe_unused]] void absent(char const* op, char const* family) {
  throw std::runtime_error(std::string(op) + ": this build of htree_cuda has no kernels of the family " + family +
                           "; build it with HTREE_CUDA_FAMILIES naming " + family + ", or without HTREE_CUDA_FAMILIES");
}

}  // namespace

#if !HTREE_CUDA_FAMILY_HTREE
#if !HTREE_CUDA_FAMILY_DECODE
void tree_pool(TreePoolParams const&, void*) { absent("tree_pool", "htree"); }
void tree_append(TreeAppendParams const&, void*) { absent("tree_append", "decode"); }
#endif
std::int64_t forward_workspace(ForwardParams const&) { absent("forward", "htree"); }
void forward(ForwardParams const&, void*) { absent("forward", "htree"); }
void explain_forward(ForwardParams const&, int, LaunchSink, void*) { absent("explain_forward", "htree"); }
std::int64_t backward_workspace(ForwardParams const&) { absent("backward", "htree"); }
void backward(BackwardParams const&, void*) { absent("backward", "htree"); }
void explain_backward(ForwardParams const&, int, LaunchSink, void*) { absent("explain_backward", "htree"); }
std::int64_t forward_workspace(Runs<ForwardParams> const&, PartParams const&) { absent("forward", "htree"); }
void forward(Runs<ForwardParams> const&, PartParams const&, void*) { absent("forward", "htree"); }
std::int64_t backward_workspace(Runs<ForwardParams> const&, PartParams const&) { absent("backward", "htree"); }
void backward(Runs<BackwardParams> const&, PartParams const&, void*) { absent("backward", "htree"); }
void explain_backward(ForwardParams const&, PartParams const&, int, LaunchSink, void*) {
  absent("explain_backward", "htree");
}
#endif

#if !HTREE_CUDA_FAMILY_DECODE
void tree_decode(TreeDecodeParams const&, void*) { absent("tree_decode", "decode"); }
#endif

#if !HTREE_CUDA_FAMILY_DSA
void attn_dist(AttnDistParams const&, void*) { absent("attn_dist", "dsa"); }
std::int64_t sparse_attention_workspace(SparseAttentionParams const&) { absent("sparse_attention", "dsa"); }
void sparse_attention(SparseAttentionParams const&, void*) { absent("sparse_attention", "dsa"); }
void topk_indices(TopkIndicesParams const&, void*) { absent("topk_indices", "dsa"); }
void indexer_logits(IndexerLogitsParams const&, void*) { absent("indexer_logits", "dsa"); }
void indexer_logits_listed(IndexerListedParams const&, void*) { absent("indexer_logits", "dsa"); }
void indexer_logits_backward(IndexerListedParams const&, void*) { absent("indexer_logits_backward", "dsa"); }
std::int64_t indexer_topk_workspace(IndexerTopkParams const&) { absent("indexer_topk", "dsa"); }
void indexer_topk(IndexerTopkParams const&, void*) { absent("indexer_topk", "dsa"); }
std::int64_t sparse_attention_backward_workspace(SparseAttentionBackwardParams const&) {
  absent("sparse_attention_backward", "dsa");
}
void sparse_attention_backward(SparseAttentionBackwardParams const&, void*) { absent("sparse_attention_backward", "dsa"); }
#endif

}  // namespace htree_cuda

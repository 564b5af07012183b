// The data contracts between the Python bindings, the C++ benchmarks and the kernel launchers: one plain struct per
// op, shapes in the comments, no CUDA and no torch types, so that bindings.cpp compiles without a CUDA toolkit.
// Strides count elements. A stream is a cudaStream_t passed as void* (null: the default stream).
//
// Where each function is: forward and explain_forward in sm90/htree_fwd/{forward,explain}.cu, backward and explain_backward
// in sm90/htree_bwd/{backward,explain}.cu, tree_decode in sm90/htree_decode/decode.cu, tree_pool and tree_append in
// tree/{pool,append}/launch.cu, indexer_topk in sm90/indexer/indexer_topk.cu, every other op in launch.cu of its folder below
// sm90/. A build without a family has host/absent_families.cu in the place of its functions.
#pragma once

#include <cstdint>

#if defined(__GNUC__)
#define HTREE_CUDA_API __attribute__((visibility("default")))
#else
#define HTREE_CUDA_API
#endif

namespace htree_cuda {

enum class DType : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kFloat8E4M3 = 3 };

// ---- library ---------------------------------------------------------------------------------------------------

// Hash of params.h that the library was built with. The bindings compare it with their own on import, so that a
// stale library beside a newer module is an ImportError instead of a misread struct.
HTREE_CUDA_API const char* library_params_hash();

// CUDA versions, 13000 for 13.0: of the runtime inside the library, and the newest that the installed driver runs
// (0: no driver).
HTREE_CUDA_API int runtime_version();
HTREE_CUDA_API int driver_version();

// Whether the library holds the htree kernels for K != V (built with HTREE_CUDA_MIXED_DIMS=1).
HTREE_CUDA_API bool has_mixed_dims();

// Makes `device` current for the life of the object, then restores the context that was current before, whichever
// copy of the CUDA runtime had set it.
class HTREE_CUDA_API DeviceGuard {
public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

private:
  void* previous_context_;
};

// ---- tree_pool -------------------------------------------------------------------------------------------------

// One tensor to pool and its tree.
struct TreePoolTensor {
  void const* in;          // [B, T, H_kv, dim], last dimension contiguous
  std::int64_t stride_b;
  std::int64_t stride_t;
  std::int64_t stride_h;
  void* tree;              // [B, H_kv, M, dim] contiguous; M = N_1 + ... + N_{L-1}, layer 1 first
  std::int64_t dim;
};

struct TreePoolParams {
  TreePoolTensor k;
  TreePoolTensor v;
  std::int64_t B;
  std::int64_t T;
  std::int64_t H_kv;
  std::int64_t compression_rate;  // r, a power of two >= 2
  int layers;                     // L, the bottom included; nothing is written when L = 1
  DType dtype;
  // Sequences of different lengths, of the forward alone: tree/geometry.h's Sequence, `sequence_count` of them on the
  // device, or null. Then B is 1, T bounds a length, and layer l of the tree has room for (total_k >> 4 l) +
  // total_k / (top_k * 16^l) nodes, of a batch at most sequence_count of the latter, for sequences of top_k * 16^l tokens or
  // more.
  void const* sequences;
  std::int64_t sequence_count;
  std::int64_t total_k;
  int top_k;
  bool packed;                    // k and v are a pack, else each sequence has a row of the batch
};

// Pools layers 1 .. L-1 of K and V on `stream` of the current device. Children are added in ascending order in
// float32 starting from the first, divided by their number and rounded to nearest even; the next layer pools what
// was stored. Throws std::invalid_argument on a malformed request and std::runtime_error on a CUDA error.
HTREE_CUDA_API void tree_pool(TreePoolParams const& params, void* stream);

// ---- forward ---------------------------------------------------------------------------------------------------

// Sequences of different lengths, packed or in the rows of a batch. All pointers are to the device.
struct SequencesParams {
  std::int64_t count = -1;                     // N; -1: sequences of one length, and nothing below is looked at
  std::int32_t const* cu_seqlens_q = nullptr;  // [N + 1], with cu_seqlens_k: a pack; both null: rows of a batch, B = N
  std::int32_t const* cu_seqlens_k = nullptr;
  std::int32_t const* seqused_q = nullptr;     // [B], or null: all rows
  std::int32_t const* seqused_k = nullptr;
  void const* q_start = nullptr;               // [B] position of the first query, or null: seqused_k - seqused_q
  bool q_start_64 = false;                     // q_start is int64, else int32
  std::int64_t total_q = 0;                    // rows of q in the pack, or B * T_q
  std::int64_t total_k = 0;
  // Set by the launchers alone, which compute a pack of many sequences in parts (host/tree_args.h): `count` is then what a
  // part has at most, all_count what the call has.
  std::int64_t part = 0;
  std::int64_t all_count = 0;
};

struct ForwardParams {
  void const* q;               // [B, T_q, H_kv * G, K], last dimension contiguous
  std::int64_t q_stride_b;
  std::int64_t q_stride_t;
  std::int64_t q_stride_h;
  void const* k;               // [B, T, H_kv, K], likewise
  std::int64_t k_stride_b;
  std::int64_t k_stride_t;
  std::int64_t k_stride_h;
  void const* v;               // [B, T, H_kv, V], likewise
  std::int64_t v_stride_b;
  std::int64_t v_stride_t;
  std::int64_t v_stride_h;
  void* out;                   // [B, T_q, H_kv * G, V] contiguous
  float* lse;                  // [B, T_q, H_kv * G] contiguous
  std::int32_t* selection;     // [L - 1, B, T_q, H_kv, top_k] contiguous, 16-byte aligned, or null
  std::int32_t const* given;   // likewise contiguous: a selection to replay, of any content, or null
  void* workspace;             // forward_workspace() bytes, 256-byte aligned; contents do not matter
  std::int64_t workspace_bytes;
  std::int64_t B;
  std::int64_t T;
  std::int64_t T_q;
  std::int64_t q_start;
  std::int64_t H_kv;
  std::int64_t G;      // 1 .. 16
  std::int64_t K;      // 64 or 128
  std::int64_t V;      // as K; the other of the two where has_mixed_dims()
  std::int64_t top_k;  // a power of two in 16 .. 512; compression_rate is 16, max_top_nodes 16 * top_k
  double scale;
  double rope_base;            // pair m is rotated by p * rope_base ** (-2 m / K)
  double const* inv_freq;      // [K / 2], or null: pair m is rotated by p * inv_freq[m]
  float const* attn_sink;      // [H_kv * G] natural, or null: exp(attn_sink) joins the denominator of out; of the forward
  bool strict_causal;
  DType dtype;         // bf16 or fp16
  // Sequences of different lengths: T and T_q bound the lengths, q_start is 0, and in a pack B is 1 and there are no
  // strides of batches; out, lse and selection have the rows of q. Values of lengths may be anything.
  SequencesParams sequences;
};

// Bytes of workspace that `forward` needs on the current device; pointers are not looked at.
HTREE_CUDA_API std::int64_t forward_workspace(ForwardParams const& params);

// htree attention on `stream` of the current device, which must be of capability 9.0. Deterministic; no host
// synchronisation, no allocation. Throws std::invalid_argument on a malformed request and std::runtime_error on a CUDA
// error.
HTREE_CUDA_API void forward(ForwardParams const& params, void* stream);

// One kernel of a call, for one layer and layer kind, over all of its launches.
struct LaunchInfo {
  char const* phase;         // rotations, pool, pack, union, gather, score, select, replay, attend; index, dkdv, dq, distribute
  int layer;                 // 0: the bottom; -1: none
  char const* kind;          // entry, selected, half-selected, or empty; one launch may serve several kinds
  char const* kernel;
  char const* tile;          // what a CTA has
  char const* reason;        // why this kernel
  std::int64_t launches;
  std::int64_t ctas;         // of all launches; 0: not counted
  std::int64_t first_query;  // positions first_query .. end_query - 1; equal where the work is not by query
  std::int64_t end_query;
  std::int64_t pairs;        // of a query (one KV head) and a block of 16 candidates, in one sweep; 0: not counted
};

using LaunchSink = void (*)(void* context, LaunchInfo const& info);

// Calls `sink` for every kernel that `forward` would launch, in their order, on a GPU with so many SMs. Needs no GPU; pointers are
// not looked at, save whether `selection` and `given` are null. The strings live until `sink` returns.
HTREE_CUDA_API void explain_forward(ForwardParams const& params, int processors, LaunchSink sink, void* context);

// ---- backward --------------------------------------------------------------------------------------------------

struct BackwardParams {
  // As of the forward call, whose out, lse and selection are read here (selection may be null where L = 1); the
  // workspace has backward_workspace() bytes. strict_causal plays no part.
  ForwardParams forward;
  void const* dout;            // [B, T_q, H_kv * G, V], any strides
  std::int64_t dout_stride_b;
  std::int64_t dout_stride_t;
  std::int64_t dout_stride_h;
  std::int64_t dout_stride_v;
  float const* dlse;           // [B, T_q, H_kv * G], any strides
  std::int64_t dlse_stride_b;
  std::int64_t dlse_stride_t;
  std::int64_t dlse_stride_h;
  void* dq;                    // [B, T_q, H_kv * G, K] contiguous, of the dtype
  void* dk;                    // [B, T, H_kv, K] likewise
  void* dv;                    // [B, T, H_kv, V] likewise
  bool float32;                // dk and dv are float32, 16-byte aligned
  bool add;                    // then: they are added to instead of written
};

// Bytes of workspace that `backward` needs; pointers are not looked at.
HTREE_CUDA_API std::int64_t backward_workspace(ForwardParams const& params);

// Gradients of `forward` on `stream` of the current device, which must be of capability 9.0. Deterministic; no host
// synchronisation, no allocation. A selection that no forward returned gives unspecified numbers, and no access out of
// bounds. Throws std::invalid_argument on a malformed request and std::runtime_error on a CUDA error.
HTREE_CUDA_API void backward(BackwardParams const& params, void* stream);

// Calls `sink` for every kernel that `backward` would launch, as explain_forward does.
HTREE_CUDA_API void explain_backward(ForwardParams const& params, int processors, LaunchSink sink, void* context);

// ---- cached tree -------------------------------------------------------------------------------------------------

inline constexpr int kMaxCacheLayers = 9;  // of 2^31 - 1 tokens at 16 children a node: 8, and room

// A cached tree: tokens and complete nodes, contiguous or in pages.
struct TreeCacheParams {
  void* k;                           // [B, H_kv, rows, K] or, in pages, [num_pages, H_kv, rows, K], contiguous
  void* v;                           // likewise, V
  void* k_upper;                     // pages: [B, H_kv, upper_rows, K], the layers from paged_layers on; else null
  void* v_upper;
  std::int32_t* lengths;             // [B] tokens of each sequence
  std::int32_t* overflowed;          // [B] 0 or 1
  std::int32_t const* reserved;      // [B] tokens that a sequence has pages for, or null: max_tokens
  std::int32_t const* block_table;   // [B, max_pages] contiguous, or null: contiguous storage
  std::int64_t layer_begin[kMaxCacheLayers];  // first row of each layer, of `rows` or, from paged_layers on, of upper_rows
  std::int64_t rows;                 // of a sequence and head, or of a page and head
  std::int64_t upper_rows;
  std::int64_t B;
  std::int64_t H_kv;
  std::int64_t K;                    // 64 or 128
  std::int64_t V;                    // 64 or 128
  std::int64_t max_tokens;           // of a sequence, below 2^31
  std::int64_t num_layers;           // stored, tokens included
  std::int64_t page_size;            // tokens of a page, a multiple of 256
  std::int64_t paged_layers;         // layers whose nodes lie in pages; num_layers where all do
  std::int64_t num_pages;
  std::int64_t max_pages;
  DType dtype;                       // bf16 or fp16
};

struct TreeAppendParams {
  TreeCacheParams cache;
  void const* k;                     // [B, T_new, H_kv, K], last dimension contiguous
  std::int64_t k_stride_b;
  std::int64_t k_stride_t;
  std::int64_t k_stride_h;
  void const* v;                     // [B, T_new, H_kv, V], likewise
  std::int64_t v_stride_b;
  std::int64_t v_stride_t;
  std::int64_t v_stride_h;
  std::int32_t const* seqused;       // [B] how many of T_new exist, or null: all
  std::int64_t T_new;
};

// Appends tokens to each sequence, pools the nodes that become complete with the bits of tree_pool, and advances `lengths`.
// A sequence that would pass its capacity gets `overflowed` and nothing else; one that has it gets nothing. One launch for
// 16 tokens or fewer, two for more, on `stream` of the current device; no host synchronisation, no allocation. Lengths and
// page numbers that no cache writes lead to unspecified content and to no access out of bounds. Throws
// std::invalid_argument on a malformed request and std::runtime_error on a CUDA error.
HTREE_CUDA_API void tree_append(TreeAppendParams const& params, void* stream);

struct TreeDecodeParams {
  TreeCacheParams cache;
  void const* q;                     // [B, T_q, H_kv * G, K], last dimension contiguous
  std::int64_t q_stride_b;
  std::int64_t q_stride_t;
  std::int64_t q_stride_h;
  std::int32_t const* seqused_q;     // [B] how many of T_q exist, or null: all
  float const* rotations;            // [16 * top_k, K / 2, 2] cos and sin of every position, contiguous, 16-byte aligned
  void* out;                         // [B, T_q, H_kv * G, V] contiguous
  float* lse;                        // [B, T_q, H_kv * G] contiguous
  std::int32_t* selection;           // [selection_layers, B, T_q, H_kv, top_k] contiguous, or null
  std::int64_t selection_layers;
  std::int64_t T_q;
  std::int64_t G;                    // 1 .. 16
  std::int64_t top_k;                // a power of two in 16 .. 512; compression_rate is 16, max_top_nodes 16 * top_k
  double scale;
  float const* attn_sink;            // [H_kv * G] natural, or null
  // Which elements of q and k are pairs: m and m + rope_dim / 2 of the first rope_dim, and likewise behind them; a multiple
  // of 16. With `interleaved` 2 m and 2 m + 1.
  std::int64_t rope_dim;
  bool interleaved;
};

// htree attention of the last queries of every sequence over a cached tree, strictly causal: query j stands at position
// lengths - seqused_q + j. Queries that do not exist get 0 and minus infinity, those of an overflowed sequence NaN. One
// launch on `stream` of the current device, which must be of capability 9.0; deterministic, and a query's bits depend on
// neither T_q, B, pages nor neighbours. No host synchronisation, no allocation. Throws as tree_append does.
HTREE_CUDA_API void tree_decode(TreeDecodeParams const& params, void* stream);

// ---- attn_dist -------------------------------------------------------------------------------------------------

struct AttnDistParams {
  void const* q;               // [B, s_q, h_q, d_qk], last dimension contiguous; base and strides multiples of 16 bytes
  std::int64_t q_stride_b;
  std::int64_t q_stride_s;
  std::int64_t q_stride_h;
  void const* k;               // [B, s_kv, 1, d_qk], likewise
  std::int64_t k_stride_b;
  std::int64_t k_stride_s;
  std::int32_t const* indices;      // [B, s_q, 1, topk]; outside [0, s_kv): an invalid slot
  std::int64_t indices_stride_b;
  std::int64_t indices_stride_s;
  std::int64_t indices_stride_t;    // of slots
  float const* lse;                 // [B, s_q, h_q]
  std::int64_t lse_stride_b;
  std::int64_t lse_stride_s;
  std::int64_t lse_stride_h;
  std::int32_t const* topk_length;  // [B, s_q], or null: all of topk
  std::int64_t topk_length_stride_b;
  std::int64_t topk_length_stride_s;
  float* out;                       // [B, ceil(h_q / 64), s_q, topk] contiguous
  std::int64_t const* q_start;      // host memory: [B], each >= 0, or null: no causal rule
  std::int64_t k_stride;            // tokens that a key row stands for, >= 1; unused without q_start
  std::int64_t B;
  std::int64_t s_q;
  std::int64_t s_kv;
  std::int64_t h_q;
  std::int64_t d_qk;  // 576, 512, 192 or 128
  std::int64_t topk;
  double sm_scale;
  double lse_base;
  DType dtype;  // of q and k: bf16 or fp16
};

// Fills `out` on `stream` of the current device, which must be of capability 9.0. Deterministic; no host
// synchronisation, no allocation; q_start is read before the call returns. Throws std::invalid_argument on a malformed
// request and std::runtime_error on a CUDA error.
HTREE_CUDA_API void attn_dist(AttnDistParams const& params, void* stream);

// ---- sparse_attention ------------------------------------------------------------------------------------------

struct SparseAttentionParams {
  void const* q;               // [B, s_q, h_q, d_qk], last dimension contiguous; base and strides multiples of 16 bytes
  std::int64_t q_stride_b;
  std::int64_t q_stride_s;
  std::int64_t q_stride_h;
  void const* kv;              // [B, s_kv, 1, d_qk], likewise; its first d_v columns are the values
  std::int64_t kv_stride_b;
  std::int64_t kv_stride_s;
  std::int32_t const* indices;      // [B, s_q, 1, topk]; outside [0, s_kv): an invalid slot
  std::int64_t indices_stride_b;
  std::int64_t indices_stride_s;
  std::int64_t indices_stride_t;    // of slots
  std::int32_t const* topk_length;  // [B, s_q], or null: all of topk
  std::int64_t topk_length_stride_b;
  std::int64_t topk_length_stride_s;
  float const* attn_sink;           // [h_q], natural logarithms, or null: exp(sink) joins out's denominator
  std::int64_t attn_sink_stride;
  void* out;                        // [B, s_q, h_q, d_v] contiguous, 16-byte aligned
  float* lse;                       // [B, s_q, h_q] contiguous
  std::int64_t const* q_start;      // host memory: [B], each >= 0, or null: no causal rule
  std::int64_t k_stride;            // tokens that a key row stands for, >= 1; unused without q_start
  std::int64_t B;
  std::int64_t s_q;
  std::int64_t s_kv;
  std::int64_t h_q;
  std::int64_t d_qk;  // 576 or 512
  std::int64_t d_v;   // 512
  std::int64_t topk;
  double sm_scale;
  double lse_base;
  DType dtype;  // of q, kv and out: bf16 or fp16
  void* workspace;  // 16-byte aligned; the backward's is another
  std::int64_t workspace_bytes;
};

// Bytes of workspace that sparse_attention needs, 0 but for few queries; reads the sizes alone.
HTREE_CUDA_API std::int64_t sparse_attention_workspace(SparseAttentionParams const& params);

// Fills `out` and `lse` on `stream` of the current device, which must be of capability 9.0. A query without a valid
// slot: zeros and minus infinity. Deterministic; no host synchronisation, no allocation; q_start is read before the call
// returns. Throws std::invalid_argument on a malformed request and std::runtime_error on a CUDA error.
HTREE_CUDA_API void sparse_attention(SparseAttentionParams const& params, void* stream);

struct SparseAttentionBackwardParams {
  SparseAttentionParams forward;  // as the forward got it, with `out` and `lse` as it wrote them
  void const* dout;               // [B, s_q, h_q, d_v], last dimension contiguous; base and strides multiples of 16 bytes
  std::int64_t dout_stride_b;
  std::int64_t dout_stride_s;
  std::int64_t dout_stride_h;
  float const* dlse;              // [B, s_q, h_q]
  std::int64_t dlse_stride_b;
  std::int64_t dlse_stride_s;
  std::int64_t dlse_stride_h;
  void* dq;                       // [B, s_q, h_q, d_qk] contiguous, 16-byte aligned
  void* dkv;                      // [B, s_kv, 1, d_qk] likewise
  float* dsink;                   // [h_q] contiguous; unused without a sink
  bool deterministic;             // dkv: the same bits each time
  void* workspace;                // 16-byte aligned
  std::int64_t workspace_bytes;
};

// Bytes of workspace that sparse_attention_backward needs; pointers are not read, but for whether there is a sink.
HTREE_CUDA_API std::int64_t sparse_attention_backward_workspace(SparseAttentionBackwardParams const& params);

// The gradients of sparse_attention, on `stream` of the current device, which must be of capability 9.0. dq and dsink
// are deterministic, dkv with `deterministic`. No host synchronisation, no allocation; q_start is read before the call
// returns. Throws std::invalid_argument on a malformed request and std::runtime_error on a CUDA error.
HTREE_CUDA_API void sparse_attention_backward(SparseAttentionBackwardParams const& params, void* stream);

// ---- indexer and selector --------------------------------------------------------------------------------------

// Which key rows each query sees: k_start <= j < k_end, and j < (q_start + s + 1) / k_stride.
struct KeyWindow {
  std::int32_t const* k_start;  // [B, s_q] of any strides and values, or null
  std::int64_t k_start_stride_b;
  std::int64_t k_start_stride_s;
  std::int32_t const* k_end;    // [B, s_q] of any strides and values, or null
  std::int64_t k_end_stride_b;
  std::int64_t k_end_stride_s;
  std::int64_t const* q_start;  // host memory: [B], each >= 0, or null: no causal rule
  std::int64_t k_stride;        // tokens that a key row stands for, >= 1; unused without q_start
};

struct TopkIndicesParams {
  float const* logits;  // [B, s_q, n], last dimension contiguous
  std::int64_t stride_b;
  std::int64_t stride_s;
  KeyWindow window;
  std::int32_t* indices;  // [B, s_q, 1, topk] contiguous
  float* values;          // [B, s_q, topk] contiguous, or null
  std::int64_t B;
  std::int64_t s_q;
  std::int64_t n;
  std::int64_t topk;  // 1 .. 2^30
};

// Fills `indices` with the rows of the topk largest logits of each window, ascending, then -1, and `values` with their
// logits, then minus infinity: NaN above infinity, ties to the smaller row, minus infinity never. One launch a chunk of
// batches on `stream` of the current device, which must be of capability 9.0. Deterministic; no host synchronisation, no
// allocation; q_start is read before the call returns. Throws std::invalid_argument on a malformed request and
// std::runtime_error on a CUDA error.
HTREE_CUDA_API void topk_indices(TopkIndicesParams const& params, void* stream);

struct IndexerLogitsParams {
  void const* q;               // [B, s_q, h_i, d_i], last dimension contiguous; base and strides multiples of 16 bytes
  std::int64_t q_stride_b;
  std::int64_t q_stride_s;
  std::int64_t q_stride_h;
  void const* k;               // [B, s_kv, 1, d_i], likewise
  std::int64_t k_stride_b;
  std::int64_t k_stride_s;
  float const* weights;        // [B, s_q, h_i] of any strides
  std::int64_t weights_stride_b;
  std::int64_t weights_stride_s;
  std::int64_t weights_stride_h;
  float const* q_scale;        // [B, s_q, h_i] of any strides, or null: 1
  std::int64_t q_scale_stride_b;
  std::int64_t q_scale_stride_s;
  std::int64_t q_scale_stride_h;
  float const* k_scale;        // [B, s_kv, 1] of any strides, or null: 1
  std::int64_t k_scale_stride_b;
  std::int64_t k_scale_stride_s;
  KeyWindow window;
  float* out;                  // [B, s_q, s_kv], last dimension contiguous
  std::int64_t out_stride_b;
  std::int64_t out_stride_s;
  bool fill;                   // whether minus infinity is written outside the windows; else nothing is
  std::int64_t B;
  std::int64_t s_q;
  std::int64_t s_kv;
  std::int64_t h_i;  // 1 .. 64
  std::int64_t d_i;  // 64 or 128
  DType dtype;       // of q and k: bf16, fp16 or e4m3
};

// Fills `out` with the sum over heads of weights * q_scale * relu(<q, k>), times k_scale. On `stream` of the current device,
// which must be of capability 9.0. Deterministic; the bits of an element depend on its query and key alone; no host
// synchronisation, no allocation; q_start is read before the call returns. Throws as topk_indices does.
HTREE_CUDA_API void indexer_logits(IndexerLogitsParams const& params, void* stream);

struct IndexerListedParams {
  IndexerLogitsParams indexer;  // bf16 or fp16, without scales; `out` [B, s_q, topk] as strided there, `fill` is not read
  std::int32_t const* indices;  // [B, s_q, 1, topk] of any strides
  std::int64_t indices_stride_b;
  std::int64_t indices_stride_s;
  std::int64_t indices_stride_t;
  std::int32_t const* topk_length;  // [B, s_q] of any strides, or null: all of topk
  std::int64_t topk_length_stride_b;
  std::int64_t topk_length_stride_s;
  std::int64_t topk;
  // Only the backward reads or writes the members that follow.
  float const* dlogits;  // [B, s_q, topk] of any strides
  std::int64_t dlogits_stride_b;
  std::int64_t dlogits_stride_s;
  std::int64_t dlogits_stride_t;
  void* dq;              // [B, s_q, h_i, d_i] contiguous, dtype of q
  float* dk;             // [B, s_kv, 1, d_i] contiguous, zeroed: gradients are added, in any order
  float* dweights;       // [B, s_q, h_i] contiguous
};

// indexer_logits at the rows that a list names: minus infinity in an invalid slot. Deterministic, but for dk. Otherwise as
// indexer_logits.
HTREE_CUDA_API void indexer_logits_listed(IndexerListedParams const& params, void* stream);
HTREE_CUDA_API void indexer_logits_backward(IndexerListedParams const& params, void* stream);

struct IndexerTopkParams {
  IndexerLogitsParams logits;  // its `out` and `fill` are not read
  std::int32_t* indices;       // [B, s_q, 1, topk] contiguous
  float* values;               // [B, s_q, topk] contiguous, or null
  std::int64_t topk;           // 1 .. 2^30
  void* workspace;             // 16-byte aligned
  std::int64_t workspace_bytes;  // at least what indexer_topk_workspace says
};

// Bytes of workspace, at most 256 MiB. Throws std::invalid_argument where one row of logits takes more.
HTREE_CUDA_API std::int64_t indexer_topk_workspace(IndexerTopkParams const& params);

// topk_indices of indexer_logits in chunks of queries, with the bits of both. Otherwise as they are.
HTREE_CUDA_API void indexer_topk(IndexerTopkParams const& params, void* stream);

}  // namespace htree_cuda

// The only pybind11 file: pointers, sizes and strides from Python become params structs. No torch and no CUDA headers
// here; tensors are taken apart in htree_cuda/kernels.py and checked in htree_cuda/checks/.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings_common.h"
#include "host/recording_api.h"
#include "params.h"
#include "part.h"

using namespace htree_cuda;

namespace {

// (pointer, stride_b, stride_t, stride_h, tree pointer, dim)
using PoolTensor = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t, std::uintptr_t, std::int64_t>;

TreePoolTensor pool_tensor(PoolTensor const& x) {
  TreePoolTensor tensor{};
  tensor.in = as_pointer(std::get<0>(x));
  tensor.stride_b = std::get<1>(x);
  tensor.stride_t = std::get<2>(x);
  tensor.stride_h = std::get<3>(x);
  tensor.tree = as_pointer(std::get<4>(x));
  tensor.dim = std::get<5>(x);
  return tensor;
}

void bind_tree_pool(py::module_& module) {
  module.def(
      "tree_pool",
      [](PoolTensor const& k, PoolTensor const& v, std::int64_t B, std::int64_t T, std::int64_t H_kv,
         std::int64_t compression_rate, int layers, DType dtype, int device, std::uintptr_t stream) {
        TreePoolParams params{};
        params.k = pool_tensor(k);
        params.v = pool_tensor(v);
        params.B = B;
        params.T = T;
        params.H_kv = H_kv;
        params.compression_rate = compression_rate;
        params.layers = layers;
        params.dtype = dtype;
        on_device(device, [&] { tree_pool(params, as_pointer(stream)); });
      },
      py::kw_only(), py::arg("k"), py::arg("v"), py::arg("B"), py::arg("T"), py::arg("H_kv"),
      py::arg("compression_rate"), py::arg("layers"), py::arg("dtype"), py::arg("device"), py::arg("stream"),
      "k, v: (pointer, stride_b, stride_t, stride_h, tree pointer, dim), strides in elements; see csrc/params.h");
}

ForwardParams forward_params(Strided const& q, Strided const& k, Strided const& v, std::int64_t B, std::int64_t T,
                             std::int64_t T_q, std::int64_t q_start, std::int64_t H_kv, std::int64_t G, std::int64_t K,
                             std::int64_t V, std::int64_t top_k, double scale, double rope_base, bool strict_causal,
                             DType dtype, std::uintptr_t inv_freq, std::uintptr_t attn_sink) {
  ForwardParams params{};
  std::tie(std::ignore, params.q_stride_b, params.q_stride_t, params.q_stride_h) = q;
  std::tie(std::ignore, params.k_stride_b, params.k_stride_t, params.k_stride_h) = k;
  std::tie(std::ignore, params.v_stride_b, params.v_stride_t, params.v_stride_h) = v;
  params.q = as_pointer(std::get<0>(q));
  params.k = as_pointer(std::get<0>(k));
  params.v = as_pointer(std::get<0>(v));
  params.B = B;
  params.T = T;
  params.T_q = T_q;
  params.q_start = q_start;
  params.H_kv = H_kv;
  params.G = G;
  params.K = K;
  params.V = V;
  params.top_k = top_k;
  params.scale = scale;
  params.rope_base = rope_base;
  params.inv_freq = static_cast<double const*>(as_pointer(inv_freq));
  params.attn_sink = static_cast<float const*>(as_pointer(attn_sink));
  params.strict_causal = strict_causal;
  params.dtype = dtype;
  return params;
}

// What `explain` gives to its sink, as dicts: LaunchInfo's fields, None where nothing was counted.
template <class Explain>
py::list explained(Explain const& explain) {
  py::list rows;
  LaunchSink const sink = [](void* context, LaunchInfo const& info) {
    auto const counted = [](std::int64_t n, bool is) -> py::object { return is ? py::object(py::int_(n)) : py::none(); };
    bool const by_query = info.first_query < info.end_query;
    py::dict row;
    row["phase"] = info.phase;
    row["layer"] = counted(info.layer, info.layer >= 0);
    row["kind"] = info.kind;
    row["kernel"] = info.kernel;
    row["tile"] = info.tile;
    row["reason"] = info.reason;
    row["launches"] = info.launches;
    row["ctas"] = counted(info.ctas, info.ctas > 0);
    row["first_query"] = counted(info.first_query, by_query);
    row["end_query"] = counted(info.end_query, by_query);
    row["pairs"] = counted(info.pairs, info.pairs > 0);
    static_cast<py::list*>(context)->append(row);
  };
  explain(sink, &rows);
  return rows;
}

void bind_recording(py::module_& module) {
  module.def(
      "recorded",
      [](py::function const& call, int processors) {
        return explained([&](LaunchSink sink, void* context) {
          begin_recording(processors);
          try {
            call();
          } catch (...) {
            end_recording(nullptr, nullptr);
            throw;
          }
          end_recording(sink, context);
        });
      },
      py::arg("call"), py::kw_only(), py::arg("processors"),
      "The kernels over index lists that `call` would launch through this module, in their order, a dict each. Nothing is "
      "launched; device is -1 in the calls. Needs no GPU.");
}

// (queries, H_kv, selection_H_kv) of the larger call that a call is a part of, zeros for none; see csrc/part.h
using Part = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

PartParams part_params(Part const& part) { return {std::get<0>(part), std::get<1>(part), std::get<2>(part)}; }

template <class Params>
Runs<Params> runs_of(std::vector<Params> const& runs) {
  return {runs.data(), static_cast<std::int64_t>(runs.size())};
}

void set_workspace(ForwardParams& params, std::uintptr_t workspace, std::int64_t bytes) {
  params.workspace = as_pointer(workspace);
  params.workspace_bytes = bytes;
}

void bind_forward(py::module_& module) {
  py::class_<ForwardParams>(module, "ForwardParams", py::module_local(), "q, k, v: (pointer, stride_b, stride_t, stride_h) in elements")
      .def(py::init(&forward_params), py::kw_only(), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("B"),
           py::arg("T"), py::arg("T_q"), py::arg("q_start"), py::arg("H_kv"), py::arg("G"), py::arg("K"), py::arg("V"),
           py::arg("top_k"), py::arg("scale"), py::arg("rope_base"), py::arg("strict_causal"), py::arg("dtype"),
           py::arg("inv_freq") = 0, py::arg("attn_sink") = 0)
      .def(
          "with_results",
          [](ForwardParams params, std::uintptr_t out, std::uintptr_t lse, std::uintptr_t selection, std::uintptr_t given) {
            params.out = as_pointer(out);
            params.lse = static_cast<float*>(as_pointer(lse));
            params.selection = static_cast<std::int32_t*>(as_pointer(selection));
            params.given = static_cast<std::int32_t const*>(as_pointer(given));
            return params;
          },
          py::kw_only(), py::arg("out"), py::arg("lse"), py::arg("selection") = 0, py::arg("given") = 0,
          "The same with tensors of results; selection, given: 0 for none")
      .def(
          "with_sequences",
          [](ForwardParams params, std::int64_t count, std::uintptr_t cu_seqlens_q, std::uintptr_t cu_seqlens_k,
             std::uintptr_t seqused_q, std::uintptr_t seqused_k, std::uintptr_t q_start, bool q_start_64,
             std::int64_t total_q, std::int64_t total_k) {
            auto const ints = [](std::uintptr_t address) { return static_cast<std::int32_t const*>(as_pointer(address)); };
            params.sequences = {count,           ints(cu_seqlens_q), ints(cu_seqlens_k), ints(seqused_q), ints(seqused_k),
                                as_pointer(q_start), q_start_64,     total_q,            total_k};
            return params;
          },
          py::kw_only(), py::arg("count"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"), py::arg("seqused_q"),
          py::arg("seqused_k"), py::arg("q_start"), py::arg("q_start_64"), py::arg("total_q"), py::arg("total_k"),
          "The same with sequences of different lengths; pointers to the device, 0 for none; see csrc/params.h");
  module.def(
      "forward_workspace",
      [](std::vector<ForwardParams> const& runs, int device, Part const& part) {
        return bytes_on_device(device, [&] { return forward_workspace(runs_of(runs), part_params(part)); });
      },
      py::arg("runs"), py::kw_only(), py::arg("device"), py::arg("part") = Part());
  module.def(
      "forward",
      [](std::vector<ForwardParams> runs, std::uintptr_t workspace, std::int64_t workspace_bytes, int device,
         std::uintptr_t stream, Part const& part) {
        for (ForwardParams& run : runs) set_workspace(run, workspace, workspace_bytes);
        on_device(device, [&] { forward(runs_of(runs), part_params(part), as_pointer(stream)); });
      },
      py::arg("runs"), py::kw_only(), py::arg("workspace"), py::arg("workspace_bytes"), py::arg("device"), py::arg("stream"),
      py::arg("part") = Part(), "runs: of queries, each with its results; see csrc/part.h");
  module.def(
      "explain_forward",
      [](ForwardParams params, bool selection, int processors) {
        std::int32_t some = 0;
        params.selection = selection ? &some : nullptr;
        return explained([&](LaunchSink sink, void* context) { explain_forward(params, processors, sink, context); });
      },
      py::arg("params"), py::kw_only(), py::arg("selection"), py::arg("processors"),
      "The kernels of a forward call in their order, a dict each; pointers of params may be 0. Needs no GPU.");
}

void bind_backward(py::module_& module) {
  py::class_<BackwardParams>(module, "BackwardParams", py::module_local(),
                             "dout: (pointer, stride_b, stride_t, stride_h, stride_v), dlse: (pointer, stride_b, stride_t, "
                             "stride_h), strides in elements; forward: with its results; see csrc/params.h")
      .def(py::init([](ForwardParams const& forward,
                       std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t> const& dout,
                       Strided const& dlse, std::uintptr_t dq, std::uintptr_t dk, std::uintptr_t dv, bool float32, bool add) {
             BackwardParams params{};
             params.forward = forward;
             std::tie(std::ignore, params.dout_stride_b, params.dout_stride_t, params.dout_stride_h, params.dout_stride_v) =
                 dout;
             std::tie(std::ignore, params.dlse_stride_b, params.dlse_stride_t, params.dlse_stride_h) = dlse;
             params.dout = as_pointer(std::get<0>(dout));
             params.dlse = static_cast<float const*>(as_pointer(std::get<0>(dlse)));
             params.dq = as_pointer(dq);
             params.dk = as_pointer(dk);
             params.dv = as_pointer(dv);
             params.float32 = float32;
             params.add = add;
             return params;
           }),
           py::arg("forward"), py::kw_only(), py::arg("dout"), py::arg("dlse"), py::arg("dq"), py::arg("dk"), py::arg("dv"),
           py::arg("float32"), py::arg("add"));
  module.def(
      "backward_workspace",
      [](std::vector<ForwardParams> const& runs, int device, Part const& part) {
        return bytes_on_device(device, [&] { return backward_workspace(runs_of(runs), part_params(part)); });
      },
      py::arg("runs"), py::kw_only(), py::arg("device"), py::arg("part") = Part());
  module.def(
      "backward",
      [](std::vector<BackwardParams> runs, std::uintptr_t workspace, std::int64_t workspace_bytes, int device,
         std::uintptr_t stream, Part const& part, std::uintptr_t before_dkv) {
        for (BackwardParams& run : runs) set_workspace(run.forward, workspace, workspace_bytes);
        PartParams own = part_params(part);
        own.before_dkv = as_pointer(before_dkv);
        on_device(device, [&] { backward(runs_of(runs), own, as_pointer(stream)); });
      },
      py::arg("runs"), py::kw_only(), py::arg("workspace"), py::arg("workspace_bytes"), py::arg("device"), py::arg("stream"),
      py::arg("part") = Part(), py::arg("before_dkv") = 0,
      "runs: of queries, whose gradients of keys and values are summed; before_dkv: a cudaEvent_t; see csrc/part.h");
  module.def(
      "explain_backward",
      [](ForwardParams const& params, int processors, Part const& part) {
        return explained([&](LaunchSink sink, void* context) {
          explain_backward(params, part_params(part), processors, sink, context);
        });
      },
      py::arg("params"), py::kw_only(), py::arg("processors"), py::arg("part") = Part(), "The kernels of a backward call, likewise.");
}

// Pointers of a cached tree: k, v, k_upper, v_upper, lengths, overflowed, reserved, block_table; 0 for none.
using CachePointers = std::array<std::uintptr_t, 8>;

TreeCacheParams cache_params(CachePointers const& pointers, std::vector<std::int64_t> const& layer_begin, std::int64_t rows,
                             std::int64_t upper_rows, std::int64_t B, std::int64_t H_kv, std::int64_t K, std::int64_t V,
                             std::int64_t max_tokens, std::int64_t page_size, std::int64_t paged_layers,
                             std::int64_t num_pages, std::int64_t max_pages, DType dtype) {
  TreeCacheParams params{};
  params.k = as_pointer(pointers[0]);
  params.v = as_pointer(pointers[1]);
  params.k_upper = as_pointer(pointers[2]);
  params.v_upper = as_pointer(pointers[3]);
  params.lengths = static_cast<std::int32_t*>(as_pointer(pointers[4]));
  params.overflowed = static_cast<std::int32_t*>(as_pointer(pointers[5]));
  params.reserved = static_cast<std::int32_t const*>(as_pointer(pointers[6]));
  params.block_table = static_cast<std::int32_t const*>(as_pointer(pointers[7]));
  if (layer_begin.size() > static_cast<std::size_t>(kMaxCacheLayers)) throw std::invalid_argument("a cache has too many layers");
  for (std::size_t l = 0; l < layer_begin.size(); ++l) params.layer_begin[l] = layer_begin[l];
  params.rows = rows;
  params.upper_rows = upper_rows;
  params.B = B;
  params.H_kv = H_kv;
  params.K = K;
  params.V = V;
  params.max_tokens = max_tokens;
  params.num_layers = static_cast<std::int64_t>(layer_begin.size());
  params.page_size = page_size;
  params.paged_layers = paged_layers;
  params.num_pages = num_pages;
  params.max_pages = max_pages;
  params.dtype = dtype;
  return params;
}

void bind_tree_cache(py::module_& module) {
  py::class_<TreeCacheParams>(module, "TreeCacheParams", py::module_local(),
                              "pointers: k, v, k_upper, v_upper, lengths, overflowed, reserved, block_table; 0 for none")
      .def(py::init(&cache_params), py::kw_only(), py::arg("pointers"), py::arg("layer_begin"), py::arg("rows"),
           py::arg("upper_rows"), py::arg("B"), py::arg("H_kv"), py::arg("K"), py::arg("V"), py::arg("max_tokens"),
           py::arg("page_size"), py::arg("paged_layers"), py::arg("num_pages"), py::arg("max_pages"), py::arg("dtype"));
  module.def(
      "tree_append",
      [](TreeCacheParams const& cache, Strided const& k, Strided const& v, std::uintptr_t seqused, std::int64_t T_new,
         int device, std::uintptr_t stream) {
        TreeAppendParams params{};
        params.cache = cache;
        std::tie(std::ignore, params.k_stride_b, params.k_stride_t, params.k_stride_h) = k;
        std::tie(std::ignore, params.v_stride_b, params.v_stride_t, params.v_stride_h) = v;
        params.k = as_pointer(std::get<0>(k));
        params.v = as_pointer(std::get<0>(v));
        params.seqused = static_cast<std::int32_t const*>(as_pointer(seqused));
        params.T_new = T_new;
        on_device(device, [&] { tree_append(params, as_pointer(stream)); });
      },
      py::arg("cache"), py::kw_only(), py::arg("k"), py::arg("v"), py::arg("seqused"), py::arg("T_new"),
      py::arg("device"), py::arg("stream"),
      "k, v: (pointer, stride_b, stride_t, stride_h) in elements; seqused: 0 for none; see csrc/params.h");
  module.def(
      "tree_decode",
      [](TreeCacheParams const& cache, Strided const& q, std::uintptr_t seqused_q, std::uintptr_t rotations,
         std::uintptr_t out, std::uintptr_t lse, std::uintptr_t selection, std::int64_t selection_layers, std::int64_t T_q,
         std::int64_t G, std::int64_t top_k, double scale, std::uintptr_t attn_sink, std::int64_t rope_dim, bool interleaved,
         int device, std::uintptr_t stream) {
        TreeDecodeParams params{};
        params.cache = cache;
        std::tie(std::ignore, params.q_stride_b, params.q_stride_t, params.q_stride_h) = q;
        params.q = as_pointer(std::get<0>(q));
        params.seqused_q = static_cast<std::int32_t const*>(as_pointer(seqused_q));
        params.rotations = static_cast<float const*>(as_pointer(rotations));
        params.out = as_pointer(out);
        params.lse = static_cast<float*>(as_pointer(lse));
        params.selection = static_cast<std::int32_t*>(as_pointer(selection));
        params.selection_layers = selection_layers;
        params.T_q = T_q;
        params.G = G;
        params.top_k = top_k;
        params.scale = scale;
        params.attn_sink = static_cast<float const*>(as_pointer(attn_sink));
        params.rope_dim = rope_dim;
        params.interleaved = interleaved;
        on_device(device, [&] { tree_decode(params, as_pointer(stream)); });
      },
      py::arg("cache"), py::kw_only(), py::arg("q"), py::arg("seqused_q"), py::arg("rotations"), py::arg("out"),
      py::arg("lse"), py::arg("selection"), py::arg("selection_layers"), py::arg("T_q"), py::arg("G"), py::arg("top_k"),
      py::arg("scale"), py::arg("attn_sink"), py::arg("rope_dim"), py::arg("interleaved"), py::arg("device"),
      py::arg("stream"),
      "q: (pointer, stride_b, stride_t, stride_h) in elements; seqused_q, selection, attn_sink: 0 for none; see csrc/params.h");
}

struct ListSizes {
  std::int64_t k_stride, B, s_q, s_kv, h_q, d_qk, topk;
};

// What the ops over index lists are told alike.
template <class Params>
void set_lists(Params& params, Strided const& q, Strided const& indices, Strided2 const& topk_length,
               Starts const& q_start, ListSizes const& sizes) {
  if (q_start && static_cast<std::int64_t>(q_start->size()) != sizes.B) {
    throw std::invalid_argument("q_start must hold B numbers");
  }
  params.q = as_pointer(std::get<0>(q));
  std::tie(std::ignore, params.q_stride_b, params.q_stride_s, params.q_stride_h) = q;
  params.indices = static_cast<std::int32_t const*>(as_pointer(std::get<0>(indices)));
  std::tie(std::ignore, params.indices_stride_b, params.indices_stride_s, params.indices_stride_t) = indices;
  params.topk_length = static_cast<std::int32_t const*>(as_pointer(std::get<0>(topk_length)));
  std::tie(std::ignore, params.topk_length_stride_b, params.topk_length_stride_s) = topk_length;
  params.q_start = q_start ? q_start->data() : nullptr;
  params.k_stride = sizes.k_stride;
  params.B = sizes.B;
  params.s_q = sizes.s_q;
  params.s_kv = sizes.s_kv;
  params.h_q = sizes.h_q;
  params.d_qk = sizes.d_qk;
  params.topk = sizes.topk;
}

void bind_attn_dist(py::module_& module) {
  module.def(
      "attn_dist",
      [](Strided const& q, Strided2 const& k, Strided const& indices, Strided const& lse, Strided2 const& topk_length,
         std::uintptr_t out, Starts const& q_start,
         std::int64_t k_stride, std::int64_t B, std::int64_t s_q, std::int64_t s_kv, std::int64_t h_q,
         std::int64_t d_qk, std::int64_t topk, double sm_scale, double lse_base, DType dtype, int device,
         std::uintptr_t stream) {
        AttnDistParams params{};
        set_lists(params, q, indices, topk_length, q_start, {k_stride, B, s_q, s_kv, h_q, d_qk, topk});
        params.k = as_pointer(std::get<0>(k));
        std::tie(std::ignore, params.k_stride_b, params.k_stride_s) = k;
        params.lse = static_cast<float const*>(as_pointer(std::get<0>(lse)));
        std::tie(std::ignore, params.lse_stride_b, params.lse_stride_s, params.lse_stride_h) = lse;
        params.out = static_cast<float*>(as_pointer(out));
        params.sm_scale = sm_scale;
        params.lse_base = lse_base;
        params.dtype = dtype;
        on_device(device, [&] { attn_dist(params, as_pointer(stream)); });
      },
      py::kw_only(), py::arg("q"), py::arg("k"), py::arg("indices"), py::arg("lse"), py::arg("topk_length"),
      py::arg("out"), py::arg("q_start"), py::arg("k_stride"), py::arg("B"), py::arg("s_q"), py::arg("s_kv"),
      py::arg("h_q"), py::arg("d_qk"), py::arg("topk"), py::arg("sm_scale"), py::arg("lse_base"), py::arg("dtype"),
      py::arg("device"), py::arg("stream"),
      "tensors: (pointer, stride of each dimension), strides in elements; a pointer 0 for none; see csrc/params.h");
}

// What the forward and the backward of sparse_attention are told alike.
SparseAttentionParams sparse_attention_params(Strided const& q, Strided2 const& kv, Strided const& indices,
                                              Strided2 const& topk_length, Strided1 const& attn_sink, std::uintptr_t out,
                                              std::uintptr_t lse, Starts const& q_start, ListSizes const& sizes,
                                              std::int64_t d_v, double sm_scale, double lse_base, DType dtype) {
  SparseAttentionParams params{};
  set_lists(params, q, indices, topk_length, q_start, sizes);
  params.kv = as_pointer(std::get<0>(kv));
  std::tie(std::ignore, params.kv_stride_b, params.kv_stride_s) = kv;
  params.attn_sink = static_cast<float const*>(as_pointer(std::get<0>(attn_sink)));
  params.attn_sink_stride = std::get<1>(attn_sink);
  params.out = as_pointer(out);
  params.lse = static_cast<float*>(as_pointer(lse));
  params.d_v = d_v;
  params.sm_scale = sm_scale;
  params.lse_base = lse_base;
  params.dtype = dtype;
  return params;
}

void bind_sparse_attention_backward(py::module_& module) {
  module.def(
      "sparse_attention_backward",
      [](Strided const& dout, Strided const& dlse, std::uintptr_t dq, std::uintptr_t dkv, std::uintptr_t dsink,
         bool deterministic, std::uintptr_t workspace, std::int64_t workspace_bytes, Strided const& q, Strided2 const& kv,
         Strided const& indices, Strided2 const& topk_length, Strided1 const& attn_sink, std::uintptr_t out,
         std::uintptr_t lse, Starts const& q_start, std::int64_t k_stride, std::int64_t B, std::int64_t s_q,
         std::int64_t s_kv, std::int64_t h_q, std::int64_t d_qk, std::int64_t d_v, std::int64_t topk, double sm_scale,
         double lse_base, DType dtype, int device, std::uintptr_t stream) {
        SparseAttentionBackwardParams params{};
        params.forward = sparse_attention_params(q, kv, indices, topk_length, attn_sink, out, lse, q_start,
                                                 {k_stride, B, s_q, s_kv, h_q, d_qk, topk}, d_v, sm_scale, lse_base, dtype);
        params.dout = as_pointer(std::get<0>(dout));
        std::tie(std::ignore, params.dout_stride_b, params.dout_stride_s, params.dout_stride_h) = dout;
        params.dlse = static_cast<float const*>(as_pointer(std::get<0>(dlse)));
        std::tie(std::ignore, params.dlse_stride_b, params.dlse_stride_s, params.dlse_stride_h) = dlse;
        params.dq = as_pointer(dq);
        params.dkv = as_pointer(dkv);
        params.dsink = static_cast<float*>(as_pointer(dsink));
        params.deterministic = deterministic;
        params.workspace = as_pointer(workspace);
        params.workspace_bytes = workspace_bytes;
        on_device(device, [&] { sparse_attention_backward(params, as_pointer(stream)); });
      },
      py::kw_only(), py::arg("dout"), py::arg("dlse"), py::arg("dq"), py::arg("dkv"), py::arg("dsink"),
      py::arg("deterministic"), py::arg("workspace"), py::arg("workspace_bytes"), py::arg("q"), py::arg("kv"),
      py::arg("indices"), py::arg("topk_length"), py::arg("attn_sink"), py::arg("out"), py::arg("lse"),
      py::arg("q_start"), py::arg("k_stride"), py::arg("B"), py::arg("s_q"), py::arg("s_kv"), py::arg("h_q"),
      py::arg("d_qk"), py::arg("d_v"), py::arg("topk"), py::arg("sm_scale"), py::arg("lse_base"), py::arg("dtype"),
      py::arg("device"), py::arg("stream"),
      "tensors: (pointer, stride of each dimension), strides in elements; a pointer 0 for none; see csrc/params.h");
  module.def(
      "sparse_attention_backward_workspace",
      [](std::int64_t B, std::int64_t s_q, std::int64_t s_kv, std::int64_t h_q, std::int64_t d_qk, bool sink,
         bool deterministic) {
        SparseAttentionBackwardParams params{};
        float const present = 0.f;
        params.forward.B = B;
        params.forward.s_q = s_q;
        params.forward.s_kv = s_kv;
        params.forward.h_q = h_q;
        params.forward.d_qk = d_qk;
        params.forward.attn_sink = sink ? &present : nullptr;
        params.deterministic = deterministic;
        return sparse_attention_backward_workspace(params);
      },
      py::kw_only(), py::arg("B"), py::arg("s_q"), py::arg("s_kv"), py::arg("h_q"), py::arg("d_qk"), py::arg("sink"),
      py::arg("deterministic"), "Bytes that sparse_attention_backward needs.");
}

void bind_sparse_attention(py::module_& module) {
  module.def(
      "sparse_attention",
      [](Strided const& q, Strided2 const& kv, Strided const& indices, Strided2 const& topk_length,
         Strided1 const& attn_sink, std::uintptr_t out, std::uintptr_t lse, Starts const& q_start, std::int64_t k_stride,
         std::int64_t B, std::int64_t s_q, std::int64_t s_kv, std::int64_t h_q, std::int64_t d_qk, std::int64_t d_v,
         std::int64_t topk, double sm_scale, double lse_base, DType dtype, std::uintptr_t workspace,
         std::int64_t workspace_bytes, int device, std::uintptr_t stream) {
        SparseAttentionParams params =
            sparse_attention_params(q, kv, indices, topk_length, attn_sink, out, lse, q_start,
                                    {k_stride, B, s_q, s_kv, h_q, d_qk, topk}, d_v, sm_scale, lse_base, dtype);
        params.workspace = as_pointer(workspace);
        params.workspace_bytes = workspace_bytes;
        on_device(device, [&] { sparse_attention(params, as_pointer(stream)); });
      },
      py::kw_only(), py::arg("q"), py::arg("kv"), py::arg("indices"), py::arg("topk_length"), py::arg("attn_sink"),
      py::arg("out"), py::arg("lse"), py::arg("q_start"), py::arg("k_stride"), py::arg("B"), py::arg("s_q"),
      py::arg("s_kv"), py::arg("h_q"), py::arg("d_qk"), py::arg("d_v"), py::arg("topk"), py::arg("sm_scale"),
      py::arg("lse_base"), py::arg("dtype"), py::arg("workspace"), py::arg("workspace_bytes"), py::arg("device"),
      py::arg("stream"),
      "tensors: (pointer, stride of each dimension), strides in elements; a pointer 0 for none; see csrc/params.h");
  module.def(
      "sparse_attention_workspace",
      [](std::int64_t B, std::int64_t s_q, std::int64_t h_q, std::int64_t topk) {
        SparseAttentionParams params{};
        std::tie(params.B, params.s_q, params.h_q, params.topk) = std::tie(B, s_q, h_q, topk);
        return sparse_attention_workspace(params);
      },
      py::kw_only(), py::arg("B"), py::arg("s_q"), py::arg("h_q"), py::arg("topk"),
      "Bytes that sparse_attention needs.");
}

// k_start and k_end as (pointer, stride_b, stride_s), pointer 0 for none.
using Rows = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;

void check_starts(Starts const& q_start, std::int64_t B) {
  if (q_start && static_cast<std::int64_t>(q_start->size()) != B) throw std::invalid_argument("q_start must hold B numbers");
}

KeyWindow key_window(Rows const& k_start, Rows const& k_end, Starts const& q_start, std::int64_t k_stride) {
  KeyWindow window{};
  window.k_start = static_cast<std::int32_t const*>(as_pointer(std::get<0>(k_start)));
  window.k_start_stride_b = std::get<1>(k_start);
  window.k_start_stride_s = std::get<2>(k_start);
  window.k_end = static_cast<std::int32_t const*>(as_pointer(std::get<0>(k_end)));
  window.k_end_stride_b = std::get<1>(k_end);
  window.k_end_stride_s = std::get<2>(k_end);
  window.q_start = q_start ? q_start->data() : nullptr;
  window.k_stride = k_stride;
  return window;
}

void bind_topk_indices(py::module_& module) {
  module.def(
      "topk_indices",
      [](Rows const& logits, Rows const& k_start, Rows const& k_end, Starts const& q_start, std::int64_t k_stride,
         std::uintptr_t indices, std::uintptr_t values, std::int64_t B, std::int64_t s_q, std::int64_t n,
         std::int64_t topk, int device, std::uintptr_t stream) {
        TopkIndicesParams params{};
        params.logits = static_cast<float const*>(as_pointer(std::get<0>(logits)));
        params.stride_b = std::get<1>(logits);
        params.stride_s = std::get<2>(logits);
        check_starts(q_start, B);
        params.window = key_window(k_start, k_end, q_start, k_stride);
        params.indices = static_cast<std::int32_t*>(as_pointer(indices));
        params.values = static_cast<float*>(as_pointer(values));
        params.B = B;
        params.s_q = s_q;
        params.n = n;
        params.topk = topk;
        on_device(device, [&] { topk_indices(params, as_pointer(stream)); });
      },
      py::kw_only(), py::arg("logits"), py::arg("k_start"), py::arg("k_end"), py::arg("q_start"), py::arg("k_stride"),
      py::arg("indices"), py::arg("values"), py::arg("B"), py::arg("s_q"), py::arg("n"), py::arg("topk"),
      py::arg("device"), py::arg("stream"),
      "logits, k_start, k_end: (pointer, stride_b, stride_s), strides in elements; pointer 0 for none; see csrc/params.h");
}

IndexerLogitsParams indexer_params(Strided const& q, Rows const& k, Strided const& weights, Strided const& q_scale,
                                   Rows const& k_scale, KeyWindow const& window, std::array<std::int64_t, 5> const& sizes,
                                   DType dtype) {
  IndexerLogitsParams params{};
  std::uintptr_t pointer;
  std::tie(pointer, params.q_stride_b, params.q_stride_s, params.q_stride_h) = q;
  params.q = as_pointer(pointer);
  std::tie(pointer, params.k_stride_b, params.k_stride_s) = k;
  params.k = as_pointer(pointer);
  std::tie(pointer, params.weights_stride_b, params.weights_stride_s, params.weights_stride_h) = weights;
  params.weights = static_cast<float const*>(as_pointer(pointer));
  std::tie(pointer, params.q_scale_stride_b, params.q_scale_stride_s, params.q_scale_stride_h) = q_scale;
  params.q_scale = static_cast<float const*>(as_pointer(pointer));
  std::tie(pointer, params.k_scale_stride_b, params.k_scale_stride_s) = k_scale;
  params.k_scale = static_cast<float const*>(as_pointer(pointer));
  params.window = window;
  params.B = sizes[0];
  params.s_q = sizes[1];
  params.s_kv = sizes[2];
  params.h_i = sizes[3];
  params.d_i = sizes[4];
  params.dtype = dtype;
  return params;
}

void bind_indexer(py::module_& module) {
  module.def(
      "indexer_logits",
      [](Strided const& q, Rows const& k, Strided const& weights, Strided const& q_scale, Rows const& k_scale,
         Rows const& k_start, Rows const& k_end, Starts const& q_start, std::int64_t k_stride, Rows const& out, bool fill,
         std::array<std::int64_t, 5> const& sizes, DType dtype, int device, std::uintptr_t stream) {
        check_starts(q_start, sizes[0]);
        IndexerLogitsParams params =
            indexer_params(q, k, weights, q_scale, k_scale, key_window(k_start, k_end, q_start, k_stride), sizes, dtype);
        params.out = static_cast<float*>(as_pointer(std::get<0>(out)));
        params.out_stride_b = std::get<1>(out);
        params.out_stride_s = std::get<2>(out);
        params.fill = fill;
        on_device(device, [&] { indexer_logits(params, as_pointer(stream)); });
      },
      py::kw_only(), py::arg("q"), py::arg("k"), py::arg("weights"), py::arg("q_scale"), py::arg("k_scale"),
      py::arg("k_start"), py::arg("k_end"), py::arg("q_start"), py::arg("k_stride"), py::arg("out"), py::arg("fill"),
      py::arg("sizes"), py::arg("dtype"), py::arg("device"), py::arg("stream"),
      "Tensors: (pointer, strides in elements, without that of a contiguous last dimension), pointer 0 for none; sizes: "
      "(B, s_q, s_kv, h_i, d_i); see csrc/params.h");
  module.def(
      "indexer_logits_listed",
      [](Strided const& q, Rows const& k, Strided const& weights, Strided const& q_scale, Rows const& k_scale,
         Rows const& k_start, Rows const& k_end, Starts const& q_start, std::int64_t k_stride, Strided const& indices,
         Rows const& topk_length, std::int64_t topk, Rows const& out, Strided const& dlogits, std::uintptr_t dq,
         std::uintptr_t dk, std::uintptr_t dweights, std::array<std::int64_t, 5> const& sizes, DType dtype, int device,
         std::uintptr_t stream) {
        check_starts(q_start, sizes[0]);
        IndexerListedParams params{};
        params.indexer =
            indexer_params(q, k, weights, q_scale, k_scale, key_window(k_start, k_end, q_start, k_stride), sizes, dtype);
        params.indexer.out = static_cast<float*>(as_pointer(std::get<0>(out)));
        params.indexer.out_stride_b = std::get<1>(out);
        params.indexer.out_stride_s = std::get<2>(out);
        params.indices = static_cast<std::int32_t const*>(as_pointer(std::get<0>(indices)));
        params.indices_stride_b = std::get<1>(indices);
        params.indices_stride_s = std::get<2>(indices);
        params.indices_stride_t = std::get<3>(indices);
        params.topk_length = static_cast<std::int32_t const*>(as_pointer(std::get<0>(topk_length)));
        params.topk_length_stride_b = std::get<1>(topk_length);
        params.topk_length_stride_s = std::get<2>(topk_length);
        params.topk = topk;
        params.dlogits = static_cast<float const*>(as_pointer(std::get<0>(dlogits)));
        params.dlogits_stride_b = std::get<1>(dlogits);
        params.dlogits_stride_s = std::get<2>(dlogits);
        params.dlogits_stride_t = std::get<3>(dlogits);
        params.dq = as_pointer(dq);
        params.dk = static_cast<float*>(as_pointer(dk));
        params.dweights = static_cast<float*>(as_pointer(dweights));
        auto const run = dq == 0 ? indexer_logits_listed : indexer_logits_backward;
        on_device(device, [&] { run(params, as_pointer(stream)); });
      },
      py::kw_only(), py::arg("q"), py::arg("k"), py::arg("weights"), py::arg("q_scale"), py::arg("k_scale"),
      py::arg("k_start"), py::arg("k_end"), py::arg("q_start"), py::arg("k_stride"), py::arg("indices"),
      py::arg("topk_length"), py::arg("topk"), py::arg("out"), py::arg("dlogits"), py::arg("dq"), py::arg("dk"),
      py::arg("dweights"), py::arg("sizes"), py::arg("dtype"), py::arg("device"), py::arg("stream"),
      "As indexer_logits; indices, dlogits: (pointer, stride_b, stride_s, stride_t); with a dq the backward, else the forward.");
  module.def(
      "indexer_topk",
      [](Strided const& q, Rows const& k, Strided const& weights, Strided const& q_scale, Rows const& k_scale,
         Rows const& k_start, Rows const& k_end, Starts const& q_start, std::int64_t k_stride, std::uintptr_t indices,
         std::uintptr_t values, std::int64_t topk, std::uintptr_t workspace, std::int64_t workspace_bytes,
         std::array<std::int64_t, 5> const& sizes, DType dtype, int device, std::uintptr_t stream) -> std::int64_t {
        check_starts(q_start, sizes[0]);
        IndexerTopkParams params{};
        params.logits =
            indexer_params(q, k, weights, q_scale, k_scale, key_window(k_start, k_end, q_start, k_stride), sizes, dtype);
        params.indices = static_cast<std::int32_t*>(as_pointer(indices));
        params.values = static_cast<float*>(as_pointer(values));
        params.topk = topk;
        params.workspace = as_pointer(workspace);
        params.workspace_bytes = workspace_bytes;
        std::int64_t const needed = indexer_topk_workspace(params);
        if (workspace != 0) on_device(device, [&] { indexer_topk(params, as_pointer(stream)); });
        return needed;
      },
      py::kw_only(), py::arg("q"), py::arg("k"), py::arg("weights"), py::arg("q_scale"), py::arg("k_scale"),
      py::arg("k_start"), py::arg("k_end"), py::arg("q_start"), py::arg("k_stride"), py::arg("indices"), py::arg("values"),
      py::arg("topk"), py::arg("workspace"), py::arg("workspace_bytes"), py::arg("sizes"), py::arg("dtype"),
      py::arg("device"), py::arg("stream"),
      "As indexer_logits. Returns the bytes of workspace that the call needs; without a workspace it does nothing else.");
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  if (std::string(library_params_hash()) != HTREE_CUDA_PARAMS_HASH) {
    throw std::runtime_error(
        "libhtree_cuda.so and the module _C were built from different versions of csrc/params.h: rebuild both");
  }
  module.doc() = "Kernel launchers of htree_cuda; call them through htree_cuda.kernels.";
  module.attr("params_hash") = HTREE_CUDA_PARAMS_HASH;
  module.def("runtime_version", &runtime_version, "CUDA version of the library, 13000 for 13.0");
  module.def("has_mixed_dims", &has_mixed_dims, "whether the htree kernels for K != V are there");
  module.def("driver_version", &driver_version, "newest CUDA version that the driver runs; 0 without a driver");
  py::enum_<DType>(module, "DType", py::module_local())
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16)
      .value("float32", DType::kFloat32)
      .value("float8_e4m3fn", DType::kFloat8E4M3);
  bind_tree_pool(module);
  bind_forward(module);
  bind_backward(module);
  bind_tree_cache(module);
  bind_recording(module);
  bind_attn_dist(module);
  bind_sparse_attention(module);
  bind_topk_indices(module);
  bind_indexer(module);
  bind_sparse_attention_backward(module);
}

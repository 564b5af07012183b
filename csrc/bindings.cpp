// The only pybind11 file: pointers, sizes and strides from Python become params structs. No torch and no CUDA headers
// here; tensors are taken apart in htree_cuda/kernels.py and checked in htree_cuda/checks.py.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "params.h"

namespace py = pybind11;
using namespace htree_cuda;

namespace {

void* as_pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// Runs `launch` on `device` without the GIL. What it throws becomes ValueError or RuntimeError.
template <class Launch>
void on_device(int device, Launch&& launch) {
  py::gil_scoped_release release;
  DeviceGuard guard(device);
  launch();
}

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

}  // namespace

PYBIND11_MODULE(_C, module) {
  if (std::string(library_params_hash()) != HTREE_CUDA_PARAMS_HASH) {
    throw std::runtime_error(
        "libhtree_cuda.so and the module _C were built from different versions of csrc/params.h: rebuild both");
  }
  module.doc() = "Kernel launchers of htree_cuda; call them through htree_cuda.kernels.";
  module.attr("params_hash") = HTREE_CUDA_PARAMS_HASH;
  py::enum_<DType>(module, "DType")
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16)
      .value("float32", DType::kFloat32);
  bind_tree_pool(module);
}

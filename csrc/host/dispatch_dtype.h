// From the dtype of a params struct to an element type of CUTLASS.
#pragma once

#include <stdexcept>
#include <string>

#include "device/elements.cuh"
#include "params.h"

namespace htree_cuda::host {

constexpr int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

template <class T>
struct TypeTag {
  using type = T;
};

// Calls fn(TypeTag<Element>{}) with the element type of a dtype.
template <class Fn>
void dispatch_dtype(char const* op, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16: return fn(TypeTag<cutlass::bfloat16_t>{});
    case DType::kFloat16: return fn(TypeTag<cutlass::half_t>{});
    case DType::kFloat32: return fn(TypeTag<float>{});
    case DType::kFloat8E4M3: break;
  }
  throw std::invalid_argument(std::string(op) + ": unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

}  // namespace htree_cuda::host

// What bindings.cpp needs for every launcher: tensors as pointers and strides, and the device of a call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "params.h"

namespace py = pybind11;

namespace htree_cuda {

// (pointer, a stride for each of three dimensions, two, or one)
using Strided = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;
using Strided2 = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;
using Strided1 = std::tuple<std::uintptr_t, std::int64_t>;
using Starts = std::optional<std::vector<std::int64_t>>;

inline void* as_pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

// Runs `launch` on `device` without the GIL. What it throws becomes ValueError or RuntimeError.
template <class Launch>
void on_device(int device, Launch&& launch) {
  py::gil_scoped_release release;
  if (device < 0) return launch();  // a recording, which needs no device
  DeviceGuard guard(device);
  launch();
}

// What `count` counts there.
template <class Count>
std::int64_t bytes_on_device(int device, Count&& count) {
  std::int64_t bytes = 0;
  on_device(device, [&] { bytes = count(); });
  return bytes;
}

}  // namespace htree_cuda

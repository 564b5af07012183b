// CUTLASS's element types by their names. As template arguments of kernels they need no definition, and the headers that
// define them take longer to compile than what launches a kernel.
#pragma once

namespace cutlass {
struct bfloat16_t;
struct half_t;
struct float_e4m3_t;
}  // namespace cutlass

namespace htree_cuda::device {

template <class Element>
inline constexpr int kElementBytes = 2;
template <>
inline constexpr int kElementBytes<cutlass::float_e4m3_t> = 1;

}  // namespace htree_cuda::device

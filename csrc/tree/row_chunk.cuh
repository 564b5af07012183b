// Eight elements of a row, 16 bytes of one of the two dtypes. A lane of the packing kernels (tree/pack,
// sm90/htree_bwd/pack) reads and rotates so many at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::tree {

// Reads chunk `chunk` of a row whose elements are `stride` apart. `vectors` says that 16 bytes may be read at once,
// which needs a stride of 1.
template <class Element>
__device__ __forceinline__ uint4 load_chunk(Element const* row, int chunk, bool vectors, std::int64_t stride = 1) {
  if (vectors) return __ldg(reinterpret_cast<uint4 const*>(row + 8 * chunk));
  alignas(16) Element values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = row[(8 * chunk + i) * stride];
  return *reinterpret_cast<uint4 const*>(values);
}

template <class Element>
__device__ __forceinline__ void to_float(uint4 const& chunk, float (&x)[8]) {
  Element const* const values = reinterpret_cast<Element const*>(&chunk);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(values[i]);
}

// Rounds a key to the precision of the inputs, as keys of the bottom are. The last three bits of such a key in fp16 are
// zeros where the inputs are bf16, and at the power limit of an H100 nonzero bits in shared memory and the tensor cores
// would cost 1 to 2% of the time.
template <class Element>
__device__ __forceinline__ float rounded(float x, bool as_inputs) {
  return as_inputs ? static_cast<float>(Element(x)) : x;
}

}  // namespace htree_cuda::tree

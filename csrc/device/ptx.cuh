// PTX that has no CUDA C++ spelling. Inline assembly lives here and in barriers.cuh, nowhere else.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace htree_cuda::device::ptx {

// ---- proxies and register budget ---------------------------------------------------------------------------------

// Orders this thread's generic-proxy accesses to shared memory (st.shared, completed cp.async) before later
// async-proxy accesses (WGMMA operands, bulk copies) of threads that synchronise with it.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// These two change the number of registers of every thread of this warpgroup. The sum over the CTA must stay within
// what the launch granted (__launch_bounds__ threads x registers at entry), because the hardware waits for ever for
// more.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// True in one thread of a warp whose lanes are all here.
__device__ __forceinline__ bool elect() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

// blockIdx.x, read at this place: the compiler computes what follows from it again instead of keeping it in registers.
__device__ __forceinline__ uint32_t block_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// gridDim.x, read at this place in the same way.
__device__ __forceinline__ uint32_t grid_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(size));
  return size;
}

// The lane's number, read at this place in the same way.
__device__ __forceinline__ uint32_t lane_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(index));
  return index;
}

// Rotates (x, y) by an angle in the threads of a warp where `rotates` holds. Instructions with a predicate, in place: of a
// branch around plain code the compiler makes copies of what it changes.
__device__ __forceinline__ void rotate_where(bool rotates, float& x, float& y, float cosine, float sine) {
  asm("{\n"
      ".reg .pred p;\n"
      ".reg .f32 from_x, from_y;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "neg.f32 from_y, %1;\n"
      "mul.rn.f32 from_x, %0, %3;\n"
      "@p mul.rn.f32 %0, %0, %2;\n"
      "@p fma.rn.f32 %0, from_y, %3, %0;\n"
      "@p fma.rn.f32 %1, %1, %2, from_x;\n"
      "}\n"
      : "+f"(x), "+f"(y)
      : "f"(cosine), "f"(sine), "r"(static_cast<uint32_t>(rotates)));
}

// The same as three shears, tangent = -tan(angle / 2): an instruction less, but what is rounded grows with the tangent.
__device__ __forceinline__ void shear_where(bool rotates, float& x, float& y, float tangent, float sine) {
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %4, 0;\n"
      "@p fma.rn.f32 %0, %1, %2, %0;\n"
      "@p fma.rn.f32 %1, %0, %3, %1;\n"
      "@p fma.rn.f32 %0, %1, %2, %0;\n"
      "}\n"
      : "+f"(x), "+f"(y)
      : "f"(tangent), "f"(sine), "r"(static_cast<uint32_t>(rotates)));
}

// ---- shared memory addresses and matrices ------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8 x 8 matrices of 16-bit elements; lanes 8 m .. 8 m + 7 name the 16-byte rows of matrix m.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&fragment)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address)
               : "memory");
}

// Loads the same four matrices, each transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&fragment)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements: a lane gives two columns of a row and gets two rows of a column.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
  return transposed;
}

// Fills the lower half of the result with the sign of byte i of x, and the upper half with the sign of byte i of y.
__device__ __forceinline__ uint32_t spread_signs(uint32_t x, uint32_t y, int i) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(0xcc88 + 0x1111 * i));
  return result;
}

// Stores four matrices as load_matrix_x4 loads them.
__device__ __forceinline__ void store_matrix_x4(uint32_t row_address, uint32_t const (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ float2 load_shared_8B(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_shared_4B(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// Loads where `wanted`, without a branch; elsewhere `value` stays as it is.
__device__ __forceinline__ void load_shared_4B_if(bool wanted, uint32_t& value, uint32_t address) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "@wanted ld.shared.u32 %0, [%1];\n"
      "}\n"
      : "+r"(value)
      : "r"(address), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void store_shared_4B(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_8B(uint32_t address, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(value.x), "r"(value.y) : "memory");
}

// A store that the compiler does not move across other volatile accesses or barrier operations.
__device__ __forceinline__ void store_shared_8B_volatile(uint32_t address, float2 value) {
  asm volatile("st.volatile.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16B(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_16B(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// These three store where `wanted`, without a branch.
__device__ __forceinline__ void store_global_if(bool wanted, float* address, float value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "@wanted st.global.f32 [%0], %1;\n"
      "}\n" ::"l"(address),
      "f"(value), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void store_global_4B_if(bool wanted, uint32_t* address, uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "@wanted st.global.b32 [%0], %1;\n"
      "}\n" ::"l"(address),
      "r"(value), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ void store_global_8B_if(bool wanted, float* address, float2 value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %3, 0;\n"
      "@wanted st.global.v2.f32 [%0], {%1, %2};\n"
      "}\n" ::"l"(address),
      "f"(value.x), "f"(value.y), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

// ---- clusters ----------------------------------------------------------------------------------------------------

// The rank of this CTA in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// How many CTAs a cluster has.
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// The address, in the shared memory of the cluster, of what lies at `shared` in the CTA of rank `rank`.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// Addresses of the cluster's shared memory.
__device__ __forceinline__ void store_cluster_4B(uint32_t address, uint32_t x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ uint4 load_cluster_16B(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

// Stores that complete their bytes of an mbarrier in the same CTA as `address`; both are addresses of the cluster's shared memory.
__device__ __forceinline__ void store_async(uint32_t address, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_async(uint32_t address, float2 value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(value.x), "f"(value.y), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_async(uint32_t address, uint4 value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_async(uint32_t address, float4 value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
}

// ---- global memory -----------------------------------------------------------------------------------------------

// Where `wanted`, 16 bytes that no thread of the grid writes and that are read once, so that L1 keeps nothing of them; else
// zeros, without a branch.
__device__ __forceinline__ uint4 load_global_once_if(bool wanted, void const* address) {
  uint4 value;
  asm("{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %5, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "mov.u32 %2, 0;\n"
      "mov.u32 %3, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(address), "r"(static_cast<uint32_t>(wanted)));
  return value;
}

// These two add to global memory where `wanted`, without a branch.
__device__ __forceinline__ void reduce_add_16B_if(bool wanted, float* address, float4 x) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %5, 0;\n"
      "@wanted red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n"
      "}\n" ::"l"(address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

// x is rounded to an integer first, which is a part of it so that the compiler converts no others ahead.
__device__ __forceinline__ void reduce_add_rounded_if(bool wanted, long long* address, float x) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      ".reg .s64 rounded;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "cvt.rni.s64.f32 rounded, %1;\n"
      "@wanted red.global.add.u64 [%0], rounded;\n"
      "}\n" ::"l"(address),
      "f"(x), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

// Brings the line that holds `address` to L2.
__device__ __forceinline__ void prefetch_l2(void const* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- asynchronous copies -----------------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory, past L1. Where `sign` is negative nothing is read and zeros are
// written.
__device__ __forceinline__ void copy_async_16B(uint32_t shared, void const* global, int sign) {
  asm volatile(
      "{\n"
      ".reg .pred ignore;\n"
      "setp.lt.s32 ignore, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignore;\n"
      "}\n" ::"r"(shared),
      "l"(global), "r"(sign)
      : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(void const* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The L2 policy for data that is read once: it is evicted first (createpolicy.fractional.L2::evict_first, fraction 1).
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000;
// The L2 policy of ordinary loads.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000;

// Copies one box of a 4-D tensor map to shared memory; its bytes count towards the transaction of `barrier`.
__device__ __forceinline__ void tma_load_4d(uint32_t shared, void const* map, uint32_t barrier, uint64_t l2_policy, int x0,
                                            int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "l"(l2_policy)
      : "memory");
}

// Copies `bytes` contiguous bytes from global to shared memory; they count towards the transaction of `barrier`. Both
// addresses and the count are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, void const* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Copies `bytes` contiguous bytes from shared to global memory. Both addresses and the count are multiples of 16.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes, uint64_t l2_policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(global),
               "r"(shared), "r"(bytes), "l"(l2_policy)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the sources of all but kPending of this thread's bulk groups have been read, so that they may be
// rewritten.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---- tensor cores, warp level ------------------------------------------------------------------------------------

// c += a b: m16n8k16, a row-major, b column-major, float32 accumulators.
__device__ __forceinline__ void mma_fp16(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c = a b: m16n8k8, a row-major, b column-major, sums rounded to fp16. A fragment of c is also a fragment of a.
__device__ __forceinline__ void multiply_fp16(uint32_t& c0, uint32_t& c1, uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%5, %5};"
      : "=r"(c0), "=r"(c1)
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

// c += a b: m16n8k8, a row-major, b column-major, tf32 operands, whose 13 lowest bits do not count, float32 accumulators.
__device__ __forceinline__ void mma_tf32(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x rounded to tf32, ties away from zero.
__device__ __forceinline__ uint32_t round_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// ---- arithmetic --------------------------------------------------------------------------------------------------

// 2^x on the special function unit; subnormal results are flushed to zero. Volatile, so that it stays where it is
// written, between the tensor core instructions that hide it.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same function for loops in which the compiler is to find the place.
__device__ __forceinline__ float exp2_movable(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max(x, y), and NaN where x or y is NaN.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
}

// Returns x, and makes the compiler keep it in a register instead of computing it again wherever it is needed.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <class T>
__device__ __forceinline__ T const* opaque(T const* x) {
  asm volatile("" : "+l"(x));
  return x;
}

}  // namespace htree_cuda::device::ptx

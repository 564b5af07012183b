// The emulator as the stand-in for the CUDA runtime (cudart.cpp) sees it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

struct Options {
  uint64_t seed = 0;        // of the schedule
  int sms = 3;  // SMs that the device says it has: few, so that persistent blocks work several times
  bool races = false;       // looks for accesses to shared memory that nothing orders
};

struct Dimensions {
  uint32_t x = 1, y = 1, z = 1;
};

void configure(Options const& options);
Options const& configuration();

// From the first call on, global memory outside the allowed ranges is out of bounds.
void allow(uint64_t address, uint64_t bytes);
void forbid(uint64_t address);
void forget_allocations();
uint64_t launch_count();

void encode_tensor_map(void* map, uint64_t address, std::vector<uint64_t> sizes, std::vector<uint64_t> strides,
                       std::vector<uint32_t> box, uint32_t element_bytes, uint32_t swizzle_bytes);

// Runs a kernel to its end; what went wrong, or nothing. `overlaps`: it was launched with leave to begin before the one
// before it in the stream has ended.
std::string launch(std::string const& name, Dimensions grid, Dimensions block, Dimensions cluster, bool overlaps,
                   void** arguments, uint32_t dynamic_shared);

}  // namespace emulator

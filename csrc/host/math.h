#pragma once

#include <cstdint>

namespace htree_cuda::host {

inline constexpr double kLog2E = 1.4426950408889634074;  // log2(e)
inline constexpr double kLn2 = 0.69314718055994530942;

template <class T, class U>
constexpr T ceil_div(T a, U b) {
  return static_cast<T>((a + b - 1) / b);
}

constexpr bool is_power_of_two(std::int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

// floor(log2(x)) for x >= 1
constexpr int log2_floor(std::int64_t x) {
  int log = 0;
  while (x > 1) {
    x >>= 1;
    ++log;
  }
  return log;
}

// How many bytes an address lies past a multiple of `bytes`.
inline std::int64_t misalignment(void const* pointer, std::int64_t bytes) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes));
}

}  // namespace htree_cuda::host

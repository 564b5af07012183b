// What a kernel translated from PTX runs on: one fiber a thread, one block (or cluster) at a time, and a memory that is
// as unkind as the programming model allows. What is checked is listed in tools/ptx_emulator/README.md.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace emulator {

// ---- numbers -------------------------------------------------------------------------------------------------------

struct half {
  uint16_t bits;
};
struct bfloat {
  uint16_t bits;
};
// cvt.rna.tf32.f32: to 10 bits after the leading one, ties away from zero.
inline uint32_t round_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bool const finite = (bits & 0x7f800000u) != 0x7f800000u;
  return (finite ? bits + 0x1000u : bits) & (finite || (bits & 0x7fffffu) == 0 ? 0xffffe000u : 0xffffffffu);
}

struct half2 {
  uint16_t low, high;
};
struct bfloat2 {
  uint16_t low, high;
};

template <class To, class From>
inline To from_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// A register's bits read as another type: the same width as they are, otherwise the low bits, or zero or sign extended.
template <class To, class From>
inline To as(From from) {
  if constexpr (std::is_same_v<To, From>) {
    return from;
  } else if constexpr (sizeof(To) == sizeof(From)) {
    return from_bits<To>(from);
  } else if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    return static_cast<To>(from);
  } else if constexpr (sizeof(To) < sizeof(From)) {
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
  } else {
    To to{};
    std::memcpy(&to, &from, sizeof(from));
    return to;
  }
}

template <class To>
inline To constant(uint64_t value) {
  return as<To>(value);
}

template <class Register, class Value>
inline void put(Register& target, Value value) {
  target = as<Register>(value);
}

inline float to_float(half x) { return _cvtsh_ss(x.bits); }
inline float to_float(bfloat x) { return from_bits<float>(static_cast<uint32_t>(x.bits) << 16); }

template <class To>
To rounded(float x);
template <>
inline half rounded<half>(float x) {
  return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
}
template <>
inline bfloat rounded<bfloat>(float x) {
  uint32_t const bits = from_bits<uint32_t>(x);
  if (std::isnan(x)) {
    return {0x7fff};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
half half_of_double(double x);  // one rounding

template <class T>
inline std::conditional_t<std::is_same_v<T, double>, double, float> wide(T x) {
  if constexpr (std::is_same_v<T, half> || std::is_same_v<T, bfloat>) {
    return to_float(x);
  } else {
    return x;
  }
}

template <class To, class From>
inline To narrow(From x) {
  if constexpr (std::is_same_v<From, half> || std::is_same_v<From, bfloat>) {
    return narrow<To>(to_float(x));
  } else if constexpr (std::is_same_v<To, half> && std::is_same_v<From, double>) {
    return half_of_double(x);
  } else if constexpr (std::is_same_v<To, half> || std::is_same_v<To, bfloat>) {
    return rounded<To>(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

template <class To, class From>
inline To to_integer(From x) {
  if (std::isnan(x)) {
    return 0;
  }
  using Limits = std::numeric_limits<To>;
  if (x >= std::ldexp(From(1), Limits::digits)) {
    return Limits::max();
  }
  return x <= static_cast<From>(Limits::min()) ? Limits::min() : static_cast<To>(x);
}

template <class Element>
inline auto pair(float low, float high) {
  using Pair = std::conditional_t<std::is_same_v<Element, half>, half2, bfloat2>;
  return Pair{rounded<Element>(low).bits, rounded<Element>(high).bits};
}

inline float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
inline double flush(double x) { return x; }
template <class T>
inline bool is_nan(T x) {
  return x != x;
}

template <class T>
inline T wrapping(T a, T b, char symbol) {
  using U = std::make_unsigned_t<std::conditional_t<sizeof(T) < 4, int32_t, T>>;
  U const x = static_cast<U>(a), y = static_cast<U>(b);
  return static_cast<T>(symbol == '+' ? x + y : symbol == '-' ? x - y : x * y);
}
template <class T>
inline T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return wrapping(a, b, '+');
  } else {
    return a + b;
  }
}
template <class T>
inline T sub(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return wrapping(a, b, '-');
  } else {
    return a - b;
  }
}
template <class T>
inline T mul(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return wrapping(a, b, '*');
  } else {
    return a * b;
  }
}
inline uint16_t half_bits(double x) { return half_of_double(x).bits; }
inline float half_value(uint16_t bits) { return to_float(half{bits}); }
inline uint16_t bfloat_bits(double x) { return rounded<bfloat>(static_cast<float>(x)).bits; }
inline float bfloat_value(uint16_t bits) { return to_float(bfloat{bits}); }

// Packed arithmetic. A product or sum of two 11-bit numbers is exact in double, so that one rounding follows.
inline half2 add(half2 a, half2 b) {
  return {half_bits(double(half_value(a.low)) + half_value(b.low)),
          half_bits(double(half_value(a.high)) + half_value(b.high))};
}
inline half2 sub(half2 a, half2 b) {
  return {half_bits(double(half_value(a.low)) - half_value(b.low)),
          half_bits(double(half_value(a.high)) - half_value(b.high))};
}
inline half2 mul(half2 a, half2 b) {
  return {half_bits(double(half_value(a.low)) * half_value(b.low)),
          half_bits(double(half_value(a.high)) * half_value(b.high))};
}
inline half2 fused(half2 a, half2 b, half2 c) {
  return {half_bits(std::fma(double(half_value(a.low)), half_value(b.low), half_value(c.low))),
          half_bits(std::fma(double(half_value(a.high)), half_value(b.high), half_value(c.high)))};
}
inline bfloat2 mul(bfloat2 a, bfloat2 b) {
  return {bfloat_bits(double(bfloat_value(a.low)) * bfloat_value(b.low)),
          bfloat_bits(double(bfloat_value(a.high)) * bfloat_value(b.high))};
}
inline half2 negative(half2 x) {
  return {static_cast<uint16_t>(x.low ^ 0x8000u), static_cast<uint16_t>(x.high ^ 0x8000u)};
}
inline bfloat2 negative(bfloat2 x) {
  return {static_cast<uint16_t>(x.low ^ 0x8000u), static_cast<uint16_t>(x.high ^ 0x8000u)};
}
inline half2 absolute(half2 x) {
  return {static_cast<uint16_t>(x.low & 0x7fffu), static_cast<uint16_t>(x.high & 0x7fffu)};
}
inline bfloat2 absolute(bfloat2 x) {
  return {static_cast<uint16_t>(x.low & 0x7fffu), static_cast<uint16_t>(x.high & 0x7fffu)};
}
inline half2 maximum(half2 a, half2 b) {
  return {half_bits(std::fmax(half_value(a.low), half_value(b.low))),
          half_bits(std::fmax(half_value(a.high), half_value(b.high)))};
}
inline bfloat2 maximum(bfloat2 a, bfloat2 b) {
  return {bfloat_bits(std::fmax(bfloat_value(a.low), bfloat_value(b.low))),
          bfloat_bits(std::fmax(bfloat_value(a.high), bfloat_value(b.high)))};
}

inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline double fused(double a, double b, double c) { return std::fma(a, b, c); }

template <class T>
inline T mul_high(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> 64);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
  }
}
template <class T>
inline T divide(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return b == 0 ? static_cast<T>(-1) : static_cast<T>(a / b);
  } else {
    return a / b;
  }
}
template <class T>
inline T remainder_of(T a, T b) {
  return b == 0 ? a : static_cast<T>(a % b);
}
template <class T>
inline T minimum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(a, b);
  } else {
    return a < b ? a : b;
  }
}
template <class T>
  requires std::is_arithmetic_v<T>
inline T maximum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(a, b);
  } else {
    return a < b ? b : a;
  }
}
inline uint32_t maximum_of_halves(uint32_t a, uint32_t b) {
  return maximum(a & 0xffff0000u, b & 0xffff0000u) | maximum(a & 0xffffu, b & 0xffffu);
}
template <class T>
inline T minimum_nan(T a, T b) {
  return a != a ? a : b != b ? b : std::fmin(a, b);
}
template <class T>
inline T maximum_nan(T a, T b) {
  return a != a ? a : b != b ? b : std::fmax(a, b);
}
template <class T>
  requires std::is_arithmetic_v<T>
inline T absolute(T x) {
  return std::is_floating_point_v<T> ? std::fabs(x) : x < 0 ? static_cast<T>(0 - x) : x;
}
template <class T>
  requires std::is_arithmetic_v<T>
inline T negative(T x) {
  if constexpr (std::is_integral_v<T>) {
    return wrapping(T(0), x, '-');
  } else {
    return -x;
  }
}
template <class T>
inline T reciprocal(T x) {
  return T(1) / x;
}
template <class T>
inline T reciprocal_sqrt(T x) {
  return T(1) / std::sqrt(x);
}

inline uint32_t add_carry(uint32_t a, uint32_t b, uint32_t in, uint32_t& out) {
  uint64_t const sum = uint64_t{a} + b + in;
  out = static_cast<uint32_t>(sum >> 32);
  return static_cast<uint32_t>(sum);
}
inline uint32_t sub_borrow(uint32_t a, uint32_t b, uint32_t in, uint32_t& out) {
  uint64_t const difference = uint64_t{a} - b - in;
  out = static_cast<uint32_t>(difference >> 63);
  return static_cast<uint32_t>(difference);
}

template <class T>
inline T shift_left(T x, uint32_t amount) {
  return amount >= 8 * sizeof(T) ? T(0) : static_cast<T>(static_cast<std::make_unsigned_t<T>>(x) << amount);
}
template <class T>
inline T shift_right(T x, uint32_t amount) {
  uint32_t const width = 8 * sizeof(T);
  return amount >= width ? static_cast<T>(x < 0 ? -1 : 0) : static_cast<T>(x >> amount);
}
inline uint32_t funnel_l_wrap(uint32_t low, uint32_t high, uint32_t n) {
  return static_cast<uint32_t>(((uint64_t{high} << 32 | low) << (n & 31)) >> 32);
}
inline uint32_t funnel_r_wrap(uint32_t low, uint32_t high, uint32_t n) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (n & 31));
}
inline uint32_t funnel_l_clamp(uint32_t low, uint32_t high, uint32_t n) {
  return n >= 32 ? low : funnel_l_wrap(low, high, n);
}
inline uint32_t funnel_r_clamp(uint32_t low, uint32_t high, uint32_t n) {
  return n >= 32 ? high : funnel_r_wrap(low, high, n);
}
inline uint32_t logic3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t out = 0;
  for (uint32_t i = 0; i < 8; ++i) {
    if (table >> i & 1u) {
      out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
  }
  return out;
}
template <class T>
inline T bit_field(T x, uint32_t position, uint32_t length) {
  uint32_t const width = 8 * sizeof(T);
  position &= 0xff, length &= 0xff;
  if (length == 0) {
    return 0;
  }
  T const shifted = shift_right(x, position);
  if (length >= width) {
    return shifted;
  }
  T const field = static_cast<T>(shifted & ((T(1) << length) - 1));
  bool const negative = std::is_signed_v<T> && (shift_right(x, std::min(position + length - 1, width - 1)) & 1);
  return negative ? static_cast<T>(field | ~((T(1) << length) - 1)) : field;
}
template <class T>
inline T bit_insert(T a, T b, uint32_t position, uint32_t length) {
  uint32_t const width = 8 * sizeof(T);
  position &= 0xff, length &= 0xff;
  if (length == 0 || position >= width) {
    return b;
  }
  T const ones = length >= width ? ~T(0) : static_cast<T>((T(1) << length) - 1);
  T const mask = static_cast<T>(ones << position);
  return static_cast<T>((b & ~mask) | ((a << position) & mask));
}
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t const bytes = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t const pick = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7)) & 0xff);
    if (pick & 8) {
      byte = byte & 0x80 ? 0xff : 0;
    }
    out |= byte << (8 * i);
  }
  return out;
}
template <class T>
inline uint32_t leading_zeros(T x) {
  return static_cast<uint32_t>(std::countl_zero(static_cast<std::make_unsigned_t<T>>(x)));
}
template <class T>
inline T reverse_bits(T x) {
  T out = 0;
  for (uint32_t i = 0; i < 8 * sizeof(T); ++i) {
    out |= static_cast<T>((x >> i & 1) << (8 * sizeof(T) - 1 - i));
  }
  return out;
}

#define EMULATOR_ATOMIC(name, expression) \
  template <class T>                      \
  struct atomic_##name {                  \
    T a{}, b{};                           \
    T operator()([[maybe_unused]] T old) const { return expression; } \
  };
EMULATOR_ATOMIC(add, static_cast<T>(old + a))
EMULATOR_ATOMIC(or, static_cast<T>(old | a))
EMULATOR_ATOMIC(and, static_cast<T>(old & a))
EMULATOR_ATOMIC(xor, static_cast<T>(old ^ a))
EMULATOR_ATOMIC(min, old < a ? old : a)
EMULATOR_ATOMIC(max, old < a ? a : old)
EMULATOR_ATOMIC(exch, a)
EMULATOR_ATOMIC(cas, old == a ? b : old)
#undef EMULATOR_ATOMIC

// ---- one thread ----------------------------------------------------------------------------------------------------

struct Block;
struct Warp;
enum class Shuffle { idx, up, down, bfly };
enum class Access : uint8_t { read, write, atomic };

// A place in a block's shared memory.
struct Place {
  Block* block;
  uint32_t offset;
};

// Operand A of a warpgroup product.
struct Operand {
  bool in_registers;
  uint32_t fragment[4];
  uint64_t descriptor;
  static Operand registers(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return {true, {a, b, c, d}, 0}; }
  static Operand shared(uint64_t descriptor) { return {false, {}, descriptor}; }
};

template <class T, int kCount>
struct Loaded {
  T item[kCount];
  T operator[](int i) const { return item[i]; }
};

struct CopyAsync {
  uint32_t offset;
  uint64_t source;
  uint32_t bytes, kept;
  bool landed;
};

struct BulkStore {
  std::vector<std::pair<uint64_t, std::vector<char>>> rows;  // global address, bytes as they were at issue
  std::vector<uint32_t> offsets;                             // their places in shared memory
};

// Accumulators that a warpgroup product in flight owns: where they live and the value they will have.
struct InFlight {
  float* key;
  std::vector<float*> registers;
  std::shared_ptr<std::vector<float>> value;
  uint64_t last;  // the latest product that writes them
};

struct Thread {
  uint32_t tid[3], ntid[3], ctaid[3], nctaid[3];
  uint32_t lane, warp, index;
  uint32_t cluster_rank, cluster_size;
  int at = 0;  // line of the PTX, for reports
  bool waited_for_grids = false;  // griddepcontrol.wait
  Block* block;
  Warp* warp_state;
  char* shared;
  uint32_t shared_bytes;

  [[noreturn]] void fail(std::string const& message);
  [[noreturn]] void exit();
  void yield();
  void maybe_yield();
  uint64_t clock();

  // -- memory
  void check_global(uint64_t address, uint32_t bytes, bool write);
  void let_next_grid_begin();  // griddepcontrol.launch_dependents
  [[noreturn]] void bad_shared(uint64_t address, uint32_t bytes);
  [[noreturn]] void misaligned(uint64_t address, uint32_t bytes);
  void mark_written(uint32_t offset, uint32_t bytes);
  void shared_access(uint32_t offset, uint32_t bytes, Access kind, void const* value = nullptr);

  char* at_shared(uint64_t address, uint32_t bytes) {
    if (address + bytes > shared_bytes) {
      bad_shared(address, bytes);
    }
    if (address % bytes != 0) {
      misaligned(address, bytes);
    }
    return shared + address;
  }
  bool is_shared(uint64_t generic) const {
    uint64_t const base = reinterpret_cast<uint64_t>(shared);
    return generic >= base && generic < base + shared_bytes;
  }
  uint64_t generic_to_shared(uint64_t generic) { return generic - reinterpret_cast<uint64_t>(shared); }
  uint64_t shared_to_generic(uint64_t address) { return address + reinterpret_cast<uint64_t>(shared); }

  template <class T, int kCount>
  Loaded<T, kCount> load_direct(uint64_t address) {
    Loaded<T, kCount> out;
    std::memcpy(&out, reinterpret_cast<void*>(address), sizeof(out));
    return out;
  }
  template <class T, int kCount>
  Loaded<T, kCount> load_global(uint64_t address) {
    check_global(address, sizeof(T) * kCount, false);
    return load_direct<T, kCount>(address);
  }
  template <class T, int kCount>
  Loaded<T, kCount> load_shared(uint64_t address) {
    Loaded<T, kCount> out;
    char* const from = at_shared(static_cast<uint32_t>(address), sizeof(out));
    shared_access(static_cast<uint32_t>(address), sizeof(out), Access::read);
    std::memcpy(&out, from, sizeof(out));
    return out;
  }
  template <class T, int kCount>
  Loaded<T, kCount> load_cluster(uint64_t address) {
    Loaded<T, kCount> out;
    std::memcpy(&out, cluster_access(resolve(address), sizeof(out), Access::read), sizeof(out));
    return out;
  }
  template <class T, int kCount>
  Loaded<T, kCount> load_generic(uint64_t address) {
    return is_shared(address) ? load_shared<T, kCount>(generic_to_shared(address)) : load_global<T, kCount>(address);
  }

  template <class T, int kCount>
  void store_direct(uint64_t address, Loaded<T, kCount> value) {
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof(value));
  }
  template <class T, int kCount>
  void store_global(uint64_t address, Loaded<T, kCount> value) {
    check_global(address, sizeof(value), true);
    store_direct<T, kCount>(address, value);
  }
  template <class T, int kCount>
  void store_shared(uint64_t address, Loaded<T, kCount> value) {
    uint32_t const offset = static_cast<uint32_t>(address);
    char* const to = at_shared(offset, sizeof(value));
    shared_access(offset, sizeof(value), Access::write, &value);
    std::memcpy(to, &value, sizeof(value));
  }
  template <class T, int kCount>
  void store_cluster(uint64_t address, Loaded<T, kCount> value) {
    std::memcpy(cluster_access(resolve(address), sizeof(value), Access::write), &value, sizeof(value));
  }
  template <class T, int kCount>
  void store_async(Place to, Loaded<T, kCount> value, Place barrier) {
    store_async(to, &value, sizeof(value), barrier);
  }
  template <class T, int kCount>
  void store_generic(uint64_t address, Loaded<T, kCount> value) {
    if (is_shared(address)) {
      store_shared<T, kCount>(generic_to_shared(address), value);
    } else {
      store_global<T, kCount>(address, value);
    }
  }

  template <class T, class Action>
  T atomic_global(uint64_t address, Action action) {
    T const old = load_global<T, 1>(address)[0];
    store_global<T, 1>(address, {action(old)});
    return old;
  }
  template <class T, class Action>
  T atomic_shared(uint64_t address, Action action) {
    char* const at = at_shared(static_cast<uint32_t>(address), sizeof(T));
    shared_access(static_cast<uint32_t>(address), sizeof(T), Access::atomic);
    T old;  // nothing yields from here on
    std::memcpy(&old, at, sizeof(T));
    T const now = action(old);
    std::memcpy(at, &now, sizeof(T));
    return old;
  }
  template <class T, class Action>
  T atomic_generic(uint64_t address, Action action) {
    return is_shared(address) ? atomic_shared<T>(generic_to_shared(address), action) : atomic_global<T>(address, action);
  }

  Place own(uint64_t address) { return {block, static_cast<uint32_t>(address)}; }
  Place resolve(uint64_t address);
  char* remote(Place place, uint32_t bytes);
  char* cluster_access(Place place, uint32_t bytes, Access kind);
  uint32_t map_to_rank(uint32_t address, uint32_t rank);

  // -- the warp
  uint32_t shuffle(Shuffle mode, uint32_t value, uint32_t b, uint32_t c, uint32_t mask, bool* valid);
  uint32_t vote_ballot(bool value, uint32_t mask);
  bool vote_any(bool value, uint32_t mask) { return vote_ballot(value, mask) != 0; }
  bool vote_all(bool value, uint32_t mask) { return vote_ballot(!value, mask) == 0; }
  uint32_t reduce_add(uint32_t value, uint32_t mask);
  uint32_t reduce_min(uint32_t value, uint32_t mask);
  uint32_t reduce_max(uint32_t value, uint32_t mask);
  uint32_t reduce_or(uint32_t value, uint32_t mask);
  bool elect(uint32_t mask);
  void warp_sync(uint32_t mask);
  void load_matrix(uint64_t address, bool transposed, std::initializer_list<uint32_t*> out);
  void store_matrix(uint64_t address, bool transposed, std::initializer_list<uint32_t> in);
  uint32_t transpose_matrix(uint32_t value);
  template <class Element>
  void mma_m16n8k16(std::initializer_list<float*> d, std::initializer_list<uint32_t> a,
                    std::initializer_list<uint32_t> b, std::initializer_list<float> c);
  template <class Element>  // sums in packed fp16
  void mma_m16n8k16(std::initializer_list<uint32_t*> d, std::initializer_list<uint32_t> a,
                    std::initializer_list<uint32_t> b, std::initializer_list<uint32_t> c);

  void mma_m16n8k8_tf32(std::initializer_list<float*> d, std::initializer_list<uint32_t> a,
                        std::initializer_list<uint32_t> b, std::initializer_list<float> c);

  // -- barriers
  void named_sync(uint32_t id, uint32_t count) { named(id, count, true, false); }
  void named_arrive(uint32_t id, uint32_t count) { named(id, count, false, false); }
  bool named_reduce_or(uint32_t id, uint32_t count, bool value) { return named(id, count, true, value) != 0; }
  bool named_reduce_and(uint32_t id, uint32_t count, bool value) { return named(id, count, true, !value) == 0; }
  uint32_t named_reduce_popc(uint32_t id, uint32_t count, bool value) { return named(id, count, true, value); }
  uint32_t named(uint32_t id, uint32_t count, bool wait, bool value);
  void cluster_arrive();
  void cluster_wait();
  void mbarrier_init(Place place, uint32_t arrivals);
  void mbarrier_invalidate(Place place);
  void mbarrier_expect(Place place, uint32_t bytes);
  void mbarrier_arrive(Place place, uint32_t count);
  bool mbarrier_try_wait(Place place, uint32_t parity);
  bool mbarrier_test_wait(Place place, uint32_t parity);
  void fence_proxy_async();
  void set_registers(bool increase, uint32_t count);

  // -- asynchronous copies
  void copy_async(Place to, uint64_t from, uint32_t bytes, uint32_t kept);
  void copy_commit();
  void copy_wait(uint32_t pending);
  void copy_wait_all();
  void copy_arrive_noinc(Place barrier);
  void bulk_load(Place to, uint64_t from, uint32_t bytes, Place barrier);
  void bulk_share(Place to, Place from, uint32_t bytes, Place barrier);
  void store_async(Place to, void const* value, uint32_t bytes, Place barrier);
  void bulk_store(uint64_t to, Place from, uint32_t bytes);
  void bulk_commit();
  void bulk_wait(uint32_t pending, bool only_read);
  void tensor_load(Place to, uint64_t map, std::initializer_list<int32_t> at, Place barrier);
  void tensor_store(uint64_t map, std::initializer_list<int32_t> at, Place from);

  // -- warpgroup products
  void wgmma_fence();
  template <class Element>
  void wgmma(int n, float* const* acc, Operand const& a, uint64_t b, bool accumulate, int transposed_a, int transposed_b);
  void wgmma_commit();
  void wgmma_wait(uint32_t pending);

  // -- state of the thread that the calls above keep
  std::vector<CopyAsync> copies;                       // not yet in a group
  std::deque<std::vector<CopyAsync>> copy_groups;      // oldest first
  std::vector<uint32_t> dirty;                         // granules written and not yet fenced for the async proxy
  BulkStore stores;
  std::deque<BulkStore> store_groups;
  uint64_t products = 0, retired_products = 0;
  std::deque<uint64_t> product_groups;                 // one past the last product of each pending group
  std::vector<InFlight> in_flight;
  uint32_t cluster_phase = 0;

private:
  void land(CopyAsync& copy);
  void land_all_due();
  void submit(int n, float* const* acc, Operand const& a, uint64_t b, bool accumulate, int transposed_a,
              int transposed_b, bool is_half);
  void multiply(float* const* d, uint32_t const* a, uint32_t const* b, float const* c, bool is_half);
};

template <class Element>
inline void Thread::mma_m16n8k16(std::initializer_list<float*> d, std::initializer_list<uint32_t> a,
                                 std::initializer_list<uint32_t> b, std::initializer_list<float> c) {
  multiply(d.begin(), a.begin(), b.begin(), c.begin(), std::is_same_v<Element, half>);
}

template <class Element>
inline void Thread::mma_m16n8k16(std::initializer_list<uint32_t*> d, std::initializer_list<uint32_t> a,
                                 std::initializer_list<uint32_t> b, std::initializer_list<uint32_t> c) {
  float sums[4];
  float* const to[4] = {&sums[0], &sums[1], &sums[2], &sums[3]};
  for (int i = 0; i < 4; ++i) {
    sums[i] = half_value(static_cast<uint16_t>(c.begin()[i / 2] >> i % 2 * 16));
  }
  multiply(to, a.begin(), b.begin(), sums, true);
  for (int i = 0; i < 2; ++i) {
    *d.begin()[i] = rounded<half>(sums[2 * i]).bits | static_cast<uint32_t>(rounded<half>(sums[2 * i + 1]).bits) << 16;
  }
}

template <class Element>
inline void Thread::wgmma(int n, float* const* acc, Operand const& a, uint64_t b, bool accumulate, int transposed_a,
                          int transposed_b) {
  submit(n, acc, a, b, accumulate, transposed_a, transposed_b, std::is_same_v<Element, half>);
}

using Kernel = void (*)(Thread&, char*);

// A kernel by its PTX name, with the places of its parameters in the parameter block.
struct Registration {
  struct Parameter {
    uint32_t offset, bytes;
  };
  Registration(char const* name, Kernel kernel, std::vector<Parameter> parameters, uint32_t static_shared,
               uint32_t cluster, uint32_t registers);
  Kernel kernel;
  std::vector<Parameter> parameters;
  uint32_t static_shared, cluster;
  uint32_t registers;  // of a thread at launch, as many as its launch bounds allow
};

}  // namespace emulator

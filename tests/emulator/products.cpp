// Warpgroup matrix products: asynchronous, and watched while they are in flight.
#include "machine.h"

namespace emulator {

namespace {

// Reads rows x 16 of an operand in shared memory, in the canonical layouts with the 128-byte swizzle, as out[row][k].
uint64_t read_operand(Thread& thread, uint64_t descriptor, int rows, bool transposed, bool is_half, float (*out)[16],
                      bool check) {
  uint32_t const start = static_cast<uint32_t>(descriptor & 0x3fffu) << 4;
  uint32_t const leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fffu) << 4;
  uint32_t const stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fffu) << 4;
  if (descriptor >> 62 != 1) {
    thread.fail("a matrix descriptor without the 128-byte swizzle");
  }
  uint64_t hash = 14695981039346656037ull;
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < 16; ++k) {
      uint32_t const linear = transposed ? start + static_cast<uint32_t>(row / 64) * leading + static_cast<uint32_t>(k / 8) * stride +
                                               static_cast<uint32_t>(k % 8 * 128 + row % 64 * 2)
                                         : start + static_cast<uint32_t>(row / 8) * stride + static_cast<uint32_t>(row % 8 * 128 + k * 2);
      uint32_t const offset = linear ^ (linear >> 3 & 0x70u);
      if (offset + 2 > thread.shared_bytes) {
        thread.bad_shared(offset, 2);
      }
      if (check && thread.block->marks[offset / kGranule] != kClean) {
        require_fenced(thread, *thread.block, offset, 2, "wgmma");
      }
      uint16_t bits;
      std::memcpy(&bits, thread.shared + offset, 2);
      hash = (hash ^ bits) * 1099511628211ull;
      out[row][k] = element(bits, is_half);
    }
  }
  return hash;
}

uint64_t operands(Thread& thread, Product const& product, float (*a)[16], float (*b)[16], bool check) {
  uint64_t hash = read_operand(thread, product.b, product.n, product.transposed_b != 0, product.is_half, b, check);
  if (product.in_registers) {
    for (int warp = 0; warp < 4; ++warp) {
      uint32_t const* fragments[32];
      for (int lane = 0; lane < 32; ++lane) {
        fragments[lane] = product.fragment[32 * warp + lane];
      }
      unpack_a(fragments, product.is_half, a + 16 * warp);
    }
  } else {
    hash ^= 31 * read_operand(thread, product.a, 64, false, product.is_half, a, check);
  }
  return hash;
}

void execute(Thread& thread, Product& product) {
  static float a[64][16], b[256][16];
  static float columns[16][256];
  product.hash = operands(thread, product, a, b, true);
  for (int n = 0; n < product.n; ++n) {
    for (int k = 0; k < 16; ++k) {
      columns[k][n] = b[n][k];
    }
  }
  for (int row = 0; row < 64; ++row) {
    float sums[256] = {};
    for (int k = 0; k < 16; ++k) {
      float const x = a[row][k];
      float const* const y = columns[k];
      for (int n = 0; n < product.n; ++n) {
        sums[n] = std::fma(x, y[n], sums[n]);
      }
    }
    for (int n = 0; n < product.n; ++n) {
      int const lane = row % 8 * 4 + n % 8 / 2, index = n / 8 * 4 + row % 16 / 8 * 2 + n % 2;
      float& to = (*product.value[row / 16 * 32 + lane])[static_cast<size_t>(index)];
      to = product.accumulate ? to + sums[n] : sums[n];
    }
  }
}

}  // namespace

void Thread::submit(int n, float* const* acc, Operand const& a, uint64_t b, bool accumulate, int transposed_b,
                    bool is_half) {
  maybe_yield();
  Warpgroup& group = block->warpgroups[warp / 4];
  Product& product = group.products[products];
  if (product.arrived == 0) {
    product.n = n, product.b = b, product.accumulate = accumulate, product.transposed_b = transposed_b;
    product.is_half = is_half, product.in_registers = a.in_registers, product.a = a.descriptor, product.line = at;
  } else if (product.n != n || product.b != b || product.accumulate != accumulate || product.a != a.descriptor ||
             product.in_registers != a.in_registers) {
    fail("the threads of a warpgroup disagree about a product");
  }
  int const me = static_cast<int>(warp % 4 * 32 + lane);
  std::copy(a.fragment, a.fragment + 4, product.fragment[me]);
  auto mine = std::find_if(in_flight.begin(), in_flight.end(), [&](InFlight const& x) { return x.key == acc[0]; });
  if (mine == in_flight.end()) {
    size_t const count = static_cast<size_t>(n / 2);
    in_flight.push_back({acc[0], {acc, acc + count}, std::make_shared<std::vector<float>>(count), 0});
    mine = in_flight.end() - 1;
    for (size_t i = 0; i < count; ++i) {
      (*mine->value)[i] = *acc[i];
      *acc[i] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  mine->last = products;
  product.value[me] = mine->value;
  if (++product.arrived == 128) {
    execute(*this, product);
    group.executed = products + 1;
    wake(group.waiters);
  }
  ++products;
}

void Thread::wgmma_commit() { product_groups.push_back(products); }

void Thread::wgmma_wait(uint32_t pending) {
  maybe_yield();
  Warpgroup& group = block->warpgroups[warp / 4];
  uint64_t done = 0;
  while (product_groups.size() > pending) {
    done = product_groups.front();
    product_groups.pop_front();
  }
  while (group.executed < done) {
    block_on(fiber_of(*this), group.waiters, "the other warps of a warpgroup product");
  }
  static float a[64][16], b[256][16];
  for (auto item = group.products.begin(); item != group.products.end() && item->first < done;) {
    Product& product = item->second;
    if (product.retired == 0 && operands(*this, product, a, b, false) != product.hash) {
      fail("an operand of the warpgroup product at PTX line " + std::to_string(product.line) +
           " was rewritten in shared memory while it was in flight");
    }
    // Every thread retires each product once, in order.
    ++item;
  }
  for (auto item = group.products.begin(); item != group.products.end() && item->first < done;) {
    item = item->first >= retired_products && ++item->second.retired == 128 ? group.products.erase(item) : std::next(item);
  }
  retired_products = std::max(retired_products, done);
  for (auto mine = in_flight.begin(); mine != in_flight.end();) {
    if (mine->last < retired_products) {
      for (size_t i = 0; i < mine->registers.size(); ++i) {
        *mine->registers[i] = (*mine->value)[i];
      }
      mine = in_flight.erase(mine);
    } else {
      ++mine;
    }
  }
}

}  // namespace emulator

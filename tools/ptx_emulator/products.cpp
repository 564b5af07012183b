// Warpgroup matrix products: each warp of the warpgroup computes its own 16 rows, at its own time, and its operands are
// watched while they are in flight.
#include <immintrin.h>

#include "machine.h"

namespace emulator {

namespace {

constexpr int kDepth = 16, kRows = 16;

// Calls visit(row, k, offset in shared memory) for the 16-byte pieces of an operand of rows x 16 elements, in the canonical
// layouts with the 128-byte swizzle. K-major: eight elements of a row; transposed: of eight rows, at the same k.
template <class Visit>
void walk(uint64_t descriptor, int rows, bool transposed, Visit&& visit) {
  uint32_t const start = static_cast<uint32_t>(descriptor & 0x3fffu) << 4;
  uint32_t const leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fffu) << 4;
  uint32_t const stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fffu) << 4;
  auto const place = [](uint32_t linear) { return linear ^ (linear >> 3 & 0x70u); };
  for (int row = 0; row < rows; row += transposed ? 8 : 1) {
    for (int k = 0; k < kDepth; k += transposed ? 1 : 8) {
      uint32_t const at = transposed ? static_cast<uint32_t>(row / 64) * leading + static_cast<uint32_t>(k / 8) * stride +
                                           static_cast<uint32_t>(k % 8 * 128 + row % 64 * 2)
                                     : static_cast<uint32_t>(row / 8) * stride + static_cast<uint32_t>(row % 8 * 128 + k * 2);
      visit(row, k, place(start + at));
    }
  }
}

template <class Visit>
void walk_operands(Product const& product, Visit&& visit) {
  walk(product.b, product.n, product.transposed_b, [&](int row, int k, uint32_t offset) { visit(false, row, k, offset); });
  if (!product.in_registers) {  // all of it: nothing says which warp reads which rows
    walk(product.a, 64, product.transposed_a, [&](int row, int k, uint32_t offset) { visit(true, row, k, offset); });
  }
}

uint64_t hash_operands(Thread const& thread, Product const& product) {
  uint64_t hash = 14695981039346656037ull;
  walk_operands(product, [&](bool, int, int, uint32_t offset) {
    uint64_t words[2];
    std::memcpy(words, thread.shared + offset, 16);
    hash = (hash ^ words[0]) * 1099511628211ull;
    hash = ((hash ^ words[1]) * 1099511628211ull) ^ hash >> 29;
  });
  return hash;
}

void unpack(char const* from, bool is_half, float* to) {
  __m128i const bits = _mm_loadu_si128(reinterpret_cast<__m128i const*>(from));
  __m256 const values = is_half ? _mm256_cvtph_ps(bits)
                                : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  _mm256_storeu_ps(to, values);
}

// What the lanes of a warp bring to a product.
struct Part {
  Thread* thread;
  Product product;
  bool accumulate;
  uint32_t const* fragment;
  std::vector<float>* value;
};

// The warp's 16 rows of the product.
void execute(Thread& thread, Product const& product, Collective& lanes) {
  static float a[64][kDepth], columns[kDepth][256];
  float eight[8];
  walk_operands(product, [&](bool is_a, int row, int k, uint32_t offset) {
    char const* const from = thread.shared + offset;
    if (is_a && product.transposed_a) {
      unpack(from, product.is_half, eight);
      for (int i = 0; i < 8; ++i) {
        a[row + i][k] = eight[i];
      }
    } else if (is_a) {
      unpack(from, product.is_half, &a[row][k]);
    } else if (product.transposed_b) {
      unpack(from, product.is_half, &columns[k][row]);
    } else {
      unpack(from, product.is_half, eight);
      for (int i = 0; i < 8; ++i) {
        columns[k + i][row] = eight[i];
      }
    }
  });
  float(*mine)[kDepth] = a + thread.warp % 4 * kRows;
  if (product.in_registers) {
    uint32_t const* fragments[32];
    for (int lane = 0; lane < 32; ++lane) {
      fragments[lane] = payload<Part>(lanes, lane).fragment;
    }
    unpack_a(fragments, product.is_half, mine);
  }
  for (int row = 0; row < kRows; ++row) {
    for (int n = 0; n < product.n; n += 8) {
      __m256 sums = _mm256_setzero_ps();
      for (int k = 0; k < kDepth; ++k) {
        sums = _mm256_fmadd_ps(_mm256_set1_ps(mine[row][k]), _mm256_loadu_ps(&columns[k][n]), sums);
      }
      _mm256_storeu_ps(eight, sums);
      for (int i = 0; i < 8; ++i) {
        Part& part = payload<Part>(lanes, row % 8 * 4 + i / 2);
        float& to = (*part.value)[static_cast<size_t>(n / 8 * 4 + row / 8 * 2 + i % 2)];
        to = part.accumulate ? to + eight[i] : eight[i];
      }
    }
  }
}

void begin(Thread& thread, Product& product, Collective& lanes) {
  if (product.b >> 62 != 1 || (!product.in_registers && product.a >> 62 != 1)) {
    thread.fail("a matrix descriptor without the 128-byte swizzle");
  }
  Clock before;
  for (int lane = 0; machine.watches_races && lane < 32; ++lane) {
    join(before, fiber_of(*payload<Part>(lanes, lane).thread).clock);
  }
  uint32_t const entity = static_cast<uint32_t>(machine.fibers.size()) + thread.warp_state->index;
  walk_operands(product, [&](bool, int, int, uint32_t offset) {
    if (offset + 16 > thread.shared_bytes) {
      thread.bad_shared(offset, 16);
    }
    require_fenced(thread, *thread.block, offset, 16, "wgmma reads");
    if (machine.watches_races) {
      watch(thread, *thread.block, offset, 16, Access::read, entity, static_cast<uint32_t>(product.index + 1), before);
    }
  });
  product.hash = hash_operands(thread, product);
}

}  // namespace

void take_step(Thread& thread, Warpgroup::Step step) {
  if (thread.block->warps.size() < thread.warp / 4 * 4 + 4) {
    thread.fail(std::string(step.name) + " by a warpgroup of fewer than four warps");
  }
  Warpgroup& group = thread.block->warpgroups[thread.warp / 4];
  uint64_t const index = thread.warp_state->steps++ - group.first;
  if (index == group.log.size()) {
    group.log.push_back(step);
  }
  Warpgroup::Step& first = group.log[index];
  if (first.line != step.line || !std::equal(first.operands, first.operands + 3, step.operands)) {
    thread.fail(std::string("the warps of a warpgroup disagree: ") + step.name + ", where another executed " + first.name +
                " at PTX line " + std::to_string(first.line) + " or with other operands");
  }
  ++first.warps;
  while (!group.log.empty() && group.log.front().warps == 4) {
    group.log.pop_front();
    ++group.first;
  }
}

void Thread::wgmma_fence() {
  Fiber& fiber = fiber_of(*this);
  fiber.fenced = ++fiber.events;
  if (lane == 0) {
    take_step(*this, {"wgmma.fence", at, {}});
  }
}

void Thread::submit(int n, float* const* acc, Operand const& a, uint64_t b, bool accumulate, int transposed_a,
                    int transposed_b, bool is_half) {
  Fiber& fiber = fiber_of(*this);
  auto mine = std::find_if(in_flight.begin(), in_flight.end(), [&](InFlight const& x) { return x.key == acc[0]; });
  if (mine == in_flight.end()) {
    if (fiber.fenced <= fiber.touched[acc[0]]) {
      fail("no wgmma.fence between the wait for an accumulator's values and the next product into it");
    }
    size_t const count = static_cast<size_t>(n / 2);
    in_flight.push_back({acc[0], {acc, acc + count}, std::make_shared<std::vector<float>>(count), 0});
    mine = in_flight.end() - 1;
    for (size_t i = 0; i < count; ++i) {
      (*mine->value)[i] = *acc[i];
      *acc[i] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  mine->last = products;
  Product const product{products, 0, n, at, transposed_a != 0, transposed_b != 0, is_half, a.in_registers, a.descriptor, b};
  Part part{this, product, accumulate, a.fragment, mine->value.get()};
  ++products;
  meet(*this, kProduct, 0xffffffffu, &part, [&](Collective& lanes) {
    for (int i = 0; i < 32; ++i) {
      Part const& other = payload<Part>(lanes, i);
      if (other.product.index != part.product.index || other.product.a != a.descriptor || other.product.b != b ||
          other.accumulate != accumulate) {
        fail("the lanes of a warp disagree about a product");
      }
    }
    take_step(*this, {"wgmma.mma_async", at, {a.descriptor, b, accumulate}});
    begin(*this, part.product, lanes);
    execute(*this, part.product, lanes);
    warp_state->products.push_back(part.product);
  });
}

void Thread::wgmma_commit() {
  product_groups.push_back(products);
  if (lane == 0) {
    take_step(*this, {"wgmma.commit_group", at, {}});
  }
}

void Thread::wgmma_wait(uint32_t pending) {
  Fiber& fiber = fiber_of(*this);
  while (product_groups.size() > pending) {
    retired_products = std::max(retired_products, product_groups.front());
    product_groups.pop_front();
  }
  meet(*this, kWait, 0xffffffffu, this, [&](Collective&) {
    take_step(*this, {"wgmma.wait_group", at, {pending}});
    auto& flying = warp_state->products;
    while (!flying.empty() && flying.front().index < retired_products) {
      if (hash_operands(*this, flying.front()) != flying.front().hash) {
        fail("an operand of the warpgroup product at PTX line " + std::to_string(flying.front().line) +
             " was rewritten in shared memory while it was in flight");
      }
      flying.pop_front();
    }
  });
  if (machine.watches_races) {
    fiber.clock[machine.fibers.size() + warp_state->index] = static_cast<uint32_t>(retired_products);
  }
  ++fiber.events;
  for (auto mine = in_flight.begin(); mine != in_flight.end();) {
    if (mine->last < retired_products) {
      for (size_t i = 0; i < mine->registers.size(); ++i) {
        *mine->registers[i] = (*mine->value)[i];
      }
      fiber.touched[mine->key] = fiber.events;
      mine = in_flight.erase(mine);
    } else {
      ++mine;
    }
  }
}

}  // namespace emulator

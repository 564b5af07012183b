// What the lanes of a warp do together.
#include "machine.h"

namespace emulator {

uint32_t Thread::shuffle(Shuffle mode, uint32_t value, uint32_t b, uint32_t c, uint32_t mask, bool* valid) {
  struct Item {
    Shuffle mode;
    uint32_t value, b, c, result;
    bool valid;
  } item{mode, value, b, c, 0, false};
  meet(*this, kShuffle, mask, &item, [](Collective& all) {
    for (int lane = 0; lane < 32; ++lane) {
      if (all.payload[lane] == nullptr) {
        continue;
      }
      Item& x = payload<Item>(all, lane);
      int const segment = static_cast<int>(x.c >> 8 & 31), clamp = static_cast<int>(x.c & 31), by = static_cast<int>(x.b & 31);
      int const last = (lane & segment) | (clamp & ~segment), first = lane & segment;
      int from = 0;
      switch (x.mode) {
        case Shuffle::up: from = lane - by, x.valid = from >= last; break;
        case Shuffle::down: from = lane + by, x.valid = from <= last; break;
        case Shuffle::bfly: from = lane ^ by, x.valid = from <= last; break;
        case Shuffle::idx: from = first | (by & ~segment), x.valid = from <= last; break;
      }
      from = x.valid ? from : lane;
      x.result = all.payload[from] != nullptr ? payload<Item>(all, from).value : 0xdeadbeefu;
    }
  });
  if (valid != nullptr) {
    *valid = item.valid;
  }
  return item.result;
}

uint32_t Thread::vote_ballot(bool value, uint32_t mask) {
  struct Item {
    bool value;
    uint32_t result;
  } item{value, 0};
  meet(*this, kVote, mask, &item, [](Collective& all) {
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      votes |= all.payload[lane] != nullptr && payload<Item>(all, lane).value ? 1u << lane : 0u;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (all.payload[lane] != nullptr) {
        payload<Item>(all, lane).result = votes;
      }
    }
  });
  return item.result;
}

// `what` folded over the lanes that meet.
static uint32_t reduce(Thread& thread, uint32_t value, uint32_t mask, uint32_t (*what)(uint32_t, uint32_t)) {
  struct Item {
    uint32_t value, result;
    uint32_t (*what)(uint32_t, uint32_t);
  } item{value, 0, what};
  meet(thread, kReduce, mask, &item, [](Collective& all) {
    Item* first = nullptr;
    for (int lane = 0; lane < 32; ++lane) {
      if (all.payload[lane] == nullptr) continue;
      Item& own = payload<Item>(all, lane);
      if (first == nullptr) {
        first = &own;
        own.result = own.value;
      } else {
        first->result = own.what(first->result, own.value);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (all.payload[lane] != nullptr) {
        payload<Item>(all, lane).result = first->result;
      }
    }
  });
  return item.result;
}

uint32_t Thread::reduce_add(uint32_t value, uint32_t mask) {
  return reduce(*this, value, mask, [](uint32_t x, uint32_t y) { return x + y; });
}

uint32_t Thread::reduce_min(uint32_t value, uint32_t mask) {
  return reduce(*this, value, mask, [](uint32_t x, uint32_t y) { return x < y ? x : y; });
}

uint32_t Thread::reduce_max(uint32_t value, uint32_t mask) {
  return reduce(*this, value, mask, [](uint32_t x, uint32_t y) { return x < y ? y : x; });
}

uint32_t Thread::reduce_or(uint32_t value, uint32_t mask) {
  return reduce(*this, value, mask, [](uint32_t x, uint32_t y) { return x | y; });
}

bool Thread::elect(uint32_t mask) {
  int item = 0;
  meet(*this, kElect, mask, &item, [](Collective&) {});
  return lane == static_cast<uint32_t>(__builtin_ctz(mask));
}

void Thread::warp_sync(uint32_t mask) {
  int item = 0;
  meet(*this, kSync, mask, &item, [](Collective& all) {
    Clock clock;
    for (Fiber* fiber : all.fiber) {
      if (fiber != nullptr) {
        release(fiber->thread, clock);
      }
    }
    for (Fiber* fiber : all.fiber) {
      if (fiber != nullptr) {
        acquire(fiber->thread, clock);
      }
    }
  });
}

namespace {

struct MatrixItem {
  uint32_t address;
  bool transposed;
  uint32_t value[4];
};

}  // namespace

void Thread::load_matrix(uint64_t address, bool transposed, std::initializer_list<uint32_t*> out) {
  at_shared(static_cast<uint32_t>(address), 16);
  MatrixItem item{static_cast<uint32_t>(address), transposed, {}};
  meet(*this, kLoadMatrix, 0xffffffffu, &item, [this](Collective& all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t rows[8][8];
      for (int row = 0; row < 8; ++row) {
        watch(all.fiber[8 * matrix + row]->thread, *block, payload<MatrixItem>(all, 8 * matrix + row).address, 16, Access::read);
        std::memcpy(rows[row], shared + payload<MatrixItem>(all, 8 * matrix + row).address, 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        MatrixItem& x = payload<MatrixItem>(all, lane);
        int const i = lane / 4, j = lane % 4 * 2;
        uint32_t const low = x.transposed ? rows[j][i] : rows[i][j], high = x.transposed ? rows[j + 1][i] : rows[i][j + 1];
        x.value[matrix] = high << 16 | low;
      }
    }
  });
  for (int i = 0; i < 4; ++i) {
    *out.begin()[i] = item.value[i];
  }
}

void Thread::store_matrix(uint64_t address, bool transposed, std::initializer_list<uint32_t> in) {
  at_shared(static_cast<uint32_t>(address), 16);
  mark_written(static_cast<uint32_t>(address), 16);
  MatrixItem item{static_cast<uint32_t>(address), transposed, {}};
  std::copy(in.begin(), in.end(), item.value);
  meet(*this, kStoreMatrix, 0xffffffffu, &item, [this](Collective& all) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t rows[8][8];
      for (int lane = 0; lane < 32; ++lane) {
        MatrixItem const& x = payload<MatrixItem>(all, lane);
        int const i = lane / 4, j = lane % 4 * 2;
        (x.transposed ? rows[j][i] : rows[i][j]) = static_cast<uint16_t>(x.value[matrix]);
        (x.transposed ? rows[j + 1][i] : rows[i][j + 1]) = static_cast<uint16_t>(x.value[matrix] >> 16);
      }
      for (int row = 0; row < 8; ++row) {
        watch(all.fiber[8 * matrix + row]->thread, *block, payload<MatrixItem>(all, 8 * matrix + row).address, 16, Access::write);
        std::memcpy(shared + payload<MatrixItem>(all, 8 * matrix + row).address, rows[row], 16);
      }
    }
  });
}

uint32_t Thread::transpose_matrix(uint32_t value) {
  MatrixItem item{0, true, {value, 0, 0, 0}};
  meet(*this, kMoveMatrix, 0xffffffffu, &item, [](Collective& all) {
    uint16_t rows[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      std::memcpy(&rows[lane / 4][lane % 4 * 2], payload<MatrixItem>(all, lane).value, 4);
    }
    for (int lane = 0; lane < 32; ++lane) {
      int const i = lane / 4, j = lane % 4 * 2;
      payload<MatrixItem>(all, lane).value[0] = uint32_t{rows[j + 1][i]} << 16 | rows[j][i];
    }
  });
  return item.value[0];
}

float element(uint16_t bits, bool is_half) { return is_half ? half_value(bits) : bfloat_value(bits); }

// Rows of a 16 x 16 operand from the fragments of a warp's lanes.
void unpack_a(uint32_t const* const fragment[32], bool is_half, float (*a)[16]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      int const row = lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
      a[row][k] = element(static_cast<uint16_t>(fragment[lane][i]), is_half);
      a[row][k + 1] = element(static_cast<uint16_t>(fragment[lane][i] >> 16), is_half);
    }
  }
}

void Thread::multiply(float* const* d, uint32_t const* a, uint32_t const* b, float const* c, bool is_half) {
  struct Item {
    uint32_t a[4], b[2];
    float c[4];
    bool is_half;
  } item;
  std::copy(a, a + 4, item.a);
  std::copy(b, b + 2, item.b);
  std::copy(c, c + 4, item.c);
  item.is_half = is_half;
  meet(*this, kMma, 0xffffffffu, &item, [](Collective& all) {
    bool const is_half = payload<Item>(all, 0).is_half;
    float a[16][16], b[16][8];
    uint32_t const* fragments[32];
    for (int lane = 0; lane < 32; ++lane) {
      fragments[lane] = payload<Item>(all, lane).a;
    }
    unpack_a(fragments, is_half, a);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 2; ++i) {
        uint32_t const bits = payload<Item>(all, lane).b[i];
        int const k = lane % 4 * 2 + 8 * i, n = lane / 4;
        b[k][n] = element(static_cast<uint16_t>(bits), is_half);
        b[k + 1][n] = element(static_cast<uint16_t>(bits >> 16), is_half);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      Item& x = payload<Item>(all, lane);
      for (int i = 0; i < 4; ++i) {
        int const row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
          sum = std::fma(a[row][k], b[k][column], sum);
        }
        x.c[i] += sum;
      }
    }
  });
  for (int i = 0; i < 4; ++i) {
    *d[i] = item.c[i];
  }
}

// The tensor cores read the upper 19 bits of an operand.
void Thread::mma_m16n8k8_tf32(std::initializer_list<float*> d, std::initializer_list<uint32_t> a,
                              std::initializer_list<uint32_t> b, std::initializer_list<float> c) {
  struct Item {
    uint32_t a[4], b[2];
    float c[4];
  } item;
  std::copy(a.begin(), a.end(), item.a);
  std::copy(b.begin(), b.end(), item.b);
  std::copy(c.begin(), c.end(), item.c);
  meet(*this, kMma, 0xffffffffu, &item, [](Collective& all) {
    auto const cut = [](uint32_t bits) {
      float x;
      bits &= 0xffffe000u;
      std::memcpy(&x, &bits, sizeof(x));
      return x;
    };
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      Item const& x = payload<Item>(all, lane);
      for (int i = 0; i < 4; ++i) {
        a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = cut(x.a[i]);
      }
      for (int i = 0; i < 2; ++i) {
        b[lane % 4 + 4 * i][lane / 4] = cut(x.b[i]);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      Item& x = payload<Item>(all, lane);
      for (int i = 0; i < 4; ++i) {
        float sum = 0;
        for (int k = 0; k < 8; ++k) {
          sum = std::fma(a[lane / 4 + i / 2 * 8][k], b[k][lane % 4 * 2 + i % 2], sum);
        }
        x.c[i] += sum;
      }
    }
  });
  for (int i = 0; i < 4; ++i) {
    *d.begin()[i] = item.c[i];
  }
}

half half_of_double(double x) {
  if (std::isnan(x)) {
    return {0x7fff};
  }
  float const nearest = static_cast<float>(x);
  half const rounded_once = rounded<half>(nearest);
  if (static_cast<double>(nearest) == x) {
    return rounded_once;
  }
  // The conversion to float was inexact: force its last bit to "inexact" (round to odd), then round once.
  uint32_t bits = from_bits<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(x)) {
    --bits;
  }
  return rounded<half>(from_bits<float>(bits | 1u));
}

}  // namespace emulator

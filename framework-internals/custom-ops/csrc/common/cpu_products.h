// Products of small matrices in the registers of a CPU: c = a b, where the elements of a are broadcast and b's rows are vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace products {
namespace {

// A unit is what one lane of an operand's vector holds: one element, or several (kDepth) that are summed at once.
template <typename T> struct Singles {
  using Unit = T;
  using Sum = T;
  using Element = T;
  static constexpr int kDepth = 1, kStep = 1, kRows = 1;
  NATIVE_BUILD_INLINE static simd::Vector<T> add(simd::Vector<T> sum, simd::Vector<T> a, simd::Vector<T> b) { return simd::fma(a, b, sum); }
};

// Registers that hold sums: what the processor has, less a row of b and an element of a.
#if defined(NATIVE_BUILD_AVX512) || defined(NATIVE_BUILD_NEON)
constexpr int kTileRows = 6, kTileVectors = 4;
#else
constexpr int kTileRows = 6, kTileVectors = 2;
#endif

// Where the units of a lie, in bytes: `row` from one row of c to the next, `step` along the sum.
struct Broadcast {
  const char* data;
  int64_t row, step;
};

// What happens to the old values of c.
enum class Old { kNone, kAdded, kScaled };

template <class Product> struct Job {
  using Unit = typename Product::Unit;
  using Sum = typename Product::Sum;
  Broadcast a;
  const Unit* b;  // (depth, columns)
  int64_t b_step;
  int64_t depth;  // in units
  Sum* c;         // (rows, columns)
  int64_t c_row;
  Old old;
  const Sum* factor;  // of each column's old values, for kScaled
};

// One tile, whose sums start from zero and stay in registers; long rows so lose fewer bits than by adding to c.
template <class Product, int kRows, int kVectors> __attribute__((noinline)) void multiply_tile(const Job<Product>& job) {
  using Unit = typename Product::Unit;
  using Sum = typename Product::Sum;
  constexpr int kLanes = simd::kLanes<Sum>;
  simd::Vector<Sum> sums[kRows][kVectors] = {};
  const char* a = job.a.data;
  const Unit* b = job.b;
  const int64_t a_row = job.a.row, a_step = job.a.step, b_step = job.b_step;
  for (int64_t k = job.depth; k > 0; --k, a += a_step, b += b_step) {
    simd::Vector<Unit> vectors[kVectors];
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) std::memcpy(&vectors[n], b + n * kLanes, sizeof vectors[n]);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      Unit unit;
      std::memcpy(&unit, a + m * a_row, sizeof unit);
      const simd::Vector<Unit> factor = simd::broadcast(unit);
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) sums[m][n] = Product::add(sums[m][n], factor, vectors[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      Sum* at = job.c + m * job.c_row + n * kLanes;
      simd::Vector<Sum> sum = sums[m][n];
      if (job.old == Old::kAdded) sum += simd::load(at);
      if (job.old == Old::kScaled) sum = simd::fma(simd::load(at), simd::load(job.factor + n * kLanes), sum);
      simd::store(sum, at);
    }
  }
}

template <class Product, int kRows, int kVectors> NATIVE_BUILD_INLINE void multiply_at_most(const Job<Product>& job, int64_t rows, int64_t vectors) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiply_at_most<Product, kRows - 1, kVectors>(job, rows, vectors);
  }
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return multiply_at_most<Product, kRows, kVectors - 1>(job, rows, vectors);
  }
  multiply_tile<Product, kRows, kVectors>(job);
}

// to (columns x rows, a row every `to_row`) = the transpose of from (rows x columns), both numbers multiples of 16; moves the
// bits of units of four or eight bytes.
template <typename Unit> void transpose(const Unit* from, int64_t from_row, int64_t rows, int64_t columns, Unit* to, int64_t to_row) {
#if defined(NATIVE_BUILD_AVX512) || defined(NATIVE_BUILD_AVX2)
  if constexpr (sizeof(Unit) == 4) {
    // Blocks of 8 x 8: pairs of rows, then of pairs, then of halves.
    for (int64_t i = 0; i < rows; i += 8) {
      for (int64_t j = 0; j < columns; j += 8) {
        __m256 x[8], y[8];
        for (int r = 0; r < 8; ++r) std::memcpy(&x[r], from + (i + r) * from_row + j, sizeof x[r]);
        for (int r = 0; r < 8; r += 2) {
          y[r] = _mm256_unpacklo_ps(x[r], x[r + 1]);
          y[r + 1] = _mm256_unpackhi_ps(x[r], x[r + 1]);
        }
        for (int r = 0; r < 8; r += 4) {
          x[r] = _mm256_shuffle_ps(y[r], y[r + 2], 0x44);
          x[r + 1] = _mm256_shuffle_ps(y[r], y[r + 2], 0xee);
          x[r + 2] = _mm256_shuffle_ps(y[r + 1], y[r + 3], 0x44);
          x[r + 3] = _mm256_shuffle_ps(y[r + 1], y[r + 3], 0xee);
        }
        for (int r = 0; r < 4; ++r) {
          y[r] = _mm256_permute2f128_ps(x[r], x[r + 4], 0x20);
          y[r + 4] = _mm256_permute2f128_ps(x[r], x[r + 4], 0x31);
        }
        for (int r = 0; r < 8; ++r) std::memcpy(to + (j + r) * to_row + i, &y[r], sizeof y[r]);
      }
    }
    return;
  }
#elif defined(NATIVE_BUILD_NEON)
  if constexpr (sizeof(Unit) == 4) {
    // Blocks of 4 x 4: pairs of rows, then of pairs.
    for (int64_t i = 0; i < rows; i += 4) {
      for (int64_t j = 0; j < columns; j += 4) {
        uint32x4_t x[4];
        uint64x2_t y[4];
        for (int r = 0; r < 4; ++r) std::memcpy(&x[r], from + (i + r) * from_row + j, sizeof x[r]);
        for (int r = 0; r < 4; r += 2) {
          y[r] = vreinterpretq_u64_u32(vtrn1q_u32(x[r], x[r + 1]));
          y[r + 1] = vreinterpretq_u64_u32(vtrn2q_u32(x[r], x[r + 1]));
        }
        const uint64x2_t turned[4] = {vtrn1q_u64(y[0], y[2]), vtrn1q_u64(y[1], y[3]), vtrn2q_u64(y[0], y[2]), vtrn2q_u64(y[1], y[3])};
        for (int r = 0; r < 4; ++r) std::memcpy(to + (j + r) * to_row + i, &turned[r], sizeof turned[r]);
      }
    }
    return;
  }
#endif
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) to[j * to_row + i] = from[i * from_row + j];
  }
}

}  // namespace
}  // namespace products
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

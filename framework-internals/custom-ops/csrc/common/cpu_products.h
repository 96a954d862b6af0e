// Products of small matrices in the registers of a CPU: c = a b, where the elements of a are broadcast and b's rows are vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Where the units of a lie, in bytes: `row` from one row of c to the next, `step` along the sum, `tile` from kTileRows rows to the next.
struct Broadcast {
  const char* data = nullptr;
  int64_t row = 0, step = 0, tile = kTileRows * row;
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
  const Sum* factor;  // of each column's old values, for kScaled; null where none are scaled
};

// `tiles` rows of tiles, each of `panels` tiles side by side: the row's part of a is in the first-level cache then, and b stays there. The sums
// of a tile start from zero and stay in registers; long rows so lose fewer bits than by adding to c. What changes from tile to tile is in
// registers too: a job in memory for each one took a sixth of the time of attention with AVX2, because a misprediction at the end of each sum
// lays open what precedes the next.
template <class Product, int kRows, int kVectors> __attribute__((noinline)) void multiply_tiles(const Job<Product>& job, int64_t tiles, int64_t panels) {
  using Unit = typename Product::Unit;
  using Sum = typename Product::Sum;
  using Vector = simd::Vector<Sum>;
  constexpr int kLanes = simd::kLanes<Sum>, kColumns = kVectors * kLanes;
  const char* first = job.a.data;
  Sum* row = job.c;
  const int64_t a_row = job.a.row, a_step = job.a.step, a_tile = job.a.tile, b_step = job.b_step, c_row = job.c_row, depth = job.depth, columns = panels * kColumns;
  const Sum* const factor = job.factor;
  const Old old = job.old;
  for (; tiles > 0; --tiles, first += a_tile, row += kRows * c_row) {
    for (int64_t column = 0; column < columns; column += kColumns) {
      Vector sums[kRows][kVectors] = {};
      const char* a = first;
      const Unit* b = job.b + column;
      for (int64_t k = depth; k > 0; --k, a += a_step, b += b_step) {
        simd::Vector<Unit> vectors[kVectors];
#pragma GCC unroll 8
        for (int n = 0; n < kVectors; ++n) std::memcpy(&vectors[n], b + n * kLanes, sizeof vectors[n]);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
          Unit unit;
          std::memcpy(&unit, a + m * a_row, sizeof unit);
          const simd::Vector<Unit> broadcast = simd::broadcast(unit);
#pragma GCC unroll 8
          for (int n = 0; n < kVectors; ++n) sums[m][n] = Product::add(sums[m][n], broadcast, vectors[n]);
        }
      }
      const auto write = [&](auto changed) NATIVE_BUILD_INLINED {
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
          for (int n = 0; n < kVectors; ++n) {
            const int64_t at = column + n * kLanes;
            Sum* const to = row + m * c_row + at;
            simd::store(changed(sums[m][n], to, at), to);
          }
        }
      };
      if (old == Old::kNone) write([](Vector sum, const Sum*, int64_t) NATIVE_BUILD_INLINED { return sum; });
      else if (factor == nullptr || old == Old::kAdded) write([](Vector sum, const Sum* c, int64_t) NATIVE_BUILD_INLINED { return sum + simd::load(c); });
      else write([factor](Vector sum, const Sum* c, int64_t at) NATIVE_BUILD_INLINED { return simd::fma(simd::load(c), simd::load(factor + at), sum); });
    }
  }
}

// The tiles below `tiles` whole ones, of `rows` rows, at most kRows.
template <class Product, int kRows, int kVectors> NATIVE_BUILD_INLINE void multiply_rest(Job<Product> job, int64_t tiles, int64_t rows, int64_t panels) {
  if constexpr (kRows > 0) {
    if (rows < kRows) return multiply_rest<Product, kRows - 1, kVectors>(job, tiles, rows, panels);
    job.a.data += tiles * job.a.tile;
    job.c += tiles * kTileRows * job.c_row;
    multiply_tiles<Product, kRows, kVectors>(job, 1, panels);
  }
}

// Any number of rows, and of vectors of columns.
template <class Product, int kVectors = kTileVectors> NATIVE_BUILD_INLINE void multiply_columns(Job<Product> job, int64_t rows, int64_t vectors) {
  const int64_t tiles = rows / kTileRows, panels = vectors / kVectors, rest = vectors % kVectors, done = (vectors - rest) * simd::kLanes<typename Product::Sum>;
  if (panels > 0) {
    if (tiles > 0) multiply_tiles<Product, kTileRows, kVectors>(job, tiles, panels);
    multiply_rest<Product, kTileRows - 1, kVectors>(job, tiles, rows % kTileRows, panels);
  }
  if constexpr (kVectors > 1) {
    if (rest == 0) return;
    job.b += done;
    job.c += done;
    if (job.factor != nullptr) job.factor += done;
    multiply_columns<Product, kVectors - 1>(job, rows, rest);
  }
}

// Neighbouring elements as units of four bytes, in a half of AVX-512's vectors and in whole ones elsewhere: 16-bit types are widened, of
// others the bits are moved.
#if defined(NATIVE_BUILD_AVX512) || defined(NATIVE_BUILD_AVX2)
template <typename From> NATIVE_BUILD_INLINE __m256 units(const From* from) {
  if constexpr (std::is_same_v<From, BFloat16>) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16));
  } else if constexpr (std::is_same_v<From, Half>) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  } else {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
}
#elif defined(NATIVE_BUILD_NEON)
template <typename From> NATIVE_BUILD_INLINE uint32x4_t units(const From* from) {
  if constexpr (sizeof(From) == 2) {
    return simd::bits<uint32x4_t>(simd::load(from));
  } else {
    uint32x4_t x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
}
#endif

// to (columns x rows, a row every `to_row`) = the transpose of from (rows x columns), both numbers multiples of 16; moves the
// bits of units of four or eight bytes, or widens elements of two.
template <typename From, typename Unit> void transpose(const From* from, int64_t from_row, int64_t rows, int64_t columns, Unit* to, int64_t to_row) {
#if defined(NATIVE_BUILD_AVX512) || defined(NATIVE_BUILD_AVX2)
  if constexpr (sizeof(Unit) == 4) {
    // Blocks of 8 x 8: pairs of rows, then of pairs, then of halves. GCC unrolls none of this by itself, and arrays then lie in memory.
    for (int64_t i = 0; i < rows; i += 8) {
      for (int64_t j = 0; j < columns; j += 8) {
        __m256 x[8], y[8];
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) x[r] = units(from + (i + r) * from_row + j);
#pragma GCC unroll 8
        for (int r = 0; r < 8; r += 2) {
          y[r] = _mm256_unpacklo_ps(x[r], x[r + 1]);
          y[r + 1] = _mm256_unpackhi_ps(x[r], x[r + 1]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; r += 4) {
          x[r] = _mm256_shuffle_ps(y[r], y[r + 2], 0x44);
          x[r + 1] = _mm256_shuffle_ps(y[r], y[r + 2], 0xee);
          x[r + 2] = _mm256_shuffle_ps(y[r + 1], y[r + 3], 0x44);
          x[r + 3] = _mm256_shuffle_ps(y[r + 1], y[r + 3], 0xee);
        }
#pragma GCC unroll 8
        for (int r = 0; r < 4; ++r) {
          y[r] = _mm256_permute2f128_ps(x[r], x[r + 4], 0x20);
          y[r + 4] = _mm256_permute2f128_ps(x[r], x[r + 4], 0x31);
        }
#pragma GCC unroll 8
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
        for (int r = 0; r < 4; ++r) x[r] = units(from + (i + r) * from_row + j);
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
    for (int64_t j = 0; j < columns; ++j) {
      if constexpr (sizeof(From) == 2) to[j * to_row + i] = widen(from[i * from_row + j]);
      else to[j * to_row + i] = from[i * from_row + j];
    }
  }
}

}  // namespace
}  // namespace products
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

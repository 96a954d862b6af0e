// Products of small matrices in the registers of a CPU: c = a b, where the elements of a are broadcast and b's rows are vectors.
//
// All products of attention have this form if the scores are transposed, with a vector along the queries: S^T = K Q^T and
// O^T = V^T P^T read K and V where they lie, one element (or pair) at a time, and the softmax needs no operation across lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/cpu.h"
#include "cpu_tiles.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace flash_attention {
namespace {

// A unit is what one lane of an operand's vector holds: one element, or two bfloat16 (kDepth) that are summed at once. Operands are
// zero up to a multiple of kStep elements along the sum and, with room in c, of kRows rows.
template <typename T> struct Singles {
  using Unit = T;
  using Sum = T;
  using Element = T;
  static constexpr int kDepth = 1, kStep = 1, kRows = 1;
  NATIVE_BUILD_INLINE static simd::Vector<T> add(simd::Vector<T> sum, simd::Vector<T> a, simd::Vector<T> b) { return simd::fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Unit = int32_t;
  using Sum = float;
  using Element = BFloat16;
  static constexpr int kDepth = 2, kStep = 2, kRows = 1;
  NATIVE_BUILD_INLINE static simd::Floats add(simd::Floats sum, simd::Ints a, simd::Ints b) {
    return _mm512_dpbf16_ps(sum, simd::bits<__m512bh>(a), simd::bits<__m512bh>(b));
  }
};
#endif

#if defined(FLASH_ATTENTION_TILES)
// 16 rows of 32 elements times 16 columns at once. The elements of a row of `a` are neighbours.
struct Tiles {
  using Unit = int32_t;
  using Sum = float;
  using Element = BFloat16;
  static constexpr int kDepth = 2, kStep = 32, kRows = 16;
};
#endif

// What a thread needs while it multiplies.
template <class Product> struct Prepared {
  Prepared() {}
};
#if defined(FLASH_ATTENTION_TILES)
template <> struct Prepared<Tiles> { const tiles::Configured configured; };
#endif

// Registers that hold sums: what the processor has, less a row of b and an element of a.
#if defined(NATIVE_BUILD_AVX512)
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

// c (rows x columns), of whole vectors of columns. Long sums are taken in parts, which loses fewer bits; 32 at
// a time would lose a third less, and cost a tenth of the speed of large heads.
template <class Product> void multiply(Job<Product> job, int64_t rows, int64_t columns) {
  constexpr int64_t kLanes = simd::kLanes<typename Product::Sum>;
  const int64_t longest = rows <= 32 || columns <= 32 ? 32 : 64;
  for (int64_t left = job.depth; left > 0; left -= longest) {
    job.depth = left < longest ? left : longest;
    for (int64_t column = 0; column < columns; column += kTileVectors * kLanes) {
      for (int64_t row = 0; row < rows; row += kTileRows) {
        Job<Product> tile = job;
        tile.a.data += row * job.a.row;
        tile.b += column;
        tile.c += row * job.c_row + column;
        if (tile.factor != nullptr) tile.factor += column;
        multiply_at_most<Product, kTileRows, kTileVectors>(tile, rows - row, (columns - column) / kLanes);
      }
    }
    job.a.data += longest * job.a.step;
    job.b += longest * job.b_step;
    job.old = Old::kAdded;
  }
}

#if defined(FLASH_ATTENTION_TILES)
// One or two tiles of rows by one or two of columns: each operand that is loaded serves all the sums of its row or column.
template <int kRowTiles, int kColumnTiles> void multiply_tiles(const Job<Tiles>& job) {
  constexpr bool kRow = kRowTiles == 2, kColumn = kColumnTiles == 2;
  const int64_t c_row = job.c_row * static_cast<int64_t>(sizeof(float)), b_row = job.b_step * static_cast<int64_t>(sizeof(int32_t));
  float* const below = job.c + tiles::kRows * job.c_row;
  if (job.old == Old::kNone) {
    tiles::zero<0>();
    if constexpr (kColumn) tiles::zero<1>();
    if constexpr (kRow) tiles::zero<2>();
    if constexpr (kRow && kColumn) tiles::zero<3>();
  } else {
    tiles::load<0>(job.c, c_row);
    if constexpr (kColumn) tiles::load<1>(job.c + 16, c_row);
    if constexpr (kRow) tiles::load<2>(below, c_row);
    if constexpr (kRow && kColumn) tiles::load<3>(below + 16, c_row);
  }
  const char* a = job.a.data;
  const int32_t* b = job.b;
  for (int64_t k = 0; k < job.depth; k += 16, a += tiles::kBytes, b += 16 * job.b_step) {
    tiles::load<4>(a, job.a.row);
    tiles::load<6>(b, b_row);
    tiles::add_product<0, 4, 6>();
    if constexpr (kColumn) {
      tiles::load<7>(b + 16, b_row);
      tiles::add_product<1, 4, 7>();
    }
    if constexpr (kRow) {
      tiles::load<5>(a + tiles::kRows * job.a.row, job.a.row);
      tiles::add_product<2, 5, 6>();
    }
    if constexpr (kRow && kColumn) tiles::add_product<3, 5, 7>();
  }
  tiles::store<0>(job.c, c_row);
  if constexpr (kColumn) tiles::store<1>(job.c + 16, c_row);
  if constexpr (kRow) tiles::store<2>(below, c_row);
  if constexpr (kRow && kColumn) tiles::store<3>(below + 16, c_row);
}

// The old values are scaled apart, where their factors are not one.
inline void scale_columns(const Job<Tiles>& job, int64_t rows, int64_t columns) {
  const simd::Floats one = simd::broadcast(1.0f);
  for (int64_t column = 0; column < columns; column += 16) {
    const simd::Floats factor = simd::load(job.factor + column);
    if (_mm512_cmp_ps_mask(factor, one, _CMP_NEQ_UQ) == 0) continue;
    for (int64_t row = 0; row < rows; ++row) {
      float* const at = job.c + row * job.c_row + column;
      simd::store(simd::load(at) * factor, at);
    }
  }
}

template <> inline void multiply<Tiles>(Job<Tiles> job, int64_t rows, int64_t columns) {
  if (job.old == Old::kScaled) scale_columns(job, rows, columns);
  for (int64_t column = 0; column < columns; column += 32) {
    for (int64_t row = 0; row < rows; row += 32) {
      Job<Tiles> tile = job;
      tile.a.data += row * job.a.row;
      tile.b += column;
      tile.c += row * job.c_row + column;
      const bool two_rows = rows - row > 16, two_columns = columns - column > 16;
      if (two_rows) two_columns ? multiply_tiles<2, 2>(tile) : multiply_tiles<2, 1>(tile);
      else two_columns ? multiply_tiles<1, 2>(tile) : multiply_tiles<1, 1>(tile);
    }
  }
}
#endif

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
#endif
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) to[j * to_row + i] = from[i * from_row + j];
  }
}

}  // namespace
}  // namespace flash_attention
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

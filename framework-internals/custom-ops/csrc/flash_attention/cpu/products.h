// The products of attention: those of ../../common/cpu_products.h, in parts, and those of bfloat16.
//
// All of them have one form, elements of a and vectors of b, if the scores are transposed, with a vector along the queries:
// S^T = K Q^T and O^T = V^T P^T read K and V where they lie, one element (or pair) at a time, and the softmax needs no operation
// across lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../common/cpu_products.h"
#include "tiles.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace flash_attention {
using namespace products;
namespace {

// A unit is one element, or two bfloat16. Operands are zero up to a multiple of kStep elements along the sum and, with room in c, of
// kRows rows.
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

// c (rows x columns), of whole vectors of columns. Long sums are taken in parts, which loses fewer bits; 32 at
// a time would lose a third less, and cost a tenth of the speed of large heads.
template <class Product> void multiply(Job<Product> job, int64_t rows, int64_t columns) {
  constexpr int64_t kLanes = simd::kLanes<typename Product::Sum>;
  const int64_t longest = rows <= 32 || columns <= 32 ? 32 : 64;
  for (int64_t left = job.depth; left > 0; left -= longest) {
    job.depth = left < longest ? left : longest;
    multiply_columns(job, rows, columns / kLanes);
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

}  // namespace
}  // namespace flash_attention
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

// RMSNorm, and layer normalisation (kCentred), on the CPU. Threads share the rows, or the blocks of columns of a few wide rows; vectors hold columns. The two passes
// over a row read it from memory once: the second finds it in the cache. weight and dweight have the accumulating type; they
// are one row among thousands.
//
// A result depends neither on the number of threads nor on the division of the work: a row is always summed block by block,
// each block by the same machine code (hence noinline), and the sums of the blocks are added in order.
//
// RMS_NORM_CPU_LEVEL names an inner namespace, so that one library can contain this file for several instruction sets.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <numeric>

#include <native_build/memory.h>
#include <native_build/simd.h>

#include "../rms_norm.h"
#include "parallel.h"

namespace rms_norm {
#ifdef RMS_NORM_CPU_LEVEL
namespace RMS_NORM_CPU_LEVEL {
#endif
namespace {

namespace simd = native_build::simd;
using native_build::BFloat16;
using native_build::Half;
using native_build::Wide;
using native_build::bits;

// The number of columns that are summed at a time. A partial sum of this many floats, spread over the lanes of vectors, has an
// error of a few units in the last place. The sums of blocks are added in double.
constexpr int64_t kColumns = 1024;

// The number of rows that are summed into one partial row of dweight. It does not depend on the number of threads, so neither does
// dweight. Few rows make small groups, so that whole rows keep some threads busy.
int64_t rows_per_partial(int64_t rows) { return rows < 512 ? 8 : 64; }

// The number of elements that justifies another thread.
constexpr int64_t kGrain = int64_t{1} << 15;

// The number of rows that a short row is summed before it is written.
constexpr int64_t kRowsAhead = 2;

// Partial rows of dweight are in the order of the lanes of simd::Block, and end after a whole one.
constexpr int64_t kPadding = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Zen 4 and older, and Intel's until 2018: two rows of two operands with weight and sums are more than 32 KiB hold.
bool has_small_cache() { return native_build::first_level_cache() <= int64_t{32} << 10; }

struct Columns {
  int64_t first;
  int64_t count;
};

// A matrix whose rows are divided into blocks of columns.
struct Grid {
  int64_t rows;
  int64_t columns;
  int64_t blocks = ceil_div(columns, kColumns);  // in a row

  Columns block(int64_t index) const { return {index * kColumns, std::min(kColumns, columns - index * kColumns)}; }
  int64_t grain_in_rows() const { return std::max<int64_t>(1, kGrain / columns); }
  int64_t grain_in_blocks() const { return std::max<int64_t>(1, kGrain / std::min(columns, kColumns)); }

  // Of a row with that sum.
  template <class A> A mean(double total) const {
    const A mean = static_cast<A>(total / static_cast<double>(columns));
    return mean == mean ? mean : std::numeric_limits<A>::quiet_NaN();
  }

  // Whether `tasks` of whole rows leave threads idle that blocks of columns would occupy.
  bool is_few_and_wide(int64_t tasks) const { return blocks > 1 && rows * columns >= 2 * kGrain && tasks < threads(); }
};

template <class T> const T* row_of(const Rows& rows, int64_t row) {
  const T* const data = static_cast<const T*>(rows.data);
  if (row < rows.inner) return data + row * rows.inner_stride;  // always, with one stride: two divisions take as long as a vector's work
  return data + (row / rows.inner) * rows.outer_stride + (row % rows.inner) * rows.inner_stride;
}

// sums + a * b, rounded once wherever it is inlined.
template <class T> NATIVE_BUILD_INLINE simd::Block<T> add_product(const simd::Block<T>& sums, const simd::Block<T>& a, const simd::Block<T>& b) {
  return simd::each<T>([](auto sum, auto x, auto y) NATIVE_BUILD_INLINED { return simd::fma(x, y, sum); }, sums, a, b);
}
template <class T> NATIVE_BUILD_INLINE simd::Block<T> product(const simd::Block<T>& a, const simd::Block<T>& b) {
  return simd::each<T>([](auto x, auto y) NATIVE_BUILD_INLINED { return x * y; }, a, b);
}
template <class T> NATIVE_BUILD_INLINE simd::Block<T> scaled(const simd::Block<T>& block, Wide<T> factor) {
  return simd::each<T>([factor](auto x) NATIVE_BUILD_INLINED { return x * factor; }, block);
}
template <class T> NATIVE_BUILD_INLINE simd::Block<T> add_scaled(const simd::Block<T>& sums, const simd::Block<T>& block, Wide<T> factor) {
  return simd::each<T>([factor](auto sum, auto x) NATIVE_BUILD_INLINED { return simd::fma(x, simd::broadcast(factor), sum); }, sums, block);
}
template <class T> NATIVE_BUILD_INLINE simd::Block<T> all(Wide<T> number) {
  const auto vector = simd::broadcast(number);
  return {{vector, vector, vector, vector}};
}
template <class T> NATIVE_BUILD_INLINE simd::Block<T> plus(const simd::Block<T>& block, Wide<T> number) {
  return simd::each<T>([number](auto x) NATIVE_BUILD_INLINED { return x + number; }, block);
}

// Whether rows are short enough for loops that a processor can hurry: where results of longer rows are streamed, they waited longer for memory
// the faster the loop was (0.80 to 0.96 times the speed).
template <class T> bool is_short(int64_t columns) { return columns * static_cast<int64_t>(sizeof(T)) <= 4096; }

// A result as a store takes it. It is not exact, so that `kFast` may round ties towards zero.
template <bool kFast, class Block> NATIVE_BUILD_INLINE auto narrow(const Block& block) {
  if constexpr (kFast) return simd::narrow_with_ties_down(block);
  else return simd::narrow_untested(block);
}

// Calls `run` with a constant: a test of a flag in a loop costs 8 % of it, and what it guards costs registers. Where the flag is never
// true, or does not matter, `kMatters` spares the code.
template <bool kMatters, class Run> NATIVE_BUILD_INLINE auto with_constant(bool flag, Run run) {
  if constexpr (kMatters)
    if (flag) return run(std::true_type{});
  return run(std::false_type{});
}

// The elements to ask for while a row is computed, so that they have arrived when they are summed: those a distance later in memory, at least
// `bytes` and `rows`, both measured. Of rows with gaps between them some of these lie in a gap, which only costs time.
class Later {
 public:
  Later(const Shape& shape, int64_t element_size, int64_t bytes, double rows) : last_(shape.rows - 1) {
    const int64_t distance = std::max(bytes / element_size, static_cast<int64_t>(rows * static_cast<double>(shape.columns)));
    rows_ = distance / shape.columns;  // once a call: a division takes as long as a vector's work
    columns_ = distance % shape.columns;
  }

  template <class T> const T* of(const Rows& rows, int64_t row) const { return row_of<T>(rows, std::min(row + rows_, last_)) + columns_; }

 private:
  int64_t last_, rows_, columns_;
};

// float8_e4m3fn, clamped to the largest finite value.
NATIVE_BUILD_INLINE uint8_t quantised(float value) {
  const uint32_t word = bits<uint32_t>(value), magnitude = word & 0x7FFFFFFFu;
  const uint32_t finite = native_build::select(magnitude >= 0x43E00000u, 0x7Eu, native_build::round_magnitude<3, 7>(magnitude));
  return static_cast<uint8_t>(((word >> 24) & 0x80u) | native_build::select(magnitude > native_build::kInfinity, 0x7Fu, finite));
}

// A number, or NaN without a payload, whose low bits would carry into the sign where a result is rounded untested.
template <class V, class A> NATIVE_BUILD_INLINE V without_payload(V value, A) {
  return value == value ? value : V{} + std::numeric_limits<A>::quiet_NaN();
}

// w = weight + offset in the order of the lanes of blocks, with zeros up to the end of the last one: thousands of rows use it.
template <class T> class PreparedWeight {
  using A = Wide<T>;

 public:
  PreparedWeight(const Weight& weight, int64_t columns) {
    if (!weight.data) return;
    const int64_t count = ceil_div(columns, kPadding) * kPadding;
    prepared_.reset(static_cast<A*>(::operator new(static_cast<size_t>(count) * sizeof(A), kAlignment)));
    const A* from = static_cast<const A*>(weight.data);
    const A offset = static_cast<A>(weight.offset);
    parallel_for(ceil_div(columns, kPadding), kGrain / kPadding, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * kPadding; i < end * kPadding; i += simd::kBlock<T>) {
        const simd::Block<T> block = i < columns ? simd::load_wide_block<T>(from + i, columns - i) : simd::Block<T>{};
        simd::store_lanes<T>(simd::each<T>([offset](auto w) NATIVE_BUILD_INLINED { return without_payload(w + offset, offset); }, block), prepared_.get() + i);
      }
    });
  }

  const A* from(int64_t column) const { return prepared_ ? prepared_.get() + column : nullptr; }

 private:
  static constexpr std::align_val_t kAlignment{64};  // a vector of 64 bytes across two cache lines takes two loads
  struct Delete {
    void operator()(A* data) const { ::operator delete(data, kAlignment); }
  };

  std::unique_ptr<A, Delete> prepared_;
};

// A block minus the mean of its row; the same block where nothing is subtracted.
template <bool kCentred, class T> NATIVE_BUILD_INLINE simd::Block<T> centred(const simd::Block<T>& block, Wide<T> mean) {
  if constexpr (kCentred) return plus<T>(block, -mean);
  else return block;
}

// The first `count` elements of a block, and zeros.
template <class T> NATIVE_BUILD_INLINE simd::Block<T> first_of(const simd::Block<T>& block, int64_t count) {
  Wide<T> values[simd::kBlock<T>];
  simd::store_wide_block<T>(block, values, count);
  return simd::load_wide_block<T>(values, count);
}

// The state that the blocks of a row share after its squares are summed.
template <class A> struct RowScale {
  A mean, rstd;
  float quantum;  // the scale that divides a quantised y
};

template <class T, bool kCentred> class ForwardKernel {
  using A = Wide<T>;

 public:
  explicit ForwardKernel(const Forward& call)
      : call_(call), columns_(call.shape.columns), weight_(call.weight, columns_), bias_({call.bias, 0}, columns_),
        streams_(!call.quantised && native_build::is_streamed(call.shape.rows * columns_ * static_cast<int64_t>(sizeof(T)))),
        sums_twice_(streams_ && call.residual.data && streams_rows(call.y) && streams_rows(call.s)),
        later_(later()) {}

  // How many rows a row is summed before it is written: the latency of the sum over lanes, the root and the division is a third of the time of
  // a row of 1024 elements of 16 bits, and the rows between hide it. float32 that is read three times would not stay in the first-level cache.
  int64_t rows_ahead() const { return is_short<T>(columns_) && !call_.residual.data && !(kCentred && sizeof(T) > 2) ? kRowsAhead : 0; }

  // Whether write_and_square() can stand for write() and squares().
  bool writes_and_squares() const { return rows_ahead() > 0 && is_plain(); }

  bool streams() const { return streams_; }
  bool scales_rows() const { return call_.quantised && !call_.quantised->scale; }

  // The sum of s, over a block; with `kDeviations` of s - mean.
  template <bool kDeviations> [[gnu::noinline]] A total(int64_t row, Columns block, A mean) const {
    return with_summands(row, block, [&](auto summands) {
      simd::Block<T> sums = {};
      simd::each_block<T>(block.count, [&](int64_t i, int64_t n) NATIVE_BUILD_INLINED {
        sums = simd::sum<T>(sums, deviations<kDeviations>(simd::values_of(summands(i, n)), n, mean));
      });
      return simd::sum_of_lanes<T>(sums);
    });
  }

  // Sums a row again where its mean is far from zero beside its deviations, of which the rounding of that sum is a part: the mean of a row of
  // equal numbers is then that number. The deviations of s from the first mean are small, so their sum has the digits that the mean lacks.
  void refine(int64_t row, const Grid& grid, A& mean, double& squares) const {
    const double columns = static_cast<double>(columns_), first = mean;
    if (!kCentred || !(squares * 256 < first * first * columns)) return;
    double total_deviation = 0;
    for (int64_t i = 0; i < grid.blocks; ++i) total_deviation += total<true>(row, grid.block(i), mean);
    mean = static_cast<A>(first + total_deviation / columns);
    squares = 0;
    for (int64_t i = 0; i < grid.blocks; ++i) squares += this->squares(row, grid.block(i), mean);
  }

  // The sum of (s - mean)^2 over a block. With a residual, this also stores s unless write_both() does.
  [[gnu::noinline]] A squares(int64_t row, Columns block, A mean) const {
    return with_summands(row, block, [&](auto summands) {
      const auto sum = [&](auto keeps) NATIVE_BUILD_INLINED {
        simd::Block<T> sums = {};
        simd::each_block<T>(block.count, [&](int64_t i, int64_t n) NATIVE_BUILD_INLINED {
          const auto s = summands(i, n);
          if constexpr (keeps) simd::store_block<T>(s, static_cast<T*>(call_.s) + row * columns_ + block.first + i, n);
          add_square(sums, simd::values_of(s), n, mean);
        });
        return simd::sum_of_lanes<T>(sums);
      };
      return call_.residual.data && !sums_twice_ ? sum(std::true_type{}) : sum(std::false_type{});
    });
  }

  RowScale<A> scale(int64_t row, A mean, double squares) const {
    const A rstd = without_payload(static_cast<A>(1.0 / std::sqrt(squares / static_cast<double>(columns_) + call_.eps)), A{});
    if constexpr (kCentred) static_cast<A*>(call_.rstd)[2 * row] = mean, static_cast<A*>(call_.rstd)[2 * row + 1] = rstd;
    else if (call_.rstd) static_cast<A*>(call_.rstd)[row] = rstd;
    return {mean, rstd, call_.quantised && call_.quantised->scale ? *call_.quantised->scale : 1.0f};
  }

  // The largest |y| of a block, as bits: bits of non-negative floats are ordered, with NaN above infinity.
  [[gnu::noinline]] uint32_t largest(int64_t row, Columns block, RowScale<A> scale) const {
    alignas(64) A y[kColumns];
    normalise_wide(row, block, scale, y);
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < block.count; ++i) {
      const uint32_t magnitude = bits<uint32_t>(static_cast<float>(y[i])) & 0x7FFFFFFFu;
      most = magnitude > most ? magnitude : most;
    }
    return most;
  }

  float quantum(int64_t row, uint32_t largest) const {
    const float scale = bits<float>(largest) / kLargestFloat8;
    return call_.quantised->row_scales[row] = scale == 0 ? 1.0f : scale;
  }

  // write() of a block of a row, and squares() of that of another with its mean, in one loop: memory and arithmetic are then evenly busy.
  [[gnu::noinline]] A write_and_square(int64_t row, Columns block, RowScale<A> scale, int64_t other, A mean) const {
    const T* const later = later_.of<T>(call_.x, row) + block.first;
    const T* const x = row_of<T>(call_.x, other) + block.first;
    simd::Block<T> sums = {};
    with_normalised(row, block, scale, false, [&](auto normalised) {
      simd::write_row(static_cast<T*>(call_.y) + row * columns_ + block.first, block.count, streams_, [&](int64_t i, int64_t n) NATIVE_BUILD_INLINED {
        simd::prefetch_block(later + i);
        add_square(sums, simd::load_block(x + i, n), n, mean);
        return narrow<true>(normalised(i, n));
      });
    });
    return simd::sum_of_lanes<T>(sums);
  }

  // Writes y of a block, and asks for that of a later row meanwhile: reads and writes of memory then overlap.
  [[gnu::noinline]] void write(int64_t row, Columns block, RowScale<A> scale) const {
    const int64_t at = row * columns_ + block.first;
    if (call_.quantised) {
      alignas(64) A buffer[kColumns];
      normalise_wide(row, block, scale, buffer);
      return quantise(buffer, scale.quantum, static_cast<uint8_t*>(call_.y) + at, block.count);
    }
    if (sums_twice_) return write_both(row, block, scale);
    const T* const later_x = later_.of<T>(call_.x, row) + block.first;
    const T* const later_residual = call_.residual.data ? later_.of<T>(call_.residual, row) + block.first : nullptr;
    with_constant<sizeof(T) <= 4>(is_plain(), [&](auto plain) {
      with_normalised(row, block, scale, !plain && call_.llama, [&](auto normalised) {
        simd::write_row(static_cast<T*>(call_.y) + at, block.count, streams_, [=](int64_t i, int64_t n) NATIVE_BUILD_INLINED {
          simd::prefetch_block(later_x + i);
          if (!plain && later_residual) simd::prefetch_block(later_residual + i);
          return narrow<plain>(normalised(i, n));
        });
      });
    });
  }

 private:
  // Without what few calls ask for, and where faster loops are faster.
  bool is_plain() const { return !call_.llama && !call_.quantised && !call_.residual.data && (is_short<T>(columns_) || !streams_); }

  Later later() const {
    if (!call_.residual.data) return {call_.shape, sizeof(T), 10240, 1.5};
    if (sums_twice_) return {call_.shape, sizeof(T), 7168, 1.75};
    return {call_.shape, sizeof(T), 4096, 2};
  }

  // Adds (s - mean)^2 of the first n elements of a block.
  static NATIVE_BUILD_INLINE void add_square(simd::Block<T>& sums, const simd::Block<T>& s, int64_t n, A mean) {
    const simd::Block<T> c = deviations<kCentred>(s, n, mean);
    sums = add_product<T>(sums, c, c);
  }

  // The first n elements of a block, minus the mean with `kFromMean`; the others are zero.
  template <bool kFromMean> static NATIVE_BUILD_INLINE simd::Block<T> deviations(const simd::Block<T>& s, int64_t n, A mean) {
    const simd::Block<T> c = centred<kFromMean, T>(s, mean);
    return kFromMean && n < simd::kBlock<T> ? first_of<T>(c, n) : c;
  }

  // Whether streaming stores can write all whole blocks of all rows.
  bool streams_rows(const void* to) const {
    return reinterpret_cast<uintptr_t>(to) % simd::kBytes == 0 && columns_ * static_cast<int64_t>(sizeof(T)) % simd::kBytes == 0;
  }

  // Writes s and y of a block past the caches, and sums x and the residual again: an s that squares() stored for this would be in the caches,
  // and its lines read from memory first.
  [[gnu::noinline]] void write_both(int64_t row, Columns block, RowScale<A> scale) const {
    const int64_t at = row * columns_ + block.first;
    T *const s_to = static_cast<T*>(call_.s) + at, *const y_to = static_cast<T*>(call_.y) + at;
    const T *const later_x = later_.of<T>(call_.x, row) + block.first, *const later_residual = later_.of<T>(call_.residual, row) + block.first;
    const auto put = [](const auto& from, T* to, int64_t n) NATIVE_BUILD_INLINED {
      if (n == simd::kBlock<T>) simd::stream_block<T>(from, to);
      else simd::store_block<T>(from, to, n);
    };
    with_summands(row, block, [&](auto summands) {
      with_normalising(block, scale, call_.llama, [&](auto normalise) {
        simd::each_block<T>(block.count, [&](int64_t i, int64_t n) NATIVE_BUILD_INLINED {
          simd::prefetch_block(later_x + i);
          simd::prefetch_block(later_residual + i);
          const auto s = summands(i, n);
          put(s, s_to + i, n);
          put(narrow<false>(normalise(simd::values_of(s), i)), y_to + i, n);
        });
      });
    });
  }

  // Calls `run` with a function of (i, n) that returns s of the elements from i on, as a store takes it.
  template <class Run> NATIVE_BUILD_INLINE auto with_summands(int64_t row, Columns block, Run run) const {
    const T* x = row_of<T>(call_.x, row) + block.first;
    if (!call_.residual.data) return run([x](int64_t i, int64_t n) NATIVE_BUILD_INLINED { return simd::load_block(x + i, n); });
    const T* residual = row_of<T>(call_.residual, row) + block.first;
    return run([=](int64_t i, int64_t n) NATIVE_BUILD_INLINED {
      return simd::rounded_to_store<T>(simd::sum<T>(simd::load_block(x + i, n), simd::load_block(residual + i, n)));
    });
  }

  // Calls `run` with a function of s and i that returns y of the block from i on.
  template <class Run> NATIVE_BUILD_INLINE auto with_normalising(Columns block, RowScale<A> scale, bool llama, Run run) const {
    const auto unweighted = [mean = scale.mean, rstd = scale.rstd, llama](const simd::Block<T>& s, int64_t) NATIVE_BUILD_INLINED {
      const simd::Block<T> normalised = scaled<T>(centred<kCentred, T>(s, mean), rstd);
      return !kCentred && llama ? simd::rounded<T>(normalised) : normalised;
    };
    const A* const weight = weight_.from(block.first);
    if constexpr (kCentred) {
      const A* const bias = bias_.from(block.first);
      if (weight && bias) {
        return run([=](const simd::Block<T>& s, int64_t i) NATIVE_BUILD_INLINED {
          return add_product<T>(simd::load_lanes<T>(bias + i), unweighted(s, i), simd::load_lanes<T>(weight + i));
        });
      }
      if (bias) return run([=](const simd::Block<T>& s, int64_t i) NATIVE_BUILD_INLINED { return simd::sum<T>(unweighted(s, i), simd::load_lanes<T>(bias + i)); });
    }
    if (!weight) return run(unweighted);
    return run([=](const simd::Block<T>& s, int64_t i) NATIVE_BUILD_INLINED { return product<T>(unweighted(s, i), simd::load_lanes<T>(weight + i)); });
  }

  // Calls `run` with a function of (i, n) that returns y of the elements from i on, from the stored s.
  template <class Run> NATIVE_BUILD_INLINE auto with_normalised(int64_t row, Columns block, RowScale<A> scale, bool llama, Run run) const {
    const T* s = (call_.residual.data ? static_cast<const T*>(call_.s) + row * columns_ : row_of<T>(call_.x, row)) + block.first;
    return with_normalising(block, scale, llama, [&](auto normalise) {
      return run([=](int64_t i, int64_t n) NATIVE_BUILD_INLINED { return normalise(simd::load_block(s + i, n), i); });
    });
  }

  void normalise_wide(int64_t row, Columns block, RowScale<A> scale, A* y) const {
    with_normalised(row, block, scale, call_.llama, [&](auto normalised) {
      for (int64_t i = 0; i < block.count; i += simd::kBlock<T>) simd::store_wide_block<T>(normalised(i, block.count - i), y + i, block.count - i);
    });
  }

  static void quantise(const A* y, float quantum, uint8_t* to, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = quantised(static_cast<float>(y[i]) / quantum);
  }

  const Forward& call_;
  const int64_t columns_;
  const PreparedWeight<T> weight_, bias_;
  const bool streams_;
  const bool sums_twice_;
  const Later later_;
};

template <class T, bool kCentred> void forward_by_rows(const ForwardKernel<T, kCentred>& kernel, const Grid& grid) {
  using A = Wide<T>;
  parallel_for(grid.rows, grid.grain_in_rows(), [&](int64_t begin, int64_t end) {
    struct {
      A mean;
      double squares;
    } summed[kRowsAhead + 1];
    const int64_t ahead = kernel.rows_ahead();
    const bool can_do_both = kernel.writes_and_squares(), scales_rows = kernel.scales_rows();
    for (int64_t row = begin, to = begin - ahead; to < end; ++row, ++to) {  // `row` is summed, and `to` written
      const bool sums = row < end, writes = to >= begin, both = sums && writes && can_do_both;
      A mean = 0;
      double squares = 0;
      if (kCentred && sums) {
        double total = 0;
        for (int64_t i = 0; i < grid.blocks; ++i) total += kernel.template total<false>(row, grid.block(i), 0);
        mean = grid.mean<A>(total);
      }
      if (sums && !both)
        for (int64_t i = 0; i < grid.blocks; ++i) squares += kernel.squares(row, grid.block(i), mean);
      auto& sums_of_row = summed[(row - begin) % (kRowsAhead + 1)];
      sums_of_row = {mean, squares};
      if (!writes) continue;
      auto& found = summed[(to - begin) % (kRowsAhead + 1)];
      kernel.refine(to, grid, found.mean, found.squares);
      RowScale<A> scale = kernel.scale(to, found.mean, found.squares);
      if (scales_rows) {
        uint32_t largest = 0;
        for (int64_t i = 0; i < grid.blocks; ++i) largest = std::max(largest, kernel.largest(to, grid.block(i), scale));
        scale.quantum = kernel.quantum(to, largest);
      }
      for (int64_t i = 0; i < grid.blocks; ++i) {
        if (both) sums_of_row.squares += kernel.write_and_square(to, grid.block(i), scale, row, mean);
        else kernel.write(to, grid.block(i), scale);
      }
    }
    if (kernel.streams()) simd::end_of_stream();
  });
}

// The passes of forward_by_rows one after the other, each over all blocks of all rows.
template <class T, bool kCentred> void forward_by_blocks(const ForwardKernel<T, kCentred>& kernel, const Grid& grid) {
  using A = Wide<T>;
  const std::unique_ptr<A[]> found(new A[grid.rows * grid.blocks]);
  const std::unique_ptr<RowScale<A>[]> scales(new RowScale<A>[grid.rows]{});
  const auto each_block = [&](auto&& visit) {
    parallel_for(grid.rows * grid.blocks, grid.grain_in_blocks(), [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) visit(index, index / grid.blocks, grid.block(index % grid.blocks));
      if (kernel.streams()) simd::end_of_stream();
    });
  };
  const auto over_row = [&](int64_t row) { return std::accumulate(&found[row * grid.blocks], &found[(row + 1) * grid.blocks], 0.0); };
  if constexpr (kCentred) {
    each_block([&](int64_t index, int64_t row, Columns block) { found[index] = kernel.template total<false>(row, block, 0); });
    for (int64_t row = 0; row < grid.rows; ++row) scales[row].mean = grid.mean<A>(over_row(row));
  }
  each_block([&](int64_t index, int64_t row, Columns block) { found[index] = kernel.squares(row, block, scales[row].mean); });
  for (int64_t row = 0; row < grid.rows; ++row) {
    double squares = over_row(row);
    kernel.refine(row, grid, scales[row].mean, squares);
    scales[row] = kernel.scale(row, scales[row].mean, squares);
  }
  if (kernel.scales_rows()) {
    const std::unique_ptr<uint32_t[]> largest(new uint32_t[grid.rows * grid.blocks]);
    each_block([&](int64_t index, int64_t row, Columns block) { largest[index] = kernel.largest(row, block, scales[row]); });
    for (int64_t row = 0; row < grid.rows; ++row) {
      const uint32_t* first = largest.get() + row * grid.blocks;
      scales[row].quantum = kernel.quantum(row, *std::max_element(first, first + grid.blocks));
    }
  }
  each_block([&](int64_t, int64_t row, Columns block) { kernel.write(row, block, scales[row]); });
}

// The sums over a row, or a block of it, of g * c and, if centred, of g.
template <class A, bool kCentred> using Sums = std::array<A, kCentred ? 2 : 1>;

template <class A, bool kCentred> void add(Sums<double, kCentred>& sums, const Sums<A, kCentred>& of_block) {
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += of_block[i];
}

// dx is g * rstd + c * pull + level.
template <class A> struct Factors {
  A pull, level;
};

template <class T, bool kCentred> class BackwardKernel {
  using A = Wide<T>;

 public:
  explicit BackwardKernel(const Backward& call)
      : call_(call), columns_(call.shape.columns), weight_(call.weight, columns_), later_(call.shape, sizeof(T), has_small_cache() ? 4096 : 7168, has_small_cache() ? 1 : 1.75),
        streams_(native_build::is_streamed(call.shape.rows * columns_ * static_cast<int64_t>(sizeof(T)))) {}

  bool streams() const { return streams_; }

  // Whether sums() adds to the gradients of the parameters, and not write(): this takes more operations. But stores leave a processor in order,
  // those of the gradients behind the streaming ones, and processors of small caches have room for few that wait.
  bool adds_first() const { return streams_ && has_small_cache(); }

  // With `kBothAsk` this asks for the first half of a later row, and write() for the second: memory is then
  // busy in both passes, but the lines are in the first-level cache for longer. With `kAdds` this adds to the gradients of the parameters.
  template <bool kBothAsk, bool kAdds> [[gnu::noinline]] Sums<A, kCentred> sums(int64_t row, Columns block, A* partial, int64_t stride) const {
    const T *dy = row_of<T>(call_.dy, row) + block.first, *s = row_of<T>(call_.s, row) + block.first;
    const T *later_dy = later_.of<T>(call_.dy, row) + block.first, *later_s = later_.of<T>(call_.s, row) + block.first;
    const A mean = this->mean(row), rstd = this->rstd(row);
    return with_constant<!kCentred>(call_.llama, [&](auto llama) {
      return with_gradient(block, llama, [&](auto gradient) {
        simd::Block<T> products = {}, gradients = {};
        simd::each_block<T>(block.count, [&](int64_t i, int64_t n) NATIVE_BUILD_INLINED {
          if constexpr (kBothAsk) ask_for_half(later_dy, later_s, i / 2);
          const simd::Block<T> dy_i = simd::load_block(dy + i, n), c_i = centred<kCentred, T>(simd::load_block(s + i, n), mean);
          const simd::Block<T> g = gradient(dy_i, i);
          products = add_product<T>(products, g, c_i);
          if constexpr (kAdds) add_to_parameters(dy_i, c_i, rstd, llama, partial + block.first + i, stride);
          if constexpr (kCentred) gradients = simd::sum<T>(gradients, g);
        });
        if constexpr (kCentred) return Sums<A, true>{simd::sum_of_lanes<T>(products), simd::sum_of_lanes<T>(gradients)};
        else return Sums<A, false>{simd::sum_of_lanes<T>(products)};
      });
    });
  }

  Factors<A> factors(int64_t row, const Sums<double, kCentred>& sums) const {
    const double rstd = this->rstd(row), columns = static_cast<double>(columns_);
    const A level = kCentred ? static_cast<A>(-sums.back() / columns * rstd) : A(0);
    return {static_cast<A>(-(sums[0] * rstd / columns) * rstd * rstd), level};  // rstd^3 may underflow
  }

  // Computes dx of a block, and with `kAdds` adds dy * c * rstd to `partial`, and dy to the one `stride` after it if centred. Asks for a
  // later row, as ForwardKernel does.
  template <bool kBothAsk, bool kAdds> [[gnu::noinline]] void write(int64_t row, Columns block, Factors<A> factors, A* partial, int64_t stride) const {
    const T *dy = row_of<T>(call_.dy, row) + block.first, *s = row_of<T>(call_.s, row) + block.first;
    const T* ds = call_.ds.data ? row_of<T>(call_.ds, row) + block.first : nullptr;
    const T *later_dy = later_.of<T>(call_.dy, row) + block.first, *later_s = later_.of<T>(call_.s, row) + block.first;
    const bool llama = !kCentred && call_.llama;
    const A mean = this->mean(row), rstd = this->rstd(row);
    with_constant<sizeof(T) <= 4>(!llama && !ds && (is_short<T>(columns_) || !streams_), [&](auto plain) {
      with_gradient(block, !plain && llama, [&](auto gradient) {
        simd::write_row(static_cast<T*>(call_.dx) + row * columns_ + block.first, block.count, streams_, [=](int64_t i, int64_t n) NATIVE_BUILD_INLINED {
          if constexpr (kBothAsk) {
            ask_for_half(later_dy, later_s, (block.count + i) / 2);
          } else {
            simd::prefetch_block(later_dy + i);
            simd::prefetch_block(later_s + i);
          }
          const simd::Block<T> dy_i = simd::load_block(dy + i, n), c_i = centred<kCentred, T>(simd::load_block(s + i, n), mean);
          if constexpr (kAdds) add_to_parameters(dy_i, c_i, rstd, !plain && llama, partial + block.first + i, stride);
          const simd::Block<T> g = gradient(dy_i, i);
          const simd::Block<T> direct = kCentred ? add_scaled<T>(all<T>(factors.level), g, rstd) : scaled<T>(g, rstd);
          const simd::Block<T> dx_i = add_scaled<T>(direct, c_i, factors.pull);
          return narrow<plain>(!plain && ds ? simd::sum<T>(dx_i, simd::load_block(ds + i, n)) : dx_i);
        });
      });
    });
  }

 private:
  static NATIVE_BUILD_INLINE void add_to_parameters(const simd::Block<T>& dy, const simd::Block<T>& c, A rstd, bool llama, A* sums, int64_t stride) {
    const simd::Block<T> normalised = scaled<T>(c, rstd);
    simd::store_lanes<T>(add_product<T>(simd::load_lanes<T>(sums), dy, llama ? simd::rounded<T>(normalised) : normalised), sums);
    if constexpr (kCentred) simd::add_to_sums<T>(dy, sums + stride);
  }

  static NATIVE_BUILD_INLINE void ask_for_half(const T* dy, const T* s, int64_t at) {
    simd::prefetch_half_block(dy + at);
    simd::prefetch_half_block(s + at);
  }

  A mean(int64_t row) const { return kCentred ? without_payload(static_cast<const A*>(call_.rstd)[2 * row], A{}) : A(0); }
  A rstd(int64_t row) const { return without_payload(static_cast<const A*>(call_.rstd)[kCentred ? 2 * row + 1 : row], A{}); }

  // Calls `run` with a function of a block of dy that returns that of g = dy * w, rounded with `llama`.
  template <class Run> NATIVE_BUILD_INLINE auto with_gradient(Columns block, bool llama, Run run) const {
    const A* const weight = weight_.from(block.first);
    if (!weight) return run([](const simd::Block<T>& dy, int64_t) NATIVE_BUILD_INLINED { return dy; });
    return run([weight, llama](const simd::Block<T>& dy, int64_t i) NATIVE_BUILD_INLINED {
      const simd::Block<T> g = product<T>(dy, simd::load_lanes<T>(weight + i));
      return llama ? simd::rounded<T>(g) : g;
    });
  }

  const Backward& call_;
  const int64_t columns_;
  const PreparedWeight<T> weight_;
  const Later later_;
  const bool streams_;
};

// Rows in groups, each with a partial row of dweight if it is needed, and one of dbias after it if centred.
template <class A> struct Groups {
  explicit Groups(const Backward& call)
      : rows(call.shape.rows), columns(call.shape.columns), stride(ceil_div(columns, kPadding) * kPadding),
        size(call.dweight ? rows_per_partial(rows) : 1), count(ceil_div(rows, size)), parameters(call.centred ? 2 : 1),
        workspace(call.dweight ? static_cast<A*>(call.workspace) : nullptr) {}

  int64_t first_row(int64_t group) const { return group * size; }
  int64_t last_row(int64_t group) const { return std::min((group + 1) * size, rows); }
  A* partial(int64_t group) const { return workspace ? workspace + group * parameters * stride : nullptr; }

  const int64_t rows, columns, stride, size, count, parameters;
  A* const workspace;
};

template <bool kBothAsk, bool kAddsFirst, bool kAddsSecond, class T, bool kCentred> void backward_by_rows(const BackwardKernel<T, kCentred>& kernel, const Grid& grid, const Groups<Wide<T>>& groups) {
  const int64_t grain = std::max<int64_t>(1, grid.grain_in_rows() / groups.size);
  parallel_for(groups.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      Wide<T>* partial = groups.partial(group);
      if (partial) std::fill_n(partial, groups.parameters * groups.stride, Wide<T>(0));
      for (int64_t row = groups.first_row(group); row < groups.last_row(group); ++row) {
        Sums<double, kCentred> sums = {};
        for (int64_t i = 0; i < grid.blocks; ++i) add<Wide<T>, kCentred>(sums, kernel.template sums<kBothAsk, kAddsFirst>(row, grid.block(i), partial, groups.stride));
        const Factors<Wide<T>> factors = kernel.factors(row, sums);
        for (int64_t i = 0; i < grid.blocks; ++i) kernel.template write<kBothAsk, kAddsSecond>(row, grid.block(i), factors, partial, groups.stride);
      }
    }
    if (kernel.streams()) simd::end_of_stream();
  });
}

template <class T, bool kCentred> void backward_by_rows(const BackwardKernel<T, kCentred>& kernel, const Grid& grid, const Groups<Wide<T>>& groups) {
  with_constant<true>(grid.columns * static_cast<int64_t>(sizeof(T)) <= 2048, [&](auto both_ask) {
    if (!groups.workspace) backward_by_rows<both_ask, false, false>(kernel, grid, groups);
    else if (kernel.adds_first()) backward_by_rows<both_ask, true, false>(kernel, grid, groups);
    else backward_by_rows<both_ask, false, true>(kernel, grid, groups);
  });
}

// The passes of backward_by_rows one after the other: the first over all blocks of all rows, the second over all blocks of
// all groups.
template <class T, bool kCentred> void backward_by_blocks(const BackwardKernel<T, kCentred>& kernel, const Grid& grid, const Groups<Wide<T>>& groups) {
  using A = Wide<T>;
  const std::unique_ptr<Sums<A, kCentred>[]> found(new Sums<A, kCentred>[grid.rows * grid.blocks]);
  const std::unique_ptr<Factors<A>[]> factors(new Factors<A>[grid.rows]);
  parallel_for(grid.rows * grid.blocks, grid.grain_in_blocks(), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index)
      found[index] = kernel.template sums<false, false>(index / grid.blocks, grid.block(index % grid.blocks), nullptr, groups.stride);
  });
  for (int64_t row = 0; row < grid.rows; ++row) {
    Sums<double, kCentred> sums = {};
    for (int64_t i = 0; i < grid.blocks; ++i) add<A, kCentred>(sums, found[row * grid.blocks + i]);
    factors[row] = kernel.factors(row, sums);
  }
  const int64_t grain = std::max<int64_t>(1, grid.grain_in_blocks() / std::min(groups.size, grid.rows));
  parallel_for(groups.count * grid.blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t group = index / grid.blocks;
      const Columns block = grid.block(index % grid.blocks);
      A* partial = groups.partial(group);
      for (int64_t parameter = 0; partial && parameter < groups.parameters; ++parameter)
        std::fill_n(partial + parameter * groups.stride + block.first, ceil_div(block.count, kPadding) * kPadding, A(0));
      for (int64_t row = groups.first_row(group); row < groups.last_row(group); ++row)
        partial ? kernel.template write<false, true>(row, block, factors[row], partial, groups.stride) : kernel.template write<false, false>(row, block, factors[row], nullptr, groups.stride);
    }
    if (kernel.streams()) simd::end_of_stream();
  });
}

template <class T> void sum_partials(const Groups<Wide<T>>& groups, Wide<T>* gradients) {
  using A = Wide<T>;
  const int64_t grain = std::max<int64_t>(1, kGrain / kColumns / groups.count);
  const Grid grid{groups.parameters, groups.columns};
  parallel_for(grid.rows * grid.blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const Columns block = grid.block(index % grid.blocks);
      const int64_t parameter = index / grid.blocks;
      const int64_t padded = ceil_div(block.count, kPadding) * kPadding;
      alignas(64) double sums[kColumns] = {};
      for (int64_t group = 0; group < groups.count; ++group) {
        const A* partial = groups.partial(group) + parameter * groups.stride + block.first;
#pragma omp simd
        for (int64_t i = 0; i < padded; ++i) sums[i] += partial[i];
      }
      alignas(64) A total[kColumns];
      for (int64_t i = 0; i < padded; ++i) total[i] = static_cast<A>(sums[i]);
      for (int64_t i = 0; i < block.count; i += simd::kBlock<T>) {
        simd::store_wide_block<T>(simd::load_lanes<T>(total + i), gradients + parameter * groups.columns + block.first + i, block.count - i);
      }
    }
  });
}

// Calls function(T{}, kCentred) for a type; the latter is a std::bool_constant.
template <class Function> void visit(Type type, bool centred, Function&& function) {
  const auto with = [&](auto zero) {
    if (centred) function(zero, std::true_type{});
    else function(zero, std::false_type{});
  };
  switch (type) {
    case Type::float32: return with(float{});
    case Type::float64: return with(double{});
    case Type::float16: return with(Half{});
    case Type::bfloat16: return with(BFloat16{});
  }
}

}  // namespace

void forward(const Forward& call) {
  visit(call.shape.type, call.centred, [&](auto zero, auto centred) {
    const ForwardKernel<decltype(zero), decltype(centred)::value> kernel(call);
    const Grid grid{call.shape.rows, call.shape.columns};
    if (grid.is_few_and_wide(grid.rows)) forward_by_blocks(kernel, grid);
    else forward_by_rows(kernel, grid);
  });
}

int64_t backward_workspace(const Backward& call) {
  if (!call.dweight) return 0;
  const int64_t bytes = call.shape.type == Type::float64 ? sizeof(double) : sizeof(float);
  return ceil_div(call.shape.rows, rows_per_partial(call.shape.rows)) * ceil_div(call.shape.columns, kPadding) * kPadding * (call.centred ? 2 : 1) * bytes;
}

void backward(const Backward& call) {
  visit(call.shape.type, call.centred, [&](auto zero, auto centred) {
    using T = decltype(zero);
    const BackwardKernel<T, decltype(centred)::value> kernel(call);
    const Grid grid{call.shape.rows, call.shape.columns};
    const Groups<Wide<T>> groups(call);
    if (grid.is_few_and_wide(groups.count)) backward_by_blocks(kernel, grid, groups);
    else backward_by_rows(kernel, grid, groups);
    if (call.dweight) sum_partials<T>(groups, static_cast<Wide<T>*>(call.dweight));
  });
}

#ifdef RMS_NORM_CPU_LEVEL
}  // namespace RMS_NORM_CPU_LEVEL
#endif
}  // namespace rms_norm

// RMSNorm on the CPU. Threads share the rows, or the blocks of columns of a few wide rows; vectors hold columns. The two passes
// over a row read it from memory once: the second finds it in the cache. weight and dweight have the accumulating type; they
// are one row among thousands.
//
// A result depends neither on the number of threads nor on the division of the work: a row is always summed block by block,
// each block by the same machine code (hence noinline), and the sums of the blocks are added in order.
//
// RMS_NORM_CPU_LEVEL names an inner namespace, so that one library can contain this file for several instruction sets.
#include <algorithm>
#include <cmath>
#include <memory>

#include "parallel.h"
#include "rms_norm.h"
#include "vectors.h"

namespace rms_norm {
#ifdef RMS_NORM_CPU_LEVEL
namespace RMS_NORM_CPU_LEVEL {
#endif
namespace {

// The number of columns that are summed at a time. A partial sum of this many floats, spread over the lanes of vectors, has an
// error of a few units in the last place. The sums of blocks are added in double.
constexpr int64_t kBlock = 1024;

// The number of rows that are summed into one partial row of dweight. It is fixed, so dweight does not depend on the number
// of threads.
constexpr int64_t kRowsPerPartial = 64;

// The number of elements that justifies another thread.
constexpr int64_t kGrain = int64_t{1} << 15;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Columns {
  int64_t first;
  int64_t count;
};

// A matrix whose rows are divided into blocks of columns.
struct Grid {
  int64_t rows;
  int64_t columns;
  int64_t blocks = ceil_div(columns, kBlock);  // in a row

  Columns block(int64_t index) const { return {index * kBlock, std::min(kBlock, columns - index * kBlock)}; }
  int64_t grain_in_rows() const { return std::max<int64_t>(1, kGrain / columns); }
  int64_t grain_in_blocks() const { return std::max<int64_t>(1, kGrain / std::min(columns, kBlock)); }

  // Whether `tasks` of whole rows leave threads idle that blocks of columns would occupy.
  bool is_few_and_wide(int64_t tasks) const { return blocks > 1 && rows * columns >= 2 * kGrain && tasks < threads(); }
};

template <class T> const T* row_of(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + (row / rows.inner) * rows.outer_stride + (row % rows.inner) * rows.inner_stride;
}

// The state that the blocks of a row share after its squares are summed.
template <class A> struct RowScale {
  A rstd;
  float quantum;  // the scale that divides a quantised y
};

template <class T> class ForwardKernel {
  using A = Wide<T>;

 public:
  explicit ForwardKernel(const Forward& call)
      : call_(call), columns_(call.shape.columns), weight_(static_cast<const A*>(call.weight.data)), offset_(static_cast<A>(call.weight.offset)),
        streams_(!call.quantised && exceeds_caches(call.shape.rows * columns_ * static_cast<int64_t>(sizeof(T)))) {}

  bool streams() const { return streams_; }
  bool scales_rows() const { return call_.quantised && !call_.quantised->scale; }

  // The sum of s^2 over a block; with a residual, this also stores s.
  [[gnu::noinline]] A squares(int64_t row, Columns block) const {
    const T* x = row_of<T>(call_.x, row) + block.first;
    if (!call_.residual.data) {
      return sum_of<T>(block.count, [x](int64_t i, int64_t n) RMS_NORM_INLINED {
        const auto s = load(x + i, n);
        return s * s;
      });
    }
    const T* residual = row_of<T>(call_.residual, row) + block.first;
    T* to = static_cast<T*>(call_.s) + row * columns_ + block.first;
    return sum_of<T>(block.count, [=](int64_t i, int64_t n) RMS_NORM_INLINED {
      const auto s = rounded<T>(load(x + i, n) + load(residual + i, n));
      store(s, to + i, n);
      return s * s;
    });
  }

  RowScale<A> scale(int64_t row, double squares) const {
    const A rstd = static_cast<A>(1.0 / std::sqrt(squares / static_cast<double>(columns_) + call_.eps));
    if (call_.rstd) static_cast<A*>(call_.rstd)[row] = rstd;
    return {rstd, call_.quantised && call_.quantised->scale ? *call_.quantised->scale : 1.0f};
  }

  // The largest |y| of a block, as bits: bits of non-negative floats are ordered, with NaN above infinity.
  [[gnu::noinline]] uint32_t largest(int64_t row, Columns block, A rstd) const {
    alignas(64) A y[kBlock];
    normalise<A>(row, block, rstd, y, false);
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < block.count; ++i) {
      const uint32_t magnitude = bits_of(static_cast<float>(y[i])) & 0x7FFFFFFFu;
      most = magnitude > most ? magnitude : most;
    }
    return most;
  }

  float quantum(int64_t row, uint32_t largest) const {
    const float scale = float_of(largest) / kLargestFloat8;
    return call_.quantised->row_scales[row] = scale == 0 ? 1.0f : scale;
  }

  [[gnu::noinline]] void write(int64_t row, Columns block, RowScale<A> scale) const {
    const int64_t at = row * columns_ + block.first;
    if (call_.quantised) {
      alignas(64) A buffer[kBlock];
      normalise<A>(row, block, scale.rstd, buffer, false);
      quantise(buffer, scale.quantum, static_cast<uint8_t*>(call_.y) + at, block.count);
    } else {
      normalise<T>(row, block, scale.rstd, static_cast<T*>(call_.y) + at, streams_);
    }
  }

 private:
  const T* s_of(int64_t row) const {
    return call_.residual.data ? static_cast<const T*>(call_.s) + row * columns_ : row_of<T>(call_.x, row);
  }

  template <class To> void normalise(int64_t row, Columns block, A rstd, To* y, bool streams) const {
    const T* s = s_of(row) + block.first;
    if (!weight_) {
      write_vectors(y, block.count, streams, [s, rstd, llama = call_.llama](int64_t i, int64_t n) RMS_NORM_INLINED {
        const auto normalised = load(s + i, n) * rstd;
        return llama ? rounded<T>(normalised) : normalised;
      });
      return;
    }
    const A* weight = weight_ + block.first;
    write_vectors(y, block.count, streams, [s, rstd, weight, offset = offset_, llama = call_.llama](int64_t i, int64_t n) RMS_NORM_INLINED {
      const auto normalised = load(s + i, n) * rstd;
      return (llama ? rounded<T>(normalised) : normalised) * (load(weight + i, n) + offset);
    });
  }

  static void quantise(const A* y, float quantum, uint8_t* to, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = quantised(static_cast<float>(y[i]) / quantum);
  }

  const Forward& call_;
  const int64_t columns_;
  const A* const weight_;
  const A offset_;
  const bool streams_;
};

template <class T> void forward_by_rows(const ForwardKernel<T>& kernel, const Grid& grid) {
  using A = Wide<T>;
  parallel_for(grid.rows, grid.grain_in_rows(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double squares = 0;
      for (int64_t i = 0; i < grid.blocks; ++i) squares += kernel.squares(row, grid.block(i));
      RowScale<A> scale = kernel.scale(row, squares);
      if (kernel.scales_rows()) {
        uint32_t largest = 0;
        for (int64_t i = 0; i < grid.blocks; ++i) largest = std::max(largest, kernel.largest(row, grid.block(i), scale.rstd));
        scale.quantum = kernel.quantum(row, largest);
      }
      for (int64_t i = 0; i < grid.blocks; ++i) kernel.write(row, grid.block(i), scale);
    }
    if (kernel.streams()) end_of_stream();
  });
}

// The passes of forward_by_rows one after the other, each over all blocks of all rows.
template <class T> void forward_by_blocks(const ForwardKernel<T>& kernel, const Grid& grid) {
  using A = Wide<T>;
  const std::unique_ptr<A[]> found(new A[grid.rows * grid.blocks]);
  const std::unique_ptr<RowScale<A>[]> scales(new RowScale<A>[grid.rows]);
  const auto each_block = [&](auto&& visit) {
    parallel_for(grid.rows * grid.blocks, grid.grain_in_blocks(), [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) visit(index, index / grid.blocks, grid.block(index % grid.blocks));
      if (kernel.streams()) end_of_stream();
    });
  };
  each_block([&](int64_t index, int64_t row, Columns block) { found[index] = kernel.squares(row, block); });
  for (int64_t row = 0; row < grid.rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < grid.blocks; ++i) squares += found[row * grid.blocks + i];
    scales[row] = kernel.scale(row, squares);
  }
  if (kernel.scales_rows()) {
    const std::unique_ptr<uint32_t[]> largest(new uint32_t[grid.rows * grid.blocks]);
    each_block([&](int64_t index, int64_t row, Columns block) { largest[index] = kernel.largest(row, block, scales[row].rstd); });
    for (int64_t row = 0; row < grid.rows; ++row) {
      const uint32_t* first = largest.get() + row * grid.blocks;
      scales[row].quantum = kernel.quantum(row, *std::max_element(first, first + grid.blocks));
    }
  }
  each_block([&](int64_t, int64_t row, Columns block) { kernel.write(row, block, scales[row]); });
}

template <class T> class BackwardKernel {
  using A = Wide<T>;

 public:
  explicit BackwardKernel(const Backward& call)
      : call_(call), columns_(call.shape.columns), weight_(static_cast<const A*>(call.weight.data)), offset_(static_cast<A>(call.weight.offset)),
        streams_(exceeds_caches(call.shape.rows * columns_ * static_cast<int64_t>(sizeof(T)))) {}

  bool streams() const { return streams_; }

  // The sum of g * s over a block.
  [[gnu::noinline]] A products(int64_t row, Columns block) const {
    const T *dy = row_of<T>(call_.dy, row) + block.first, *s = row_of<T>(call_.s, row) + block.first;
    return with_gradient(block, [&](auto gradient) {
      return sum_of<T>(block.count, [=](int64_t i, int64_t n) RMS_NORM_INLINED { return gradient(load(dy + i, n), i, n) * load(s + i, n); });
    });
  }

  // The factor of s in dx: -rstd^3 * mean(g * s).
  A pull(int64_t row, double products) const {
    const double rstd = this->rstd(row);
    return static_cast<A>(-(products * rstd / static_cast<double>(columns_)) * rstd * rstd);  // rstd^3 may underflow
  }

  // Computes dx of a block, and adds dy * s * rstd to `partial` (one row) unless it is null.
  [[gnu::noinline]] void write(int64_t row, Columns block, A pull, A* partial) const {
    const T *dy = row_of<T>(call_.dy, row) + block.first, *s = row_of<T>(call_.s, row) + block.first;
    const T* ds = call_.ds.data ? row_of<T>(call_.ds, row) + block.first : nullptr;
    A* sums = partial ? partial + block.first : nullptr;
    const A rstd = this->rstd(row);
    const bool llama = call_.llama;
    with_gradient(block, [&](auto gradient) {
      write_vectors(static_cast<T*>(call_.dx) + row * columns_ + block.first, block.count, streams_, [=](int64_t i, int64_t n) RMS_NORM_INLINED {
        const auto dy_i = load(dy + i, n), s_i = load(s + i, n);
        if (sums) {
          const auto normalised = s_i * rstd;
          store(load(sums + i, n) + dy_i * (llama ? rounded<T>(normalised) : normalised), sums + i, n);
        }
        const auto dx = gradient(dy_i, i, n) * rstd + s_i * pull;
        return ds ? dx + load(ds + i, n) : dx;
      });
    });
  }

 private:
  A rstd(int64_t row) const { return static_cast<const A*>(call_.rstd)[row]; }

  // Calls `run` with a function of the vectors of dy that returns those of g = dy * w; with `llama`, g is rounded.
  template <class Run> RMS_NORM_INLINE auto with_gradient(Columns block, Run run) const {
    if (!weight_) return run([](auto dy, int64_t, int64_t) RMS_NORM_INLINED { return dy; });
    return run([weight = weight_ + block.first, offset = offset_, llama = call_.llama](auto dy, int64_t i, int64_t n) RMS_NORM_INLINED {
      const auto g = dy * (load(weight + i, n) + offset);
      return llama ? rounded<T>(g) : g;
    });
  }

  const Backward& call_;
  const int64_t columns_;
  const A* const weight_;
  const A offset_;
  const bool streams_;
};

// Rows in groups, each with a partial row of dweight if it is needed.
template <class A> struct Groups {
  explicit Groups(const Backward& call)
      : rows(call.shape.rows), columns(call.shape.columns), size(call.dweight ? kRowsPerPartial : 1), count(ceil_div(rows, size)),
        workspace(call.dweight ? static_cast<A*>(call.workspace) : nullptr) {}

  int64_t first_row(int64_t group) const { return group * size; }
  int64_t last_row(int64_t group) const { return std::min((group + 1) * size, rows); }
  A* partial(int64_t group) const { return workspace ? workspace + group * columns : nullptr; }

  const int64_t rows, columns, size, count;
  A* const workspace;
};

template <class T> void backward_by_rows(const BackwardKernel<T>& kernel, const Grid& grid, const Groups<Wide<T>>& groups) {
  const int64_t grain = std::max<int64_t>(1, grid.grain_in_rows() / groups.size);
  parallel_for(groups.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      Wide<T>* partial = groups.partial(group);
      if (partial) std::fill_n(partial, grid.columns, Wide<T>(0));
      for (int64_t row = groups.first_row(group); row < groups.last_row(group); ++row) {
        double products = 0;
        for (int64_t i = 0; i < grid.blocks; ++i) products += kernel.products(row, grid.block(i));
        const Wide<T> pull = kernel.pull(row, products);
        for (int64_t i = 0; i < grid.blocks; ++i) kernel.write(row, grid.block(i), pull, partial);
      }
    }
    if (kernel.streams()) end_of_stream();
  });
}

// The passes of backward_by_rows one after the other: the first over all blocks of all rows, the second over all blocks of
// all groups.
template <class T> void backward_by_blocks(const BackwardKernel<T>& kernel, const Grid& grid, const Groups<Wide<T>>& groups) {
  using A = Wide<T>;
  const std::unique_ptr<A[]> found(new A[grid.rows * grid.blocks]);
  const std::unique_ptr<A[]> pulls(new A[grid.rows]);
  parallel_for(grid.rows * grid.blocks, grid.grain_in_blocks(), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index)
      found[index] = kernel.products(index / grid.blocks, grid.block(index % grid.blocks));
  });
  for (int64_t row = 0; row < grid.rows; ++row) {
    double products = 0;
    for (int64_t i = 0; i < grid.blocks; ++i) products += found[row * grid.blocks + i];
    pulls[row] = kernel.pull(row, products);
  }
  const int64_t grain = std::max<int64_t>(1, grid.grain_in_blocks() / std::min(groups.size, grid.rows));
  parallel_for(groups.count * grid.blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t group = index / grid.blocks;
      const Columns block = grid.block(index % grid.blocks);
      A* partial = groups.partial(group);
      if (partial) std::fill_n(partial + block.first, block.count, A(0));
      for (int64_t row = groups.first_row(group); row < groups.last_row(group); ++row)
        kernel.write(row, block, pulls[row], partial);
    }
    if (kernel.streams()) end_of_stream();
  });
}

template <class A> void sum_partials(const Groups<A>& groups, A* dweight) {
  const int64_t grain = std::max<int64_t>(1, kGrain / kBlock / groups.count);
  parallel_for(ceil_div(groups.columns, kBlock), grain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const Columns block = Grid{1, groups.columns}.block(index);
      alignas(64) double sums[kBlock] = {};
      for (int64_t group = 0; group < groups.count; ++group) {
        const A* partial = groups.partial(group) + block.first;
#pragma omp simd
        for (int64_t i = 0; i < block.count; ++i) sums[i] += partial[i];
      }
      for (int64_t i = 0; i < block.count; ++i) dweight[block.first + i] = static_cast<A>(sums[i]);
    }
  });
}

template <class Function> auto visit(Type type, Function&& function) {
  switch (type) {
    case Type::float64: return function(double{});
    case Type::float16: return function(Half{});
    case Type::bfloat16: return function(BFloat16{});
    case Type::float32: break;
  }
  return function(float{});
}

}  // namespace

void forward(const Forward& call) {
  visit(call.shape.type, [&](auto zero) {
    const ForwardKernel<decltype(zero)> kernel(call);
    const Grid grid{call.shape.rows, call.shape.columns};
    if (grid.is_few_and_wide(grid.rows)) forward_by_blocks(kernel, grid);
    else forward_by_rows(kernel, grid);
  });
}

int64_t backward_workspace(const Backward& call) {
  if (!call.dweight) return 0;
  const int64_t bytes = call.shape.type == Type::float64 ? sizeof(double) : sizeof(float);
  return ceil_div(call.shape.rows, kRowsPerPartial) * call.shape.columns * bytes;
}

void backward(const Backward& call) {
  visit(call.shape.type, [&](auto zero) {
    using T = decltype(zero);
    const BackwardKernel<T> kernel(call);
    const Grid grid{call.shape.rows, call.shape.columns};
    const Groups<Wide<T>> groups(call);
    if (grid.is_few_and_wide(groups.count)) backward_by_blocks(kernel, grid, groups);
    else backward_by_rows(kernel, grid, groups);
    if (call.dweight) sum_partials(groups, static_cast<Wide<T>*>(call.dweight));
  });
}

#ifdef RMS_NORM_CPU_LEVEL
}  // namespace RMS_NORM_CPU_LEVEL
#endif
}  // namespace rms_norm

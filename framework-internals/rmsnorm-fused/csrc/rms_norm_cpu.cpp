// RMSNorm on the CPU: rows spread over torch's threads, columns over vector registers by the compiler. weight and dweight
// are of the accumulating type here (impl/cpp.py converts): they are one row against thousands.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "rms_norm.h"

namespace rms_norm {
namespace {

// Columns that are converted and summed at a time: three such blocks of floats fit the L1 cache, and a partial sum in
// float of this many terms, spread over the lanes of a vector, keeps its error at a few units in the last place. Sums of
// blocks go on in double.
constexpr int64_t kBlock = 1024;

// Rows whose dy * x * rstd are summed into one partial row of dweight. Fixed, so that dweight does not depend on the
// number of threads.
constexpr int64_t kRowsPerPartial = 64;

template <class T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T> const T* row_of(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + (row / rows.inner) * rows.outer_stride + (row % rows.inner) * rows.inner_stride;
}

// n elements as the accumulating type: `from` itself where it is that already, else converted into `buffer`.
template <class T> const Wide<T>* widen(const T* from, Wide<T>* buffer, int64_t n) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return from;
  } else {
    int64_t i = 0;
#ifdef __F16C__  // compilers do not vectorise this conversion by themselves
    if constexpr (std::is_same_v<T, c10::Half>)
      for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; ++i) buffer[i] = static_cast<float>(from[i]);
    return buffer;
  }
}

// Where to compute n elements of the accumulating type before they go to `to`: there itself, or in `buffer`.
template <class T> Wide<T>* target(T* to, Wide<T>* buffer) {
  if constexpr (std::is_same_v<T, Wide<T>>) return to;
  else return buffer;
}

template <class T> void narrow([[maybe_unused]] const Wide<T>* from, [[maybe_unused]] T* to, [[maybe_unused]] int64_t n) {
  if constexpr (!std::is_same_v<T, Wide<T>>) {
    int64_t i = 0;
#ifdef __F16C__
    if constexpr (std::is_same_v<T, c10::Half>)
      for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) to[i] = static_cast<T>(from[i]);
  }
}

template <class T> void forward_row(const T* x, const Wide<T>* weight, T* y, Wide<T>* rstd, int64_t columns, double eps) {
  using A = Wide<T>;
  alignas(64) A x_buffer[kBlock], y_buffer[kBlock];
  double squares = 0;
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t n = std::min(kBlock, columns - first);
    const A* wide = widen(x + first, x_buffer, n);
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += wide[i] * wide[i];
    squares += sum;
  }
  const A scale = static_cast<A>(1.0 / std::sqrt(squares / static_cast<double>(columns) + eps));
  *rstd = scale;
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t n = std::min(kBlock, columns - first);
    const A* wide = widen(x + first, x_buffer, n);
    A* out = target(y + first, y_buffer);
    if (weight) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) out[i] = wide[i] * scale * weight[first + i];
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) out[i] = wide[i] * scale;
    }
    narrow(out, y + first, n);
  }
}

// dx of one row; dy * x * rstd is added to `partial` unless that is null.
template <class T>
void backward_row(const T* dy, const T* x, const Wide<T>* weight, Wide<T> rstd, T* dx, Wide<T>* partial, int64_t columns) {
  using A = Wide<T>;
  alignas(64) A dy_buffer[kBlock], x_buffer[kBlock], dx_buffer[kBlock];
  double products = 0;
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t n = std::min(kBlock, columns - first);
    const A* g = widen(dy + first, dy_buffer, n);
    const A* wide = widen(x + first, x_buffer, n);
    A sum = 0;
    if (weight) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; ++i) sum += g[i] * weight[first + i] * wide[i];
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; ++i) sum += g[i] * wide[i];
    }
    products += sum;
  }
  const double r = rstd;
  const A pull = static_cast<A>(-r * r * r * products / static_cast<double>(columns));
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t n = std::min(kBlock, columns - first);
    const A* g = widen(dy + first, dy_buffer, n);
    const A* wide = widen(x + first, x_buffer, n);
    A* out = target(dx + first, dx_buffer);
    if (weight) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) out[i] = g[i] * weight[first + i] * rstd + wide[i] * pull;
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) out[i] = g[i] * rstd + wide[i] * pull;
    }
    if (partial) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) partial[first + i] += g[i] * rstd * wide[i];
    }
    narrow(out, dx + first, n);
  }
}

int64_t partials(const Shape& shape) { return (shape.rows + kRowsPerPartial - 1) / kRowsPerPartial; }

template <class T> void forward_rows(const Forward& call) {
  const Shape& shape = call.shape;
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 15) / shape.columns);  // a task is worth waking a thread for
  at::parallel_for(0, shape.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      forward_row(row_of<T>(call.x, row), static_cast<const Wide<T>*>(call.weight), static_cast<T*>(call.y) + row * shape.columns,
                  static_cast<Wide<T>*>(call.rstd) + row, shape.columns, call.eps);
  });
}

template <class T> void backward_rows(const Backward& call) {
  using A = Wide<T>;
  const Shape& shape = call.shape;
  const int64_t count = partials(shape);
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      A* partial = call.dweight ? static_cast<A*>(call.workspace) + index * shape.columns : nullptr;
      if (partial) std::fill_n(partial, shape.columns, A(0));
      for (int64_t row = index * kRowsPerPartial; row < std::min((index + 1) * kRowsPerPartial, shape.rows); ++row)
        backward_row(row_of<T>(call.dy, row), row_of<T>(call.x, row), static_cast<const A*>(call.weight),
                     static_cast<const A*>(call.rstd)[row], static_cast<T*>(call.dx) + row * shape.columns, partial, shape.columns);
    }
  });
  if (!call.dweight) return;
  at::parallel_for(0, shape.columns, 256, [&](int64_t begin, int64_t end) {
    std::vector<double> sums(end - begin, 0.0);
    for (int64_t index = 0; index < count; ++index) {
      const A* partial = static_cast<const A*>(call.workspace) + index * shape.columns + begin;
      for (int64_t i = 0; i < end - begin; ++i) sums[i] += partial[i];
    }
    for (int64_t i = 0; i < end - begin; ++i) static_cast<A*>(call.dweight)[begin + i] = static_cast<A>(sums[i]);
  });
}

template <class Function> void visit(Type type, Function&& function) {
  switch (type) {
    case Type::float32: return function(float{});
    case Type::float64: return function(double{});
    case Type::float16: return function(c10::Half{});
    case Type::bfloat16: return function(c10::BFloat16{});
  }
}

}  // namespace

void forward(const Forward& call) {
  visit(call.shape.type, [&](auto zero) { forward_rows<decltype(zero)>(call); });
}

int64_t backward_workspace(const Backward& call) { return call.dweight ? partials(call.shape) * call.shape.columns : 0; }

void backward(const Backward& call) {
  visit(call.shape.type, [&](auto zero) { backward_rows<decltype(zero)>(call); });
}

}  // namespace rms_norm

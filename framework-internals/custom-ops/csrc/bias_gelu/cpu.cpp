// CPU kernels over rows of vectors. sigmoid(2 z) is 1 / (1 + p) with p = exp(-2 z) = 2^t; std::exp would be a call per element.

#include "kernels.h"

#include <algorithm>

#include "../common/simd.h"
#include "../common/streaming.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kCubic = 0.044715;
constexpr double kLog2E = 1.44269504088896340736;

template <typename W> CUSTOM_OPS_INLINE simd::Vector<W> constant(double value) { return simd::broadcast(static_cast<W>(value)); }

// exp(-2 z) of u; infinite far below zero.
template <typename W> CUSTOM_OPS_INLINE simd::Vector<W> power_of(simd::Vector<W> u) {
  constexpr double kLinear = -2 * kLog2E * kSqrt2OverPi;
  return simd::exp2(u * simd::fma(constant<W>(kLinear * kCubic), u * u, constant<W>(kLinear)));
}

template <typename W> CUSTOM_OPS_INLINE simd::Vector<W> gelu(simd::Vector<W> u) { return u / (W(1) + power_of<W>(u)); }

// s + u * 2z' * s (1 - s) = s (1 + u * 2z' * p s) with s = sigmoid(2 z); p s is 1 - s without its cancellation.
template <typename W> CUSTOM_OPS_INLINE simd::Vector<W> slope(simd::Vector<W> u) {
  constexpr double kLinear = 2 * kSqrt2OverPi, kSquare = kLinear * 3 * kCubic;
  // Beyond +-64 the slope is 0 or 1, and infinity would be multiplied by zero. So would an infinite p by s, which is then zero.
  u = simd::min(constant<W>(64), simd::max(constant<W>(-64), u));
  const simd::Vector<W> p = power_of<W>(u), s = W(1) / (W(1) + p), steep = u * simd::fma(constant<W>(kSquare), u * u, constant<W>(kLinear));
  return s * simd::fma(steep, simd::min(constant<W>(sizeof(W) == 8 ? 1e300 : 1e38), p) * s, constant<W>(1));
}

template <typename T> CUSTOM_OPS_INLINE simd::Pair<T> sum(simd::Pair<T> a, simd::Pair<T> b) { return {a.first + b.first, a.second + b.second}; }

// Partial sums of dbias are kept in the order of the lanes of pairs.
template <typename T> CUSTOM_OPS_INLINE simd::Pair<T> load_sums(const Wide<T>* from) {
  return {simd::load(from), simd::load(from + simd::kLanes<Wide<T>>)};
}
template <typename T> CUSTOM_OPS_INLINE void store_sums(simd::Pair<T> sums, Wide<T>* to) {
  simd::store(sums.first, to);
  simd::store(sums.second, to + simd::kLanes<Wide<T>>);
}

template <typename T> void forward(const BiasGelu& call, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(call.x);
  const T* bias = static_cast<const T*>(call.bias);
  T* out = static_cast<T*>(call.out);
  const bool large = exceeds_caches(call.rows * call.columns * sizeof(T));
  for (int64_t at = begin; at < end;) {  // a row, or the part of one at either end
    const int64_t column = at % call.columns, count = std::min(end - at, call.columns - column);
    write_row(out + at, count, large, [&](int64_t i, int64_t some) CUSTOM_OPS_INLINED {
      const simd::Pair<T> u = sum(simd::load_pair(x + at + i, some), simd::load_pair(bias + column + i, some));
      return simd::Pair<T>{gelu<Wide<T>>(u.first), gelu<Wide<T>>(u.second)};
    });
    at += count;
  }
  if (large) simd::end_of_stream();
}

template <typename T> void backward_rows(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t groups = bias_gelu_backward_groups(call.rows), columns = call.columns;
  const T* bias = static_cast<const T*>(call.bias);
  const bool large = exceeds_caches(call.rows * columns * sizeof(T));
  for (int64_t group = begin; group < end; ++group) {
    W* sums = static_cast<W*>(call.workspace) + group * bias_gelu_backward_stride(columns);
    std::fill_n(sums, bias_gelu_backward_stride(columns), W(0));
    for (int64_t row = group * call.rows / groups; row < (group + 1) * call.rows / groups; ++row) {
      const T* grad = static_cast<const T*>(call.grad) + row * columns;
      const T* x = static_cast<const T*>(call.x) + row * columns;
      write_row(static_cast<T*>(call.dx) + row * columns, columns, large, [&](int64_t i, int64_t some) CUSTOM_OPS_INLINED {
        const simd::Pair<T> u = sum(simd::load_pair(x + i, some), simd::load_pair(bias + i, some));
        const simd::Pair<T> g = simd::load_pair(grad + i, some), dx = {g.first * slope<W>(u.first), g.second * slope<W>(u.second)};
        store_sums(sum(load_sums<T>(sums + i), dx), sums + i);
        return dx;
      });
    }
  }
  if (large) simd::end_of_stream();
}

template <typename T> void backward_columns(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t groups = bias_gelu_backward_groups(call.rows), stride = bias_gelu_backward_stride(call.columns);
  const W* sums = static_cast<const W*>(call.workspace);
  T* dbias = static_cast<T*>(call.dbias);
  for (int64_t at = begin * kColumnBlock; at < std::min(end * kColumnBlock, call.columns); at += simd::kPair<T>) {
    simd::Pair<T> total = {};
    for (int64_t group = 0; group < groups; ++group) total = sum(total, load_sums<T>(sums + group * stride + at));
    simd::store_pair(total, dbias + at, call.columns - at);
  }
}

}  // namespace

#define CUSTOM_OPS_FOR_DTYPE(loop)                               \
  switch (call.dtype) {                                          \
    case Dtype::kFloat32: return loop<float>(call, begin, end);  \
    case Dtype::kFloat64: return loop<double>(call, begin, end); \
    case Dtype::kFloat16: return loop<Half>(call, begin, end);   \
    case Dtype::kBFloat16: return loop<BFloat16>(call, begin, end); \
  }

void bias_gelu_cpu(const BiasGelu& call, int64_t begin, int64_t end) { CUSTOM_OPS_FOR_DTYPE(forward) }

void bias_gelu_backward_rows_cpu(const BiasGeluBackward& call, int64_t begin, int64_t end) { CUSTOM_OPS_FOR_DTYPE(backward_rows) }

void bias_gelu_backward_columns_cpu(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  CUSTOM_OPS_FOR_DTYPE(backward_columns)
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

// CPU kernels. The exponential is written out so that the compiler vectorises it; std::exp would be a call per element.

#include "kernels.h"

#include <algorithm>
#include <cmath>

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kCubic = 0.044715;
constexpr double kLog2E = 1.44269504088896340736;

// 2^t: t = n + f with integer n and |f| <= 1/2. The Taylor polynomial of 2^f up to f^7 has a relative error of 5e-9, below
// float32's rounding; n is added to the exponent. The result is infinite from 128 on, and zero at -127 and below.
CUSTOM_OPS_INLINE float exp2_of(float t) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
  t = t > 128.0f ? 128.0f : t;
  t = t < -127.0f ? -127.0f : t;
  const float shifted = t + kWhole;
  const float f = t - (shifted - kWhole);
  float power = 1.5252734e-5f;
  power = power * f + 1.5403530e-4f;
  power = power * f + 1.3333558e-3f;
  power = power * f + 9.6181291e-3f;
  power = power * f + 5.5504109e-2f;
  power = power * f + 2.4022651e-1f;
  power = power * f + 6.9314718e-1f;
  power = power * f + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const int32_t exponent = (bits - 0x4b400000 + 127) << 23;
  float scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return power * scale;
}
CUSTOM_OPS_INLINE double exp2_of(double t) { return std::exp2(t); }

// exp(-2 z) of u, which is at most 2^`most`.
template <typename W> CUSTOM_OPS_INLINE W power_of(W u, W most) {
  constexpr W kLinear = static_cast<W>(-2 * kLog2E * kSqrt2OverPi);
  constexpr W kThird = static_cast<W>(-2 * kLog2E * kSqrt2OverPi * kCubic);
  const W t = u * (kLinear + kThird * (u * u));
  return exp2_of(t > most ? most : t);  // keeps NaN
}

// sigmoid(2 z) of u.
template <typename W> CUSTOM_OPS_INLINE W gate(W u) { return W(1) / (W(1) + power_of(u, W(1024))); }

// s + u * 2z' * s (1 - s) with s = sigmoid(2 z), and 1 - s as exp(-2 z) s, which does not cancel.
template <typename W> CUSTOM_OPS_INLINE W slope(W u) {
  constexpr W kLinear = static_cast<W>(2 * kSqrt2OverPi);
  constexpr W kSquare = static_cast<W>(2 * kSqrt2OverPi * 3 * kCubic);
  // Beyond the bound the slope is 0 or 1; without it, infinity would be multiplied by zero.
  constexpr W kFar = 64, kMost = sizeof(W) == 8 ? 1000 : 126;
  const W power = power_of(u, kMost), s = W(1) / (W(1) + power);
  W near = u > kFar ? kFar : u;
  near = near < -kFar ? -kFar : near;
  return s + near * (kLinear + kSquare * (near * near)) * (power * s * s);
}

template <typename T> void forward(const BiasGelu& call, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(call.x);
  const T* bias = static_cast<const T*>(call.bias);
  T* out = static_cast<T*>(call.out);
  for (int64_t at = begin; at < end;) {
    const int64_t column = at % call.columns;
    const int64_t count = std::min({kBlock, end - at, call.columns - column});
    Wide<T> u[kBlock], b[kBlock];
    load(x + at, count, u);
    load(bias + column, count, b);
    for (int64_t i = 0; i < count; ++i) {
      const Wide<T> sum = u[i] + b[i];
      u[i] = sum * gate(sum);
    }
    store(u, count, out + at);
    at += count;
  }
}

template <typename T> void backward_rows(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t groups = bias_gelu_backward_groups(call.rows), columns = call.columns;
  const T* bias = static_cast<const T*>(call.bias);
  for (int64_t group = begin; group < end; ++group) {
    W* sums = static_cast<W*>(call.workspace) + group * columns;
    for (int64_t column = 0; column < columns; ++column) sums[column] = 0;
    for (int64_t row = group * call.rows / groups; row < (group + 1) * call.rows / groups; ++row) {
      const T* grad = static_cast<const T*>(call.grad) + row * columns;
      const T* x = static_cast<const T*>(call.x) + row * columns;
      T* dx = static_cast<T*>(call.dx) + row * columns;
      for (int64_t at = 0; at < columns; at += kBlock) {
        const int64_t count = std::min(kBlock, columns - at);
        W u[kBlock], b[kBlock], g[kBlock];
        load(x + at, count, u);
        load(bias + at, count, b);
        load(grad + at, count, g);
        for (int64_t i = 0; i < count; ++i) g[i] *= slope(u[i] + b[i]);
        for (int64_t i = 0; i < count; ++i) sums[at + i] += g[i];
        store(g, count, dx + at);
      }
    }
  }
}

template <typename T> void backward_columns(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t groups = bias_gelu_backward_groups(call.rows);
  const W* sums = static_cast<const W*>(call.workspace);
  T* dbias = static_cast<T*>(call.dbias);
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    W total[kBlock] = {};
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t i = 0; i < count; ++i) total[i] += sums[group * call.columns + at + i];
    }
    store(total, count, dbias + at);
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

// CPU kernels over rows of vectors.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include <native_build/memory.h>

#include "../gelu.h"
#include "../../common/cpu.h"
#include "normal.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

using simd::Vector;

constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kDensity = 0.39894228040143267794;  // of the normal distribution at 0

template <typename W> NATIVE_BUILD_INLINE Vector<W> within(Vector<W> u, double limit) {  // NaN stays
  return simd::min(constant<W>(limit), simd::max(constant<W>(-limit), u));
}

// ---- silu

template <typename W> NATIVE_BUILD_INLINE Vector<W> silu(Vector<W> u) { return u / (W(1) + simd::exp2(u * constant<W>(-kLog2E))); }
// s + u * s (1 - s), and 1 - s as p s, which does not cancel. Beyond the limits p would be infinite.
template <typename W> NATIVE_BUILD_INLINE Vector<W> silu_slope(Vector<W> u) {
  u = within<W>(u, sizeof(W) == 8 ? 700 : 87);
  const Vector<W> p = simd::exp2(u * constant<W>(-kLog2E)), s = W(1) / (W(1) + p);
  return s * simd::fma(u, p * s, constant<W>(1));
}

// ---- gelu: with the tail q = Phi(-|u|), gelu(u) = max(u, 0) - |u| q, and Phi(u) is q or 1 - q

struct Normal {
  simd::Floats size;  // |u|, at most 64, where the tail is 0
  simd::Floats power;  // exp(-u^2 / 2)
  simd::Floats tail;
};
NATIVE_BUILD_INLINE Normal normal_of(simd::Floats u) {
  const simd::Floats a = simd::min(constant<float>(64), simd::max(-u, u));
  const simd::Floats t = 1.0f / simd::fma(a, constant<float>(CUSTOM_OPS_NORMAL_STEP), constant<float>(1));
  const simd::Floats power = simd::exp2(a * a * constant<float>(-kLog2E / 2));
#define CUSTOM_OPS_FIRST(c) simd::Floats tail = constant<float>(c);
#define CUSTOM_OPS_NEXT(c) tail = simd::fma(tail, t, constant<float>(c));
  CUSTOM_OPS_NORMAL_TAIL(CUSTOM_OPS_FIRST, CUSTOM_OPS_NEXT)
#undef CUSTOM_OPS_FIRST
#undef CUSTOM_OPS_NEXT
  return {a, power, tail * power};
}
NATIVE_BUILD_INLINE simd::Floats exact_gelu(simd::Floats u) {
  const Normal normal = normal_of(u);
  return simd::fma(-normal.size, normal.tail, simd::max(constant<float>(0), u));  // -0 of -0
}
NATIVE_BUILD_INLINE simd::Floats exact_gelu_slope(simd::Floats u) {
  const Normal normal = normal_of(u);
  const simd::Floats density = normal.power * constant<float>(kDensity) * normal.size;
  return u > constant<float>(0) ? (1.0f - normal.tail) + density : normal.tail - density;
}
NATIVE_BUILD_INLINE simd::Doubles exact_gelu(simd::Doubles u) {
  for (int i = 0; i < simd::kLanes<double>; ++i) u[i] *= 0.5 * std::erfc(-u[i] * kSqrtHalf);
  return u;
}
NATIVE_BUILD_INLINE simd::Doubles exact_gelu_slope(simd::Doubles u) {
  u = within<double>(u, 40);
  for (int i = 0; i < simd::kLanes<double>; ++i) u[i] = 0.5 * std::erfc(-u[i] * kSqrtHalf) + u[i] * kDensity * std::exp(-u[i] * u[i] / 2);
  return u;
}

// ---- blocks

template <Activation kActivation, typename T> NATIVE_BUILD_INLINE simd::Block<T> values(const simd::Block<T>& u) {
  if constexpr (kActivation == Activation::kGeluTanh) return gelus(u);
  return simd::each<T>([](auto v) NATIVE_BUILD_INLINED {
    if constexpr (kActivation == Activation::kSilu) return silu<Wide<T>>(v);
    else return exact_gelu(v);
  }, u);
}
template <Activation kActivation, typename T> NATIVE_BUILD_INLINE simd::Block<T> slopes_of(const simd::Block<T>& u) {
  if constexpr (kActivation == Activation::kGeluTanh) return slopes(u);
  return simd::each<T>([](auto v) NATIVE_BUILD_INLINED {
    if constexpr (kActivation == Activation::kSilu) return silu_slope<Wide<T>>(v);
    else return exact_gelu_slope(v);
  }, u);
}
template <typename T, typename... Blocks> NATIVE_BUILD_INLINE simd::Block<T> product(const simd::Block<T>& a, const Blocks&... others) {
  return simd::each<T>([](auto first, auto... rest) NATIVE_BUILD_INLINED { return (first * ... * rest); }, a, others...);
}

// Calls visit(row, column, count) for each row, or the part of one at either end.
template <typename Visit> NATIVE_BUILD_INLINE void each_row(int64_t columns, int64_t begin, int64_t end, Visit visit) {
  for (int64_t at = begin; at < end;) {
    const int64_t column = at % columns, count = std::min(end - at, columns - column);
    visit(at / columns, column, count);
    at += count;
  }
}

template <Activation kActivation, typename T> void forward(const Glu& call, int64_t begin, int64_t end) {
  const bool large = native_build::is_streamed(call.rows * call.columns * sizeof(T));
  each_row(call.columns, begin, end, [&](int64_t row, int64_t column, int64_t count) {
    const T* const gate = static_cast<const T*>(call.gate) + row * call.gate_row + column;
    const T* const up = static_cast<const T*>(call.up) + row * call.up_row + column;
    simd::write_row(static_cast<T*>(call.out) + row * call.columns + column, count, large, [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED {
      return narrowed(product(values<kActivation, T>(simd::load_block(gate + i, some)), simd::load_block(up + i, some)));
    });
  });
  if (large) simd::end_of_stream();
}

template <Activation kActivation, typename T> void backward(const GluBackward& call, int64_t begin, int64_t end) {
  const bool large = native_build::is_streamed(call.rows * call.columns * sizeof(T));
  each_row(call.columns, begin, end, [&](int64_t row, int64_t column, int64_t count) {
    const T* const grad = static_cast<const T*>(call.grad) + row * call.columns + column;
    const T* const gate = static_cast<const T*>(call.gate) + row * call.gate_row + column;
    const T* const up = static_cast<const T*>(call.up) + row * call.up_row + column;
    T* const dup = static_cast<T*>(call.dup) + row * call.result_row + column;
    const bool streams = large && reinterpret_cast<uintptr_t>(dup) % simd::kBytes == 0;
    simd::write_row(static_cast<T*>(call.dgate) + row * call.result_row + column, count, large, [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED {
      const simd::Block<T> g = simd::load_block(grad + i, some), u = simd::load_block(gate + i, some);
      const auto of_up = narrowed(product(values<kActivation, T>(u), g));
      if (streams && some == simd::kBlock<T>) simd::stream_block<T>(of_up, dup + i);
      else simd::store_block<T>(of_up, dup + i, some);
      return narrowed(product(slopes_of<kActivation, T>(u), g, simd::load_block(up + i, some)));
    });
  });
  if (large) simd::end_of_stream();
}

// Calls run(dtype's type, activation) with compile-time constants.
template <typename Call, typename Run> NATIVE_BUILD_INLINE void for_kind(const Call& call, Run run) {
  for_dtype(call.dtype, [&](auto tag) {
    switch (call.activation) {
      case Activation::kSilu: return run(tag, std::integral_constant<Activation, Activation::kSilu>{});
      case Activation::kGelu: return run(tag, std::integral_constant<Activation, Activation::kGelu>{});
      case Activation::kGeluTanh: return run(tag, std::integral_constant<Activation, Activation::kGeluTanh>{});
    }
  });
}

}  // namespace

void glu_cpu(const Glu& call, int64_t begin, int64_t end) {
  for_kind(call, [&](auto tag, auto activation) { forward<decltype(activation)::value, typename decltype(tag)::type>(call, begin, end); });
}

void glu_backward_cpu(const GluBackward& call, int64_t begin, int64_t end) {
  for_kind(call, [&](auto tag, auto activation) { backward<decltype(activation)::value, typename decltype(tag)::type>(call, begin, end); });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

// CPU kernels over rows of vectors. sigmoid(2 z) is 1 / (1 + p) with p = exp(-2 z) = 2^t; std::exp would be a call per element.

#include "kernels.h"

#include <algorithm>
#include <type_traits>

#include <native_build/memory.h>

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kCubic = 0.044715;
constexpr double kLog2E = 1.44269504088896340736;

template <typename W> NATIVE_BUILD_INLINE simd::Vector<W> constant(double value) { return simd::broadcast(static_cast<W>(value)); }

// ---- any number: float32 to within a few units in the last place

// exp(-2 z) of u; infinite far below zero.
template <typename W> NATIVE_BUILD_INLINE simd::Vector<W> power_of(simd::Vector<W> u) {
  constexpr double kLinear = -2 * kLog2E * kSqrt2OverPi;
  return simd::exp2(u * simd::fma(constant<W>(kLinear * kCubic), u * u, constant<W>(kLinear)));
}

template <typename W> NATIVE_BUILD_INLINE simd::Vector<W> gelu(simd::Vector<W> u) { return u / (W(1) + power_of<W>(u)); }

// s + u * 2z' * s (1 - s) = s (1 + u * 2z' * p s) with s = sigmoid(2 z); p s is 1 - s without its cancellation. `steep` is u * 2z'.
template <typename W> NATIVE_BUILD_INLINE simd::Vector<W> steep_of(simd::Vector<W> u) {
  constexpr double kLinear = 2 * kSqrt2OverPi, kSquare = kLinear * 3 * kCubic;
  return u * simd::fma(constant<W>(kSquare), u * u, constant<W>(kLinear));
}
template <typename W> NATIVE_BUILD_INLINE simd::Vector<W> slope(simd::Vector<W> u) {
  // Beyond +-64 the slope is 0 or 1, and infinity would be multiplied by zero. So would an infinite p by s, which is then zero.
  u = simd::min(constant<W>(64), simd::max(constant<W>(-64), u));
  const simd::Vector<W> p = power_of<W>(u), s = W(1) / (W(1) + p);
  return s * simd::fma(steep_of<W>(u), simd::min(constant<W>(sizeof(W) == 8 ? 1e300 : 1e38), p) * s, constant<W>(1));
}

// ---- bfloat16 with |u| <= kUsual: fewer operations. The relative error of sigmoid(2 z) is at most 2^-12.8 (2^-14 each from the
// power and the reciprocal, and the roundings); half a unit in the last place of a result is 2^-9 of it or more. A block takes each step for all
// its vectors, which hides latency.

using Short = simd::Block<BFloat16>;
constexpr float kUsual = 9;  // exp(-2 z) is at most 2^96, and no term overflows

template <typename Function, typename... Blocks> NATIVE_BUILD_INLINE Short each(Function function, const Blocks&... blocks) {
  return simd::each<BFloat16>(function, blocks...);
}

#if defined(NATIVE_BUILD_AVX512)
// 2^t from a table of 32 powers: t = k / 32 + r with integer k and |r| <= 1/64, and 2^r is nearly 1 + ln(2) r. An entry is 2^(j / 32)
// less j << 18, so that adding k << 18 puts k's whole part into the exponent.
NATIVE_BUILD_INLINE Short short_exp2(const Short& t) {
  alignas(64) static constexpr uint32_t kPowers[32] = {
      0x3f800000, 0x3f7ecd87, 0x3f7daac3, 0x3f7c980f, 0x3f7b95c2, 0x3f7aa43a, 0x3f79c3d3, 0x3f78f4f0,
      0x3f7837f0, 0x3f778d3a, 0x3f76f532, 0x3f767043, 0x3f75fed7, 0x3f75a15b, 0x3f75583f, 0x3f7523f6,
      0x3f7504f3, 0x3f74fbaf, 0x3f7508a4, 0x3f752c4d, 0x3f75672a, 0x3f75b9be, 0x3f76248c, 0x3f76a81e,
      0x3f7744fd, 0x3f77fbb8, 0x3f78ccdf, 0x3f79b907, 0x3f7ac0c7, 0x3f7be4ba, 0x3f7d257d, 0x3f7e83b3,
  };
  constexpr float kThirtySeconds = 393216.0f;  // 1.5 * 2^18: adding it rounds to k / 32, and keeps k in the low bits
  const Short shifted = each([](auto v) NATIVE_BUILD_INLINED { return v + kThirtySeconds; }, t);
  const Short rest = each([](auto v, auto s) NATIVE_BUILD_INLINED { return v - (s - kThirtySeconds); }, t, shifted);
  const Short power = each([](auto s) NATIVE_BUILD_INLINED {
    const __m512i k = simd::bits<__m512i>(s);
    const __m512i entry = _mm512_permutex2var_epi32(_mm512_load_si512(kPowers), k, _mm512_load_si512(kPowers + 16));
    return simd::bits<simd::Floats>(_mm512_add_epi32(entry, _mm512_slli_epi32(k, 18)));
  }, shifted);
  return each([](auto p, auto r) NATIVE_BUILD_INLINED { return p * simd::fma(constant<float>(0.69314718), r, constant<float>(1)); }, power, rest);
}
NATIVE_BUILD_INLINE simd::Floats short_reciprocal(simd::Floats x) { return _mm512_rcp14_ps(x); }
#else
// 2^t as simd::exp2 finds it, without its limits, by the polynomial of degree 3 with the smallest relative error, 2^-13.7.
NATIVE_BUILD_INLINE Short short_exp2(const Short& t) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23, whose bits leave the word with the shift
  return each([](auto v) NATIVE_BUILD_INLINED {
    const simd::Floats shifted = v + kWhole, f = v - (shifted - kWhole);
    simd::Floats power = simd::fma(constant<float>(0.05517167), f, constant<float>(0.24261113));
    power = simd::fma(power, f, constant<float>(0.69326097));
    power = simd::fma(power, f, constant<float>(0.99992806));
    return simd::bits<simd::Floats>(simd::bits<simd::Ints>(power) + (simd::bits<simd::Ints>(shifted) << 23));
  }, t);
}
NATIVE_BUILD_INLINE simd::Floats short_reciprocal(simd::Floats x) { return 1.0f / x; }
#endif

NATIVE_BUILD_INLINE Short short_power(const Short& u, const Short& square) {
  constexpr double kLinear = -2 * kLog2E * kSqrt2OverPi;
  return short_exp2(each([](auto v, auto s) NATIVE_BUILD_INLINED {
    return v * simd::fma(constant<float>(kLinear * kCubic), s, constant<float>(kLinear));
  }, u, square));
}
NATIVE_BUILD_INLINE Short short_gelu(const Short& u, const Short& square) {
  return each([](auto v, auto p) NATIVE_BUILD_INLINED { return v * short_reciprocal(1.0f + p); }, u, short_power(u, square));
}
NATIVE_BUILD_INLINE Short short_slope(const Short& u, const Short& square) {
  const Short p = short_power(u, square), s = each([](auto of) NATIVE_BUILD_INLINED { return short_reciprocal(1.0f + of); }, p);
  return each([](auto v, auto of_p, auto of_s) NATIVE_BUILD_INLINED {
    return of_s * simd::fma(steep_of<float>(v), of_p * of_s, constant<float>(1));
  }, u, p, s);
}

// ---- blocks

// `quick`(u, u^2) if the block is of bfloat16 with usual numbers, no NaN among them; else `exact` of each vector.
template <typename T, typename Quick, typename Exact> NATIVE_BUILD_INLINE simd::Block<T> by_range(const simd::Block<T>& u, Quick quick, Exact exact) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const Short squares = each([](auto v) NATIVE_BUILD_INLINED { return v * v; }, u);
    const simd::Floats largest = simd::max(simd::max(squares.of[0], squares.of[1]), simd::max(squares.of[2], squares.of[3]));
    if (__builtin_expect(!simd::any_above(largest, simd::broadcast(kUsual * kUsual)), true)) return quick(u, squares);
  }
  return simd::each<T>(exact, u);
}
template <typename T> NATIVE_BUILD_INLINE simd::Block<T> gelus(const simd::Block<T>& u) {
  return by_range<T>(u, [](const auto& v, const auto& squares) NATIVE_BUILD_INLINED { return short_gelu(v, squares); },
                     [](auto v) NATIVE_BUILD_INLINED { return gelu<Wide<T>>(v); });
}
template <typename T> NATIVE_BUILD_INLINE simd::Block<T> slopes(const simd::Block<T>& u) {
  return by_range<T>(u, [](const auto& v, const auto& squares) NATIVE_BUILD_INLINED { return short_slope(v, squares); },
                     [](auto v) NATIVE_BUILD_INLINED { return slope<Wide<T>>(v); });
}

template <typename T> void forward(const BiasGelu& call, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(call.x);
  const T* bias = static_cast<const T*>(call.bias);
  T* out = static_cast<T*>(call.out);
  const bool large = native_build::exceeds_caches(call.rows * call.columns * sizeof(T));
  for (int64_t at = begin; at < end;) {  // a row, or the part of one at either end
    const int64_t column = at % call.columns, count = std::min(end - at, call.columns - column);
    simd::write_row(out + at, count, large, [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED {
      return gelus<T>(simd::sum<T>(simd::load_block(x + at + i, some), simd::load_block(bias + column + i, some)));
    });
    at += count;
  }
  if (large) simd::end_of_stream();
}

template <typename T> void backward_rows(const BiasGeluBackward& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t groups = bias_gelu_backward_groups(call.rows), columns = call.columns;
  const T* bias = static_cast<const T*>(call.bias);
  const bool large = native_build::exceeds_caches(call.rows * columns * sizeof(T));
  for (int64_t group = begin; group < end; ++group) {
    W* sums = static_cast<W*>(call.workspace) + group * bias_gelu_backward_stride(columns);  // in the order of blocks
    std::fill_n(sums, bias_gelu_backward_stride(columns), W(0));
    for (int64_t row = group * call.rows / groups; row < (group + 1) * call.rows / groups; ++row) {
      const T* grad = static_cast<const T*>(call.grad) + row * columns;
      const T* x = static_cast<const T*>(call.x) + row * columns;
      simd::write_row(static_cast<T*>(call.dx) + row * columns, columns, large, [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED {
        const simd::Block<T> slope = slopes<T>(simd::sum<T>(simd::load_block(x + i, some), simd::load_block(bias + i, some)));
        const simd::Block<T> dx = simd::each<T>([](auto g, auto s) NATIVE_BUILD_INLINED { return g * s; }, simd::load_block(grad + i, some), slope);
        simd::add_to_sums<T>(dx, sums + i);
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
  for (int64_t at = begin * kColumnBlock; at < std::min(end * kColumnBlock, call.columns); at += simd::kBlock<T>) {
    simd::Block<T> total = {};
    for (int64_t group = 0; group < groups; ++group) {
      const W* from = sums + group * stride + at;
      for (int i = 0; i < simd::kVectors; ++i) total.of[i] += simd::load(from + i * simd::kLanes<T>);
    }
    simd::store_block(total, dbias + at, call.columns - at);
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

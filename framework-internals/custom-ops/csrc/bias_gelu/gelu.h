// GELU in its tanh approximation and its slope, of vectors and of blocks, for the CPU kernels that include this file in their level's
// namespace. sigmoid(2 z) is 1 / (1 + p) with p = exp(-2 z) = 2^t; std::exp would be a call per element.
#pragma once

#include <algorithm>
#include <type_traits>

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

#if defined(NATIVE_BUILD_AVX512)
// ---- bfloat16 by cubics of a = |u|, one for each of 32 segments, whose coefficients a permutation of two registers finds:
//   gelu(u) = max(u, 0) - G(a) with G(a) = a sigmoid(-2 z(a)), and its slope is 1/2 + sign(u) H(a) with H(a) = 1/2 - G'(a).
// The error of G is at most 2^-13 G or 2^-24, that of H at most 2^-19. This takes half as long as an exponential and a reciprocal.

constexpr float kWidth = 0.1875f;  // of a segment; segment k is around k * kWidth
constexpr float kLast = 31 * kWidth;  // from there on G is 0 (it is below 1e-9) and H is 1/2

constexpr double exponential(double x) {  // of 0 to 25: the series at x / 1024, squared ten times
  double term = 1, power = 1;
  for (int i = 1; i <= 8; ++i) power += term *= x / 1024 / i;
  for (int i = 0; i < 10; ++i) power *= power;
  return power;
}
constexpr double gate(double a) { return 1 / (1 + exponential(2 * kSqrt2OverPi * (a + kCubic * a * a * a))); }  // sigmoid(-2 z)
constexpr double part_of_gelu(double a) { return a * gate(a); }
constexpr double part_of_slope(double a) {
  return 0.5 - gate(a) * (1 - a * 2 * kSqrt2OverPi * (1 + 3 * kCubic * a * a) * (1 - gate(a)));
}

struct Cubics {
  alignas(64) float coefficient[4][32];  // of the powers of a
};
// The cubic through `function` at the zeros of Chebyshev's polynomial of each segment, which is nearly the best one. The first passes
// through the function's value at 0, so that the relative error of G is small there too.
constexpr Cubics cubics_of(double (*function)(double), double last) {
  Cubics found = {};
  for (int k = 0; k < 31; ++k) {
    const double low = k == 0 ? 0 : (k - 0.5) * kWidth, width = (k + 0.5) * kWidth - low;
    const double x[4] = {low + width * (k == 0 ? 0 : 0.03806), low + width * 0.30866, low + width * 0.69134, low + width * 0.96194};
    double divided[4] = {function(x[0]), function(x[1]), function(x[2]), function(x[3])};
    for (int order = 1; order < 4; ++order) {
      for (int i = 3; i >= order; --i) divided[i] = (divided[i] - divided[i - 1]) / (x[i] - x[i - order]);
    }
    double power[4] = {divided[3], 0, 0, 0};
    for (int i = 2; i >= 0; --i) {  // power = power * (a - x[i]) + divided[i]
      for (int of = 3; of > 0; --of) power[of] = power[of - 1] - x[i] * power[of];
      power[0] = divided[i] - x[i] * power[0];
    }
    for (int of = 0; of < 4; ++of) found.coefficient[of][k] = static_cast<float>(power[of]);
  }
  found.coefficient[0][31] = static_cast<float>(last);
  return found;
}
static constexpr Cubics kGelu = cubics_of(part_of_gelu, 0), kSlope = cubics_of(part_of_slope, 0.5);

using Short = simd::Block<BFloat16>;

template <typename Function, typename... Blocks> NATIVE_BUILD_INLINE Short each(Function function, const Blocks&... blocks) {
  return simd::each<BFloat16>(function, blocks...);
}
// The number of the segment of a, in the low bits.
NATIVE_BUILD_INLINE Short segments_of(const Short& a) {
  return each([](auto v) NATIVE_BUILD_INLINED { return simd::fma(v, constant<float>(1 / kWidth), constant<float>(12582912)); }, a);  // 1.5 * 2^23
}
NATIVE_BUILD_INLINE simd::Floats look_up(const Cubics& cubics, int power, simd::Floats segment) {
  const float* from = cubics.coefficient[power];
  return _mm512_permutex2var_ps(_mm512_load_ps(from), simd::bits<__m512i>(segment), _mm512_load_ps(from + 16));
}
// (c3 a + c2) a + c1
NATIVE_BUILD_INLINE Short upper_part(const Cubics& cubics, const Short& a, const Short& segments) {
  const Short cubic = each([&](auto v, auto k) NATIVE_BUILD_INLINED { return simd::fma(look_up(cubics, 3, k), v, look_up(cubics, 2, k)); }, a, segments);
  return each([&](auto c, auto v, auto k) NATIVE_BUILD_INLINED { return simd::fma(c, v, look_up(cubics, 1, k)); }, cubic, a, segments);
}
NATIVE_BUILD_INLINE Short gelus(const Short& u) {
  // By the kind of number: max(u, 0) with -0 of what is below zero or is -0, and NaN of -infinity, as PyTorch has it (-infinity * 0).
  [[maybe_unused]] constexpr int kMaximum = 7 << (4 * 6) | 3 << (4 * 4);  // unused without optimisation, says GCC
  const Short above = each([](auto v) NATIVE_BUILD_INLINED { return simd::Floats(_mm512_fixupimm_ps(v, v, _mm512_set1_epi32(kMaximum), 0)); }, u);
  const Short a = each([](auto v) NATIVE_BUILD_INLINED { return simd::Floats(_mm512_range_ps(v, constant<float>(kLast), 0xa)); }, u);  // min(|u|, kLast)
  const Short segments = segments_of(a), upper = upper_part(kGelu, a, segments);
  const Short rest = each([](auto y, auto k) NATIVE_BUILD_INLINED { return y - look_up(kGelu, 0, k); }, above, segments);
  return each([](auto c, auto v, auto y) NATIVE_BUILD_INLINED { return simd::Floats(_mm512_fnmadd_ps(c, v, y)); }, upper, a, rest);
}
NATIVE_BUILD_INLINE Short slopes(const Short& u) {
  const Short a = each([](auto v) NATIVE_BUILD_INLINED { return simd::Floats(_mm512_min_ps(constant<float>(kLast), _mm512_abs_ps(v))); }, u);  // NaN of NaN
  const Short segments = segments_of(a), upper = upper_part(kSlope, a, segments);
  return each([](auto c, auto v, auto k, auto sign) NATIVE_BUILD_INLINED {
    const __m512i size = simd::bits<__m512i>(simd::fma(c, v, look_up(kSlope, 0, k))), of = simd::bits<__m512i>(sign);
    return simd::bits<simd::Floats>(_mm512_ternarylogic_epi32(size, of, _mm512_set1_epi32(INT32_MIN), 0xd8)) + 0.5f;  // of ? sign : size, by bits
  }, upper, a, segments, u);
}
#else
// ---- float32 and 16-bit types with |u| <= kUsual, in fewer operations than for any number. A block takes each step for all its vectors,
// which hides latency.

constexpr float kUsual = 7.5f;  // exp(-2 z) is at most 2^61, and its square a number

// Polynomials of the smallest relative error of 2^f, |f| <= 1/2: 2^-23.3, of those with the constant 1, and 2^-13.7 for bfloat16, half a unit in
// whose last place is 2^-9 of a result or more.
constexpr float kExp2[] = {1.32695539e-3f, 9.6712932e-3f, 5.55071086e-2f, 2.40222469e-1f, 6.93147004e-1f, 1.0f};
constexpr float kShortExp2[] = {0.05517167f, 0.24261113f, 0.69326097f, 0.99992806f};

// exp(-2 z) of a block of usual numbers and their squares, as its two factors.
template <typename T> NATIVE_BUILD_INLINE simd::Power<T> usual_power(const simd::Block<T>& u, const simd::Block<T>& squares) {
  constexpr double kLinear = -2 * kLog2E * kSqrt2OverPi;
  const simd::Block<T> t = simd::each<T>([](auto v, auto s) NATIVE_BUILD_INLINED { return v * simd::fma(constant<float>(kLinear * kCubic), s, constant<float>(kLinear)); }, u, squares);
  if constexpr (std::is_same_v<T, BFloat16>) return simd::power_within(t, kShortExp2);
  else return simd::power_within(t, kExp2);
}
template <typename T> NATIVE_BUILD_INLINE simd::Block<T> usual_gelu(const simd::Block<T>& u, const simd::Block<T>& squares) {
  const simd::Power<T> power = usual_power(u, squares);
  return simd::each<T>([](auto v, auto part, auto whole) NATIVE_BUILD_INLINED { return v / simd::fma(part, whole, constant<float>(1)); }, u, power.part, power.whole);
}
// s (1 + u * 2z' * p s) as (1 + p (1 + u * 2z')) / (1 + p)^2: the division does not wait for another one.
template <typename T> NATIVE_BUILD_INLINE simd::Block<T> usual_slope(const simd::Block<T>& u, const simd::Block<T>& squares) {
  constexpr double kLinear = 2 * kSqrt2OverPi;
  const simd::Power<T> power = usual_power(u, squares);
  const simd::Block<T> p = simd::each<T>([](auto part, auto whole) NATIVE_BUILD_INLINED { return part * whole; }, power.part, power.whole);
  const simd::Block<T> steep = simd::each<T>([](auto v, auto s) NATIVE_BUILD_INLINED {
    return simd::fma(v, simd::fma(constant<float>(kLinear * 3 * kCubic), s, constant<float>(kLinear)), constant<float>(1));
  }, u, squares);
  return simd::each<T>([](auto of_p, auto of_steep) NATIVE_BUILD_INLINED {
    const simd::Floats root = of_p + 1.0f;
    return simd::fma(of_p, of_steep, constant<float>(1)) / (root * root);
  }, p, steep);
}

// `usual`(u, u^2) of a block of usual numbers, no NaN among them; else `any` of each vector.
template <typename T, typename Usual, typename Any> NATIVE_BUILD_INLINE simd::Block<T> by_range(const simd::Block<T>& u, Usual usual, Any any) {
  const simd::Block<T> squares = simd::each<T>([](auto v) NATIVE_BUILD_INLINED { return v * v; }, u);
  const simd::Floats largest = simd::max(simd::max(squares.of[0], squares.of[1]), simd::max(squares.of[2], squares.of[3]));
  return __builtin_expect(simd::any_above(largest, simd::broadcast(kUsual * kUsual)), false) ? simd::each<T>(any, u) : usual(u, squares);
}
#endif

// ---- blocks

template <typename T> NATIVE_BUILD_INLINE simd::Block<T> gelus(const simd::Block<T>& u) {
  const auto any = [](auto v) NATIVE_BUILD_INLINED { return gelu<Wide<T>>(v); };
#if !defined(NATIVE_BUILD_AVX512)
  if constexpr (!std::is_same_v<T, double>) {
    return by_range<T>(u, [](const auto& v, const auto& squares) NATIVE_BUILD_INLINED { return usual_gelu<T>(v, squares); }, any);
  }
#endif
  return simd::each<T>(any, u);
}
template <typename T> NATIVE_BUILD_INLINE simd::Block<T> slopes(const simd::Block<T>& u) {
  const auto any = [](auto v) NATIVE_BUILD_INLINED { return slope<Wide<T>>(v); };
#if !defined(NATIVE_BUILD_AVX512)
  if constexpr (!std::is_same_v<T, double>) {
    return by_range<T>(u, [](const auto& v, const auto& squares) NATIVE_BUILD_INLINED { return usual_slope<T>(v, squares); }, any);
  }
#endif
  return simd::each<T>(any, u);
}

template <typename T> NATIVE_BUILD_INLINE auto narrowed(const simd::Block<T>& block) {
  if constexpr (std::is_same_v<T, BFloat16>) return simd::narrow_with_ties_down(block);
  else return block;
}

}  // namespace
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

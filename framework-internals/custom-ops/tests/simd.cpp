// Compares common/simd.h with plain loops, for the instruction set that it is compiled for. Prints nothing and returns 0 if
// all is right, and returns 77 if this processor lacks the instruction set.

#include "../csrc/common/simd.h"

#include <cmath>
#include <cstdio>
#include <limits>

using namespace custom_ops;
namespace {

int failures = 0;
constexpr int kUnsupported = 77;

void expect(bool right, const char* what, double got, double expected) {
  if (right || (std::isnan(got) && std::isnan(expected))) return;
  std::printf("%s: expected %.9g, got %.9g\n", what, expected, got);
  ++failures;
}

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
// Ties of both directions, the largest numbers, subnormal ones, and what rounds past the largest.
const float kHard[] = {0.0f,     -0.0f,     1.0f,    -1.0f,       1.00390625f, 1.01171875f, 1.00048828125f, 1.00146484375f, 65504.0f,
                       65520.0f, 3.389e38f, 3.4e38f, 6.0e-8f,     2.9e-8f,     1e-40f,      kInf,           -kInf,          kNan,
                       -2.5f,    0.1f,      1e-5f,   -1.2345678f, 127.4f,      -126.7f,     3.0f,           7.0f};
constexpr int kCount = sizeof kHard / sizeof kHard[0];

template <typename T> void check_memory(const char* name) {
  constexpr int kLanes = simd::kLanes<Wide<T>>;
  // Every offset, so that no alignment is assumed; every count, so that nothing beyond it is touched.
  for (int at = 0; at + kLanes <= kCount; ++at) {
    for (int count = 0; count <= kLanes; ++count) {
      T from[kCount], to[kLanes + 1];
      for (int i = 0; i < kCount; ++i) narrow(kHard[i], from[i]);
      for (T& x : to) narrow(42.0f, x);
      const auto loaded = simd::load(from + at, count);
      simd::store(loaded, to, count);
      for (int i = 0; i <= kLanes; ++i) {
        const double expected = i < count ? static_cast<double>(widen(from[at + i])) : 42.0;
        expect(widen(to[i]) == expected, name, widen(to[i]), expected);
        if (i < kLanes && i >= count) expect(loaded[i] == 0, name, loaded[i], 0);
      }
    }
  }
}

template <typename T> void check_rounding(const char* name) {
  for (int at = 0; at + simd::kLanes<float> <= kCount; ++at) {
    T got[simd::kLanes<float>], expected;
    simd::store(simd::load(kHard + at), got);
    for (int i = 0; i < simd::kLanes<float>; ++i) {
      narrow(kHard[at + i], expected);
      expect(widen(got[i]) == widen(expected), name, widen(got[i]), widen(expected));
    }
  }
}

void check_arithmetic() {
  for (const float a : kHard) {
    for (const float b : kHard) {
      const float largest = simd::max(simd::broadcast(a), simd::broadcast(b))[0];
      expect(largest == (a > b ? a : b), "max", largest, a > b ? a : b);
      const float sum = simd::fma(simd::broadcast(a), simd::broadcast(b), simd::broadcast(1.0f))[0];
      const double exact = static_cast<double>(a) * b + 1.0;
      expect(sum == static_cast<float>(exact) || std::fabs(sum - exact) <= 1.2e-7 * (std::fabs(exact) + std::fabs(exact - 1)), "fma", sum, exact);
    }
  }
  double worst = 0;
  for (float t = -126.4f; t < 127.4f; t += 0.00371f) {
    const double got = simd::exp2(simd::broadcast(t))[0], exact = std::exp2(static_cast<double>(t));
    worst = std::fmax(worst, std::fabs(got / exact - 1));
  }
  expect(worst < 1.2e-7, "exp2: relative error", worst, 0);
  const float ends[][2] = {{0.0f, 1.0f}, {10.0f, 1024.0f}, {128.0f, kInf}, {kInf, kInf}, {-127.0f, 0.0f}, {-kInf, 0.0f}, {kNan, kNan}};
  for (const auto& [t, expected] : ends) {
    const float got = simd::exp2(simd::broadcast(t))[0];
    expect(got == expected, "exp2", got, expected);
  }
}

}  // namespace

int main() {
#if defined(CUSTOM_OPS_AVX512)
  if (!__builtin_cpu_supports("avx512f")) return kUnsupported;
#elif defined(CUSTOM_OPS_AVX2)
  if (!__builtin_cpu_supports("avx2")) return kUnsupported;
#endif
  check_memory<float>("float32");
  check_memory<double>("float64");
  check_memory<Half>("float16");
  check_memory<BFloat16>("bfloat16");
  check_rounding<Half>("to float16");
  check_rounding<BFloat16>("to bfloat16");
  check_arithmetic();
  return failures != 0;
}

// Compares native_build/simd.h with plain loops, for the instruction set that it is compiled for. Prints nothing and returns 0 if
// all is right, and returns 77 if this processor lacks the instruction set.

#include <native_build/simd.h>

#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <limits>

using namespace native_build;
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
  const float ends[][2] = {{0.0f, 1.0f}, {10.0f, 1024.0f}, {128.0f, kInf}, {kInf, kInf}, {-150.0f, 0.0f}, {-kInf, 0.0f}, {kNan, kNan}};
  for (const auto& [t, expected] : ends) {
    const float got = simd::exp2(simd::broadcast(t))[0];
    expect(got == expected, "exp2", got, expected);
  }
}

// The error of 2^t in units in the last place of the exact result, where that is a normal number.
double error_of_exp2(float t) {
  if (!(t >= -126.0f && t < 127.4f)) return 0;
  const double exact = std::exp2(static_cast<double>(t));
  return std::fabs(simd::exp2(simd::broadcast(t))[0] - exact) / std::ldexp(1.0, std::ilogb(exact) - 23);
}

void check_exp2() {
  double worst = 0;
  for (uint32_t word = 0; word < 0x10000; ++word) {  // every bfloat16 and every float16
    const uint16_t narrow = static_cast<uint16_t>(word);
    worst = std::fmax(worst, error_of_exp2(widen(BFloat16{narrow})));
    Half half;
    std::memcpy(&half, &narrow, sizeof half);
    worst = std::fmax(worst, error_of_exp2(widen(half)));
  }
  for (uint64_t word = 0; word < 0x100000000u; word += 1237) worst = std::fmax(worst, error_of_exp2(simd::bits<float>(static_cast<uint32_t>(word))));
#if defined(NATIVE_BUILD_AVX512) || defined(NATIVE_BUILD_AVX2) || defined(NATIVE_BUILD_NEON)
  expect(worst <= 1, "exp2: error in units in the last place", worst, 1);
#else
  expect(worst <= 1.1, "exp2: error in units in the last place, without fused multiply-add", worst, 1.1);
#endif
}

// Results of narrow() at every element of a block, for each number beside several others; stored plainly, in part and streaming.
template <typename T> void check_blocks(const char* name) {
  constexpr int kBlock = simd::kBlock<T>;
  for (int at = 0; at < kCount; ++at) {
    alignas(64) T from[kBlock], whole[kBlock], streamed[kBlock], round_trip[kBlock];
    for (int i = 0; i < kBlock; ++i) narrow(kHard[(at + i * i) % kCount], from[i]);
    const simd::Block<T> block = simd::load_block(from);
    simd::store_block(block, whole);
    simd::stream_block(block, streamed);
    simd::end_of_stream();
    simd::store_block(simd::rounded<T>(block), round_trip);
    Wide<T> wide[kBlock], in_order[kBlock];
    simd::store_wide_block<T>(block, wide);
    simd::store_wide_block<T>(simd::load_wide_block<T>(wide), in_order);
    for (int i = 0; i < kBlock; ++i) {
      for (const T each : {whole[i], streamed[i], round_trip[i]}) expect(widen(each) == widen(from[i]), name, widen(each), widen(from[i]));
      for (const Wide<T> each : {wide[i], in_order[i]}) expect(each == widen(from[i]), name, each, widen(from[i]));
    }
    for (int count = 0; count <= kBlock; ++count) {
      T part[kBlock];
      Wide<T> wide_part[kBlock];
      for (T& x : part) narrow(42.0f, x);
      for (Wide<T>& x : wide_part) x = 42;
      simd::store_block(simd::load_block(from, count), part, count);
      simd::store_wide_block<T>(simd::load_wide_block<T>(wide, count), wide_part, count);
      for (int i = 0; i < kBlock; ++i) {
        const double expected = i < count ? static_cast<double>(widen(from[i])) : 42.0;
        expect(widen(part[i]) == expected, name, widen(part[i]), expected);
        expect(wide_part[i] == expected, name, wide_part[i], expected);
      }
    }
  }
}

// Sums that lie between two numbers of the type, rounded in every vector of a block; in others beside a NaN.
template <typename T> void check_block_rounding(const char* name) {
  for (const float a : kHard) {
    for (const float b : kHard) {
      T x, y, expected, got[simd::kBlock<T>];
      narrow(a, x), narrow(b, y);
      const float sum = widen(x) + widen(y) * 0.0078125f;
      narrow(sum, expected);
      for (const float last : {sum, kNan}) {
        simd::store_block(simd::Block<T>{{simd::broadcast(sum), simd::broadcast(sum), simd::broadcast(sum), simd::broadcast(last)}}, got);
        for (int i = 0; i < simd::kBlock<T> / 2; ++i) expect(widen(got[i]) == widen(expected), name, widen(got[i]), widen(expected));
      }
    }
  }
}

// Every bit pattern of the upper half of a float, with lower halves around the ties of both types, rounded to a type; and every number
// of the type, as a float.
template <typename T> void check_every_number(const char* name) {
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float value = bits<float>(upper << 16 | lower);
      T expected, got[simd::kBlock<T>], alone[simd::kLanes<T>];
      narrow(value, expected);
      simd::store_block(simd::Block<T>{{simd::broadcast(value), simd::broadcast(value), simd::Floats{}, simd::broadcast(value)}}, got);
      simd::store(simd::broadcast(value), alone);
      for (int i = 0; i < simd::kBlock<T> / 2; ++i) expect(got[i].bits == expected.bits || value != value, name, got[i].bits, expected.bits);
      for (const T& x : alone) expect(x.bits == expected.bits || value != value, name, x.bits, expected.bits);
      if (value != value) expect(widen(got[0]) != widen(got[0]) && widen(alone[0]) != widen(alone[0]), name, got[0].bits, expected.bits);
    }
    T from[simd::kLanes<T>];
    for (T& x : from) x.bits = static_cast<uint16_t>(upper);
    const float whole = widen(from[0]), loaded = simd::load(from)[1];
    expect(whole != whole ? loaded != loaded : bits<uint32_t>(whole) == bits<uint32_t>(loaded), name, loaded, whole);
  }
}

void check_comparisons() {
  for (const float a : kHard) {
    for (const float b : kHard) {
      simd::Floats x = simd::broadcast(0.0f), y = x;
      x[1] = a, y[1] = b;
      expect(simd::any_above(x, y) == !(a <= b), "any_above", a, b);
      expect(simd::any_nan(x, y) == (a != a || b != b), "any_nan", a, b);
    }
  }
}

}  // namespace

int main() {
#if defined(NATIVE_BUILD_AVX512)
  if (!__builtin_cpu_supports("avx512f")) return kUnsupported;
#elif defined(NATIVE_BUILD_AVX2)
  if (!__builtin_cpu_supports("avx2")) return kUnsupported;
#endif
  check_memory<float>("float32");
  check_memory<double>("float64");
  check_memory<Half>("float16");
  check_memory<BFloat16>("bfloat16");
  check_rounding<Half>("to float16");
  check_rounding<BFloat16>("to bfloat16");
  check_blocks<float>("blocks of float32");
  check_blocks<double>("blocks of float64");
  check_blocks<Half>("blocks of float16");
  check_blocks<BFloat16>("blocks of bfloat16");
  check_block_rounding<Half>("blocks to float16");
  check_block_rounding<BFloat16>("blocks to bfloat16");
  check_every_number<Half>("any float16");
  check_every_number<BFloat16>("any bfloat16");
  check_comparisons();
  check_arithmetic();
  check_exp2();
  return failures != 0;
}

// Shared by the CPU kernels: 16-bit types, and blocks of them in float32.
//
// A wheel built on one machine runs on another, so it cannot use the instruction set of the build machine. The library
// compiles each cpu.cpp once per level of stable/cpu_levels.cpp, in a namespace of that name (CUSTOM_OPS_LEVEL), and selects
// one at run time. GCC's target_clones does not work here: it uses the clone for "arch=haswell" on a Haswell only, and not
// on later processors.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

// Always inlined: the linker could share an ordinary function among the levels, with the instructions of any of them.
#define CUSTOM_OPS_INLINE __attribute__((always_inline)) inline

#ifdef CUSTOM_OPS_LEVEL
#define CUSTOM_OPS_BEGIN_LEVEL namespace CUSTOM_OPS_LEVEL {
#define CUSTOM_OPS_END_LEVEL }
#else
#define CUSTOM_OPS_BEGIN_LEVEL
#define CUSTOM_OPS_END_LEVEL
#endif

namespace custom_ops {

using Half = _Float16;

struct BFloat16 {
  uint16_t bits;
};

// The type of the arithmetic, as in PyTorch: float32 for the 16-bit types.
template <typename T> struct WideOf { using type = float; };
template <> struct WideOf<double> { using type = double; };
template <typename T> using Wide = typename WideOf<T>::type;

CUSTOM_OPS_INLINE double widen(double value) { return value; }
CUSTOM_OPS_INLINE float widen(float value) { return value; }
CUSTOM_OPS_INLINE float widen(Half value) { return static_cast<float>(value); }
CUSTOM_OPS_INLINE float widen(BFloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &word, sizeof wide);
  return wide;
}

CUSTOM_OPS_INLINE void narrow(double value, double& out) { out = value; }
CUSTOM_OPS_INLINE void narrow(float value, float& out) { out = value; }
CUSTOM_OPS_INLINE void narrow(float value, Half& out) { out = static_cast<Half>(value); }
CUSTOM_OPS_INLINE void narrow(float value, BFloat16& out) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  // Rounds to nearest, ties to even: 0x7fff plus the last kept bit carries into the kept bits. NaN would become infinity.
  const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  out.bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

// The number of values that are widened, processed and narrowed at a time, so that one vectorised loop handles every type.
constexpr int64_t kBlock = 64;

template <typename T> CUSTOM_OPS_INLINE void load(const T* from, int64_t count, Wide<T>* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
template <typename T> CUSTOM_OPS_INLINE void store(const Wide<T>* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}

#ifdef __F16C__
// GCC 12 converts float16 one element at a time unless AVX512-FP16 is enabled.
CUSTOM_OPS_INLINE void load(const Half* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < count; ++i) to[i] = widen(from[i]);
}
CUSTOM_OPS_INLINE void store(const float* from, int64_t count, Half* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i narrowed = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), narrowed);
  }
  for (; i < count; ++i) narrow(from[i], to[i]);
}
#endif

}  // namespace custom_ops

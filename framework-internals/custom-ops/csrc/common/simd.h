// Vectors of the instruction set that a file is compiled for: 64 bytes with AVX-512, 32 with AVX2, else 16.
//
// A Vector<T> is a vector type of GCC and clang, so + - * / and comparisons are the compiler's, and the same code runs for
// every width and every processor. Only what the language cannot say is written with intrinsics, and has a plain version.
// 16-bit types are loaded as float32 and rounded once, to nearest even, when they are stored.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace simd {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CUSTOM_OPS_AVX512 1
constexpr int kBytes = 64;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CUSTOM_OPS_AVX2 1
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <typename T> struct VectorOf { typedef T type __attribute__((vector_size(kBytes))); };
template <typename T> using Vector = typename VectorOf<T>::type;
template <typename T> constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));
using Floats = Vector<float>;
using Doubles = Vector<double>;
using Ints = Vector<int32_t>;

template <typename To, typename From> CUSTOM_OPS_INLINE To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type keeps the bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T> CUSTOM_OPS_INLINE Vector<T> broadcast(T value) { return value - Vector<T>{}; }  // - 0, which also keeps -0

// ---- loads and stores of kLanes neighbouring elements, of any alignment

CUSTOM_OPS_INLINE Doubles load(const double* from) {
  Doubles to;
  std::memcpy(&to, from, sizeof to);
  return to;
}
CUSTOM_OPS_INLINE Floats load(const float* from) {
  Floats to;
  std::memcpy(&to, from, sizeof to);
  return to;
}
CUSTOM_OPS_INLINE Floats load(const BFloat16* from) {
#if defined(CUSTOM_OPS_AVX512)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return bits<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#elif defined(CUSTOM_OPS_AVX2)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return bits<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  Floats to;
  for (int i = 0; i < kLanes<float>; ++i) to[i] = widen(from[i]);
  return to;
#endif
}
CUSTOM_OPS_INLINE Floats load(const Half* from) {
#if defined(CUSTOM_OPS_AVX512)
  return bits<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(CUSTOM_OPS_AVX2)
  return bits<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Floats to;
  for (int i = 0; i < kLanes<float>; ++i) to[i] = widen(from[i]);
  return to;
#endif
}

CUSTOM_OPS_INLINE void store(Doubles from, double* to) { std::memcpy(to, &from, sizeof from); }
CUSTOM_OPS_INLINE void store(Floats from, float* to) { std::memcpy(to, &from, sizeof from); }
CUSTOM_OPS_INLINE void store(Floats from, BFloat16* to) {
#if defined(CUSTOM_OPS_AVX512)
  // Adds 0x7fff plus the last kept bit, which carries into the kept bits; NaN would become infinity. vcvtneps2bf16 would do
  // this at once, but flushes subnormal numbers.
  const __m512i word = bits<__m512i>(from), last = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(word, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(bits<__m512>(from), bits<__m512>(from), _CMP_UNORD_Q);
  const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
#elif defined(CUSTOM_OPS_AVX2)
  const __m256i word = bits<__m256i>(from), last = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(word, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(bits<__m256>(from), bits<__m256>(from), _CMP_UNORD_Q));
  const __m256i whole = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow);
#else
  for (int i = 0; i < kLanes<float>; ++i) narrow(from[i], to[i]);
#endif
}
CUSTOM_OPS_INLINE void store(Floats from, Half* to) {
#if defined(CUSTOM_OPS_AVX512)
  const __m256i narrow = _mm512_cvtps_ph(bits<__m512>(from), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
#elif defined(CUSTOM_OPS_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(bits<__m256>(from), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes<float>; ++i) narrow(from[i], to[i]);
#endif
}

// The first `count` elements, at most kLanes; the other lanes are zero.
template <typename T> CUSTOM_OPS_INLINE Vector<Wide<T>> load(const T* from, int64_t count) {
  if (count >= kLanes<Wide<T>>) return load(from);
  T part[kLanes<Wide<T>>] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = from[i];
  return load(part);
}
template <typename T> CUSTOM_OPS_INLINE void store(Vector<Wide<T>> from, T* to, int64_t count) {
  if (count >= kLanes<Wide<T>>) return store(from, to);
  T part[kLanes<Wide<T>>];
  store(from, part);
  for (int64_t i = 0; i < count; ++i) to[i] = part[i];
}

// ---- arithmetic

// a * b + c, rounded once where the processor can.
template <typename V> CUSTOM_OPS_INLINE V fma(V a, V b, V c) { return a * b + c; }
#if defined(CUSTOM_OPS_AVX512)
template <> CUSTOM_OPS_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
template <> CUSTOM_OPS_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(CUSTOM_OPS_AVX2)
template <> CUSTOM_OPS_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
template <> CUSTOM_OPS_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
#endif

// a > b ? a : b in each lane, so b if either is NaN.
template <typename V> CUSTOM_OPS_INLINE V max(V a, V b) { return a > b ? a : b; }
#if defined(CUSTOM_OPS_AVX512)
template <> CUSTOM_OPS_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
#elif defined(CUSTOM_OPS_AVX2)
template <> CUSTOM_OPS_INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
#endif

// 2^t: t = n + f with integer n and |f| <= 1/2. The polynomial is Taylor's of 2^f up to f^7, whose relative error of 5e-9 is
// below float32's rounding; n is added to the exponent. Infinite above 127.5, zero below -126.5, NaN of NaN.
CUSTOM_OPS_INLINE Floats exp2(Floats t) {
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
  t = max(broadcast(-127.0f), t);
  t = -max(broadcast(-128.0f), -t);
  const Floats shifted = t + kWhole;
  const Floats f = t - (shifted - kWhole);
  Floats power = fma(broadcast(1.5252734e-5f), f, broadcast(1.5403530e-4f));
  power = fma(power, f, broadcast(1.3333558e-3f));
  power = fma(power, f, broadcast(9.6181291e-3f));
  power = fma(power, f, broadcast(5.5504109e-2f));
  power = fma(power, f, broadcast(2.4022651e-1f));
  power = fma(power, f, broadcast(6.9314718e-1f));
  power = fma(power, f, broadcast(1.0f));
  const Ints exponent = (bits<Ints>(shifted) - (0x4b400000 - 127)) << 23;
  return power * bits<Floats>(exponent);
}

}  // namespace simd
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

// Vectors of the instruction set that a file is compiled for: 64 bytes with AVX-512, 32 with AVX2, else 16.
//
// A Vector<T> is a vector type of GCC and clang, so + - * / and comparisons are the compiler's, and the same code runs for
// every width and every processor. Only what the language cannot say is written with intrinsics, and has a plain version.
// 16-bit types are loaded as float32 and rounded once, to nearest even, when they are stored.
#pragma once

#include <cmath>
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
using Words = Vector<uint32_t>;

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

template <typename V> CUSTOM_OPS_INLINE V min(V a, V b) { return a < b ? a : b; }
#if defined(CUSTOM_OPS_AVX512)
template <> CUSTOM_OPS_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
#elif defined(CUSTOM_OPS_AVX2)
template <> CUSTOM_OPS_INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
#endif

// 2^t, with an error below one unit in the last place (0.83 found; tests/simd.cpp): t = n + f with integer n and |f| <= 1/2,
// and 2^f by the polynomial of degree 6 with the smallest relative error (3e-9) among those with float32 coefficients and
// the constant 1. NaN of NaN. With AVX-512 the result is rounded to subnormal numbers, and infinite from 128 on; elsewhere it
// is zero below -126.5 and infinite from 127.5 on.
CUSTOM_OPS_INLINE Floats exp2(Floats t) {
#if defined(CUSTOM_OPS_AVX512)
  const Floats n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT), f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEAREST_INT);
#else
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the low bits
  t = min(broadcast(128.0f), max(broadcast(-127.0f), t));
  const Floats shifted = t + kWhole;
  const Floats f = t - (shifted - kWhole);
#endif
  Floats power = fma(broadcast(1.5325675e-4f), f, broadcast(1.3390805e-3f));
  power = fma(power, f, broadcast(9.618508e-3f));
  power = fma(power, f, broadcast(5.55036e-2f));
  power = fma(power, f, broadcast(2.4022648e-1f));
  power = fma(power, f, broadcast(6.931472e-1f));
  power = fma(power, f, broadcast(1.0f));
#if defined(CUSTOM_OPS_AVX512)
  return _mm512_scalef_ps(power, n);
#else
  const Ints exponent = (bits<Ints>(shifted) - (0x4b400000 - 127)) << 23;
  return power * bits<Floats>(exponent);
#endif
}
CUSTOM_OPS_INLINE Doubles exp2(Doubles t) {
  for (int i = 0; i < kLanes<double>; ++i) t[i] = std::exp2(t[i]);
  return t;
}

// ---- two vectors at a time, for loops that do not depend on the order of the lanes
//
// Of 2 * kLanes neighbouring elements, `first` holds the lower half and `second` the upper one; of bfloat16, `first` holds the
// elements with even numbers and `second` those with odd ones, since a shift and a mask then widen and narrow them.

template <typename T> constexpr int kPair = 2 * kLanes<Wide<T>>;
template <typename T> struct Pair {
  Vector<Wide<T>> first, second;
};

template <typename T> CUSTOM_OPS_INLINE Pair<T> load_pair(const T* from) { return {load(from), load(from + kLanes<Wide<T>>)}; }
template <> CUSTOM_OPS_INLINE Pair<BFloat16> load_pair(const BFloat16* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return {bits<Floats>(words << 16), bits<Floats>(words & 0xffff0000u)};
}

// The bits of a float rounded to bfloat16, in the upper half of each word.
CUSTOM_OPS_INLINE Words round_to_bfloat16(Floats value) {
  const Words word = bits<Words>(value), rounded = word + ((word >> 16) & 1u) + 0x7fffu;
  return value != value ? Words{} + 0x7fc00000u : rounded;
}
CUSTOM_OPS_INLINE Words narrow_pair(Pair<BFloat16> from) {
  return (round_to_bfloat16(from.first) >> 16) | (round_to_bfloat16(from.second) & 0xffff0000u);
}

template <typename T> CUSTOM_OPS_INLINE void store_pair(Pair<T> from, T* to) {
  store(from.first, to);
  store(from.second, to + kLanes<Wide<T>>);
}
template <> CUSTOM_OPS_INLINE void store_pair(Pair<BFloat16> from, BFloat16* to) {
  const Words words = narrow_pair(from);
  std::memcpy(to, &words, sizeof words);
}

// The first `count` elements; the others are loaded as zeros.
template <typename T> CUSTOM_OPS_INLINE Pair<T> load_pair(const T* from, int64_t count) {
  if (count >= kPair<T>) return load_pair(from);
  T part[kPair<T>] = {};
  std::memcpy(part, from, count * sizeof(T));
  return load_pair(part);
}
template <typename T> CUSTOM_OPS_INLINE void store_pair(Pair<T> from, T* to, int64_t count) {
  if (count >= kPair<T>) return store_pair(from, to);
  T part[kPair<T>];
  store_pair(from, part);
  std::memcpy(to, part, count * sizeof(T));
}

// A store that does not read the line of memory first, and does not keep it in the caches. `to` is a multiple of the vector's
// size; the writer calls end_of_stream() before other threads read.
template <typename V> CUSTOM_OPS_INLINE void stream(V from, void* to) {
#if defined(CUSTOM_OPS_AVX512)
  _mm512_stream_si512(static_cast<__m512i*>(to), bits<__m512i>(from));
#elif defined(CUSTOM_OPS_AVX2)
  _mm256_stream_si256(static_cast<__m256i*>(to), bits<__m256i>(from));
#elif defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(to), bits<__m128i>(from));
#else
  std::memcpy(to, &from, sizeof from);
#endif
}
CUSTOM_OPS_INLINE void end_of_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

template <typename T> CUSTOM_OPS_INLINE void stream_pair(Pair<T> from, T* to) {
  stream(from.first, to);
  stream(from.second, to + kLanes<T>);
}
template <> CUSTOM_OPS_INLINE void stream_pair(Pair<BFloat16> from, BFloat16* to) { stream(narrow_pair(from), to); }
template <> CUSTOM_OPS_INLINE void stream_pair(Pair<Half> from, Half* to) {
  Half halves[kPair<Half>];
  store_pair(from, halves);
  Words words;
  std::memcpy(&words, halves, sizeof words);
  stream(words, to);
}

}  // namespace simd
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

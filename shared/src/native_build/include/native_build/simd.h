// Vectors of the instruction set that a file is compiled for: 64 bytes with AVX-512, 32 with AVX2, else 16, as those of NEON.
//
// A Vector<T> is a vector type of GCC and clang, so + - * / and comparisons are the compiler's, and the same code runs for
// every width and every processor. Only what the language cannot say is written with intrinsics, and has a plain version.
// 16-bit types are loaded as float32 and rounded once, to nearest even, when they are stored.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif

#include "narrow_types.h"

namespace native_build::simd {

using native_build::bits;

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define NATIVE_BUILD_AVX512 1
constexpr int kBytes = 64;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define NATIVE_BUILD_AVX2 1
constexpr int kBytes = 32;
#else
#if defined(__aarch64__)  // every processor of this family has NEON, with fused multiply-add and float16 conversions
#define NATIVE_BUILD_NEON 1
#endif
constexpr int kBytes = 16;
#endif

template <typename T> struct VectorOf { typedef T type __attribute__((vector_size(kBytes))); };
template <typename T> using Vector = typename VectorOf<T>::type;
template <typename T> constexpr int kLanes = kBytes / static_cast<int>(sizeof(Wide<T>));
using Floats = Vector<float>;
using Doubles = Vector<double>;
using Ints = Vector<int32_t>;
using Words = Vector<uint32_t>;

template <typename T> NATIVE_BUILD_INLINE Vector<T> broadcast(T value) { return value - Vector<T>{}; }  // - 0, which also keeps -0

// ---- loads and stores of kLanes neighbouring elements, of any alignment

#if !defined(NATIVE_BUILD_AVX512) && !defined(NATIVE_BUILD_AVX2) && !defined(NATIVE_BUILD_NEON)
// The conversions of narrow_types.h for all lanes at once: one after the other, they are most of the code that is compiled.
// Magnitudes are compared as signed numbers, for which every processor has an instruction.
typedef uint16_t Shorts __attribute__((vector_size(kBytes / 2)));

NATIVE_BUILD_INLINE Words load_shorts(const void* from) {
  Shorts shorts;
  std::memcpy(&shorts, from, sizeof shorts);
  return __builtin_convertvector(shorts, Words);
}
NATIVE_BUILD_INLINE void store_shorts(Words from, void* to) {
  const Shorts shorts = __builtin_convertvector(from, Shorts);
  std::memcpy(to, &shorts, sizeof shorts);
}
NATIVE_BUILD_INLINE Words select(Ints mask, Words yes, Words no) { return (yes & bits<Words>(mask)) | (no & ~bits<Words>(mask)); }
NATIVE_BUILD_INLINE Ints is_below(Words magnitude, int32_t limit) { return bits<Ints>(magnitude) < limit; }

NATIVE_BUILD_INLINE Floats widen_halves(Words half) {
  const Words magnitude = half & 0x7FFFu, sign = (half & 0x8000u) << 16;
  const Words subnormal = bits<Words>(bits<Floats>(magnitude | (126u << 23)) - 0.5f), normal = (magnitude << 13) + (112u << 23);
  const Words finite = select(is_below(magnitude, 0x400), subnormal, normal);
  return bits<Floats>(sign | select(is_below(magnitude, 0x7C00), finite, (magnitude << 13) | kInfinity));
}
NATIVE_BUILD_INLINE Words narrow_to_halves(Floats from) {
  constexpr uint32_t kRebias = 112u << 23, kAnchor = 126u << 23;
  const Words word = bits<Words>(from), magnitude = word & 0x7FFFFFFFu;
  const Words subnormal = bits<Words>(bits<Floats>(magnitude) + bits<float>(kAnchor)) - kAnchor;
  const Words normal = (magnitude - kRebias + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  const Words small = select(is_below(magnitude, kRebias + (1u << 23)), subnormal, normal);
  const Words finite = select(is_below(magnitude, 0x477FF000), small, Words{} + 0x7C00u);  // from 65520 on
  return ((word >> 16) & 0x8000u) | select(from == from, finite, Words{} + 0x7E00u);
}
NATIVE_BUILD_INLINE Words narrow_to_bfloat16(Floats from) {
  const Words word = bits<Words>(from);
  return select(from == from, (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16, Words{} + 0x7FC0u);
}
#endif

NATIVE_BUILD_INLINE Doubles load(const double* from) {
  Doubles to;
  std::memcpy(&to, from, sizeof to);
  return to;
}
NATIVE_BUILD_INLINE Floats load(const float* from) {
  Floats to;
  std::memcpy(&to, from, sizeof to);
  return to;
}
NATIVE_BUILD_INLINE Floats load(const BFloat16* from) {
#if defined(NATIVE_BUILD_AVX512)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return bits<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#elif defined(NATIVE_BUILD_AVX2)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return bits<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#elif defined(NATIVE_BUILD_NEON)
  return bits<Floats>(vshll_n_u16(vld1_u16(&from->bits), 16));
#else
  return bits<Floats>(load_shorts(from) << 16);
#endif
}
NATIVE_BUILD_INLINE Floats load(const Half* from) {
#if defined(NATIVE_BUILD_AVX512)
  return bits<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(NATIVE_BUILD_AVX2)
  return bits<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(NATIVE_BUILD_NEON)
  return bits<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
#else
  return widen_halves(load_shorts(from));
#endif
}

NATIVE_BUILD_INLINE void store(Doubles from, double* to) { std::memcpy(to, &from, sizeof from); }
NATIVE_BUILD_INLINE void store(Floats from, float* to) { std::memcpy(to, &from, sizeof from); }
NATIVE_BUILD_INLINE void store(Floats from, BFloat16* to) {
#if defined(NATIVE_BUILD_AVX512)
  // Adds 0x7fff plus the last kept bit, which carries into the kept bits; NaN would become infinity. vcvtneps2bf16 would do
  // this at once, but flushes subnormal numbers.
  const __m512i word = bits<__m512i>(from), last = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(word, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(bits<__m512>(from), bits<__m512>(from), _CMP_UNORD_Q);
  const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
#elif defined(NATIVE_BUILD_AVX2)
  const __m256i word = bits<__m256i>(from), last = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(word, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(bits<__m256>(from), bits<__m256>(from), _CMP_UNORD_Q));
  const __m256i whole = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow);
#elif defined(NATIVE_BUILD_NEON)
  const uint32x4_t word = bits<uint32x4_t>(from), last = vandq_u32(vshrq_n_u32(word, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(word, vaddq_u32(last, vdupq_n_u32(0x7fff)));
  const uint32x4_t number = vceqq_f32(bits<float32x4_t>(from), bits<float32x4_t>(from));
  vst1_u16(&to->bits, vshrn_n_u32(vbslq_u32(number, rounded, vdupq_n_u32(0x7fc00000)), 16));
#else
  store_shorts(narrow_to_bfloat16(from), to);
#endif
}
NATIVE_BUILD_INLINE void store(Floats from, Half* to) {
#if defined(NATIVE_BUILD_AVX512)
  const __m256i narrow = _mm512_cvtps_ph(bits<__m512>(from), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
#elif defined(NATIVE_BUILD_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(bits<__m256>(from), _MM_FROUND_TO_NEAREST_INT));
#elif defined(NATIVE_BUILD_NEON)
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(bits<float32x4_t>(from))));
#else
  store_shorts(narrow_to_halves(from), to);
#endif
}

// The first `count` elements, at most kLanes; the other lanes are zero.
template <typename T> NATIVE_BUILD_INLINE Vector<Wide<T>> load(const T* from, int64_t count) {
  if (count >= kLanes<T>) return load(from);
  T part[kLanes<T>] = {};
  if (count > 0) std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
  return load(part);
}
template <typename T> NATIVE_BUILD_INLINE void store(Vector<Wide<T>> from, T* to, int64_t count) {
  if (count >= kLanes<T>) return store(from, to);
  T part[kLanes<T>];
  store(from, part);
  if (count > 0) std::memcpy(to, part, static_cast<size_t>(count) * sizeof(T));
}

// ---- arithmetic

// a * b + c, rounded once where the processor can.
template <typename V> NATIVE_BUILD_INLINE V fma(V a, V b, V c) { return a * b + c; }
#if defined(NATIVE_BUILD_AVX512)
NATIVE_BUILD_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
NATIVE_BUILD_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(NATIVE_BUILD_AVX2)
NATIVE_BUILD_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
NATIVE_BUILD_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
#elif defined(NATIVE_BUILD_NEON)
NATIVE_BUILD_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return bits<Floats>(vfmaq_f32(bits<float32x4_t>(c), bits<float32x4_t>(a), bits<float32x4_t>(b)));
}
NATIVE_BUILD_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) {
  return bits<Doubles>(vfmaq_f64(bits<float64x2_t>(c), bits<float64x2_t>(a), bits<float64x2_t>(b)));
}
#endif

// a > b ? a : b in each lane, so b if either is NaN. NEON has no instruction for this (its maxima give NaN, or the number), and
// the compiler takes a comparison and a selection.
template <typename V> NATIVE_BUILD_INLINE V max(V a, V b) { return a > b ? a : b; }
template <typename V> NATIVE_BUILD_INLINE V min(V a, V b) { return a < b ? a : b; }
#if defined(NATIVE_BUILD_AVX512)
NATIVE_BUILD_INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
NATIVE_BUILD_INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
#elif defined(NATIVE_BUILD_AVX2)
NATIVE_BUILD_INLINE Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
NATIVE_BUILD_INLINE Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
#endif

// Whether a > b in any lane, or either is NaN there.
NATIVE_BUILD_INLINE bool any_above(Floats a, Floats b) {
#if defined(NATIVE_BUILD_AVX512)
  return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ) != 0;
#elif defined(NATIVE_BUILD_AVX2)
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NLE_UQ)) != 0;
#elif defined(NATIVE_BUILD_NEON)
  return vminvq_u32(vcleq_f32(bits<float32x4_t>(a), bits<float32x4_t>(b))) == 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps(_mm_cmpnle_ps(a, b)) != 0;
#else
  bool any = false;
  for (int i = 0; i < kLanes<float>; ++i) any |= !(a[i] <= b[i]);
  return any;
#endif
}
NATIVE_BUILD_INLINE bool any_above(Doubles a, Doubles b) {
  bool any = false;
  for (int i = 0; i < kLanes<double>; ++i) any |= !(a[i] <= b[i]);
  return any;
}
NATIVE_BUILD_INLINE bool any_nan(Floats a, Floats b) {
#if defined(NATIVE_BUILD_AVX512)
  return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
#elif defined(NATIVE_BUILD_AVX2)
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
#elif defined(NATIVE_BUILD_NEON)
  const float32x4_t x = bits<float32x4_t>(a), y = bits<float32x4_t>(b);
  return vminvq_u32(vandq_u32(vceqq_f32(x, x), vceqq_f32(y, y))) == 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps(_mm_cmpunord_ps(a, b)) != 0;
#else
  bool any = false;
  for (int i = 0; i < kLanes<float>; ++i) any |= a[i] != a[i] || b[i] != b[i];
  return any;
#endif
}

// Adding 1.5 * 2^23 rounds to a whole number n, kept in the low bits; with 127 more they are the exponent of 2^n, of -127 to 128.
constexpr float kShift = 12582912.0f + 127.0f;
NATIVE_BUILD_INLINE Floats whole_power(Floats shifted) { return bits<Floats>(bits<Ints>(shifted) << 23); }

// 2^t, with an error below one unit in the last place (0.83 found; shared/tests/native_build/simd.cpp): t = n + f with integer n
// and |f| <= 1/2, and 2^f by the polynomial of degree 6 with the smallest relative error (3e-9) among those with float32
// coefficients and the constant 1. NaN of NaN. With AVX-512 the result is rounded to subnormal numbers, and infinite from 128 on;
// elsewhere it is zero below -126.5 and infinite from 127.5 on.
constexpr float kExp2[] = {1.5325675e-4f, 1.3390805e-3f, 9.618508e-3f, 5.55036e-2f, 2.4022648e-1f, 6.931472e-1f, 1.0f};
NATIVE_BUILD_INLINE Floats exp2(Floats t) {
#if defined(NATIVE_BUILD_AVX512)
  const Floats n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT), f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEAREST_INT);
#else
  t = min(broadcast(128.0f), max(broadcast(-127.0f), t));
  const Floats shifted = t + kShift, f = t - (shifted - kShift);
#endif
  Floats power = fma(broadcast(kExp2[0]), f, broadcast(kExp2[1]));
#pragma GCC unroll 8
  for (int i = 2; i < 7; ++i) power = fma(power, f, broadcast(kExp2[i]));
#if defined(NATIVE_BUILD_AVX512)
  return _mm512_scalef_ps(power, n);
#else
  return power * whole_power(shifted);
#endif
}
NATIVE_BUILD_INLINE Doubles exp2(Doubles t) {
  for (int i = 0; i < kLanes<double>; ++i) t[i] = std::exp2(t[i]);
  return t;
}

// ---- blocks of four vectors, for loops that do not depend on the order of the lanes
//
// Four independent chains of operations hide the latency of one another. Of bfloat16, a vector's 2 * kLanes neighbouring elements
// make two vectors: those with even numbers, then those with odd ones, since a shift and a mask then widen them. A block of any
// other type has its elements in their order.

constexpr int kVectors = 4;
template <typename T> constexpr int kBlock = kVectors * kLanes<T>;
template <typename T> struct Block {
  Vector<Wide<T>> of[kVectors];
};

// Applies a function of vectors to the vectors of blocks, one after the other.
template <typename T, typename Function, typename... Blocks> NATIVE_BUILD_INLINE Block<T> each(Function function, const Blocks&... blocks) {
  return {{function(blocks.of[0]...), function(blocks.of[1]...), function(blocks.of[2]...), function(blocks.of[3]...)}};
}
template <typename T> NATIVE_BUILD_INLINE Block<T> sum(const Block<T>& a, const Block<T>& b) {
  return each<T>([](auto x, auto y) NATIVE_BUILD_INLINED { return x + y; }, a, b);
}

#if !defined(NATIVE_BUILD_AVX512)
// 2^t of t from -127 to 128 as its two factors, a polynomial of the fraction and a power of two, each step for all vectors of a block: one
// after the other, their chains of operations are longer than what a processor keeps waiting.
template <typename T> struct Power {
  Block<T> part, whole;
};
template <typename T, int kCoefficients> NATIVE_BUILD_INLINE Power<T> power_within(const Block<T>& t, const float (&coefficients)[kCoefficients]) {
  const Block<T> shifted = each<T>([](auto v) NATIVE_BUILD_INLINED { return v + kShift; }, t);
  const Block<T> f = each<T>([](auto v, auto s) NATIVE_BUILD_INLINED { return v - (s - kShift); }, t, shifted);
  Block<T> part = each<T>([&](auto v) NATIVE_BUILD_INLINED { return fma(broadcast(coefficients[0]), v, broadcast(coefficients[1])); }, f);
#pragma GCC unroll 8
  for (int i = 2; i < kCoefficients; ++i) {
    part = each<T>([&](auto p, auto v) NATIVE_BUILD_INLINED { return fma(p, v, broadcast(coefficients[i])); }, part, f);
  }
  return {part, each<T>([](auto s) NATIVE_BUILD_INLINED { return whole_power(s); }, shifted)};
}
#endif

NATIVE_BUILD_INLINE Block<BFloat16> widen_words(Words low, Words high) {
  return {{bits<Floats>(low << 16), bits<Floats>(low & 0xffff0000u), bits<Floats>(high << 16), bits<Floats>(high & 0xffff0000u)}};
}

template <typename T> NATIVE_BUILD_INLINE Block<T> load_block(const T* from) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    Words low, high;  // an array would go through memory
    std::memcpy(&low, from, sizeof low);
    std::memcpy(&high, from + 2 * kLanes<T>, sizeof high);
    return widen_words(low, high);
  } else {
    return {{load(from), load(from + kLanes<T>), load(from + 2 * kLanes<T>), load(from + 3 * kLanes<T>)}};
  }
}

// Wide elements in the order of a block of T.
template <typename T> NATIVE_BUILD_INLINE Block<T> load_wide_block(const Wide<T>* from) {
  Block<T> block = {{load(from), load(from + kLanes<T>), load(from + 2 * kLanes<T>), load(from + 3 * kLanes<T>)}};
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (int i = 0; i < kVectors; i += 2) {
      const Floats low = block.of[i], high = block.of[i + 1];
#if defined(NATIVE_BUILD_AVX512)
      const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
      block.of[i] = _mm512_permutex2var_ps(low, even, high);
      block.of[i + 1] = _mm512_permutex2var_ps(low, _mm512_or_si512(even, _mm512_set1_epi32(1)), high);
#elif defined(NATIVE_BUILD_AVX2)
      const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0x88)), odd = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0xdd));
      block.of[i] = bits<Floats>(_mm256_permute4x64_pd(even, 0xd8));
      block.of[i + 1] = bits<Floats>(_mm256_permute4x64_pd(odd, 0xd8));
#elif defined(NATIVE_BUILD_NEON)
      block.of[i] = bits<Floats>(vuzp1q_f32(bits<float32x4_t>(low), bits<float32x4_t>(high)));
      block.of[i + 1] = bits<Floats>(vuzp2q_f32(bits<float32x4_t>(low), bits<float32x4_t>(high)));
#else
      block.of[i] = Floats{low[0], low[2], high[0], high[2]};
      block.of[i + 1] = Floats{low[1], low[3], high[1], high[3]};
#endif
    }
  }
  return block;
}

// The reverse: the lanes of a block of T, as wide elements in their order.
template <typename T> NATIVE_BUILD_INLINE void store_wide_block(const Block<T>& from, Wide<T>* to) {
  for (int i = 0; i < kVectors; i += 2) {
    Vector<Wide<T>> low = from.of[i], high = from.of[i + 1];
    if constexpr (std::is_same_v<T, BFloat16>) {
      const Floats even = low, odd = high;
#if defined(NATIVE_BUILD_AVX512)
      const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
      low = _mm512_permutex2var_ps(even, first, odd);
      high = _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd);
#elif defined(NATIVE_BUILD_AVX2)
      const __m256 a = _mm256_unpacklo_ps(even, odd), b = _mm256_unpackhi_ps(even, odd);
      low = _mm256_permute2f128_ps(a, b, 0x20);
      high = _mm256_permute2f128_ps(a, b, 0x31);
#elif defined(NATIVE_BUILD_NEON)
      low = bits<Floats>(vzip1q_f32(bits<float32x4_t>(even), bits<float32x4_t>(odd)));
      high = bits<Floats>(vzip2q_f32(bits<float32x4_t>(even), bits<float32x4_t>(odd)));
#else
      low = Floats{even[0], odd[0], even[1], odd[1]};
      high = Floats{even[2], odd[2], even[3], odd[3]};
#endif
    }
    store(low, to + i * kLanes<T>);
    store(high, to + (i + 1) * kLanes<T>);
  }
}

// The bits of a float rounded to bfloat16, in the upper half of each word.
NATIVE_BUILD_INLINE Words round_to_bfloat16(Floats value) {
  const Words word = bits<Words>(value), rounded = word + ((word >> 16) & 1u) + 0x7fffu;
  return value != value ? Words{} + 0x7fc00000u : rounded;
}
NATIVE_BUILD_INLINE Words narrow_any(Floats even, Floats odd) { return (round_to_bfloat16(even) >> 16) | (round_to_bfloat16(odd) & 0xffff0000u); }

// NaN has to have a low half of zeros, as in the type itself and after an operation: ones would carry into the sign.
NATIVE_BUILD_INLINE Words narrow_numbers(Floats even, Floats odd) {
#if defined(NATIVE_BUILD_AVX512)
  // Both at once, in lanes of 16 bits: the kept bits, and the carry of the lost ones plus 0x7fff plus the last kept bit.
  const __m512i first = bits<__m512i>(even), second = bits<__m512i>(odd);
  const __m512i kept = _mm512_mask_mov_epi16(_mm512_srli_epi32(first, 16), 0xaaaaaaaa, second);
  const __m512i lost = _mm512_mask_mov_epi16(first, 0xaaaaaaaa, _mm512_slli_epi32(second, 16));
  const __m512i addend = _mm512_ternarylogic_epi32(kept, _mm512_set1_epi16(1), _mm512_set1_epi16(0x7ffe), 0xea);  // (a & b) | c
  return bits<Words>(_mm512_add_epi16(kept, _mm512_srli_epi16(_mm512_avg_epu16(lost, addend), 15)));
#elif defined(NATIVE_BUILD_AVX2)
  const __m256i first = bits<__m256i>(even), second = bits<__m256i>(odd);
  const __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32(first, 16), second, 0xaa);
  const __m256i lost = _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa);
  const __m256i addend = _mm256_or_si256(_mm256_and_si256(kept, _mm256_set1_epi16(1)), _mm256_set1_epi16(0x7ffe));
  return bits<Words>(_mm256_add_epi16(kept, _mm256_srli_epi16(_mm256_avg_epu16(lost, addend), 15)));
#elif defined(NATIVE_BUILD_NEON)
  const uint16x8_t first = bits<uint16x8_t>(even), second = bits<uint16x8_t>(odd);
  const uint16x8_t kept = vtrn2q_u16(first, second), lost = vtrn1q_u16(first, second);
  const uint16x8_t addend = vorrq_u16(vandq_u16(kept, vdupq_n_u16(1)), vdupq_n_u16(0x7ffe));
  return bits<Words>(vsraq_n_u16(kept, vrhaddq_u16(lost, addend), 15));  // kept + (average >> 15)
#else
  return narrow_any(even, odd);
#endif
}

// What a block of a 16-bit type is in memory.
struct TwoWords {
  Words low, high;
};
NATIVE_BUILD_INLINE TwoWords narrow_block(const Block<BFloat16>& from) {
  const Floats *of = from.of;
  if (__builtin_expect(any_nan(of[0], of[1]) || any_nan(of[2], of[3]), false)) return {narrow_any(of[0], of[1]), narrow_any(of[2], of[3])};
  return {narrow_numbers(of[0], of[1]), narrow_numbers(of[2], of[3])};
}
NATIVE_BUILD_INLINE TwoWords narrow_block(const Block<Half>& from) {
  const Floats* of = from.of;
#if defined(NATIVE_BUILD_AVX512)
  const auto both = [](Floats a, Floats b) NATIVE_BUILD_INLINED {
    const __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), high = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
    return bits<Words>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  };
  return {both(of[0], of[1]), both(of[2], of[3])};
#elif defined(NATIVE_BUILD_AVX2)
  const auto both = [](Floats a, Floats b) NATIVE_BUILD_INLINED {
    return bits<Words>(_mm256_set_m128i(_mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)));
  };
  return {both(of[0], of[1]), both(of[2], of[3])};
#elif defined(NATIVE_BUILD_NEON)
  const auto both = [](Floats a, Floats b) NATIVE_BUILD_INLINED {
    return bits<Words>(vcvt_high_f16_f32(vcvt_f16_f32(bits<float32x4_t>(a)), bits<float32x4_t>(b)));
  };
  return {both(of[0], of[1]), both(of[2], of[3])};
#else
  Half halves[kBlock<Half>];
  for (int i = 0; i < kVectors; ++i) store(of[i], halves + i * kLanes<Half>);
  TwoWords words;
  std::memcpy(&words, halves, sizeof words);
  return words;
#endif
}

// With ties towards zero: half as many instructions, for results that are not exact, so that a tie means nothing. NaN has to come from
// the type itself, whose low bits are zero, or from an operation.
NATIVE_BUILD_INLINE TwoWords narrow_with_ties_down(const Block<BFloat16>& from) {
  const auto both = [](Floats even, Floats odd) NATIVE_BUILD_INLINED {
    const Words first = bits<Words>(even) + 0x7fffu, second = bits<Words>(odd) + 0x7fffu;
#if defined(NATIVE_BUILD_AVX2)
    return bits<Words>(_mm256_blend_epi16(bits<__m256i>(first >> 16), bits<__m256i>(second), 0xaa));
#else
    return (first >> 16) | (second & 0xffff0000u);
#endif
  };
  return {both(from.of[0], from.of[1]), both(from.of[2], from.of[3])};
}
template <typename T> NATIVE_BUILD_INLINE const Block<T>& narrow_with_ties_down(const Block<T>& from) { return from; }
// The same numbers as narrow_block rounds to, for a block whose NaN have a low half of zeros.
NATIVE_BUILD_INLINE TwoWords narrow_untested(const Block<BFloat16>& from) {
  return {narrow_numbers(from.of[0], from.of[1]), narrow_numbers(from.of[2], from.of[3])};
}
template <typename T> NATIVE_BUILD_INLINE const Block<T>& narrow_untested(const Block<T>& from) { return from; }
NATIVE_BUILD_INLINE TwoWords narrow_block(const TwoWords& narrowed) { return narrowed; }

// Of a block, or of what narrowed one.
template <typename T, typename From> NATIVE_BUILD_INLINE void store_block(const From& from, T* to) {
  if constexpr (sizeof(T) == 2) {
    const TwoWords words = narrow_block(from);
    std::memcpy(to, &words.low, sizeof words.low);
    std::memcpy(to + 2 * kLanes<T>, &words.high, sizeof words.high);
  } else {
    for (int i = 0; i < kVectors; ++i) store(from.of[i], to + i * kLanes<T>);
  }
}

// The first `count` elements; the others are loaded as zeros.
template <typename T> NATIVE_BUILD_INLINE Block<T> load_block(const T* from, int64_t count) {
  if (count >= kBlock<T>) return load_block(from);
  T part[kBlock<T>] = {};
  std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
  return load_block(part);
}
template <typename T> NATIVE_BUILD_INLINE Block<T> load_wide_block(const Wide<T>* from, int64_t count) {
  if (count >= kBlock<T>) return load_wide_block<T>(from);
  Wide<T> part[kBlock<T>] = {};
  std::memcpy(part, from, static_cast<size_t>(count) * sizeof(Wide<T>));
  return load_wide_block<T>(part);
}
template <typename T, typename From> NATIVE_BUILD_INLINE void store_block(const From& from, T* to, int64_t count) {
  if (count >= kBlock<T>) return store_block(from, to);
  T part[kBlock<T>];
  store_block(from, part);
  std::memcpy(to, part, static_cast<size_t>(count) * sizeof(T));
}

template <typename T> NATIVE_BUILD_INLINE void store_wide_block(const Block<T>& from, Wide<T>* to, int64_t count) {
  if (count >= kBlock<T>) return store_wide_block<T>(from, to);
  Wide<T> part[kBlock<T>];
  store_wide_block<T>(from, part);
  std::memcpy(to, part, static_cast<size_t>(count) * sizeof(Wide<T>));
}

// Rounded to T and back, as a store and a load would; for NaN as narrow_untested says.
template <typename T> NATIVE_BUILD_INLINE Block<T> rounded(const Block<T>& block) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const TwoWords words = narrow_untested(block);
    return widen_words(words.low, words.high);
  } else if constexpr (std::is_same_v<T, Half>) {
    Half narrow[kBlock<T>];
    store_block(block, narrow);
    return load_block(narrow);
  } else {
    return block;
  }
}

// A block rounded to T as a store takes it, for which values_of() has the rounded numbers: one rounding for both uses.
template <typename T> NATIVE_BUILD_INLINE auto rounded_to_store(const Block<T>& block) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return narrow_untested(block);
  } else {
    return rounded<T>(block);
  }
}
NATIVE_BUILD_INLINE Block<BFloat16> values_of(const TwoWords& rounded) { return widen_words(rounded.low, rounded.high); }
template <typename T> NATIVE_BUILD_INLINE const Block<T>& values_of(const Block<T>& rounded) { return rounded; }

// A block in memory that is in the order of its lanes.
template <typename T> NATIVE_BUILD_INLINE Block<T> load_lanes(const Wide<T>* from) {
  Block<T> block;
  for (int i = 0; i < kVectors; ++i) block.of[i] = load(from + i * kLanes<T>);
  return block;
}
template <typename T> NATIVE_BUILD_INLINE void store_lanes(const Block<T>& from, Wide<T>* to) {
  for (int i = 0; i < kVectors; ++i) store(from.of[i], to + i * kLanes<T>);
}

// Adds to sums in memory, which are in the order of the lanes of blocks.
template <typename T> NATIVE_BUILD_INLINE void add_to_sums(const Block<T>& addends, Wide<T>* sums) {
  for (int i = 0; i < kVectors; ++i) store(load(sums + i * kLanes<T>) + addends.of[i], sums + i * kLanes<T>);
}

// By halves, which takes a third of the time of lane after lane.
NATIVE_BUILD_INLINE float sum_of_lanes(Floats v) {
#if defined(NATIVE_BUILD_AVX512)
  return _mm512_reduce_add_ps(v);
#elif defined(NATIVE_BUILD_AVX2)
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#elif defined(NATIVE_BUILD_NEON)
  return vaddvq_f32(bits<float32x4_t>(v));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
NATIVE_BUILD_INLINE double sum_of_lanes(Doubles v) {
  double total = 0;
  for (int lane = 0; lane < kLanes<double>; ++lane) total += v[lane];
  return total;
}
template <typename T> NATIVE_BUILD_INLINE Wide<T> sum_of_lanes(const Block<T>& block) {
  return sum_of_lanes((block.of[0] + block.of[1]) + (block.of[2] + block.of[3]));
}

// ---- rows of results

// A store that does not read the line of memory first, and does not keep it in the caches. `to` is a multiple of the vector's
// size; the writer calls end_of_stream() before other threads read.
template <typename V> NATIVE_BUILD_INLINE void stream(V from, void* to) {
#if defined(NATIVE_BUILD_AVX512)
  _mm512_stream_si512(static_cast<__m512i*>(to), bits<__m512i>(from));
#elif defined(NATIVE_BUILD_AVX2)
  _mm256_stream_si256(static_cast<__m256i*>(to), bits<__m256i>(from));
#elif defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(to), bits<__m128i>(from));
#else
  std::memcpy(to, &from, sizeof from);
#endif
}
NATIVE_BUILD_INLINE void end_of_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}
template <typename T, typename From> NATIVE_BUILD_INLINE void stream_block(const From& from, T* to) {
  if constexpr (sizeof(T) == 2) {
    const TwoWords words = narrow_block(from);
    stream(words.low, to);
    stream(words.high, to + 2 * kLanes<T>);
  } else {
    for (int i = 0; i < kVectors; ++i) stream(from.of[i], to + i * kLanes<T>);
  }
}

// Calls visit(i, n) for the elements from i on, for all `count` elements; n is kBlock<T>, less for the last block. That one has a call of
// its own: a test in each iteration cost the sums of a row a tenth of their speed.
template <typename T, typename Visit> NATIVE_BUILD_INLINE void each_block(int64_t count, Visit visit) {
  int64_t i = 0;
  for (; i + kBlock<T> <= count; i += kBlock<T>) visit(i, int64_t{kBlock<T>});
  if (i < count) visit(i, count - i);
}

// Writes block_at(i, n), a block or a narrowed one, of the elements from i on to `to + i`, for all `count` elements; n is kBlock<T>, less for the last block.
// With `streams`, by streaming stores if `to` is aligned; the writer calls end_of_stream() once for all its rows.
template <typename T, typename BlockAt> NATIVE_BUILD_INLINE void write_row(T* to, int64_t count, bool streams, BlockAt block_at) {
  int64_t i = 0;
  if (streams && reinterpret_cast<uintptr_t>(to) % kBytes == 0) {
    for (; i + kBlock<T> <= count; i += kBlock<T>) stream_block<T>(block_at(i, int64_t{kBlock<T>}), to + i);
  } else {
    for (; i + kBlock<T> <= count; i += kBlock<T>) store_block<T>(block_at(i, int64_t{kBlock<T>}), to + i);
  }
  if (i < count) store_block<T>(block_at(i, count - i), to + i, count - i);
}

// Asks for the lines of some elements in the first-level cache, without waiting; nothing is read, so any address is allowed.
template <typename T> NATIVE_BUILD_INLINE void prefetch_elements(const T* from, int64_t count) {
  for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(from) + byte, 0, 3);
}
template <typename T> NATIVE_BUILD_INLINE void prefetch_block(const T* from) { prefetch_elements(from, kBlock<T>); }
template <typename T> NATIVE_BUILD_INLINE void prefetch_half_block(const T* from) { prefetch_elements(from, kBlock<T> / 2); }

}  // namespace
}  // namespace native_build::simd

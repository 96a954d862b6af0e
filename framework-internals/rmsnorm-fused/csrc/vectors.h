// Vectors of the instruction set that a file is compiled for: 64 bytes with AVX-512, 32 with AVX2, else 16.
//
// A Vector<T> is a vector type of GCC and clang, so arithmetic is the compiler's, and the same code runs for every width and
// every processor. Intrinsics have a plain version each. 16-bit types are loaded as float, and rounded once, to nearest even,
// when they are stored. Everything is local to the file: the linker would keep a shared definition of any one width.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "low_precision.h"

namespace rms_norm {
namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define RMS_NORM_AVX512 1
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define RMS_NORM_AVX2 1
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T> struct VectorOf { typedef T type __attribute__((vector_size(kVectorBytes))); };
template <class T> using Vector = typename VectorOf<T>::type;
template <class T> constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Wide<T>));
using Floats = Vector<float>;
using Words = Vector<uint32_t>;
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

#define RMS_NORM_INLINE [[gnu::always_inline]] inline
#define RMS_NORM_INLINED __attribute__((always_inline))  // of a lambda

template <class To, class From> RMS_NORM_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type keeps the bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- conversions of a vector

RMS_NORM_INLINE Floats widen(Halves values, BFloat16) { return bits_as<Floats>(__builtin_convertvector(values, Words) << 16); }

RMS_NORM_INLINE Words round_to_bfloat16(Floats values) {
  const Words word = bits_as<Words>(values), rounded = word + ((word >> 16) & 1u) + 0x7FFFu;
  return values != values ? Words{} + 0x7FC00000u : rounded;
}
RMS_NORM_INLINE Halves narrow(Floats values, BFloat16) { return __builtin_convertvector(round_to_bfloat16(values) >> 16, Halves); }

RMS_NORM_INLINE Floats widen(Halves values, Half) {
#if defined(RMS_NORM_AVX512)
  return _mm512_cvtph_ps(bits_as<__m256i>(values));
#elif defined(RMS_NORM_AVX2)
  return _mm256_cvtph_ps(bits_as<__m128i>(values));
#else
  Floats wide;
  for (int i = 0; i < kLanes<float>; ++i) wide[i] = widened(Half{values[i]});
  return wide;
#endif
}
RMS_NORM_INLINE Halves narrow(Floats values, Half) {
#if defined(RMS_NORM_AVX512)
  return bits_as<Halves>(_mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
#elif defined(RMS_NORM_AVX2)
  return bits_as<Halves>(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
#else
  Halves narrowed;
  for (int i = 0; i < kLanes<float>; ++i) {
    Half half;
    narrow_to(half, values[i]);
    narrowed[i] = half.bits;
  }
  return narrowed;
#endif
}

// ---- loads and stores of kLanes neighbouring elements, of any alignment

template <class T> RMS_NORM_INLINE Vector<Wide<T>> load(const T* from) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    Vector<T> values;
    std::memcpy(&values, from, sizeof values);
    return values;
  } else {
    Halves values;
    std::memcpy(&values, from, sizeof values);
    return widen(values, T{});
  }
}

template <class T> RMS_NORM_INLINE auto narrowed(Vector<Wide<T>> values) {
  if constexpr (std::is_same_v<T, Wide<T>>) return values;
  else return narrow(values, T{});
}

template <class T> RMS_NORM_INLINE void store(Vector<Wide<T>> values, T* to) {
  const auto result = narrowed<T>(values);
  std::memcpy(to, &result, sizeof result);
}

// The first `count` elements, at most kLanes; the other lanes are zero.
template <class T> RMS_NORM_INLINE Vector<Wide<T>> load(const T* from, int64_t count) {
  if (count >= kLanes<T>) return load(from);
  T part[kLanes<T>] = {};
  std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
  return load(part);
}
template <class T> RMS_NORM_INLINE void store(Vector<Wide<T>> values, T* to, int64_t count) {
  if (count >= kLanes<T>) return store(values, to);
  T part[kLanes<T>];
  store(values, part);
  std::memcpy(to, part, static_cast<size_t>(count) * sizeof(T));
}

// A store that does not read the line of memory first, and does not keep it in the caches. `to` is a multiple of
// kStreamAlignment<T>; the writer calls end_of_stream() before other threads read.
template <class T> constexpr uintptr_t kStreamAlignment = kLanes<T> * sizeof(T);
template <class T> RMS_NORM_INLINE void stream(Vector<Wide<T>> values, T* to) {
  [[maybe_unused]] const auto result = narrowed<T>(values);
#ifdef RMS_NORM_AVX512
  if constexpr (sizeof result == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits_as<__m512i>(result));
#endif
#if defined(RMS_NORM_AVX512) || defined(RMS_NORM_AVX2)
  if constexpr (sizeof result == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(result));
#endif
#ifdef __SSE2__
  if constexpr (sizeof result == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits_as<__m128i>(result));
#endif
  store(values, to);
}
RMS_NORM_INLINE void end_of_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// ---- arithmetic

// Rounds to T and back, as a store and a load would.
template <class T> RMS_NORM_INLINE Vector<Wide<T>> rounded(Vector<Wide<T>> values) {
  if constexpr (std::is_same_v<T, Wide<T>>) return values;
  else if constexpr (std::is_same_v<T, BFloat16>) return bits_as<Floats>(round_to_bfloat16(values) & 0xFFFF0000u);
  else return widen(narrow(values, T{}), T{});
}

// The sum of the vectors of at(i, n) over `count` elements, n at a time; in an order that depends on `count` alone. Several
// sums at once, because an addition waits for the one before it.
template <class T, class At> RMS_NORM_INLINE Wide<T> sum_of(int64_t count, At at) {
  constexpr int kSums = 4;
  Vector<Wide<T>> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes<T> <= count; i += kSums * kLanes<T>) {
    for (int part = 0; part < kSums; ++part) sums[part] += at(i + part * kLanes<T>, int64_t{kLanes<T>});
  }
  for (; i < count; i += kLanes<T>) sums[0] += at(i, count - i);
  const Vector<Wide<T>> sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  Wide<T> total = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) total += sum[lane];
  return total;
}

// Writes at(i, n) of the elements from i on to `to + i`, n at a time; with streaming stores if `streams` and `to` is aligned.
template <class T, class At> RMS_NORM_INLINE void write_vectors(T* to, int64_t count, bool streams, At at) {
  const bool streams_here = streams && reinterpret_cast<uintptr_t>(to) % kStreamAlignment<T> == 0;
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
    const auto values = at(i, int64_t{kLanes<T>});
    if (streams_here) stream(values, to + i);
    else store(values, to + i);
  }
  if (i < count) store(at(i, count - i), to + i, count - i);
}

// ---- the caches

// The bytes of the last-level cache, as Linux found them; glibc's sysconf gave ten times as many on a virtual AMD processor.
RMS_NORM_INLINE int64_t last_level_cache() {
  constexpr const char* kPaths[] = {"/sys/devices/system/cpu/cpu0/cache/index3/size", "/sys/devices/system/cpu/cpu0/cache/index2/size"};
  for (const char* path : kPaths) {
    std::FILE* const file = std::fopen(path, "r");
    if (file == nullptr) continue;
    long kibibytes = 0;
    const int found = std::fscanf(file, "%ldK", &kibibytes);
    std::fclose(file);
    if (found == 1) return int64_t{kibibytes} << 10;
  }
  return int64_t{32} << 20;
}

// Whether a result of so many bytes leaves the caches before anything can read it there.
inline bool exceeds_caches(int64_t bytes) {
  constexpr int64_t kSmall = int64_t{1} << 20;  // answers for a small call without reading anything
  if (bytes <= kSmall) return false;
  static const int64_t available = last_level_cache();
  return bytes > available;
}

}  // namespace
}  // namespace rms_norm

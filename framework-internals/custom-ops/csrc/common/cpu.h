// What the CPU kernels share: 16-bit types, and a second version of each loop for AVX2, chosen at run time.
//
// A wheel built on one machine runs on another, so that the instruction set cannot be the builder's. GCC's target_clones
// does not do: its clone for "arch=haswell" is taken on a Haswell only, not on what came after.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define CUSTOM_OPS_AVX2 __attribute__((target("avx2,fma,f16c")))
#include <immintrin.h>
#endif

#define CUSTOM_OPS_INLINE __attribute__((always_inline)) inline

namespace custom_ops {

using Half = _Float16;

struct BFloat16 {
  uint16_t bits;
};

// The type that arithmetic is done in, as in PyTorch: float32 for the 16-bit types.
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
  // To nearest, ties to even: 0x7fff and the last kept bit carry into it. A NaN would carry into infinity.
  const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  out.bits = static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

// Values are widened into this many, worked on and narrowed, so that one vectorised loop serves every type.
constexpr int64_t kBlock = 64;

template <typename T> CUSTOM_OPS_INLINE void load(const T* from, int64_t count, Wide<T>* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
template <typename T> CUSTOM_OPS_INLINE void store(const Wide<T>* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
}

inline bool has_avx2() {
#ifdef CUSTOM_OPS_AVX2
  static const bool found =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return found;
#else
  return false;
#endif
}

// Defines `name(call, begin, end)`, which runs `loop(call, begin, end)` compiled for any processor, or for AVX2 where it is.
#ifdef CUSTOM_OPS_AVX2
#define CUSTOM_OPS_TWO_LEVELS(name, Call, loop)                                                                   \
  CUSTOM_OPS_AVX2 void name##_avx2(Call call, int64_t begin, int64_t end) { loop(call, begin, end); }             \
  void name(Call call, int64_t begin, int64_t end) {                                                              \
    if (has_avx2()) return name##_avx2(call, begin, end);                                                         \
    loop(call, begin, end);                                                                                       \
  }
#else
#define CUSTOM_OPS_TWO_LEVELS(name, Call, loop) \
  void name(Call call, int64_t begin, int64_t end) { loop(call, begin, end); }
#endif

}  // namespace custom_ops

// The 16-bit types on a CPU, and conversions without branches and calls, so that compilers vectorise loops of them.
//
// Everything in this folder is local to the file that includes it or always inlined: a library compiles one source for several
// instruction sets, and the linker would keep a shared definition of any one of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#define NATIVE_BUILD_INLINE __attribute__((always_inline)) inline
#define NATIVE_BUILD_INLINED __attribute__((always_inline))  // of a lambda

namespace native_build {

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

// The type of the arithmetic, as in PyTorch: float32 for the 16-bit types.
template <typename T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename To, typename From> NATIVE_BUILD_INLINE To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a change of type keeps the bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

constexpr uint32_t kInfinity = 0xFFu << 23;  // bits of a float without its sign, like the magnitudes below

// Selects one of two values without a branch. With a branch, compilers move the computation of a value into its side and do
// not vectorise it, because a floating-point operation there might trap.
NATIVE_BUILD_INLINE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// The magnitude of a float rounded to a type of fewer exponent bits, to the nearest, ties to even. Not for infinities, for NaN,
// and for what rounds past the largest number of the type.
template <int kMantissaBits, int kBias> NATIVE_BUILD_INLINE uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kRebias = uint32_t{127 - kBias} << 23;
  // Its last place has the value of the type's smallest subnormal number, so an addition rounds there.
  constexpr uint32_t kAnchor = uint32_t{127 + 24 - kBias - kMantissaBits} << 23;
  const uint32_t subnormal = bits<uint32_t>(bits<float>(magnitude) + bits<float>(kAnchor)) - kAnchor;
  const uint32_t normal = (magnitude - kRebias + ((1u << (kShift - 1)) - 1) + ((magnitude >> kShift) & 1)) >> kShift;
  return select(magnitude < kRebias + (1u << 23), subnormal, normal);
}

NATIVE_BUILD_INLINE double widen(double value) { return value; }
NATIVE_BUILD_INLINE float widen(float value) { return value; }
NATIVE_BUILD_INLINE float widen(BFloat16 value) { return bits<float>(uint32_t{value.bits} << 16); }
NATIVE_BUILD_INLINE float widen(Half value) {
  const uint32_t magnitude = value.bits & 0x7FFFu, sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t subnormal = bits<uint32_t>(bits<float>((126u << 23) | magnitude) - 0.5f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t finite = select(magnitude < 0x400u, subnormal, normal);
  return bits<float>(sign | select(magnitude >= 0x7C00u, (magnitude << 13) | kInfinity, finite));
}

NATIVE_BUILD_INLINE void narrow(double value, double& to) { to = value; }
NATIVE_BUILD_INLINE void narrow(float value, float& to) { to = value; }
NATIVE_BUILD_INLINE void narrow(float value, BFloat16& to) {
  // Adds 0x7fff plus the last kept bit, which carries into the kept bits. NaN would become infinity.
  const uint32_t word = bits<uint32_t>(value), rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
  to.bits = static_cast<uint16_t>(select(value != value, 0x7FC0u, rounded));
}
NATIVE_BUILD_INLINE void narrow(float value, Half& to) {
  const uint32_t word = bits<uint32_t>(value), magnitude = word & 0x7FFFFFFFu;
  const uint32_t finite = select(magnitude >= 0x477FF000u, 0x7C00u, round_magnitude<10, 15>(magnitude));  // from 65520 on
  to.bits = static_cast<uint16_t>(((word >> 16) & 0x8000u) | select(magnitude > kInfinity, 0x7E00u, finite));
}

}  // namespace native_build

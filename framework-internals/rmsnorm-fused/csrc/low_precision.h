// The narrow types on a CPU, and conversions without branches and calls, so that compilers vectorise loops of them
// (always_inline, because compilers stop inlining at a limit, and then do not vectorise). Every function is static: files
// compiled for several instruction sets include this header and are linked into one library, and the linker would keep a
// shared definition of any one set.
#pragma once

#include <cstdint>
#include <cstring>

namespace rms_norm {

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };

[[gnu::always_inline]] static inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[gnu::always_inline]] static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

constexpr uint32_t kInfinity = 0xFFu << 23;  // bits of a float without its sign, like the magnitudes below

// Selects one of two values without a branch. With a branch, compilers move the computation of a value into its side and do
// not vectorise it, because a floating-point operation there might trap.
[[gnu::always_inline]] static inline uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// The magnitude of a float rounded to a type of fewer exponent bits, to the nearest, ties to even. Not for infinities,
// for NaN, and for what rounds past the largest number of the type.
template <int kMantissaBits, int kBias> [[gnu::always_inline]] static inline uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int shift = 23 - kMantissaBits;
  constexpr uint32_t rebias = uint32_t{127 - kBias} << 23;
  // Its last place has the value of the type's smallest subnormal number, so an addition rounds there.
  constexpr uint32_t anchor = uint32_t{127 + 24 - kBias - kMantissaBits} << 23;
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(anchor)) - anchor;
  const uint32_t normal = (magnitude - rebias + ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift;
  return select(magnitude < rebias + (1u << 23), subnormal, normal);
}

[[gnu::always_inline]] static inline float widened(Half value) {
  const uint32_t magnitude = value.bits & 0x7FFFu, sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t subnormal = bits_of(float_of((126u << 23) | magnitude) - 0.5f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t finite = select(magnitude < 0x400u, subnormal, normal);
  return float_of(sign | select(magnitude >= 0x7C00u, (magnitude << 13) | kInfinity, finite));
}

[[gnu::always_inline]] static inline void narrow_to(Half& to, float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu;
  const uint32_t finite = select(magnitude >= 0x477FF000u, 0x7C00u, round_magnitude<10, 15>(magnitude));  // from 65520 up
  to.bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | select(magnitude > kInfinity, 0x7E00u, finite));
}

// float8_e4m3fn, clamped to the largest finite value, 448.
[[gnu::always_inline]] static inline uint8_t quantised(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFFu;
  const uint32_t finite = select(magnitude >= 0x43E00000u, 0x7Eu, round_magnitude<3, 7>(magnitude));
  return static_cast<uint8_t>(((bits >> 24) & 0x80u) | select(magnitude > kInfinity, 0x7Fu, finite));
}

}  // namespace rms_norm

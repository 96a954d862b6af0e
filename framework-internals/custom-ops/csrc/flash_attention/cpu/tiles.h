// The tile registers of AMX: eight of 16 rows of 64 bytes, and products of bfloat16 that are summed in float32.
//
// The instructions are written out, because GCC's intrinsics take no constant expression for a register and do not say that they
// read and write memory. FLASH_ATTENTION_EMULATED_TILES replaces them by the same arithmetic in C++, for tests on other processors.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../common/cpu.h"

#if defined(FLASH_ATTENTION_EMULATED_TILES) || defined(__AMX_BF16__) || defined(__AMXBF16__)  // the last one in clang 15
#define FLASH_ATTENTION_TILES 1

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace flash_attention::tiles {
namespace {

constexpr int64_t kRows = 16, kBytes = 64;

#if defined(FLASH_ATTENTION_EMULATED_TILES)

inline thread_local char registers[8][kRows][kBytes];

// All tiles of a thread, in their full size, for the life of this object.
struct Configured {
  Configured() { std::memset(registers, 0, sizeof registers); }
  ~Configured() { std::memset(registers, 0xff, sizeof registers); }
};

template <int kTile> void zero() { std::memset(registers[kTile], 0, sizeof registers[kTile]); }
template <int kTile> void load(const void* from, int64_t stride) {
  for (int64_t i = 0; i < kRows; ++i) std::memcpy(registers[kTile][i], static_cast<const char*>(from) + i * stride, kBytes);
}
template <int kTile> void store(void* to, int64_t stride) {
  for (int64_t i = 0; i < kRows; ++i) std::memcpy(static_cast<char*>(to) + i * stride, registers[kTile][i], kBytes);
}

// As the manual says: even and odd elements are summed apart, each sum is rounded, and subnormal numbers count as zero.
NATIVE_BUILD_INLINE float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
template <int kSum, int kA, int kB> void add_product() {
  BFloat16 a[kRows][32], b[kRows][32];
  float sum[kRows][16];
  std::memcpy(static_cast<void*>(a), registers[kA], sizeof a);
  std::memcpy(static_cast<void*>(b), registers[kB], sizeof b);
  std::memcpy(sum, registers[kSum], sizeof sum);
  for (int m = 0; m < kRows; ++m) {
    float parts[2][16] = {};
    for (int k = 0; k < 16; ++k) {
      for (int odd = 0; odd < 2; ++odd) {
        const float factor = flushed(widen(a[m][2 * k + odd]));
        for (int n = 0; n < 16; ++n) parts[odd][n] = flushed(std::fma(factor, flushed(widen(b[k][2 * n + odd])), parts[odd][n]));
      }
    }
    for (int n = 0; n < 16; ++n) sum[m][n] = flushed(flushed(sum[m][n]) + flushed(parts[0][n] + parts[1][n]));
  }
  std::memcpy(registers[kSum], sum, sizeof sum);
}

#else

struct Configured {
  Configured() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {kBytes, kBytes, kBytes, kBytes, kBytes, kBytes, kBytes, kBytes};
      uint8_t rows[16] = {kRows, kRows, kRows, kRows, kRows, kRows, kRows, kRows};
    } const shapes;
    static_assert(sizeof shapes == 64);
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~Configured() { asm volatile("tilerelease"); }
};

template <int kTile> NATIVE_BUILD_INLINE void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(kTile)); }
template <int kTile> NATIVE_BUILD_INLINE void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile> NATIVE_BUILD_INLINE void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kSum, int kA, int kB> NATIVE_BUILD_INLINE void add_product() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(kB), "i"(kA), "i"(kSum));
}

#endif

}  // namespace
}  // namespace flash_attention::tiles
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

#endif

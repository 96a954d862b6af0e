// Operations on the fragment of a warp: the online softmax, packing, splitting fp32 numbers into two fp16 numbers, writing.
//
// Fragment layout (of mma.sync and wgmma alike): score[4 t + 2 e + i] of lane L is row 8 e + L / 4 of the warp's 16
// rows and key 8 t + 2 (L % 4) + i, so that a row lies in four neighbouring lanes.
#pragma once

#include "device/platform.cuh"

namespace custom_ops::flash_attention {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_huge_valf();

// Two fp16 numbers store 22 bits of a float whose magnitude lies well inside fp16's range. Probabilities are therefore
// multiplied by 2^14, so that the low part of every significant one is a normal number. Tensors are scaled to a largest
// magnitude in [2^9, 2^10), 128 rows at a time.
constexpr float kSplitProbabilityExponent = 14.f;
constexpr int kSplitExponent = 9;

template <typename T>
FLASH_DEVICE uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (__is_same(T, __half)) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&packed, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&packed, &pair, 4);
  }
  return packed;
}
template <typename T>
FLASH_DEVICE float2 unpack(uint32_t packed) {
  if constexpr (__is_same(T, __half)) {
    __half2 pair;
    memcpy(&pair, &packed, 4);
    return __half22float2(pair);
  } else {
    __nv_bfloat162 pair;
    memcpy(&pair, &packed, 4);
    return __bfloat1622float2(pair);
  }
}
FLASH_DEVICE float2 unpack_half(uint32_t packed) { return unpack<__half>(packed); }

// The power of two that scales numbers of this largest magnitude. Infinities are not scaled; fmaxf ignores NaN, which stays
// NaN in both parts.
FLASH_DEVICE int split_exponent(float largest) {
  uint32_t bits;
  memcpy(&bits, &largest, 4);
  const int exponent = static_cast<int>(bits >> 23) - 127;  // largest lies in [2^exponent, 2^(exponent + 1))
  if (bits == 0 || exponent == 128) return 0;
  return min(kSplitExponent - exponent, 100);
}
FLASH_DEVICE float power_of_two(int exponent) {  // -126 ... 127
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// The exponents of a split tensor: one per kSplitRows rows of a head.
constexpr int kSplitRows = 128;
FLASH_DEVICE float split_unit(const int* exponents, int seq, int head, int row) {
  return power_of_two(-exponents[head * ((seq + kSplitRows - 1) / kSplitRows) + row / kSplitRows]);
}

// The kernels compute exp2(scale * s - maximum) with a fused multiply-add if scale > 0 and not too large. For large scales,
// the rounding of the maximum could make a probability several times one, which overflows fp16. Other scales are multiplied
// and rounded beforehand, in kernels of their own where the path would cost ordinary scales time.
constexpr float kLargestFusedScale = 16.f;
FLASH_HOST_DEVICE bool fused_scale(float scale) { return scale > 0.f && scale <= kLargestFusedScale; }

// The state of the two rows to which a lane contributes. `maximum` is scaled and in units of log2; `sum` covers the lane's
// own elements.
struct RowState {
  float maximum[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0.f, 0.f};
};

// The maximum of a row that may see no key: no score is lower, and 2^(-inf - it) is zero.
constexpr float kNoMaximum = -3.402823466e+38f;

// Ends a row that may have a sink or no key at all; returns the factor of its output.
FLASH_DEVICE float end_row(float& maximum, float& sum, float shift, const float* sink) {
  float factor = 1.f;
  if (sink != nullptr) {
    const float score = *sink * kLog2e, top = fmaxf(maximum, score);
    factor = exp2_approx(maximum - top);
    sum = sum * factor + exp2_approx(score - top + shift);
    maximum = top;
  }
  return sum > 0.f || sum != sum ? factor / sum : 0.f;
}

// By how much, in units of log2, a score may exceed the maximum that its row keeps. While it stays, output and sum stay too, and
// after a few tiles hardly any row has a higher one. A probability of 2^8 has the same relative error as one of 1.
constexpr float kKeptMaximum = 8.f;

template <int kCount>
FLASH_DEVICE void row_maxima(const float (&score)[kCount], float (&largest)[2]) {
  float odd[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) largest[e] = score[2 * e], odd[e] = score[2 * e + 1];
#pragma unroll
  for (int i = 4; i < kCount; i += 4) {  // four independent chains: an instruction has the latency of four
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      largest[e] = fmaxf(largest[e], score[i + 2 * e]);
      odd[e] = fmaxf(odd[e], score[i + 2 * e + 1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) largest[e] = fmaxf(largest[e], odd[e]);
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
#pragma unroll
    for (int e = 0; e < 2; ++e) largest[e] = fmaxf(largest[e], shuffle_xor(largest[e], mask));
  }
}

// Turns scores into 2^shift * probabilities relative to the row's maximum, with kKeep the one that kKeptMaximum allows.
// `correction` receives the factor for the old output and sum. `scale` includes log2(e); `fused` is fused_scale of the
// problem's scale.
template <bool kKeep, int kCount>
FLASH_DEVICE void online_softmax(float (&score)[kCount], RowState& state, float (&correction)[2], float scale,
                                 float shift, bool fused) {
  if (!fused) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) score[i] = score[i] == -kInfinity ? score[i] : score[i] * scale;
    scale = 1.f;
  }
  float largest[2], offset[2], sum[2][2] = {};
  row_maxima(score, largest);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float now = largest[e] * scale, kept = state.maximum[e] + (kKeep ? kKeptMaximum : 0.f);
    const float maximum = now > kept ? now : state.maximum[e];
    correction[e] = exp2_approx(state.maximum[e] - maximum);
    state.maximum[e] = maximum;
    if (!fused) {
#pragma unroll
      for (int i = 2 * e; i < kCount; i += 4) score[i] -= maximum, score[i + 1] -= maximum;
    }
    offset[e] = fused ? shift - maximum : shift;
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float power = exp2_approx(fmaf(score[i + 2 * e + j], scale, offset[e]));
        sum[e][j] += power;
        score[i + 2 * e + j] = power;
      }
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) state.sum[e] = state.sum[e] * correction[e] + (sum[e][0] + sum[e][1]);
}

FLASH_DEVICE float quad_sum(float value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}

// Transposes a 4 x 4 matrix whose columns lie in four neighbouring lanes.
FLASH_DEVICE void transpose_quad(uint32_t (&word)[4], int lane) {
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const bool second = lane & mask;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & mask) continue;
      const uint32_t other = shuffle_xor(second ? word[i] : word[i + mask], mask);
      (second ? word[i] : word[i + mask]) = other;
    }
  }
}

// Writes two neighbouring elements of an output row, unless they lie past the head size.
template <typename T, typename Out>
FLASH_DEVICE void write_pair(Out* row, int column, int head_size, float x, float y) {
  if (column >= head_size) return;
  if constexpr (__is_same(Out, float)) {
    row[column] = x;
    row[column + 1] = y;
  } else {
    *reinterpret_cast<uint32_t*>(row + column) = pack<T>(x, y);
  }
}

}  // namespace custom_ops::flash_attention

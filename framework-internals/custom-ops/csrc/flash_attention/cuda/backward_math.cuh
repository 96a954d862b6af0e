// Shared by the backward kernels: probabilities from the log-sum-exp, and the scales of split numbers.
#pragma once

#include "device/platform.cuh"
#include "softmax.cuh"

namespace custom_ops::flash_attention {

// A probability of at most one leaves a factor of two below fp16's largest number.
constexpr int kBackwardProbabilityExponent = 15;

// exp2(scale * s - lse), with lse in units of log2. Because of rounding, a probability may slightly exceed one; it may
// exceed one by far if scores are so large that lse is coarse.
FLASH_DEVICE float probability(float s, float scale, float lse) {
  return exp2_approx(fminf(fmaf(s, scale, -lse), 0.f));
}

template <int kParts, int kCount>
FLASH_DEVICE void scale_probabilities(float (&p)[kCount]) {
  if constexpr (kParts == 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] *= power_of_two(kBackwardProbabilityExponent);
  }
}

// The factors that undo the scaling of the split operands (two of rows, two of tiles) in each product.
struct SplitUnits {
  float score = 1.f, product = 1.f, first = 1.f, second = 1.f;
  static constexpr float kFromScaled =
      1.f / (1 << kBackwardProbabilityExponent);  // for products of scaled probabilities
  FLASH_DEVICE SplitUnits() {}
  FLASH_DEVICE explicit SplitUnits(const float (&unit)[4])
      : score(unit[0] * unit[2]), product(unit[1] * unit[3]), first(unit[2]), second(unit[3] * kFromScaled) {}
};

// Multiplies the two rows of a fragment by powers of two so that their largest magnitude lies in [2^9, 2^10); `undo`
// receives the inverse factors.
template <int kCount>
FLASH_DEVICE void scale_rows(float (&value)[kCount], float (&undo)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float largest = 0.f;
#pragma unroll
    for (int i = 2 * e; i < kCount; i += 4) largest = fmaxf(largest, fmaxf(fabsf(value[i]), fabsf(value[i + 1])));
    largest = fmaxf(largest, shuffle_xor(largest, 1));
    largest = fmaxf(largest, shuffle_xor(largest, 2));
    const int exponent = split_exponent(largest);
    const float factor = power_of_two(exponent);
    undo[e] = power_of_two(-exponent);
#pragma unroll
    for (int i = 2 * e; i < kCount; i += 4) value[i] *= factor, value[i + 1] *= factor;
  }
}

}  // namespace custom_ops::flash_attention

// GELU in its tanh approximation and its slope, of one number, without host headers.
//
// tanh takes longer than the memory traffic: at 4 TB/s, one SM of an H200 has 28 instruction slots and 3.5 special-function
// slots for each 16-bit element of the forward pass, and tanhf takes about thirty instructions. u * sigmoid(2 z) takes an
// exponential and a reciprocal (two special functions) and nine other instructions. tanh.approx would save one special
// function, but lose digits in the tail, where 1 + tanh cancels and u * sigmoid does not.
#pragma once

#include "../common/device.cuh"

namespace custom_ops {

constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kCubic = 0.044715;
constexpr double kLog2E = 1.44269504088896340736;

// The factors of log2 exp(-2 z), without u.
__device__ __forceinline__ float exponent_over(float u) {
  constexpr float kLinear = static_cast<float>(-2 * kLog2E * kSqrt2OverPi);
  constexpr float kThird = static_cast<float>(-2 * kLog2E * kSqrt2OverPi * kCubic);
  return fmaf(kThird, u * u, kLinear);
}

// 2^t and 1/x, accurate to two units in the last place of float32 (CUDA C++ Programming Guide, "Mathematical Functions").
// They flush only results below 2^-126 to zero.
__device__ __forceinline__ float power_of_two(float t) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(t));
  return power;
}
__device__ __forceinline__ float reciprocal(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

// u * sigmoid(2 z).
__device__ __forceinline__ float gelu(float u) { return u * reciprocal(1.0f + power_of_two(u * exponent_over(u))); }
__device__ __forceinline__ double gelu(double u) {
  return u / (1.0 + exp(-2 * kSqrt2OverPi * u * fma(kCubic, u * u, 1.0)));
}

// The smaller of a and a number b, or NaN if a is NaN; fminf would drop it.
__device__ __forceinline__ float smaller(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a >= b ? b : a;
#endif
}

// s + u * 2z' * s (1 - s) with s = sigmoid(2 z), and 1 - s as exp(-2 z) s, which does not cancel. For |u| above 64 the slope
// is 0 or 1; without the bounds, infinity would be multiplied by zero.
__device__ __forceinline__ float gelu_slope(float u) {
  constexpr float kLinear = static_cast<float>(2 * kSqrt2OverPi);
  constexpr float kSquare = static_cast<float>(2 * kSqrt2OverPi * 3 * kCubic);
  const float power = power_of_two(smaller(u * exponent_over(u), 126.0f)), s = reciprocal(1.0f + power);
  const float near = fmaxf(fminf(u, 64.0f), -64.0f);
  return fmaf(near * fmaf(kSquare, near * near, kLinear), power * s * s, s);
}
__device__ __forceinline__ double gelu_slope(double u) {
  constexpr double kLinear = 2 * kSqrt2OverPi, kSquare = 2 * kSqrt2OverPi * 3 * kCubic;
  const double exponent = -2 * kSqrt2OverPi * u * fma(kCubic, u * u, 1.0);
  const double power = exp(exponent > 700.0 ? 700.0 : exponent), s = 1.0 / (1.0 + power);
  const double near = fmax(fmin(u, 64.0), -64.0);
  return fma(near * fma(kSquare, near * near, kLinear), power * s * s, s);
}

}  // namespace custom_ops

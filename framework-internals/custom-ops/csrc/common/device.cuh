// Shared by the CUDA kernels: conversions and 16-byte vectors. No host headers, so that both NVRTC and nvcc compile it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace custom_ops {

using Index = long long;

constexpr int kVectorBytes = 16;  // the widest load that one thread issues on every architecture

// The type of the arithmetic, as in PyTorch: float32 for the 16-bit types.
template <typename T> struct WideOf { using type = float; };
template <> struct WideOf<double> { using type = double; };
template <typename T> using Wide = typename WideOf<T>::type;

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
__device__ __forceinline__ void narrow(float value, __half& out) { out = __float2half_rn(value); }
__device__ __forceinline__ void narrow(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T lane[kWidth];
};

// One instruction rounds two values to 16 bits; the compiler does not find the pairs by itself.
template <int kWidth, typename W, typename T>
__device__ __forceinline__ void narrow_lanes(const W (&wide)[kWidth], Vector<T, kWidth>& out) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) narrow(wide[i], out.lane[i]);
}
template <int kWidth>
__device__ __forceinline__ void narrow_lanes(const float (&wide)[kWidth], Vector<__nv_bfloat16, kWidth>& out) {
  if constexpr (kWidth == 1) {
    narrow(wide[0], out.lane[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(wide[i], wide[i + 1]);
      out.lane[i] = pair.x;
      out.lane[i + 1] = pair.y;
    }
  }
}
template <int kWidth>
__device__ __forceinline__ void narrow_lanes(const float (&wide)[kWidth], Vector<__half, kWidth>& out) {
  if constexpr (kWidth == 1) {
    narrow(wide[0], out.lane[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const __half2 pair = __floats2half2_rn(wide[i], wide[i + 1]);
      out.lane[i] = pair.x;
      out.lane[i + 1] = pair.y;
    }
  }
}

// Division by a number that the host knows, as a multiplication. A 32-bit division takes about twenty instructions, once
// per vector, too many for a kernel at the memory limit. Granlund and Montgomery, PLDI 1994.
struct FastDivisor {
  unsigned divisor;
  unsigned magic;
  unsigned shift;

  // Both require n below 2^31.
  __device__ __forceinline__ unsigned quotient(unsigned n) const { return (__umulhi(n, magic) + n) >> shift; }
  __device__ __forceinline__ unsigned remainder(unsigned n) const { return n - divisor * quotient(n); }
};

}  // namespace custom_ops

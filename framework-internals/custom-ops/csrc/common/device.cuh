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

__device__ __forceinline__ void narrow_pair(float a, float b, __half& first, __half& second) {
  const __half2 pair = __floats2half2_rn(a, b);
  first = pair.x;
  second = pair.y;
}
__device__ __forceinline__ void narrow_pair(float a, float b, __nv_bfloat16& first, __nv_bfloat16& second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  first = pair.x;
  second = pair.y;
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T lane[kWidth];
};

// Rounds a thread's values. The result is a value, not a reference to memory: into memory the compiler would write each 16-bit
// lane by itself, as many stores as lanes, of which a warp's 32 lie 16 bytes apart.
template <typename T, int kWidth> __device__ __forceinline__ Vector<T, kWidth> narrow_lanes(const Wide<T> (&wide)[kWidth]) {
  Vector<T, kWidth> narrowed;
  if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
    // One instruction rounds two values to 16 bits; the compiler does not find the pairs by itself.
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) narrow_pair(wide[i], wide[i + 1], narrowed.lane[i], narrowed.lane[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) narrow(wide[i], narrowed.lane[i]);
  }
  return narrowed;
}

// One store of 16 bytes. Of an assignment the compiler may make several smaller ones, each of which writes a part of every 16
// bytes of a warp's: a fifth of the time of bias_gelu's backward pass, four fifths of rotary's.
template <typename T, int kWidth> __device__ __forceinline__ void store(T* to, const Vector<T, kWidth>& lanes) {
  if constexpr (sizeof(lanes) == 16) {
    const uint4 words = __builtin_bit_cast(uint4, lanes);
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");
  } else {
    *reinterpret_cast<Vector<T, kWidth>*>(to) = lanes;
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

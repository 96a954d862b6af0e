// Shared by the CUDA kernels of this folder: types, loads, sums over threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../rms_norm.h"

namespace rms_norm {

template <class T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T> __device__ __forceinline__ T narrow(Wide<T> value) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(value);
  else return value;
}

// `value` rounded to T, in the accumulating type.
template <class T> __device__ __forceinline__ Wide<T> rounded(Wide<T> value) { return widen(narrow<T>(value)); }

__device__ __forceinline__ float reciprocal_root(float value) { return rsqrtf(value); }
__device__ __forceinline__ double reciprocal_root(double value) { return 1.0 / sqrt(value); }

// V elements, loaded at once if they have at most 16 bytes; 32 bytes (float weights of bfloat16 rows) take two loads.
template <class T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Vector {
  T at[V];
};

// The number of elements in the 16 bytes that a thread loads at once.
template <class T> constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T, int V> __device__ __forceinline__ Vector<T, V> vector_of(const T* row, int index) {
  return reinterpret_cast<const Vector<T, V>*>(row)[index];
}

// Row numbers have 32 bits (check_size() ensures this), because 64-bit division takes many registers.
template <class T> __device__ __forceinline__ const T* row_of(const Rows& rows, uint32_t row) {
  const uint32_t inner = static_cast<uint32_t>(rows.inner), outer = row / inner;
  return static_cast<const T*>(rows.data) + outer * rows.outer_stride + (row - outer * inner) * rows.inner_stride;
}

// The weights at a vector's columns in the accumulating type, with the offset added. Their type is a uniform branch and not a
// template parameter, which would double the number of kernels.
template <class T, int V> __device__ __forceinline__ void load_weight(Wide<T> (&w)[V], const Weight& weight, bool of_type_t, int index) {
  using A = Wide<T>;
  if (!weight.data) {
#pragma unroll
    for (int e = 0; e < V; ++e) w[e] = A(1);
    return;
  }
  if (of_type_t) {
    const auto loaded = vector_of<T, V>(static_cast<const T*>(weight.data), index);
#pragma unroll
    for (int e = 0; e < V; ++e) w[e] = widen(loaded.at[e]);
  } else {
    const auto loaded = vector_of<A, V>(static_cast<const A*>(weight.data), index);
#pragma unroll
    for (int e = 0; e < V; ++e) w[e] = loaded.at[e];
  }
#pragma unroll
  for (int e = 0; e < V; ++e) w[e] += static_cast<A>(weight.offset);
}

// What a forward pass keeps of a row.
template <class A> struct Moments {
  A mean, rstd;
};

template <bool kCentred, class A> __device__ __forceinline__ Moments<A> moments_of(const A* kept, uint32_t row) {
  if constexpr (kCentred) return {kept[2 * row], kept[2 * row + 1]};
  else return {A(0), kept[row]};
}

// c of rms_norm.h: an element minus the mean of its row if centred, else itself.
template <bool kCentred, class A> __device__ __forceinline__ A centred(A value, A mean) {
  if constexpr (kCentred) return value - mean;
  else return value;
}

// Makes `x` opaque to the compiler. Otherwise it keeps the widened elements of the first pass for the second one, or unpacks
// early loads immediately, with twice the registers.
template <class T, int V> __device__ __forceinline__ void widen_anew(Vector<T, V>& x) {
  if constexpr (sizeof(T) < 4 && V > 1) {
    static_assert(sizeof(x) % 4 == 0);
#pragma unroll
    for (int word = 0; word < static_cast<int>(sizeof(x) / 4); ++word) asm volatile("" : "+r"(reinterpret_cast<uint32_t*>(&x)[word]));
  }
}

struct Add {
  template <class A> __device__ __forceinline__ A operator()(A a, A b) const { return a + b; }
};
// The maximum of magnitudes, or NaN if one is NaN: their bits are ordered, with NaN above infinity. fmaxf would drop NaN.
struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b))); }
};

// `combine` of the values of `lanes` neighbouring threads (a power of two, at most 32), in all of them.
template <class A, class Combine> __device__ __forceinline__ A within_warp(A value, int lanes, Combine combine) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// `combine` of the values of a row's `lanes` threads (a power of two, or a multiple of 32), in all of them. Every row of
// the block has separate slots among the 32. Two calls must not share `slots`, because a slow thread may still read them.
template <class A, class Combine> __device__ __forceinline__ A over_row(A value, int lanes, A* slots, Combine combine) {
  if (lanes < 32) return within_warp(value, lanes, combine);
  value = within_warp(value, 32, combine);
  if (lanes == 32) return value;
  const int lane = threadIdx.x % 32, warps = lanes / 32;
  slots += threadIdx.y * warps;
  if (lane == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  const auto from_warp = [&](int warp) {
    const A part = slots[warp < warps ? warp : 0];
    return std::is_same_v<Combine, Add> && warp >= warps ? A(0) : part;
  };
  if (warps <= 8) return within_warp(from_warp(lane % 8), 8, combine);  // saves two shuffles of a single row
  return within_warp(from_warp(lane), 32, combine);
}

}  // namespace rms_norm

// The host side of a launch: selects the instance of a kernel template and the number of blocks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "device.cuh"
#include "dtype.h"

namespace custom_ops {

constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A view may start at any element: x[1:] of float32 is aligned to 4 bytes, and a 16-byte load from it would fault.
template <typename... Pointers> bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % kVectorBytes == 0) && ...);
}

template <typename T> struct TypeTag { using type = T; };

// Calls `run` with the tag of the dtype's CUDA type.
template <typename Run> int for_dtype(Dtype dtype, Run run) {
  switch (dtype) {
    case Dtype::kFloat32: return run(TypeTag<float>{});
    case Dtype::kFloat64: return run(TypeTag<double>{});
    case Dtype::kFloat16: return run(TypeTag<__half>{});
    case Dtype::kBFloat16: return run(TypeTag<__nv_bfloat16>{});
  }
  return cudaErrorInvalidValue;
}

// The magic number of common/device.cuh for a divisor from 1 to 2^31.
inline FastDivisor fast_divisor(uint32_t divisor) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < divisor) ++shift;
  const uint64_t magic = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1;
  return {divisor, static_cast<uint32_t>(magic), shift};
}

}  // namespace custom_ops

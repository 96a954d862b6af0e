// CUDA kernels: 16-byte loads and stores, several in flight a thread; no torch header, so nvcc takes a second or two.

#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

namespace custom_ops {
namespace {

constexpr int kThreads = 256;
// Independent vectors a thread loads before it stores any: what hides the latency of device memory.
constexpr int kVectors = 2;
constexpr int kVectorBytes = 16;       // the widest load that one thread issues on every architecture
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
__device__ __forceinline__ void narrow(double value, double& out) { out = value; }
__device__ __forceinline__ void narrow(float value, __half& out) { out = __float2half_rn(value); }
__device__ __forceinline__ void narrow(float value, __nv_bfloat16& out) { out = __float2bfloat16_rn(value); }

struct Add {
  template <typename Wide>
  __device__ __forceinline__ Wide operator()(Wide x, Wide b) const {
    return x + b;
  }
};

struct Axpb {
  double alpha;
  __device__ __forceinline__ double operator()(double x, double b) const { return fma(alpha, x, b); }
  __device__ __forceinline__ float operator()(float x, float b) const { return fmaf(static_cast<float>(alpha), x, b); }
};

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T lane[kWidth];
};

// A block takes kThreads * kVectors vectors at a time. The launch has a block for each such tile (blocks that come and go
// keep the memory busier than a persistent grid of this kernel does); the stride is there for grids beyond the limit.
template <typename T, int kWidth, typename Op>
__global__ void __launch_bounds__(kThreads)
    elementwise(const T* __restrict__ x, const T* __restrict__ b, T* __restrict__ out, int64_t count, Op op) {
  using Lanes = Vector<T, kWidth>;
  const Lanes* x_lanes = reinterpret_cast<const Lanes*>(x);
  const Lanes* b_lanes = reinterpret_cast<const Lanes*>(b);
  Lanes* out_lanes = reinterpret_cast<Lanes*>(out);
  const int64_t vectors = count / kWidth;
  constexpr int64_t kTile = int64_t{kThreads} * kVectors;

  for (int64_t tile = blockIdx.x * kTile; tile < vectors; tile += gridDim.x * kTile) {
    Lanes own_x[kVectors], own_b[kVectors];
#pragma unroll
    for (int step = 0; step < kVectors; ++step) {
      const int64_t i = tile + step * kThreads + threadIdx.x;
      if (i < vectors) {
        own_x[step] = x_lanes[i];
        own_b[step] = b_lanes[i];
      }
    }
#pragma unroll
    for (int step = 0; step < kVectors; ++step) {
      const int64_t i = tile + step * kThreads + threadIdx.x;
      if (i < vectors) {
        Lanes sum;
#pragma unroll
        for (int lane = 0; lane < kWidth; ++lane) {
          narrow(op(widen(own_x[step].lane[lane]), widen(own_b[step].lane[lane])), sum.lane[lane]);
        }
        out_lanes[i] = sum;
      }
    }
  }

  // The last count % kWidth elements: fewer than a warp, so one block does them.
  const int64_t i = vectors * kWidth + threadIdx.x;
  if (blockIdx.x == 0 && i < count) narrow(op(widen(x[i]), widen(b[i])), out[i]);
}

template <typename T, int kWidth, typename Op>
cudaError_t launch_width(const Operands& operands, Op op, cudaStream_t stream) {
  constexpr int64_t kElements = int64_t{kThreads} * kVectors * kWidth;
  const int64_t blocks = std::min((operands.count + kElements - 1) / kElements, kMaxBlocks);
  elementwise<T, kWidth><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(operands.x), static_cast<const T*>(operands.b), static_cast<T*>(operands.out),
      operands.count, op);
  return cudaGetLastError();
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0; }

template <typename T, typename Op>
cudaError_t launch(const Operands& operands, Op op, cudaStream_t stream) {
  if (operands.count == 0) return cudaSuccess;  // an empty grid is an invalid configuration
  // A view may begin at any element: x[1:] of float32 is aligned to 4 bytes, and a 16-byte load of it would fault.
  if (aligned(operands.x) && aligned(operands.b) && aligned(operands.out)) {
    return launch_width<T, kVectorBytes / sizeof(T)>(operands, op, stream);
  }
  return launch_width<T, 1>(operands, op, stream);
}

template <typename Op>
int launch_dtype(const Operands& operands, Op op, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (operands.dtype) {
    case Dtype::kFloat32: return launch<float>(operands, op, cuda_stream);
    case Dtype::kFloat64: return launch<double>(operands, op, cuda_stream);
    case Dtype::kFloat16: return launch<__half>(operands, op, cuda_stream);
    case Dtype::kBFloat16: return launch<__nv_bfloat16>(operands, op, cuda_stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int add_cuda(const Operands& operands, void* stream) { return launch_dtype(operands, Add{}, stream); }

int axpb_cuda(const Operands& operands, double alpha, void* stream) {
  return launch_dtype(operands, Axpb{alpha}, stream);
}

}  // namespace custom_ops

// Launches of kernels.cuh.

#include "kernels.h"

#include <algorithm>

#include "../common/launch.h"
#include "kernels.cuh"

namespace custom_ops {
namespace {

// The bytes of shared memory with which `blocks` blocks fit on an SM; 0 if CUDA does not say.
int shared_bytes(int blocks) {
  int device = 0, of_processor = 0, of_block = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    cudaGetLastError();  // clears the error; otherwise the next check in this process would report it
    return 0;
  }
  constexpr int kOwn = 2048;  // 1 KiB that CUDA reserves per block, and the sums of the warps
  return std::max(0, std::min(of_processor / blocks - kOwn, of_block - kOwn));
}

template <typename T, int kThreads, bool kGradient> int launch(const CrossEntropy& call, cudaStream_t stream) {
  auto* kernel = cross_entropy_row<T, kThreads, kGradient>;
  int kept = 0;
  if constexpr (kGradient) {
    const int64_t vectors = call.classes * sizeof(T) / kVectorBytes;
    kept = static_cast<int>(std::min<int64_t>(vectors, shared_bytes(kSharing<T> / kThreads) / kVectorBytes));
    if (kept * kVectorBytes > 48 * 1024) {
      cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kept * kVectorBytes);
      if (status == cudaSuccess) {
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      }
      if (status != cudaSuccess) return status;
    }
  }
  kernel<<<static_cast<unsigned>(call.rows), kThreads, kept * kVectorBytes, stream>>>(
      static_cast<T*>(call.logits), reinterpret_cast<const long long*>(call.targets), static_cast<Wide<T>*>(call.losses),
      call.columns, call.classes, call.ignore_index, kept);
  return cudaGetLastError();
}

template <typename T, int kThreads> int launch_block(const CrossEntropyBlock& call, cudaStream_t stream) {
  T* const logits = static_cast<T*>(call.logits);
  const auto* const targets = reinterpret_cast<const long long*>(call.targets);
  auto* const sums = static_cast<Wide<T>*>(call.sums);
  const auto blocks = static_cast<unsigned>(call.rows);
  if (call.gradient) {
    cross_entropy_block_gradient<T, kThreads>
        <<<blocks, kThreads, 0, stream>>>(logits, targets, sums, call.columns, call.classes, call.first, call.ignore_index);
  } else {
    cross_entropy_block_sums<T, kThreads><<<blocks, kThreads, 0, stream>>>(
        logits, targets, sums, static_cast<Wide<T>*>(call.chosen), call.columns, call.classes, call.first, call.ignore_index);
  }
  return cudaGetLastError();
}

// A thread of the larger block has four vectors or more.
template <typename T> bool is_narrow(int64_t classes) {
  return classes * static_cast<int64_t>(sizeof(T)) < 4 * 512 * kVectorBytes;
}

}  // namespace

int cross_entropy_block_cuda(const CrossEntropyBlock& call, void* stream) {
  if (call.rows == 0) return cudaSuccess;
  if (call.rows > kMaxBlocks) return cudaErrorInvalidValue;
  return for_dtype(call.dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    const auto on = static_cast<cudaStream_t>(stream);
    return is_narrow<T>(call.classes) ? launch_block<T, 128>(call, on) : launch_block<T, 512>(call, on);
  });
}

int cross_entropy_cuda(const CrossEntropy& call, void* stream) {
  if (call.rows == 0) return cudaSuccess;  // an empty grid is an invalid configuration
  if (call.rows > kMaxBlocks) return cudaErrorInvalidValue;
  return for_dtype(call.dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    const auto on = static_cast<cudaStream_t>(stream);
    const bool narrow = is_narrow<T>(call.classes);
    if constexpr (kSharing<T> == 1024) {  // a row that half of the shared memory does not hold has all of it
      if (call.gradient && call.classes * static_cast<int64_t>(sizeof(T)) > shared_bytes(2)) return launch<T, 1024, true>(call, on);
    }
    if (call.gradient) return narrow ? launch<T, 128, true>(call, on) : launch<T, 512, true>(call, on);
    return narrow ? launch<T, 128, false>(call, on) : launch<T, 512, false>(call, on);
  });
}

}  // namespace custom_ops

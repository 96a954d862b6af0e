// Launches of kernels.cuh and general.cuh.

#include "kernels.h"

#include <algorithm>
#include <type_traits>

#include "../common/launch.h"
#include "general.cuh"
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

// `more` are the arguments that a kernel takes beside those of cross_entropy_row.
template <typename T, int kThreads, bool kGradient, typename Kernel, typename... More>
int launch(Kernel* kernel, const CrossEntropy& call, cudaStream_t stream, More... more) {
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
      call.columns, call.classes, call.ignore_index, kept, more...);
  return cudaGetLastError();
}

// A thread of the larger block has four vectors or more.
template <typename T> bool is_narrow(int64_t classes) {
  return classes * static_cast<int64_t>(sizeof(T)) < 4 * 512 * kVectorBytes;
}

template <int kNumber> using Threads = std::integral_constant<int, kNumber>;

// Calls run(type, threads, whether the gradient is wanted) with compile-time constants.
template <typename Run> int for_rows(const CrossEntropy& call, Run run) {
  if (call.rows == 0) return cudaSuccess;  // an empty grid is an invalid configuration
  if (call.rows > kMaxBlocks) return cudaErrorInvalidValue;
  return for_dtype(call.dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    const bool narrow = is_narrow<T>(call.classes);
    if constexpr (kSharing<T> == 1024) {  // a row that half of the shared memory does not hold has all of it
      if (call.gradient && call.classes * static_cast<int64_t>(sizeof(T)) > shared_bytes(2)) return run(tag, Threads<1024>{}, std::true_type{});
    }
    if (call.gradient) return narrow ? run(tag, Threads<128>{}, std::true_type{}) : run(tag, Threads<512>{}, std::true_type{});
    return narrow ? run(tag, Threads<128>{}, std::false_type{}) : run(tag, Threads<512>{}, std::false_type{});
  });
}

template <typename Run> int for_block(const CrossEntropyBlock& call, Run run) {
  if (call.rows == 0) return cudaSuccess;
  if (call.rows > kMaxBlocks) return cudaErrorInvalidValue;
  return for_dtype(call.dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    return is_narrow<T>(call.classes) ? run(tag, Threads<128>{}) : run(tag, Threads<512>{});
  });
}

template <typename T> Parts<Wide<T>> parts_of(const GeneralParts& parts) {
  using W = Wide<T>;
  return {static_cast<const W*>(parts.class_weight), static_cast<W>(parts.share), static_cast<W>(parts.softcap),
          static_cast<W>(parts.softcap == 0 ? 0 : 1 / parts.softcap), parts.accuracy};
}

}  // namespace

int cross_entropy_cuda(const CrossEntropy& call, void* stream) {
  return for_rows(call, [&](auto tag, auto threads, auto gradient) {
    using T = typename decltype(tag)::type;
    constexpr int kThreads = decltype(threads)::value;
    constexpr bool kGradient = decltype(gradient)::value;
    return launch<T, kThreads, kGradient>(cross_entropy_row<T, kThreads, kGradient>, call, static_cast<cudaStream_t>(stream));
  });
}

int general_cross_entropy_cuda(const GeneralCrossEntropy& call, void* stream) {
  return for_rows(call.rows, [&](auto tag, auto threads, auto gradient) {
    using T = typename decltype(tag)::type;
    using W = Wide<T>;
    constexpr int kThreads = decltype(threads)::value;
    constexpr bool kGradient = decltype(gradient)::value;
    return launch<T, kThreads, kGradient>(general_cross_entropy_row<T, kThreads, kGradient>, call.rows, static_cast<cudaStream_t>(stream),
                                          static_cast<const W*>(call.factors), parts_of<T>(call.parts), static_cast<W*>(call.statistics));
  });
}

int cross_entropy_block_cuda(const CrossEntropyBlock& call, void* stream) {
  return for_block(call, [&](auto tag, auto threads) -> int {
    using T = typename decltype(tag)::type;
    constexpr int kThreads = decltype(threads)::value;
    T* const logits = static_cast<T*>(call.logits);
    const auto* const targets = reinterpret_cast<const long long*>(call.targets);
    auto* const sums = static_cast<Wide<T>*>(call.sums);
    const auto blocks = static_cast<unsigned>(call.rows);
    const auto on = static_cast<cudaStream_t>(stream);
    if (call.gradient) {
      cross_entropy_block_gradient<T, kThreads>
          <<<blocks, kThreads, 0, on>>>(logits, targets, sums, call.columns, call.classes, call.first, call.ignore_index);
    } else {
      cross_entropy_block_sums<T, kThreads><<<blocks, kThreads, 0, on>>>(
          logits, targets, sums, static_cast<Wide<T>*>(call.chosen), call.columns, call.classes, call.first, call.ignore_index);
    }
    return cudaGetLastError();
  });
}

int general_cross_entropy_block_cuda(const GeneralCrossEntropyBlock& call, void* stream) {
  const CrossEntropyBlock& block = call.block;
  return for_block(block, [&](auto tag, auto threads) -> int {
    using T = typename decltype(tag)::type;
    constexpr int kThreads = decltype(threads)::value;
    T* const logits = static_cast<T*>(block.logits);
    const auto* const targets = reinterpret_cast<const long long*>(block.targets);
    auto* const sums = static_cast<Wide<T>*>(block.sums);
    const auto blocks = static_cast<unsigned>(block.rows);
    const auto on = static_cast<cudaStream_t>(stream);
    const auto parts = parts_of<T>(call.parts);
    if (block.gradient) {
      general_cross_entropy_block_gradient<T, kThreads>
          <<<blocks, kThreads, 0, on>>>(logits, targets, sums, block.columns, block.classes, block.first, block.ignore_index, parts);
    } else {
      general_cross_entropy_block_sums<T, kThreads>
          <<<blocks, kThreads, 0, on>>>(logits, targets, sums, static_cast<Wide<T>*>(block.chosen), block.columns, block.classes, block.first,
                                        block.ignore_index, parts);
    }
    return cudaGetLastError();
  });
}

}  // namespace custom_ops

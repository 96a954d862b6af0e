// Launches of kernels.cuh.

#include "kernels.h"

#include <algorithm>
#include <type_traits>

#include "../common/launch.h"
#include "kernels.cuh"

namespace custom_ops {
namespace {

template <typename T, int kWidth, int kVectors> int launch_forward(const BiasGelu& call, cudaStream_t stream) {
  const int64_t count = call.rows * call.columns, vectors = count / kWidth;
  const int64_t blocks = std::min(ceil_div(vectors, int64_t{kGeluThreads} * kVectors), kMaxBlocks);
  const bool large = vectors > INT32_MAX;
  auto* kernel = large ? bias_gelu_forward<T, kWidth, kVectors, true> : bias_gelu_forward<T, kWidth, kVectors, false>;
  kernel<<<static_cast<unsigned>(blocks), kGeluThreads, 0, stream>>>(
      static_cast<const T*>(call.x), static_cast<const T*>(call.bias), static_cast<T*>(call.out), count,
      fast_divisor(static_cast<uint32_t>(call.columns / kWidth)));
  return cudaGetLastError();
}

template <typename T, int kWidth, int kAcross>
int launch_backward(const BiasGeluBackward& call, int64_t groups, bool larger_than_l2, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(call.columns, int64_t{kAcross} * kWidth)), static_cast<unsigned>(groups));
  bias_gelu_backward<T, kWidth, kAcross><<<grid, kGeluThreads, 0, stream>>>(
      static_cast<const T*>(call.grad), static_cast<const T*>(call.x), static_cast<const T*>(call.bias),
      static_cast<T*>(call.dx), static_cast<Wide<T>*>(call.workspace), call.rows, call.columns, larger_than_l2);
  return cudaGetLastError();
}

template <typename T, int kWidth> int launch_backward_of_few_rows(const BiasGeluBackward& call, cudaStream_t stream) {
  bias_gelu_backward_of_few_rows<T, kWidth><<<static_cast<unsigned>(ceil_div(call.columns, 32)), 1024, 0, stream>>>(
      static_cast<const T*>(call.grad), static_cast<const T*>(call.x), static_cast<const T*>(call.bias),
      static_cast<T*>(call.dx), static_cast<T*>(call.dbias), call.rows, call.columns);
  return cudaGetLastError();
}

int64_t element_size(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2; }

// A plan with every choice made, and the resulting groups of rows.
struct Groups {
  int across;
  int width;
  int64_t count;  // 0: the rows are few, and one launch takes them all
  bool larger_than_l2;  // each operand
};

// Requires at least one column; otherwise the number of blocks would be divided by zero.
Groups groups_of(const BiasGeluBackward& call) {
  int device = 0, processors = 0, l2_cache = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&l2_cache, cudaDevAttrL2CacheSize, device) != cudaSuccess) {
    cudaGetLastError();  // clears the error; otherwise the next check in this process would report it
    return {};
  }
  const int64_t size = element_size(call.dtype);
  // The workspace size is computed before dx exists; a new tensor is aligned.
  const bool vectors = call.plan.vector_bytes != size && call.columns % (kVectorBytes / size) == 0 &&
                       aligned(call.grad, call.x, call.bias, call.dx);
  const int width = vectors ? static_cast<int>(kVectorBytes / size) : 1;
  // A thread has at most four rows, and each block a multiprocessor to itself; beyond, two launches are faster (NOTES.md).
  const bool automatic = call.plan.threads_across == 0 && call.plan.blocks_per_processor == 0 && call.plan.vector_bytes == 0;
  const bool few = automatic && call.rows <= 4 * 32 * width && ceil_div(call.columns, 32) <= processors;
  const int64_t across_row = ceil_div(call.columns, width);
  int across = call.plan.threads_across;
  // The widest block of two rows or more in which at most an eighth of the threads have no column.
  for (int wide = 128; across == 0; wide /= 2) {
    if (wide == 32 || ceil_div(across_row, wide) * wide - across_row <= across_row / 8) across = wide;
  }
  const int64_t blocks = (call.plan.blocks_per_processor ? call.plan.blocks_per_processor : 4) * int64_t{processors};
  const int64_t down = kGeluThreads / across;
  const int64_t wanted = std::max<int64_t>(1, blocks / ceil_div(across_row, across));
  // At least eight steps per thread; otherwise the partial sums would cause as much traffic as the operands.
  const int64_t count = few ? 0 : std::min({wanted, ceil_div(call.rows, down * 8), int64_t{65535}});
  return {across, width, count, call.rows * call.columns * size > l2_cache};
}

}  // namespace

int bias_gelu_cuda(const BiasGelu& call, void* stream) {
  if (call.rows * call.columns == 0) return cudaSuccess;  // an empty grid is an invalid configuration
  return for_dtype(call.dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const auto on = static_cast<cudaStream_t>(stream);
    const bool vectors = aligned(call.x, call.bias, call.out) && call.columns % kWidth == 0;
    if (call.access == Access::kScalar || (call.access == Access::kAuto && !vectors)) {
      return launch_forward<T, 1, 1>(call, on);
    }
    if (!vectors) return cudaErrorMisalignedAddress;
    switch (call.access) {
      case Access::kVector2: return launch_forward<T, kWidth, 2>(call, on);
      case Access::kVector4: return launch_forward<T, kWidth, 4>(call, on);
      default: return launch_forward<T, kWidth, 1>(call, on);
    }
  });
}

int64_t bias_gelu_backward_workspace_cuda(const BiasGeluBackward& call) {
  if (call.columns == 0) return 0;
  const Groups groups = groups_of(call);
  if (groups.across == 0) return -1;
  return groups.count * call.columns * (call.dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float));
}

int bias_gelu_backward_cuda(const BiasGeluBackward& call, void* stream) {
  if (call.columns == 0) return cudaSuccess;
  const Groups groups = groups_of(call);
  if (groups.across == 0) return cudaErrorNoDevice;
  return for_dtype(call.dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    const auto on = static_cast<cudaStream_t>(stream);
    const auto launch = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      if (groups.count == 0) return launch_backward_of_few_rows<T, kWidth>(call, on);
      switch (groups.across) {
        case 32: return launch_backward<T, kWidth, 32>(call, groups.count, groups.larger_than_l2, on);
        case 64: return launch_backward<T, kWidth, 64>(call, groups.count, groups.larger_than_l2, on);
        case 128: return launch_backward<T, kWidth, 128>(call, groups.count, groups.larger_than_l2, on);
        default: return launch_backward<T, kWidth, 256>(call, groups.count, groups.larger_than_l2, on);
      }
    };
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const int status = groups.width == 1 ? launch(std::integral_constant<int, 1>{}) : launch(std::integral_constant<int, kWidth>{});
    if (status != cudaSuccess || groups.count == 0) return status;
    bias_gelu_dbias<T><<<static_cast<unsigned>(ceil_div(call.columns, 32)), 1024, 0, on>>>(
        static_cast<const Wide<T>*>(call.workspace), static_cast<T*>(call.dbias), groups.count, call.columns);
    return cudaGetLastError();
  });
}

}  // namespace custom_ops

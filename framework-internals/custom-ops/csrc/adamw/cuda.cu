// Launches of kernels.cuh: one for as many tensors as its parameters have room for.

#include "kernels.h"

#include <algorithm>
#include <cmath>

#include "../common/launch.h"
#include "kernels.cuh"

namespace custom_ops {
namespace {

static_assert(sizeof(GradientTable) + 64 <= 4096 && sizeof(ParameterTable) + sizeof(AdamWSettings) + 64 <= 4096,
              "the parameters of a launch take at most 4 KiB before CUDA 12.1");

// Calls `launch` with each table of at most kMost tensors, its first chunk and its number of chunks.
template <typename Table, int kMost, typename Part, typename Launch>
int for_tables(const std::vector<Part>& parts, Part (Table::*column)[kMost], int64_t chunks, Launch launch) {
  const int64_t all = static_cast<int64_t>(parts.size());
  for (int64_t first = 0; first < all; first += kMost) {
    Table table;
    table.count = static_cast<int>(std::min<int64_t>(kMost, all - first));
    std::copy_n(parts.begin() + first, table.count, table.*column);
    const int64_t begin = parts[first].first_chunk, end = first + kMost < all ? parts[first + kMost].first_chunk : chunks;
    if (end - begin > kMaxBlocks) return cudaErrorInvalidValue;
    launch(table, begin, static_cast<unsigned>(end - begin));
    if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <typename T> int norm(const GradientNorm& call, cudaStream_t stream) {
  const int status = for_tables(call.gradients, &GradientTable::gradients, call.chunks, [&](const GradientTable& table, int64_t first, unsigned blocks) {
    sums_of_squares<T><<<blocks, kAdamWThreads, 0, stream>>>(table, first, call.sums);
  });
  if (status != cudaSuccess) return status;
  norm_of_sums<T><<<1, kAdamWThreads, 0, stream>>>(call.sums, call.chunks, static_cast<T*>(call.norm));
  return cudaGetLastError();
}

template <typename T, typename G, typename C> int update(Types<T, G, C>, const AdamW& call, cudaStream_t stream) {
  const bool near = call.beta1 > 0.5;
  const AdamWSettings settings{call.norm, call.device_lr, call.lr, std::log(call.beta1), std::log(call.beta2),
                               near ? 1 - call.beta1 : -call.beta1, call.beta2, 1 - call.beta2, call.eps,
                               call.weight_decay, call.max_norm, near, call.maximize};
  const auto kernel = call.amsgrad ? adamw<T, G, C, true> : adamw<T, G, C, false>;
  return for_tables(call.parameters, &ParameterTable::parameters, call.chunks, [&](const ParameterTable& table, int64_t first, unsigned blocks) {
    kernel<<<blocks, kAdamWThreads, 0, stream>>>(table, first, settings);
  });
}

}  // namespace

int gradient_norm_cuda(const GradientNorm& call, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return call.dtype == Dtype::kFloat32 ? norm<float>(call, on) : norm<double>(call, on);
}

int adamw_cuda(const AdamW& call, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return for_types<__half, __nv_bfloat16>(call, [&](auto types) { return update(types, call, on); });
}

}  // namespace custom_ops

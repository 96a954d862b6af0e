// The launch of kernels.cuh.

#include "kernels.h"

#include <algorithm>

#include "../common/launch.h"
#include "kernels.cuh"

namespace custom_ops {
namespace {

constexpr int64_t kMostThreads = 256, kWarp = 32;

template <typename T, int kWidth, bool kInterleaved> int launch(const Rotary& call, cudaStream_t stream) {
  const int64_t work = call.heads * call.pairs / kWidth;
  const auto threads = static_cast<unsigned>(std::clamp(ceil_div(work, kWarp) * kWarp, kWarp, kMostThreads));
  const auto blocks = static_cast<unsigned>(std::min(call.batch * call.tokens, kMaxBlocks));
  rotary<T, kWidth, kInterleaved><<<blocks, threads, 0, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace

int rotary_cuda(const Rotary& call, void* stream) {
  if (call.batch * call.tokens * call.heads * call.size == 0) return cudaSuccess;  // an empty grid is an invalid configuration
  return for_dtype(call.dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    constexpr int kWidth = kVectorBytes / sizeof(T);
    const auto whole = [](int64_t elements) { return elements % kWidth == 0; };
    const bool vectors = aligned(call.x, call.cos, call.sin, call.out) && whole(call.pairs) && whole(call.size) && whole(call.batch_stride) && whole(call.token_stride) && whole(call.head_stride);
    const auto on = static_cast<cudaStream_t>(stream);
    if (call.interleaved) return vectors ? launch<T, kWidth, true>(call, on) : launch<T, 1, true>(call, on);
    return vectors ? launch<T, kWidth, false>(call, on) : launch<T, 1, false>(call, on);
  });
}

}  // namespace custom_ops

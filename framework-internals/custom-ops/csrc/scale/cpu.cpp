// One loop per dtype, vectorised by the compiler, in blocks that are widened, scaled and narrowed.

#include "kernels.h"

#include <algorithm>
#include <type_traits>

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

template <typename T> void loop(const ScaleCall& call, int64_t begin, int64_t end) {
  const T* __restrict x = static_cast<const T*>(call.x);
  T* __restrict out = static_cast<T*>(call.out);
  const Wide<T> alpha = static_cast<Wide<T>>(call.alpha);
  if constexpr (std::is_same_v<T, Wide<T>>) {
    for (int64_t i = begin; i < end; ++i) out[i] = alpha * x[i];
    return;
  }
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    Wide<T> block[kBlock];
    load(x + at, count, block);
    for (int64_t i = 0; i < count; ++i) block[i] *= alpha;
    store(block, count, out + at);
  }
}

}  // namespace

void scale_cpu(const ScaleCall& call, int64_t begin, int64_t end) {
  switch (call.dtype) {
    case Dtype::kFloat32: return loop<float>(call, begin, end);
    case Dtype::kFloat64: return loop<double>(call, begin, end);
    case Dtype::kFloat16: return loop<Half>(call, begin, end);
    case Dtype::kBFloat16: return loop<BFloat16>(call, begin, end);
  }
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

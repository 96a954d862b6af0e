// One loop a dtype, left to the compiler's vectoriser, in blocks that are widened, scaled and narrowed.

#include "kernels.h"

#include <algorithm>

#include "../common/cpu.h"

namespace custom_ops {
namespace {

template <typename T> CUSTOM_OPS_INLINE void loop(const ScaleCall& call, int64_t begin, int64_t end) {
  const T* __restrict x = static_cast<const T*>(call.x);
  T* __restrict out = static_cast<T*>(call.out);
  const Wide<T> alpha = static_cast<Wide<T>>(call.alpha);
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    Wide<T> block[kBlock];
    load(x + at, count, block);
    for (int64_t i = 0; i < count; ++i) block[i] *= alpha;
    store(block, count, out + at);
  }
}

CUSTOM_OPS_INLINE void loop_of_dtype(const ScaleCall& call, int64_t begin, int64_t end) {
  switch (call.dtype) {
    case Dtype::kFloat32: return loop<float>(call, begin, end);
    case Dtype::kFloat64: return loop<double>(call, begin, end);
    case Dtype::kFloat16: return loop<Half>(call, begin, end);
    case Dtype::kBFloat16: return loop<BFloat16>(call, begin, end);
  }
}

CUSTOM_OPS_TWO_LEVELS(run, const ScaleCall&, loop_of_dtype)

}  // namespace

void scale_cpu(const ScaleCall& call, int64_t begin, int64_t end) { run(call, begin, end); }

}  // namespace custom_ops

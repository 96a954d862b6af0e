// Vectors that are widened, scaled and narrowed.

#include "kernels.h"

#include "../common/streaming.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

template <typename T> void loop(const ScaleCall& call, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(call.x) + begin;
  const bool large = exceeds_caches(call.count * sizeof(T));
  const Wide<T> alpha = static_cast<Wide<T>>(call.alpha);
  write_row(static_cast<T*>(call.out) + begin, end - begin, large, [&](int64_t i, int64_t some) CUSTOM_OPS_INLINED {
    const simd::Pair<T> pair = simd::load_pair(x + i, some);
    return simd::Pair<T>{alpha * pair.first, alpha * pair.second};
  });
  if (large) simd::end_of_stream();
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

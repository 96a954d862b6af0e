// Vectors that are widened, scaled and narrowed.

#include "kernels.h"

#include <native_build/memory.h>

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

template <typename T> void loop(const ScaleCall& call, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(call.x) + begin;
  const bool large = native_build::is_streamed(call.count * sizeof(T));
  const Wide<T> alpha = static_cast<Wide<T>>(call.alpha);
  simd::write_row(static_cast<T*>(call.out) + begin, end - begin, large, [&](int64_t i, int64_t some) NATIVE_BUILD_INLINED {
    return simd::each<T>([alpha](auto v) NATIVE_BUILD_INLINED { return alpha * v; }, simd::load_block(x + i, some));
  });
  if (large) simd::end_of_stream();
}

}  // namespace

void scale_cpu(const ScaleCall& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { loop<typename decltype(tag)::type>(call, begin, end); });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

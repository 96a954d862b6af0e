// The CPU kernel: both halves of a head at once, in vectors. Each element is read and written once.

#include "kernels.h"

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

template <typename T> void loop(const Rotary& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t half = call.size / 2;
  const auto sign = simd::broadcast(call.inverse ? W(-1) : W(1));
  for (int64_t at = begin; at < end; ++at) {
    const int64_t token = at % call.tokens;
    const W* const cos = static_cast<const W*>(call.cos) + token * half;
    const W* const sin = static_cast<const W*>(call.sin) + token * half;
    const T* x = static_cast<const T*>(call.x) + at / call.tokens * call.batch_stride + token * call.token_stride;
    T* y = static_cast<T*>(call.out) + at * call.heads * call.size;
    for (int64_t head = 0; head < call.heads; ++head, x += call.head_stride, y += call.size) {
      for (int64_t i = 0; i < half; i += simd::kLanes<T>) {
        const int64_t some = half - i;
        const auto first = simd::load(x + i, some), second = simd::load(x + half + i, some);
        const auto c = simd::load(cos + i, some), s = sign * simd::load(sin + i, some);
        simd::store<T>(first * c - second * s, y + i, some);
        simd::store<T>(second * c + first * s, y + half + i, some);
      }
    }
  }
}

}  // namespace

void rotary_cpu(const Rotary& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { loop<typename decltype(tag)::type>(call, begin, end); });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

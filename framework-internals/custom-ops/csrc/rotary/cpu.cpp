// The CPU kernel: both halves of a head at once, in vectors; neighbours one pair at a time. Each element is read and written once.

#include "kernels.h"

#include <cstring>

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

template <typename T, typename W> void turn_neighbours(const T* x, const W* cos, const W* sin, W sign, int64_t pairs, T* y) {
  for (int64_t i = 0; i < pairs; ++i) {
    const W first = widen(x[2 * i]), second = widen(x[2 * i + 1]), s = sign * sin[i];
    narrow(first * cos[i] - second * s, y[2 * i]);
    narrow(second * cos[i] + first * s, y[2 * i + 1]);
  }
}

template <typename T> void loop(const Rotary& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  const int64_t half = call.pairs;
  const auto sign = simd::broadcast(call.inverse ? W(-1) : W(1));
  for (int64_t at = begin; at < end; ++at) {
    const int64_t token = at % call.tokens, row = at / call.tokens * call.table_stride + token * half;
    const W* const cos = static_cast<const W*>(call.cos) + row;
    const W* const sin = static_cast<const W*>(call.sin) + row;
    const T* x = static_cast<const T*>(call.x) + at / call.tokens * call.batch_stride + token * call.token_stride;
    T* y = static_cast<T*>(call.out) + at * call.heads * call.size;
    for (int64_t head = 0; head < call.heads; ++head, x += call.head_stride, y += call.size) {
      std::memcpy(static_cast<void*>(y + 2 * half), x + 2 * half, static_cast<size_t>(call.size - 2 * half) * sizeof(T));
      if (call.interleaved) {
        turn_neighbours(x, cos, sin, call.inverse ? W(-1) : W(1), half, y);
        continue;
      }
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

// CPU kernels over runs of one channel, or of all channels for channels-last, in vectors.

#include "kernels.h"

#include <algorithm>

#include "../common/cpu.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

template <typename T> void loop(const ScaleShiftRelu& call, int64_t begin, int64_t end) {
  using W = Wide<T>;
  T* x = static_cast<T*>(call.x);
  const W* scale = static_cast<const W*>(call.scale);
  const W* shift = static_cast<const W*>(call.shift);
  const bool last = call.inner == 1;
  const int64_t run = last ? call.channels : call.inner;
  for (int64_t at = begin; at < end;) {
    const int64_t within = at % run, channel = at / call.inner % call.channels, count = std::min(end - at, run - within);
    for (int64_t i = 0; i < count; i += simd::kLanes<T>) {
      const int64_t some = count - i;
      const auto factor = last ? simd::load(scale + channel + i, some) : simd::broadcast(scale[channel]);
      const auto addend = last ? simd::load(shift + channel + i, some) : simd::broadcast(shift[channel]);
      const auto y = factor * simd::load(x + at + i, some) + addend;
      simd::store<T>(y < W(0) ? simd::Vector<W>{} : y, x + at + i, some);  // keeps NaN
    }
    at += count;
  }
}

}  // namespace

void scale_shift_relu_cpu(const ScaleShiftRelu& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { loop<typename decltype(tag)::type>(call, begin, end); });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

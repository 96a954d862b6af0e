// CPU kernels over runs of one channel, or of all channels for channels-last, in blocks that the compiler vectorises.

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
    const int64_t within = at % run, channel = at / call.inner % call.channels;
    const int64_t count = std::min({kBlock, end - at, run - within});
    W block[kBlock];
    load(x + at, count, block);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t c = last ? channel + i : channel;
      const W y = scale[c] * block[i] + shift[c];
      block[i] = y < W(0) ? W(0) : y;
    }
    store(block, count, x + at);
    at += count;
  }
}

}  // namespace

void scale_shift_relu_cpu(const ScaleShiftRelu& call, int64_t begin, int64_t end) {
  switch (call.dtype) {
    case Dtype::kFloat32: return loop<float>(call, begin, end);
    case Dtype::kFloat64: return loop<double>(call, begin, end);
    case Dtype::kFloat16: return loop<Half>(call, begin, end);
    case Dtype::kBFloat16: return loop<BFloat16>(call, begin, end);
  }
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

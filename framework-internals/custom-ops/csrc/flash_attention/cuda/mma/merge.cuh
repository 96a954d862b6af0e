// Few queries leave most multiprocessors idle, so each goes over parts of the keys in as many blocks. This adds the parts up.
#pragma once

#include "../../flash_attention.h"
#include "../device/platform.cuh"
#include "../softmax.cuh"

namespace custom_ops::flash_attention {

struct MergeParts {
  const float* out;     // (rows, parts, width), relative to the part's maximum
  const float2* state;  // (rows, parts): maximum and sum
  Tensor to;
  float* lse;
  const float* sinks;
  int64_t rows;  // batch * heads * seq
  int parts, width, heads, seq, head_size;
  float shift;
};

constexpr int kMergeThreads = 128;

// One warp per query.
template <typename T, typename Out>
__global__ void __launch_bounds__(kMergeThreads) merge_parts(const MergeParts args) {
  const int64_t row = int64_t{blockIdx.x} * (kMergeThreads / 32) + threadIdx.x / 32;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % 32, head = static_cast<int>(row / args.seq % args.heads);
  const float2* const state = args.state + row * args.parts;
  float top = kNoMaximum, total = 0.f;
  for (int part = 0; part < args.parts; ++part) top = fmaxf(top, state[part].x);
  for (int part = 0; part < args.parts; ++part) total = fmaf(state[part].y, exp2_approx(state[part].x - top), total);
  float maximum = top;
  const float factor = end_row(maximum, total, args.shift, args.sinks == nullptr ? nullptr : args.sinks + head);
  Out* const to = static_cast<Out*>(args.to.data) + row / args.seq / args.heads * args.to.batch_stride +
                  head * args.to.head_stride + row % args.seq * args.to.seq_stride;
  for (int column = 2 * lane; column < args.head_size; column += 64) {
    float2 sum = {0.f, 0.f};
    for (int part = 0; part < args.parts; ++part) {
      const float weight = exp2_approx(state[part].x - top);
      const float2 of = *reinterpret_cast<const float2*>(args.out + (row * args.parts + part) * args.width + column);
      sum.x = fmaf(of.x, weight, sum.x);
      sum.y = fmaf(of.y, weight, sum.y);
    }
    write_pair<T>(to, column, args.head_size, sum.x * factor, sum.y * factor);
  }
  if (args.lse != nullptr && lane == 0) args.lse[row] = (maximum + log2f(total) - args.shift) * kLn2;
}

}  // namespace custom_ops::flash_attention

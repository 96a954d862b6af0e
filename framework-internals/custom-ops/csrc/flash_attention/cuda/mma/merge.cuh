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

constexpr int kMergeThreads = 128, kMostParts = 32;

// One warp per query, a lane for the state of each part.
template <typename T, typename Out>
__global__ void __launch_bounds__(kMergeThreads) merge_parts(const MergeParts args) {
  const int64_t row = int64_t{blockIdx.x} * (kMergeThreads / 32) + threadIdx.x / 32;
  if (row >= args.rows) return;
  const int lane = threadIdx.x % 32, head = static_cast<int>(row / args.seq % args.heads);
  const float2 own = lane < args.parts ? args.state[row * args.parts + lane] : float2{kNoMaximum, 0.f};
  float maximum = own.x;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) maximum = fmaxf(maximum, shuffle_xor(maximum, mask));
  const float weight = exp2_approx(own.x - maximum);
  float total = own.y * weight;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) total += shuffle_xor(total, mask);
  const float factor = end_row(maximum, total, args.shift, args.sinks == nullptr ? nullptr : args.sinks + head);
  Out* const to = static_cast<Out*>(args.to.data) + row / args.seq / args.heads * args.to.batch_stride +
                  head * args.to.head_stride + row % args.seq * args.to.seq_stride;
  const float* const from = args.out + row * args.parts * args.width;
  for (int first = 0; first < args.width; first += 64) {  // whole warps: the lanes share their weights
    const int column = first + 2 * lane;
    float2 sum = {0.f, 0.f};
#pragma unroll 8
    for (int part = 0; part < args.parts; ++part) {
      const float2 of = *reinterpret_cast<const float2*>(from + part * args.width + column);
      const float of_part = shuffle_from(weight, part);
      sum.x = fmaf(of.x, of_part, sum.x);
      sum.y = fmaf(of.y, of_part, sum.y);
    }
    write_pair<T>(to, column, args.head_size, sum.x * factor, sum.y * factor);
  }
  if (args.lse != nullptr && lane == 0) args.lse[row] = (maximum + log2f(total) - args.shift) * kLn2;
}

template <typename T, typename Out>
const char* launch_merge(const MergeParts& args, void* stream) {
  constexpr int kRows = kMergeThreads / 32;
  const auto blocks = static_cast<unsigned>((args.rows + kRows - 1) / kRows);
  return launch(merge_parts<T, Out>, dim3(blocks), kMergeThreads, 0, stream, args);
}

}  // namespace custom_ops::flash_attention

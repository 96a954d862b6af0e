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
  int parts, heads, seq, head_size;
  float shift;
};

constexpr int kMergeThreads = 128, kMostParts = 32;

// One block per query. A thread has four columns of every kGroups-th part; a lane of each warp has the state of each part. All loads are
// issued before anything is waited for: the parts' latencies, one after another, would be most of a short call's time.
template <typename T, typename Out, int kWidth>
__global__ void __launch_bounds__(kMergeThreads) merge_parts(const MergeParts args) {
  constexpr int kColumns = kWidth / 4, kGroups = kMergeThreads / kColumns, kLoads = kMostParts / kGroups;
  FLASH_SHARED_MEMORY(memory);
  float4* const sums = reinterpret_cast<float4*>(memory);
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32, head = static_cast<int>(row / args.seq % args.heads);
  const int column = threadIdx.x % kColumns * 4, group = threadIdx.x / kColumns;
  const float* const from = args.out + row * args.parts * kWidth + column;
  float4 of[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int part = group + i * kGroups;
    of[i] = part < args.parts ? *reinterpret_cast<const float4*>(from + part * kWidth) : float4{};
  }
  const float2 own = lane < args.parts ? args.state[row * args.parts + lane] : float2{kNoMaximum, 0.f};
  float maximum = own.x;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) maximum = fmaxf(maximum, shuffle_xor(maximum, mask));
  const float weight = exp2_approx(own.x - maximum);
  float total = own.y * weight;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) total += shuffle_xor(total, mask);
  const float factor = end_row(maximum, total, args.shift, args.sinks == nullptr ? nullptr : args.sinks + head);
  float4 sum{};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const float of_part = shuffle_from(weight, group + i * kGroups);
    sum = {fmaf(of[i].x, of_part, sum.x), fmaf(of[i].y, of_part, sum.y), fmaf(of[i].z, of_part, sum.z), fmaf(of[i].w, of_part, sum.w)};
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (group != 0) return;
#pragma unroll
  for (int other = 1; other < kGroups; ++other) {
    const float4 more = sums[other * kColumns + threadIdx.x];
    sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
  }
  Out* const to = static_cast<Out*>(args.to.data) + row / args.seq / args.heads * args.to.batch_stride +
                  head * args.to.head_stride + row % args.seq * args.to.seq_stride;
  write_pair<T>(to, column, args.head_size, sum.x * factor, sum.y * factor);
  write_pair<T>(to, column + 2, args.head_size, sum.z * factor, sum.w * factor);
  if (args.lse != nullptr && threadIdx.x == 0) args.lse[row] = (maximum + log2f(total) - args.shift) * kLn2;
}

template <typename T, typename Out, int kWidth>
const char* launch_merge(const MergeParts& args, void* stream) {
  if (args.rows > INT32_MAX) return "flash_attention: more than 2^31 queries in parts";
  return launch(merge_parts<T, Out, kWidth>, dim3(static_cast<unsigned>(args.rows)), kMergeThreads, kMergeThreads * 16, stream, args);
}

}  // namespace custom_ops::flash_attention

// Two numbers per query for the backward: lse in units of log2, and delta, the sum over head_size of out times its gradient,
// minus the gradient of lse. The queries of a head are padded to a multiple of 128 with an lse of infinity and a delta of
// zero, so that the probabilities of the padding are zero, as are those of a query without any key.
#pragma once

#include "launch.cuh"
#include "softmax.cuh"

namespace custom_ops::flash_attention {

struct StatisticsArgs {
  Tensor out, grad_out;
  const float *lse, *grad_lse;
  RowStatistics to;
  int64_t rows;  // heads * stride
  int heads, seq, head_size;
};

constexpr int kStatisticsThreads = 256;

// One warp per query.
template <typename T>
__global__ void __launch_bounds__(kStatisticsThreads) row_statistics(const StatisticsArgs args) {
  const int64_t row = int64_t{blockIdx.x} * (kStatisticsThreads / 32) + threadIdx.x / 32;
  if (row >= args.rows) return;
  const int64_t index = row / args.to.stride, query = row % args.to.stride, batch = index / args.heads,
                head = index % args.heads;
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
  if (query < args.seq) {
    const T* out = static_cast<const T*>(args.out.data) + batch * args.out.batch_stride + head * args.out.head_stride +
                   query * args.out.seq_stride;
    const T* grad = static_cast<const T*>(args.grad_out.data) + batch * args.grad_out.batch_stride +
                    head * args.grad_out.head_stride + query * args.grad_out.seq_stride;
    for (int i = lane; i < args.head_size; i += 32)
      sum = fmaf(static_cast<float>(out[i]), static_cast<float>(grad[i]), sum);
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += shuffle_xor(sum, offset);
  if (lane != 0) return;
  const int64_t place = index * args.seq + query;
  args.to.lse[row] = query < args.seq && args.lse[place] != -kInfinity ? args.lse[place] * kLog2e : kInfinity;
  args.to.delta[row] = query < args.seq ? sum - (args.grad_lse == nullptr ? 0.f : args.grad_lse[place]) : 0.f;
}

}  // namespace custom_ops::flash_attention

// What surrounds the one-pass backward for each query: before it, lse, delta and a cleared sum; after it, dq from the sum.
#pragma once

#include "../launch.cuh"
#include "../softmax.cuh"

namespace custom_ops::flash_attention {

struct QueryStarts {
  Tensor out, grad_out;
  const float *lse, *grad_lse;
  float *to_lse, *to_negative_delta;  // (heads, stride): in units of log2; minus the sum of out * grad_out, plus grad_lse
  float4* sums;                       // (heads, stride, head width)
  int* turns;                         // (heads, stride / 8), or null
  int64_t rows;                       // heads * stride
  int heads, seq, stride, head_size;
};

constexpr int kQueryThreads = 256;

// A query past the end, or without any key, has an lse of infinity and a delta of zero, so that its probabilities are zero.
template <typename T, int kD>
__global__ void __launch_bounds__(kQueryThreads) start_queries(const QueryStarts args) {
  constexpr int kLanes = kD / 8;  // of a query, with 16 bytes each
  const int64_t row = int64_t{blockIdx.x} * (kQueryThreads / kLanes) + threadIdx.x / kLanes;
  if (row >= args.rows) return;  // whole warps: the rows of a head are a multiple of those of a warp
  const int64_t index = row / args.stride;
  const int query = static_cast<int>(row % args.stride), column = threadIdx.x % kLanes * 8;
  const int64_t batch = index / args.heads, head = index % args.heads;
  args.sums[row * (kD / 4) + column / 4] = args.sums[row * (kD / 4) + column / 4 + 1] = float4{};
  float sum = 0.f;
  if (query < args.seq && column < args.head_size) {
    const auto load = [&](const Tensor& from, T(&to)[8]) {
      const T* const start = static_cast<const T*>(from.data) + batch * from.batch_stride + head * from.head_stride;
      const uint4 bits = *reinterpret_cast<const uint4*>(start + query * from.seq_stride + column);
      memcpy(to, &bits, 16);
    };
    T out[8], grad[8];
    load(args.out, out);
    load(args.grad_out, grad);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(static_cast<float>(out[i]), static_cast<float>(grad[i]), sum);
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) sum += shuffle_xor(sum, offset);
  if (column != 0) return;
  const int64_t place = index * args.seq + query;
  args.to_lse[row] = query < args.seq && args.lse[place] != -kInfinity ? args.lse[place] * kLog2e : kInfinity;
  args.to_negative_delta[row] = query < args.seq ? (args.grad_lse == nullptr ? 0.f : args.grad_lse[place]) - sum : 0.f;
  if (args.turns != nullptr && row % 8 == 0) args.turns[row / 8] = 0;
}

struct QueryFinish {
  const float4* sums;
  Tensor dq;
  int heads, seq, head_size, tiles;
  float scale;
};

// A tile of dq from its sum in fragments (one_pass.cuh), one warp for each warp that computed it.
template <typename T, int kD, int kTile>
__global__ void __launch_bounds__(kQueryThreads) finish_queries(const QueryFinish args) {
  constexpr int kSums = kTile * kD / kQueryThreads, kPitch = kD + 8;
  constexpr int kQueries = kD == 64 ? kTile / 2 : kTile, kColumns = kD == 64 ? 0 : kD / 2;  // of a warpgroup
  FLASH_SHARED_MEMORY(memory);
  T* const rows = reinterpret_cast<T*>(memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, group = thread / 128;
  const int column = group * kColumns + warp * 16 + lane / 4, first = (kD == 64 ? group * kQueries : 0) + lane % 4 * 2;
  const float4* const from = args.sums + int64_t{blockIdx.x} * (kTile * kD / 4) + thread / 32 * (kSums * 8) + lane;
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
    const float4 x = from[i * 32];
    T* const to = rows + (first + i * 8 % kQueries) * kPitch + column + i * 8 / kQueries * 64;
    const auto store = [&](T* row, float low, float high) {
      const uint32_t both = pack<T>(low * args.scale, high * args.scale);
      memcpy(row, &both, 2);
      memcpy(row + 8, reinterpret_cast<const char*>(&both) + 2, 2);
    };
    store(to, x.x, x.z);
    store(to + kPitch, x.y, x.w);
  }
  __syncthreads();
  const int head = static_cast<int>(blockIdx.x) / args.tiles, query = static_cast<int>(blockIdx.x) % args.tiles * kTile;
  T* const start = static_cast<T*>(args.dq.data) + head / args.heads * args.dq.batch_stride +
                   head % args.heads * args.dq.head_stride;
  for (int i = thread; i < kTile * kD / 8; i += kQueryThreads) {
    const int row = i / (kD / 8), to = i % (kD / 8) * 8;
    if (query + row >= args.seq || to >= args.head_size) continue;
    *reinterpret_cast<uint4*>(start + (query + row) * args.dq.seq_stride + to) =
        *reinterpret_cast<const uint4*>(rows + row * kPitch + to);
  }
}

}  // namespace custom_ops::flash_attention

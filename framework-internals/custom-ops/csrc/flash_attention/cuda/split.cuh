// Splits fp32 tensors into two fp16 tensors: x * 2^e = high + low. 2^e is the power of two that brings the largest magnitude
// of 128 neighbouring rows of a head into [2^9, 2^10). The parts have shape (batch, heads, sequence, width), where width is
// head_size padded with zeros to the width of the attention kernel. A block keeps its rows in registers while it finds their
// largest magnitude and writes the parts: 4 bytes read and 4 written per element.
#pragma once

#include "launch.cuh"
#include "softmax.cuh"

namespace custom_ops::flash_attention {

constexpr int kSplitThreads = 256;

struct SplitTensor {
  const float* from;
  int64_t batch_stride, head_stride, seq_stride;
  __half *high, *low;
  int* exponent;  // one per kSplitRows rows of a head
  int batch, heads, seq;
};

struct Split {
  SplitTensor tensor[kSplitTensors];
  int head_size;
};

// Four neighbouring elements of a row, zeros past the head size; loads 16 bytes at once if the tensor allows it.
FLASH_DEVICE float4 load_four(const float* row, int column, int head_size) {
  const float* from = row + column;
  if (column + 4 <= head_size && reinterpret_cast<uintptr_t>(from) % 16 == 0)
    return *reinterpret_cast<const float4*>(from);
  return {column < head_size ? from[0] : 0.f, column + 1 < head_size ? from[1] : 0.f,
          column + 2 < head_size ? from[2] : 0.f, column + 3 < head_size ? from[3] : 0.f};
}

FLASH_DEVICE float largest_of(float4 x) { return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))); }

template <int kWidth>
__global__ void __launch_bounds__(kSplitThreads) split_rows(const Split args) {
  constexpr int kQuadsARow = kWidth / 4, kQuads = kSplitRows * kQuadsARow / kSplitThreads;  // per thread
  const SplitTensor& tensor = args.tensor[blockIdx.y];
  const int chunks = (tensor.seq + kSplitRows - 1) / kSplitRows;
  const int head = blockIdx.x / chunks, first_row = blockIdx.x % chunks * kSplitRows;
  if (head >= tensor.batch * tensor.heads) return;
  const float* from =
      tensor.from + head / tensor.heads * tensor.batch_stride + head % tensor.heads * tensor.head_stride;
  const int thread = threadIdx.x;

  float4 x[kQuads];
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int place = i * kSplitThreads + thread, row = first_row + place / kQuadsARow;
    x[i] =
        row < tensor.seq ? load_four(from + row * tensor.seq_stride, place % kQuadsARow * 4, args.head_size) : float4{};
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) largest = fmaxf(largest, largest_of(x[i]));

  for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, shuffle_xor(largest, offset));
  FLASH_SHARED_MEMORY(memory);
  float* const of_warp = reinterpret_cast<float*>(memory);
  if (thread % 32 == 0) of_warp[thread / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kSplitThreads / 32; ++warp) largest = fmaxf(largest, of_warp[warp]);

  const int exponent = split_exponent(largest);
  const float scale = power_of_two(exponent);
  if (thread == 0) tensor.exponent[blockIdx.x] = exponent;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int place = i * kSplitThreads + thread, row = first_row + place / kQuadsARow;
    if (row >= tensor.seq) continue;
    x[i] = {x[i].x * scale, x[i].y * scale, x[i].z * scale, x[i].w * scale};
    const uint2 high{pack<__half>(x[i].x, x[i].y), pack<__half>(x[i].z, x[i].w)};
    const float2 a = unpack_half(high.x), b = unpack_half(high.y);
    const int64_t to = (int64_t{head} * tensor.seq + first_row) * kQuadsARow + place;
    reinterpret_cast<uint2*>(tensor.high)[to] = high;
    reinterpret_cast<uint2*>(tensor.low)[to] =
        uint2{pack<__half>(x[i].x - a.x, x[i].y - a.y), pack<__half>(x[i].z - b.x, x[i].w - b.y)};
  }
}

}  // namespace custom_ops::flash_attention

// fp32 tensors as two fp16 tensors: x * 2^e = high + low, with 2^e the power of two that brings the head's largest
// magnitude into [2^9, 2^10). The parts are written (batch, heads, sequence, width), width being head_size filled up with
// zeros to what the attention kernel works on. Two passes: the largest magnitude of each head, then the parts.
#pragma once

#include "launch.cuh"
#include "softmax.cuh"

namespace custom_ops::flash_attention {

constexpr int kSplitThreads = 256;

struct SplitTensor {
  const float* from;
  int64_t batch_stride, head_stride, seq_stride;
  __half *high, *low;
  uint32_t* largest;  // a head; zero before the first pass
  int batch, heads, seq;
};

struct Split {
  SplitTensor tensor[kSplitTensors];
  int head_size, width;
};

// Four neighbouring elements of a row, zeros past the head size; 16 bytes at once where the tensor allows that.
FLASH_DEVICE float4 load_four(const SplitTensor& tensor, const float* row, int column, int head_size) {
  const float* from = row + column;
  if (column + 4 <= head_size && reinterpret_cast<uintptr_t>(from) % 16 == 0) return *reinterpret_cast<const float4*>(from);
  return {column < head_size ? from[0] : 0.f, column + 1 < head_size ? from[1] : 0.f, column + 2 < head_size ? from[2] : 0.f,
          column + 3 < head_size ? from[3] : 0.f};
}

// visit(four elements, their place in the parts), for this block's share (blockIdx.x) of a head (blockIdx.y) of a tensor.
template <typename Visit>
FLASH_DEVICE void for_each_four(const SplitTensor& tensor, int head_size, int width, Visit visit) {
  const int quads = width / 4, head = blockIdx.y;
  const float* start = tensor.from + head / tensor.heads * tensor.batch_stride + head % tensor.heads * tensor.head_stride;
  const int64_t count = int64_t{tensor.seq} * quads;
  for (int64_t i = int64_t{blockIdx.x} * kSplitThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kSplitThreads) {
    const int64_t row = i / quads;
    const int column = static_cast<int>(i % quads) * 4;
    visit(load_four(tensor, start + row * tensor.seq_stride, column, head_size), head * count + i);
  }
}

// NaN and infinity count as infinity, which leaves the head unscaled.
FLASH_DEVICE uint32_t magnitude_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits &= 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0x7f800000u;
}

__global__ void __launch_bounds__(kSplitThreads) find_largest(const Split args) {
  const SplitTensor& tensor = args.tensor[blockIdx.z];
  if (blockIdx.y >= tensor.batch * tensor.heads) return;
  uint32_t largest = 0;
  for_each_four(tensor, args.head_size, args.width, [&](float4 x, int64_t) {
    largest = max(max(largest, max(magnitude_bits(x.x), magnitude_bits(x.y))), max(magnitude_bits(x.z), magnitude_bits(x.w)));
  });
  // A bit pattern of a magnitude as a float keeps its order; shuffles move floats.
  for (int offset = 16; offset > 0; offset /= 2) {
    float mine;
    memcpy(&mine, &largest, 4);
    largest = max(largest, magnitude_bits(shuffle_xor(mine, offset)));
  }
  if (threadIdx.x % 32 == 0 && largest != 0) atomic_max(tensor.largest + blockIdx.y, largest);
}

__global__ void __launch_bounds__(kSplitThreads) write_parts(const Split args) {
  const SplitTensor& tensor = args.tensor[blockIdx.z];
  if (blockIdx.y >= tensor.batch * tensor.heads) return;
  const float scale = power_of_two(split_exponent(tensor.largest[blockIdx.y]));
  for_each_four(tensor, args.head_size, args.width, [&](float4 x, int64_t place) {
    x = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    const uint2 high{pack<__half>(x.x, x.y), pack<__half>(x.z, x.w)};
    const float2 a = unpack_half(high.x), b = unpack_half(high.y);
    reinterpret_cast<uint2*>(tensor.high)[place] = high;
    reinterpret_cast<uint2*>(tensor.low)[place] = uint2{pack<__half>(x.x - a.x, x.y - a.y), pack<__half>(x.z - b.x, x.w - b.y)};
  });
}

}  // namespace custom_ops::flash_attention

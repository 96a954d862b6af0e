// The CUDA kernel. Memory is the limit: each element is read and written once; the heads of a position share a row of the
// tables, which the first one brings into the cache.
#pragma once

#include "../common/device.cuh"
#include "kernels.h"

namespace custom_ops {

// kWidth neighbours in a table, in loads of 16 bytes where they are that many.
template <typename W, int kWidth> __device__ __forceinline__ void load_angles(const W* from, W (&to)[kWidth]) {
  constexpr int kMost = kVectorBytes / sizeof(W), kStep = kWidth < kMost ? kWidth : kMost;
#pragma unroll
  for (int i = 0; i < kWidth; i += kStep) {
    const auto part = *reinterpret_cast<const Vector<W, kStep>*>(from + i);
#pragma unroll
    for (int lane = 0; lane < kStep; ++lane) to[i + lane] = part.lane[lane];
  }
}

// A block per position of (batch, tokens), and a thread per kWidth pairs of one of its heads.
template <typename T, int kWidth, bool kInterleaved>
__global__ void rotary(const __grid_constant__ Rotary call) {
  using W = Wide<T>;
  using Lanes = Vector<T, kWidth>;
  const int half = static_cast<int>(call.pairs), of_head = half / kWidth, work = static_cast<int>(call.heads) * of_head;
  const int rest = static_cast<int>(call.size) / kWidth - 2 * of_head;  // what is copied of a head
  for (Index at = blockIdx.x; at < call.batch * call.tokens; at += gridDim.x) {
    const Index batch = at / call.tokens, token = at - batch * call.tokens;
    const T* const x = static_cast<const T*>(call.x) + batch * call.batch_stride + token * call.token_stride;
    T* const y = static_cast<T*>(call.out) + at * call.heads * call.size;
    const W* const cos = static_cast<const W*>(call.cos) + batch * call.table_stride + token * half;
    const W* const sin = static_cast<const W*>(call.sin) + batch * call.table_stride + token * half;
    for (int i = threadIdx.x; i < work; i += blockDim.x) {
      const int head = i / of_head, pair = (i - head * of_head) * kWidth;
      const int place = kInterleaved ? 2 * pair : pair, apart = kInterleaved ? kWidth : half;
      const T* const from = x + head * call.head_stride + place;
      T* const to = y + head * call.size + place;
      const Lanes read[2] = {*reinterpret_cast<const Lanes*>(from), *reinterpret_cast<const Lanes*>(from + apart)};
      W c[kWidth], s[kWidth], turned[2][kWidth];
      load_angles(cos + pair, c);
      load_angles(sin + pair, s);
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane) {
        const W sine = call.inverse ? -s[lane] : s[lane];
        // The two of a pair among the elements that are read: lane `lane` of both vectors, or neighbours.
        const int i = kInterleaved ? 2 * lane : lane, j = kInterleaved ? i + 1 : kWidth + lane;
        const W first = widen(read[i / kWidth].lane[i % kWidth]), second = widen(read[j / kWidth].lane[j % kWidth]);
        turned[i / kWidth][i % kWidth] = first * c[lane] - second * sine;
        turned[j / kWidth][j % kWidth] = second * c[lane] + first * sine;
      }
      store(to, narrow_lanes<T>(turned[0]));
      store(to + apart, narrow_lanes<T>(turned[1]));
    }
    for (int i = threadIdx.x; i < static_cast<int>(call.heads) * rest; i += blockDim.x) {
      const int head = i / rest, place = 2 * half + (i - head * rest) * kWidth;
      store(y + head * call.size + place, *reinterpret_cast<const Lanes*>(x + head * call.head_stride + place));
    }
  }
}

}  // namespace custom_ops

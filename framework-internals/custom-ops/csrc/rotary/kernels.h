// The interface of the kernels for a binding: rotary positions (Su et al. 2021, arXiv:2104.09864) in the half-split layout.
//
//   y_i = x_i·cos − x_{i+D/2}·sin        y_{i+D/2} = x_{i+D/2}·cos + x_i·sin        0 ≤ i < D/2, D the head size
//
// cos and sin are (tokens, D/2), contiguous, float32 for the 16-bit dtypes and in the dtype itself for float32 and float64.
// The inverse rotation has −sin; it is the derivative, too. Arithmetic is in the tables' dtype, and each result is rounded once.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace custom_ops {

struct Rotary {
  Dtype dtype;
  const void* x;  // (batch, tokens, heads, size); neighbours in a head are neighbours in memory
  const void* cos;
  const void* sin;
  void* out;  // contiguous
  int64_t batch, tokens, heads, size;
  int64_t batch_stride, token_stride, head_stride;  // of x, in elements
  bool inverse;
};

// `begin` and `end` select positions of (batch, tokens).
void rotary_cpu(const Rotary& call, int64_t begin, int64_t end);
int rotary_cuda(const Rotary& call, void* stream);  // a cudaStream_t; returns a cudaError_t

}  // namespace custom_ops

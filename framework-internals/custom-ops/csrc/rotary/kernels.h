// The interface of the kernels for a binding: rotary positions (Su et al. 2021, arXiv:2104.09864).
//
//   y_i = x_i·cos − x_j·sin        y_j = x_j·cos + x_i·sin        for the P pairs (i, i + P), or (2i, 2i + 1) if interleaved
//
// Elements from 2P on are copied. cos and sin are (tokens, P), or (batch, tokens, P), contiguous, float32 for the 16-bit dtypes and in the dtype itself for float32 and float64.
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
  bool inverse, interleaved;
  int64_t pairs;         // P, at most half of the size
  int64_t table_stride;  // from batch to batch of the tables: 0 if they have none
};

// `begin` and `end` select positions of (batch, tokens).
void rotary_cpu(const Rotary& call, int64_t begin, int64_t end);
int rotary_cuda(const Rotary& call, void* stream);  // a cudaStream_t; returns a cudaError_t

}  // namespace custom_ops

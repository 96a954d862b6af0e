// The interface of the kernels for a binding: plain structs and functions on raw pointers.
//
//   y = max(scale[c] * x + shift[c], 0)    scale = gamma / sqrt(var + eps)    shift = beta + (conv_bias - mean) * scale
//
// In evaluation, a batch-norm is such a scale and shift per channel. One in-place pass over the convolution's result
// applies the bias, the normalisation and the ReLU.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace custom_ops {

// x is (outer, channels, inner), contiguous, and is overwritten. inner is the number of pixels of an image, or 1 for
// channels-last. scale and shift are float32 (float64 for float64). NaN stays NaN.
struct ScaleShiftRelu {
  Dtype dtype;
  void* x;
  const void* scale;
  const void* shift;
  int64_t outer;
  int64_t channels;
  int64_t inner;
};

// `begin` and `end` select elements.
void scale_shift_relu_cpu(const ScaleShiftRelu& call, int64_t begin, int64_t end);
int scale_shift_relu_cuda(const ScaleShiftRelu& call, void* stream);  // a cudaStream_t; returns a cudaError_t

}  // namespace custom_ops

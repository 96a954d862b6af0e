// The interface of the kernels for a binding: plain structs and functions on raw pointers.
//
//   y = activation(gate) * up    silu(u) = u * sigmoid(u)    gelu(u) = u * Phi(u), or its tanh approximation (bias_gelu/kernels.h)
//
// All tensors are (rows, columns) with a distance from one row to the next, in elements, so that both halves of a packed (rows, 2
// columns) are read, and written, in place. Arithmetic is in float32 for the 16-bit dtypes and in the dtype itself for float32 and
// float64; each result is rounded once.
#pragma once

#include <cstdint>

#include "../../common/dtype.h"

namespace custom_ops {

enum class Activation { kSilu, kGelu, kGeluTanh };

struct Glu {
  Dtype dtype;
  Activation activation;
  const void* gate;
  const void* up;
  void* out;  // contiguous
  int64_t rows;
  int64_t columns;
  int64_t gate_row;
  int64_t up_row;
};

// dgate = grad * up * activation'(gate); dup = grad * activation(gate).
struct GluBackward {
  Dtype dtype;
  Activation activation;
  const void* grad;  // contiguous
  const void* gate;
  const void* up;
  void* dgate;
  void* dup;
  int64_t rows;
  int64_t columns;
  int64_t gate_row;
  int64_t up_row;
  int64_t result_row;  // of dgate and dup
};

// `begin` and `end` select elements of (rows, columns).
void glu_cpu(const Glu& call, int64_t begin, int64_t end);
void glu_backward_cpu(const GluBackward& call, int64_t begin, int64_t end);
int glu_cuda(const Glu& call, void* stream);  // a cudaStream_t; returns a cudaError_t
int glu_backward_cuda(const GluBackward& call, void* stream);

}  // namespace custom_ops

// The interface of the kernels for a binding: a gradient norm over many tensors, and AdamW on many tensors.
//
//   norm = √ Σ g²        over all elements of all gradients
//   g ← g · min(1, max_norm / (norm + 1e-6))
//   p ← p · (1 − lr·weight_decay)
//   m ← m + (1 − β1)·(g − m)        v ← β2·v + (1 − β2)·g²
//   p ← p − lr / (1 − β1^t) · m / (√v / √(1 − β2^t) + ε)
//
// Loshchilov and Hutter 2019, and the clipping of torch.nn.utils.clip_grad_norm_. The gradients are only read. Tensors are
// contiguous; the update is computed in the dtype of the parameters, float32 or float64. Gradients of 16 bits belong to
// copies of float32 parameters in that dtype, which the update writes too. Work is divided into chunks of kChunk elements,
// none across two tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "../common/dtype.h"

namespace custom_ops {

constexpr int64_t kChunk = 32768;

struct Gradient {
  const void* values;
  int64_t count;
  int64_t first_chunk;  // the number of chunks of all gradients before this one
  Dtype dtype;
};

struct GradientNorm {
  Dtype dtype;  // of the norm: float64 for float64 gradients, else float32
  std::vector<Gradient> gradients;  // none is empty
  int64_t chunks;
  double* sums;  // (chunks,), scratch
  void* norm;  // a scalar; the CPU kernel leaves it to the caller
};

struct Parameter {
  void* values;
  const void* gradient;
  void* mean;
  void* square;
  void* copy;  // the parameter in the dtype of the gradient; null if that is the parameter's
  const float* step;  // t, a scalar, at least 1
  int64_t count;
  int64_t first_chunk;
};

struct AdamW {
  Dtype dtype, gradient_dtype;
  std::vector<Parameter> parameters;  // none is empty
  int64_t chunks;
  const void* norm;  // a scalar of the dtype; null: no clipping
  const void* device_lr;  // a float32 scalar on the device; null: `lr`
  double lr, beta1, beta2, eps, weight_decay, max_norm;
};

// The sum of squares of each chunk, so that the norm does not depend on the number of threads.
void gradient_norm_chunks_cpu(const GradientNorm& call, int64_t begin_chunk, int64_t end_chunk);
void adamw_cpu(const AdamW& call, int64_t begin_chunk, int64_t end_chunk);

int gradient_norm_cuda(const GradientNorm& call, void* stream);  // a cudaStream_t; returns a cudaError_t
int adamw_cuda(const AdamW& call, void* stream);

}  // namespace custom_ops

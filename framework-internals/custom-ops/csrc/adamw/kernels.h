// The interface of the kernels for a binding: a gradient norm over many tensors, and AdamW on many tensors.
//
//   norm = √ Σ g²        over all elements of all gradients
//   g ← g · min(1, max_norm / (norm + 1e-6)), and −g to maximize
//   p ← copy             where there is a copy that is not p, rounded
//   p ← p · (1 − lr·weight_decay)
//   m ← β1·m + (1 − β1)·g           v ← β2·v + (1 − β2)·g²
//   w ← max(w, v)        with AMSGrad, else w = v
//   p ← p − lr / (1 − β1^t) · m / (√w / √(1 − β2^t) + ε)        copy ← p, rounded
//
// Loshchilov and Hutter 2019, Reddi et al. 2018 for the maximum, and the clipping of torch.nn.utils.clip_grad_norm_. The
// gradients are only read. Tensors are contiguous; the update is computed in the dtype of the parameters, float32 or float64.
// Beside float32, gradients may have 16 bits, and the parameters copies of 16 bits, which a model computes with. A copy that
// differs was written by somebody else since the last step, so it is newer than the parameter, which is its master.
// Work is divided into chunks of kChunk elements, none across two tensors.
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
  void* most;  // the largest second moment so far; null without AMSGrad
  void* copy;  // the parameter in 16 bits; null if there is none
  const float* step;  // t, a scalar, at least 1
  int64_t count;
  int64_t first_chunk;
};

struct AdamW {
  Dtype dtype, gradient_dtype, copy_dtype;  // the last is the first if there are no copies
  std::vector<Parameter> parameters;  // none is empty
  int64_t chunks;
  const void* norm;  // a scalar of the dtype; null: no clipping
  const void* device_lr;  // a float32 scalar on the device; null: `lr`
  double lr, beta1, beta2, eps, weight_decay, max_norm;
  bool amsgrad, maximize;
};

// The types of parameters, gradients and copies; T again for no copies.
template <typename T, typename G, typename C> struct Types {};

// Calls `run` with the types of a call, of which those of 16 bits have other names on a GPU.
template <typename Half, typename BFloat16, typename Run> auto for_types(const AdamW& call, Run run) {
  if (call.dtype == Dtype::kFloat64) return run(Types<double, double, double>{});
  const bool copies = call.copy_dtype != call.dtype;
  const bool half = (copies ? call.copy_dtype : call.gradient_dtype) == Dtype::kFloat16;
  if (call.gradient_dtype == Dtype::kFloat32) {
    if (!copies) return run(Types<float, float, float>{});
    return half ? run(Types<float, float, Half>{}) : run(Types<float, float, BFloat16>{});
  }
  if (!copies) return half ? run(Types<float, Half, float>{}) : run(Types<float, BFloat16, float>{});
  return half ? run(Types<float, Half, Half>{}) : run(Types<float, BFloat16, BFloat16>{});
}

// The sum of squares of each chunk, so that the norm does not depend on the number of threads.
void gradient_norm_chunks_cpu(const GradientNorm& call, int64_t begin_chunk, int64_t end_chunk);
void adamw_cpu(const AdamW& call, int64_t begin_chunk, int64_t end_chunk);

int gradient_norm_cuda(const GradientNorm& call, void* stream);  // a cudaStream_t; returns a cudaError_t
int adamw_cuda(const AdamW& call, void* stream);

}  // namespace custom_ops

// The interface of the kernels for a binding: plain functions on raw pointers.
#pragma once

#include <cstdint>

#include "../common/column_major.h"
#include "../common/dtype.h"

namespace custom_ops {

// out = alpha * x for `count` contiguous elements, rounded once. The 16-bit dtypes use float32, also for alpha. The CUDA kernel takes a
// matrix too that lies column by column.
struct ScaleCall {
  Dtype dtype;
  const void* x;
  double alpha;
  void* out;
  int64_t count;
  ColumnMajor order{};
};

void scale_cpu(const ScaleCall& call, int64_t begin, int64_t end);
int scale_cuda(const ScaleCall& call, void* stream);  // stream is a cudaStream_t; returns the launch's cudaError_t

}  // namespace custom_ops

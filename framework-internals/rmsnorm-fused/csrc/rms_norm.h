// RMSNorm on one machine: what the CPU kernels (rms_norm_cpu.cpp) and the CUDA kernels (rms_norm_cuda.cu) both implement,
// and what binding.cpp hands to Python. Free of torch headers, so that the CUDA file compiles in seconds and anywhere.
//
//   y  = x * rstd * weight,   rstd = 1 / sqrt(mean(x^2) + eps)                       a row of x at a time
//   dx = rstd * g - x * rstd^3 * mean(g * x),   g = dy * weight
//   dweight = sum over the rows of dy * x * rstd
//
// All arithmetic is in float (double for double tensors); each result is rounded to its own type once.
#pragma once

#include <cstdint>

namespace rms_norm {

enum class Type { float32, float64, float16, bfloat16 };

// A matrix whose columns are adjacent and whose rows lie at two strides, counted in elements: row r begins at
// data + (r / inner) * outer_stride + (r % inner) * inner_stride. One stride is the case inner = number of rows; two
// are what the heads of a fused query-key-value projection need.
struct Rows {
  const void* data;
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
};

struct Shape {
  int64_t rows;
  int64_t columns;
  Type type;         // of x, y, dy, dx
  Type weight_type;  // of weight, dweight
  int device;        // index of the GPU; unused on a CPU
  void* stream;      // cudaStream_t; unused on a CPU
};

struct Forward {
  Shape shape;
  Rows x;
  const void* weight;  // columns; null: no weight
  double eps;
  void* y;     // rows x columns, contiguous
  void* rstd;  // rows; float or double
};

struct Backward {
  Shape shape;
  Rows dy;
  Rows x;
  const void* weight;  // columns; null: no weight
  const void* rstd;    // rows, from forward()
  void* dx;            // rows x columns, contiguous
  void* dweight;       // columns; null: not wanted
  void* workspace;     // as many floats or doubles as backward_workspace() says
};

// weight_type is the accumulating type of x (float; double for double) or, with the CUDA kernels, also the type of x.
void forward(const Forward& call);
int64_t backward_workspace(const Backward& call);
void backward(const Backward& call);

}  // namespace rms_norm

// RMSNorm on one machine: what the CPU kernels and the CUDA kernels both implement, and what the bindings hand to
// PyTorch. Free of torch headers, so that the CUDA files compile in seconds and anywhere.
//
//   s  = x + residual, rounded to the type of x;  s = x where there is no residual
//   y  = s * rstd * w,   rstd = 1 / sqrt(mean(s^2) + eps),   w = weight + weight_offset               a row at a time
//   dx = rstd * g - s * rstd^3 * mean(g * s) + ds,   g = dy * w                      (dx is dresidual as well)
//   dweight = sum over the rows of dy * s * rstd
//
// All arithmetic is in float (double for double tensors); each result is rounded to its own type once. With `llama`,
// s * rstd is rounded to the type of x before the product with w, and so is g, as Hugging Face's LlamaRMSNorm does.
#pragma once

#include <cstdint>

namespace rms_norm {

enum class Type { float32, float64, float16, bfloat16 };

// The largest finite float8_e4m3fn: what |y| / scale is cut off at, and what a row's largest |y| is mapped to.
constexpr float kLargestFloat8 = 448.0f;

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
  Type type;         // of x, residual, s, y, dy, ds, dx
  Type weight_type;  // of weight, dweight: that of x or the accumulating one; on a CPU the accumulating one
  int device;        // index of the GPU; unused on a CPU
  void* stream;      // cudaStream_t; unused on a CPU
};

struct Weight {
  const void* data;  // columns; null: none, and w is 1
  double offset;     // added in the accumulating type; 1 for Gemma's zero-centred weight
};

// y as float8_e4m3fn: y / scale rounded to the nearest, ties to even, and cut off at the largest finite value.
struct Quantised {
  const float* scale;  // one; null: each row's own, its largest |y| over kLargestFloat8 (1 where that is 0, NaN beside a NaN)
  float* row_scales;   // rows; where each row's own go
};

struct Forward {
  Shape shape;
  Rows x;
  Rows residual;  // data null: none
  Weight weight;
  double eps;
  bool llama;
  void* y;                     // rows x columns, contiguous; of shape.type, or float8 with `quantised`
  void* s;                     // rows x columns, contiguous; where there is a residual
  void* rstd;                  // rows; float or double; null: not wanted
  const Quantised* quantised;  // null: y is of shape.type; not for float64
};

struct Backward {
  Shape shape;
  Rows dy;
  Rows ds;  // the gradient that reaches s from elsewhere; data null: none
  Rows s;
  Weight weight;
  const void* rstd;    // rows, from forward()
  bool llama;
  bool deterministic;  // equal inputs give an equal dweight, bit for bit
  void* dx;            // rows x columns, contiguous
  void* dweight;       // columns; null: not wanted
  void* workspace;     // as many bytes as backward_workspace() says
};

void forward(const Forward& call);
int64_t backward_workspace(const Backward& call);
void backward(const Backward& call);

}  // namespace rms_norm

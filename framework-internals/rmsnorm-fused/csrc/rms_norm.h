// The interface of the CPU and the CUDA kernels, which the bindings expose to PyTorch. It includes no torch headers, so the
// CUDA files compile in seconds and on any machine.
//
//   s  = x + residual, rounded to the type of x;  s = x without a residual
//   y  = s * rstd * w,   rstd = 1 / sqrt(mean(s^2) + eps),   w = weight + weight_offset               for each row
//   dx = rstd * g - s * rstd^3 * mean(g * s) + ds,   g = dy * w                      (dx is dresidual as well)
//   dweight = sum over the rows of dy * s * rstd
//
// and `centred`, which is layer normalisation, with c = s - mean(s):
//
//   y  = c * rstd * w + bias,   rstd = 1 / sqrt(mean(c^2) + eps)
//   dx = rstd * (g - mean(g)) - c * rstd^3 * mean(g * c) + ds
//   dweight = sum over the rows of dy * c * rstd,   dbias = sum over the rows of dy
//
// All arithmetic is in float (double for double tensors); each result is rounded to its own type once. With `llama`,
// s * rstd is rounded to the type of x before the product with w, and so is g, as Hugging Face's LlamaRMSNorm does.
#pragma once

#include <cstdint>

namespace rms_norm {

enum class Type { float32, float64, float16, bfloat16 };

// The largest finite float8_e4m3fn: |y| / scale is clamped to it, and a row's largest |y| is mapped to it.
constexpr float kLargestFloat8 = 448.0f;

// A matrix with adjacent columns and rows at two strides, counted in elements: row r starts at
// data + (r / inner) * outer_stride + (r % inner) * inner_stride. With one stride, inner is the number of rows; the heads of
// a fused query-key-value projection have two strides.
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
  Type weight_type;  // of weight, bias and their gradients: that of x or the accumulating one; on a CPU the accumulating one
  int device;        // index of the GPU; unused on a CPU
  void* stream;      // cudaStream_t; unused on a CPU
};

struct Weight {
  const void* data;  // columns; null: none, and w is 1
  double offset;     // added in the accumulating type; 1 for Gemma's zero-centred weight
};

// y as float8_e4m3fn: y / scale rounded to nearest, ties to even, and clamped to the largest finite value.
struct Quantised {
  const float* scale;  // one element; null: per row, largest abs(y) / kLargestFloat8 (1 if 0, NaN if there is a NaN)
  float* row_scales;   // rows; output of the scales per row
};

struct Forward {
  Shape shape;
  Rows x;
  Rows residual;  // data null: none
  Weight weight;
  double eps;
  bool llama;
  void* y;                     // rows x columns, contiguous; of shape.type, or float8 with `quantised`
  void* s;                     // rows x columns, contiguous; only with a residual
  void* rstd;                  // rows, or rows x (mean, rstd) if centred; float or double; null: not computed
  const Quantised* quantised;  // null: y is of shape.type; not for float64, nor centred
  bool centred = false;        // without an offset of the weight, and without `llama`
  const void* bias = nullptr;  // columns; null: none; only centred
};

struct Backward {
  Shape shape;
  Rows dy;
  Rows ds;  // the gradient that reaches s from other uses; data null: none
  Rows s;
  Weight weight;
  const void* rstd;    // rows, from forward()
  bool llama;
  bool deterministic;  // equal inputs give an equal dweight, bit for bit
  void* dx;            // rows x columns, contiguous
  void* dweight;       // columns, then those of dbias if centred; null: not computed
  void* workspace;     // backward_workspace() bytes
  bool centred = false;
};

void forward(const Forward& call);
int64_t backward_workspace(const Backward& call);
void backward(const Backward& call);

// One implementation of the three.
struct Kernels {
  void (*forward)(const Forward& call);
  int64_t (*backward_workspace)(const Backward& call);
  void (*backward)(const Backward& call);
};

}  // namespace rms_norm

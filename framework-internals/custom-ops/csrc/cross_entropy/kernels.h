// The interface of the kernels for a binding.
//
//   loss = log Σ exp(logits) − logits[target]        gradient of the logits = softmax(logits) − onehot(target)
//
// logits are (rows, columns), contiguous. Only the first `classes` columns are logits; the others are padding, whose gradient
// is zero. Arithmetic is in float32 for the 16-bit dtypes and in the dtype itself for float32 and float64.
#pragma once

#include <cstdint>

#include "../common/dtype.h"

namespace custom_ops {

struct CrossEntropy {
  Dtype dtype;
  void* logits;  // overwritten by their gradient if `gradient`, else only read
  const int64_t* targets;  // (rows,)
  void* losses;  // (rows,), float32, or float64 for float64
  int64_t rows;
  int64_t columns;
  int64_t classes;
  int64_t ignore_index;  // a row with this target has a loss and a gradient of zero
  bool gradient;
};

// A block of the classes, from `first` on. `sums` holds two numbers for each row: a reference, at least the highest logit of
// the blocks so far, and the sum of exp(logit − reference) over them; `chosen` the logit of the target, if a block had it.
struct CrossEntropyBlock {
  Dtype dtype;
  void* logits;  // (rows, columns), of which `classes` are logits
  const int64_t* targets;  // (rows,)
  void* sums;  // (rows, 2) in the dtype of the arithmetic
  void* chosen;  // (rows,), likewise; not used for the gradient
  int64_t rows;
  int64_t columns;
  int64_t classes;
  int64_t first;
  int64_t ignore_index;
  bool gradient;  // the logits become softmax − onehot by the sums of all blocks, else their sums are merged
};

// A loss with more in it. With l = softcap · tanh(logits / softcap), or the logits, and n = log Σ exp(l), a row has
//
//   loss = f0 · (n − l[target]) + share · Σ_v w_v (n − l_v) + f2 · n²
//
// where f0, f1 = share · Σ w and f2 are its `factors`: so smoothing, weights of classes and the penalty on n enter.
struct GeneralParts {
  const void* class_weight;  // (all classes,) in the dtype of the arithmetic; null: ones
  double share;  // 0 without smoothing
  double softcap;  // 0 without
  bool accuracy;  // whether the hits are wanted: 1 where the target is the first class with the highest logit, else 0
};

struct GeneralCrossEntropy {
  CrossEntropy rows;
  GeneralParts parts;
  const void* factors;  // (rows, 3)
  void* statistics;  // (rows, 2), n and the hit; 0 of an ignored row
};

// For the sums, `sums` is (rows, 5): reference, sum of exp(l − reference), Σ w·l, the highest logit and the hit. For the gradient it
// is (rows, 3): reference, the factor of exp(l − reference), f0.
struct GeneralCrossEntropyBlock {
  CrossEntropyBlock block;
  GeneralParts parts;
};

void general_cross_entropy_cpu(const GeneralCrossEntropy& call, int64_t begin_row, int64_t end_row);
int general_cross_entropy_cuda(const GeneralCrossEntropy& call, void* stream);
void general_cross_entropy_block_cpu(const GeneralCrossEntropyBlock& call, int64_t begin_row, int64_t end_row);
int general_cross_entropy_block_cuda(const GeneralCrossEntropyBlock& call, void* stream);

void cross_entropy_block_cpu(const CrossEntropyBlock& call, int64_t begin_row, int64_t end_row);
int cross_entropy_block_cuda(const CrossEntropyBlock& call, void* stream);  // a cudaStream_t; returns a cudaError_t

// Any other target below 0 or from `classes` on gives NaN, in the loss and in the gradient.
void cross_entropy_cpu(const CrossEntropy& call, int64_t begin_row, int64_t end_row);
int cross_entropy_cuda(const CrossEntropy& call, void* stream);  // a cudaStream_t; returns a cudaError_t

}  // namespace custom_ops

// Makes operands of the mma.sync kernels from a binding's tensor, or from the parts of an fp32 tensor in the workspace.
#pragma once

#include "../launch.cuh"
#include "tiles.cuh"

namespace custom_ops::flash_attention {

inline MmaOperand mma_operand(const Problem& problem, const Tensor& tensor, const Parts* parts, bool keys) {
  const int64_t heads = keys ? problem.heads_kv : problem.heads_q, seq = keys ? problem.seq_kv : problem.seq_q;
  if (parts == nullptr) {
    return {{tensor.data, nullptr}, tensor.batch_stride,     tensor.head_stride,
            tensor.seq_stride,      static_cast<int>(heads), static_cast<int>(seq)};
  }
  const int64_t width = head_width(problem.head_size);
  return {{parts->high, parts->low}, heads * seq * width,  seq * width, width,
          static_cast<int>(heads),   static_cast<int>(seq)};
}

}  // namespace custom_ops::flash_attention

// The tensor maps of an operand: of a binding's tensor, or of the parts of an fp32 tensor in the workspace.
#pragma once

#include "../launch.cuh"

namespace custom_ops::flash_attention {

inline const char* tensor_map(TensorMap& map, const Problem& problem, const Tensor& tensor, bool keys, int box_rows) {
  const int64_t sizes[4] = {problem.head_size, keys ? problem.seq_kv : problem.seq_q,
                            keys ? problem.heads_kv : problem.heads_q, problem.batch};
  const int64_t strides[4] = {1, tensor.seq_stride, tensor.head_stride, tensor.batch_stride};
  return make_tensor_map(map, tensor.data, sizes, strides, box_rows);
}

// Of scores (batch, heads, queries, keys): a bias, 1 of what has a stride of 0, or its gradient.
inline const char* score_map(TensorMap& map, const Problem& problem, void* data, const int64_t (&stride)[4], int box_queries) {
  const int64_t lengths[3] = {problem.seq_q, problem.heads_q, problem.batch};
  int64_t sizes[4] = {problem.seq_kv}, strides[4] = {1};
  for (int i = 1; i < 4; ++i) {
    const int64_t of = stride[3 - i];
    sizes[i] = of == 0 ? 1 : lengths[i - 1];
    strides[i] = of == 0 ? 8 : of;  // 16 bytes, the smallest that a map takes
  }
  return make_tensor_map(map, data, sizes, strides, stride[2] == 0 ? 1 : box_queries);
}

inline const char* tensor_maps(TensorMap (&maps)[2], const Problem& problem, const Tensor& tensor, const Parts* parts,
                               bool keys, int box_rows) {
  if (parts == nullptr) return tensor_map(maps[0], problem, tensor, keys, box_rows);
  const int64_t heads = keys ? problem.heads_kv : problem.heads_q, seq = keys ? problem.seq_kv : problem.seq_q;
  const int64_t width = head_width(problem.head_size);
  const int64_t sizes[4] = {width, seq, heads, problem.batch},
                strides[4] = {1, width, seq * width, heads * seq * width};
  FLASH_TRY(make_tensor_map(maps[0], parts->high, sizes, strides, box_rows));
  return make_tensor_map(maps[1], parts->low, sizes, strides, box_rows);
}

}  // namespace custom_ops::flash_attention

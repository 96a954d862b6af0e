// Launches the Hopper backward of fp32: the kernels for keys, then the one for queries.

#include "backward.cuh"

#include "tensor_maps.cuh"

namespace custom_ops::flash_attention {
namespace {

template <typename Shape>
const char* launch_shape(const Backward& args, const BackwardWorkspace& workspace, void* stream) {
  const Problem& problem = args.problem;
  const Tensor* tensors[4] = {&args.q, &args.k, &args.v, &args.grad_out};
  constexpr int kOfQueries[4] = {0, 3, 1, 2}, kOfKeys[4] = {1, 2, 0, 3};  // rows, then tiles
  WgmmaBackward kernel{};
  for (int i = 0; i < 4; ++i) {
    const int which = Shape::kKeys ? kOfKeys[i] : kOfQueries[i];
    FLASH_TRY(tensor_maps(kernel.operand[i], problem, *tensors[which],
                          &workspace.split.parts[which], which == 1 || which == 2,
                          i < 2 ? Shape::kRows : Shape::kTile));
    kernel.exponent[i] = workspace.split.parts[which].exponent;
  }
  const Tensor &first = Shape::kKeys ? args.dk : args.dq, &second = args.dv;
  kernel.first = first.data;
  kernel.second = second.data;
  const int64_t first_stride[3] = {first.batch_stride, first.head_stride, first.seq_stride};
  const int64_t second_stride[3] = {second.batch_stride, second.head_stride, second.seq_stride};
  for (int i = 0; i < 3; ++i) kernel.first_stride[i] = first_stride[i], kernel.second_stride[i] = second_stride[i];
  kernel.lse = workspace.statistics.lse;
  kernel.delta = workspace.statistics.delta;
  kernel.statistics_stride = workspace.statistics.stride;
  kernel.heads_rows = static_cast<int>(Shape::kKeys ? problem.heads_kv : problem.heads_q);
  kernel.heads_tiles = static_cast<int>(Shape::kKeys ? problem.heads_q : problem.heads_kv);
  kernel.seq_rows = static_cast<int>(Shape::kKeys ? problem.seq_kv : problem.seq_q);
  kernel.seq_tiles = static_cast<int>(Shape::kKeys ? problem.seq_q : problem.seq_kv);
  kernel.head_size = static_cast<int>(problem.head_size);
  kernel.scale = static_cast<float>(problem.scale);
  kernel.causal = problem.causal;
  const int64_t blocks = int64_t{kernel.seq_rows + Shape::kRows - 1} / Shape::kRows * problem.batch * kernel.heads_rows;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of rows";
  return launch(backward_wgmma<Shape>, dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kSharedBytes,
                stream, kernel);
}

}  // namespace

const char* backward_wgmma(const Backward& args, void* stream) {
  BackwardWorkspace workspace;
  FLASH_TRY(prepare_backward(args, workspace, stream));
  if (head_width(args.problem.head_size) == 64) {
    FLASH_TRY((launch_shape<WgmmaBackwardShape<64, 64, 2, 2, true, true, true>>(args, workspace, stream)));
    return launch_shape<WgmmaBackwardShape<64, 64, 2, 2, false, true, false>>(args, workspace, stream);
  }
  FLASH_TRY((launch_shape<WgmmaBackwardShape<128, 64, 2, 1, true, true, false>>(args, workspace, stream)));
  FLASH_TRY((launch_shape<WgmmaBackwardShape<128, 64, 2, 2, true, false, true>>(args, workspace, stream)));
  return launch_shape<WgmmaBackwardShape<128, 64, 2, 1, false, true, false>>(args, workspace, stream);
}

}  // namespace custom_ops::flash_attention

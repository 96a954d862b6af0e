// Launches the Hopper forward: tensor maps, the order of the blocks, one kernel per type and head width.

#include "forward.cuh"

#include <algorithm>

#include "tensor_maps.cuh"

namespace custom_ops::flash_attention {
namespace {

template <typename Shape>
const char* launch_shape(const Forward& args, const General* general, void* stream) {
  const Problem& problem = args.problem;
  WgmmaForward kernel{};
  const Tensor* tensors[3] = {&args.q, &args.k, &args.v};
  TensorMap(*maps[3])[2] = {&kernel.q, &kernel.k, &kernel.v};
  SplitWorkspace workspace{};
  if constexpr (Shape::kParts == 2) {
    Pieces pieces(args.workspace);
    workspace = take_parts(pieces, problem, 3);
    FLASH_TRY(split_tensors(problem, tensors, 3, workspace, stream));
  }
  for (int i = 0; i < 3; ++i) {
    FLASH_TRY(tensor_maps(*maps[i], problem, *tensors[i], Shape::kParts == 2 ? &workspace.parts[i] : nullptr, i != 0,
                          i == 0 ? Shape::kBlockM : Shape::kBlockN));
  }
  kernel.out = args.out.data;
  kernel.out_batch_stride = args.out.batch_stride;
  kernel.out_head_stride = args.out.head_stride;
  kernel.out_seq_stride = args.out.seq_stride;
  kernel.lse = static_cast<float*>(args.lse);
  for (int i = 0; i < 3; ++i) kernel.exponent[i] = workspace.parts[i].exponent;
  kernel.batch = static_cast<int>(problem.batch);
  kernel.heads_q = static_cast<int>(problem.heads_q);
  kernel.heads_kv = static_cast<int>(problem.heads_kv);
  kernel.seq_q = static_cast<int>(problem.seq_q);
  kernel.seq_kv = static_cast<int>(problem.seq_kv);
  kernel.head_size = static_cast<int>(problem.head_size);
  kernel.scale = static_cast<float>(problem.scale * 1.4426950408889634);
  kernel.causal = problem.causal;
  const int64_t blocks = (problem.seq_q + Shape::kBlockM - 1) / Shape::kBlockM * problem.batch * problem.heads_q;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of queries";
  const auto persistent = static_cast<unsigned>(std::min<int64_t>(blocks, device().multiprocessors));
  const dim3 grid(persistent);
  if constexpr (Shape::kGeneral) {
    kernel.general = *general;
    if constexpr (Shape::kBias) {
      FLASH_TRY(score_map(kernel.bias, problem, const_cast<void*>(general->bias), general->bias_stride, Shape::kBlockM));
    }
    return launch(forward_wgmma<Shape, true>, grid, Shape::kThreads, Shape::kSharedBytes, stream, kernel);
  } else {
    return fused_scale(kernel.scale)
               ? launch(forward_wgmma<Shape, true>, grid, Shape::kThreads, Shape::kSharedBytes, stream, kernel)
               : launch(forward_wgmma<Shape, false>, grid, Shape::kThreads, Shape::kSharedBytes, stream, kernel);
  }
}

// A block of few tiles ends before its warpgroups have fallen into step, and smaller tiles waste less of the diagonal: 1.02
// times cuDNN's speed at 1,024 and 2,048 tokens, where the tiles of longer sequences reach 0.80 and 0.89. At 4,096, 1.01 and 1.04.
constexpr int64_t kShortCausal = 2560;

template <typename T, Form kForm>
const char* launch_form(const Forward& args, const General* general, void* stream) {
  switch (head_width(args.problem.head_size)) {
    case 64: return launch_shape<WgmmaShape<T, 1, 64, 128, 2, 3, true, kForm>>(args, general, stream);
    case 128: return launch_shape<WgmmaShape<T, 1, 128, 128, 2, 2, true, kForm>>(args, general, stream);
    default: return launch_shape<WgmmaShape<T, 1, 256, 64, 2, 2, true, kForm>>(args, general, stream);
  }
}

template <typename T>
const char* launch_general(const Forward& args, const General* general, void* stream) {
  if (general->bias != nullptr) return launch_form<T, Form::kBiased>(args, general, stream);
  return general->softcap > 0.f ? launch_form<T, Form::kCapped>(args, general, stream) : launch_form<T, Form::kGeneral>(args, general, stream);
}

template <typename T>
const char* launch_width(const Forward& args, const General* general, void* stream) {
  if (general != nullptr) return launch_general<T>(args, general, stream);
  switch (head_width(args.problem.head_size)) {
    case 64:
      if (args.problem.causal && std::min(args.problem.seq_q, args.problem.seq_kv) <= kShortCausal)
        return launch_shape<WgmmaShape<T, 1, 64, 64, 4, 6, false>>(args, nullptr, stream);
      return launch_shape<WgmmaShape<T, 1, 64, 128, 3, 3>>(args, nullptr, stream);
    case 128: return launch_shape<WgmmaShape<T, 1, 128, 128, 2, 2>>(args, nullptr, stream);
    default: return launch_shape<WgmmaShape<T, 1, 256, 64, 2, 2>>(args, nullptr, stream);
  }
}

}  // namespace

const char* forward_wgmma(const Forward& args, const General* general, void* stream) {
  switch (args.problem.dtype) {
    case ScalarType::kFloat16: return launch_width<__half>(args, general, stream);
    case ScalarType::kBFloat16: return launch_width<__nv_bfloat16>(args, general, stream);
    default: break;
  }
  if (head_width(args.problem.head_size) == 64) return launch_shape<WgmmaShape<__half, 2, 64, 128, 2, 2>>(args, nullptr, stream);
  return launch_shape<WgmmaShape<__half, 2, 128, 64, 2, 2>>(args, nullptr, stream);
}

}  // namespace custom_ops::flash_attention

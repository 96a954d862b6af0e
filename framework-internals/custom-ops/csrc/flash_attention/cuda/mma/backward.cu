// Launches the mma.sync backward: the kernel for keys, then the one for queries.

#include "backward.cuh"

#include "operand.cuh"

namespace custom_ops::flash_attention {
namespace {

template <typename Shape>
const char* launch_shape(const Backward& args, const BackwardWorkspace& workspace, const General* general, void* stream) {
  const Problem& problem = args.problem;
  const Tensor* tensors[4] = {&args.q, &args.k, &args.v, &args.grad_out};
  constexpr int kQueries[4] = {0, 3, 1, 2}, kKeys[4] = {1, 2, 0, 3};  // rows, then tiles
  MmaBackward kernel{};
  for (int i = 0; i < 4; ++i) {
    const int which = Shape::kKeys ? kKeys[i] : kQueries[i];
    kernel.operand[i] =
        mma_operand(problem, *tensors[which], Shape::kParts == 2 ? &workspace.split.parts[which] : nullptr,
                    which == 1 || which == 2);
    kernel.exponent[i] = workspace.split.parts[which].exponent;
  }
  const Tensor& first = Shape::kKeys ? args.dk : args.dq;
  kernel.first = first.data;
  kernel.second = args.dv.data;
  const int64_t first_stride[3] = {first.batch_stride, first.head_stride, first.seq_stride};
  const int64_t second_stride[3] = {args.dv.batch_stride, args.dv.head_stride, args.dv.seq_stride};
  for (int i = 0; i < 3; ++i) kernel.first_stride[i] = first_stride[i], kernel.second_stride[i] = second_stride[i];
  kernel.lse = workspace.statistics.lse;
  kernel.delta = workspace.statistics.delta;
  kernel.statistics_stride = workspace.statistics.stride;
  kernel.head_size = static_cast<int>(Shape::kParts == 2 ? Shape::kD : problem.head_size);
  kernel.out_head_size = static_cast<int>(problem.head_size);
  kernel.scale = static_cast<float>(problem.scale);
  kernel.causal = problem.causal;
  if (general != nullptr) kernel.general = general[Shape::kKeys];
  const int64_t rows = Shape::kKeys ? problem.seq_kv : problem.seq_q,
                heads = Shape::kKeys ? problem.heads_kv : problem.heads_q;
  const int64_t blocks = (rows + Shape::kRows - 1) / Shape::kRows * problem.batch * heads;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of rows";
  return launch(backward_mma<Shape>, dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kSharedBytes, stream,
                kernel);
}

template <typename T, int kParts, int kD, int kTile, int kWarps, int kStages, bool kGeneral>
struct Shapes {
  template <bool kKeys, bool kFirst, bool kSecond>
  using Of = MmaBackwardShape<T, kParts, kD, kTile, kWarps, kStages, kKeys, kFirst, kSecond, kGeneral>;
};

// For the widest heads, the two sums of a block of keys do not fit in the registers together, so each has its own launch.
template <typename Shapes, bool kTogether>
const char* launch_passes(const Backward& args, const BackwardWorkspace& workspace, const General* general, void* stream) {
  if constexpr (kTogether) {
    FLASH_TRY((launch_shape<typename Shapes::template Of<true, true, true>>(args, workspace, general, stream)));
  } else {
    FLASH_TRY((launch_shape<typename Shapes::template Of<true, true, false>>(args, workspace, general, stream)));
    FLASH_TRY((launch_shape<typename Shapes::template Of<true, false, true>>(args, workspace, general, stream)));
  }
  return launch_shape<typename Shapes::template Of<false, true, false>>(args, workspace, general, stream);
}

template <typename T, int kParts, bool kGeneral>
const char* launch_width(const Backward& args, const BackwardWorkspace& workspace, const General* general, void* stream) {
  constexpr bool kSplit = kParts == 2;
  using Narrow = Shapes<T, kParts, 64, kSplit ? 32 : 64, 4, 2, kGeneral>;
  using Middle = Shapes<T, kParts, 128, kSplit ? 16 : 32, 4, 2, kGeneral>;
  using Wide = Shapes<T, kParts, 256, 16, kSplit ? 2 : 4, kSplit ? 1 : 2, kGeneral>;
  switch (head_width(args.problem.head_size)) {
    case 64: return launch_passes<Narrow, true>(args, workspace, general, stream);
    case 128: return launch_passes<Middle, true>(args, workspace, general, stream);
    default: return launch_passes<Wide, false>(args, workspace, general, stream);
  }
}

template <bool kGeneral>
const char* launch_type(const Backward& args, const BackwardWorkspace& workspace, const General* general, void* stream) {
  switch (args.problem.dtype) {
    case ScalarType::kFloat16: return launch_width<__half, 1, kGeneral>(args, workspace, general, stream);
    case ScalarType::kBFloat16: return launch_width<__nv_bfloat16, 1, kGeneral>(args, workspace, general, stream);
    default: return launch_width<__half, 2, kGeneral>(args, workspace, general, stream);
  }
}

}  // namespace

const char* backward_mma(const Backward& args, const General* general, void* stream) {
  BackwardWorkspace workspace;
  FLASH_TRY(prepare_backward(args, workspace, stream));
  return general == nullptr ? launch_type<false>(args, workspace, nullptr, stream) : launch_type<true>(args, workspace, general, stream);
}

}  // namespace custom_ops::flash_attention

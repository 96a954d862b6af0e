// Launches the one-pass backward of 16-bit types: its queries' starts, the pass, and dq from the sums.

#include <algorithm>

#include "one_pass_narrow.cuh"
#include "one_pass_wide.cuh"
#include "query_ends.cuh"
#include "tensor_maps.cuh"

namespace custom_ops::flash_attention {
namespace {

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_one_pass(const __grid_constant__ OnePassBackward args) {
#if FLASH_HOPPER
  FLASH_SHARED_MEMORY(shared);
  constexpr int kWarps = 4 * Shape::kConsumers;  // one lane of every consuming warp arrives
  const OnePassMemory<Shape> memory(shared);
  if (threadIdx.x == 0) {
    barrier_init(memory.keys_full(), 1);
    barrier_init(memory.values_full(), 1);
    barrier_init(memory.sums_full(0), kWarps);
    barrier_init(memory.sums_full(1), kWarps);
    barrier_init(memory.sums_empty(), 1);
    for (int slot = 0; slot < Shape::kSlots; ++slot) {
      barrier_init(memory.query_full(slot), 1);
      barrier_init(memory.query_empty(slot), kWarps);
      barrier_init(memory.grad_out_full(slot), 1);
      barrier_init(memory.grad_out_empty(slot), kWarps);
    }
    fence_async_proxy();
  }
  __syncthreads();
  const OnePassBlock<Shape> block(args);
  if (threadIdx.x < 128) {
    registers_release<24>();
    if (threadIdx.x == 0) load_one_pass<Shape>(args, memory, block);
    if constexpr (!Shape::kWide) {
      if (threadIdx.x == 32) add_sums<Shape>(args, memory, block, 0);
      if (threadIdx.x == 64) add_sums<Shape>(args, memory, block, 1);
    }
  } else {
    registers_acquire<240>();
    using Consumer = std::conditional_t<Shape::kWide, WideConsumer<Shape>, NarrowConsumer<Shape>>;
    Consumer consumer(args, memory, block);
    typename Consumer::Sums sums;
    OnePassStep<Shape> now(args, block);
    barrier_wait(memory.keys_full(), 0);
    barrier_wait(memory.values_full(), 0);
    for (int step = 0; step < block.steps; ++step) {
      consumer.add_tile(sums, step, now);
      now.advance(block);
    }
    if constexpr (Shape::kWide) consumer.pass_previous();
    if constexpr (Shape::kBias) bulk_wait();
    consumer.write(sums);
  }
#endif
}

struct OnePassWorkspace {
  float *sums, *lse, *negative_delta;
  int* turns;
};

OnePassWorkspace take_one_pass(Pieces& pieces, const Problem& problem, int tile) {
  const int64_t tiles = problem.batch * problem.heads_q * ((problem.seq_q + tile - 1) / tile);
  OnePassWorkspace workspace{};
  workspace.sums = pieces.take<float>(tiles * tile * head_width(problem.head_size));
  workspace.lse = pieces.take<float>(tiles * tile);
  workspace.negative_delta = pieces.take<float>(tiles * tile);
  workspace.turns = pieces.take<int>(tiles * tile / 8);
  return workspace;
}

template <typename Shape>
const char* start(const Backward& args, const OnePassWorkspace& workspace, void* stream) {
  const Problem& problem = args.problem;
  const int64_t tiles = (problem.seq_q + Shape::kTile - 1) / Shape::kTile;
  QueryStarts kernel{args.out, args.grad_out, static_cast<const float*>(args.lse), static_cast<const float*>(args.grad_lse)};
  kernel.to_lse = workspace.lse;
  kernel.to_negative_delta = workspace.negative_delta;
  kernel.sums = reinterpret_cast<float4*>(workspace.sums);
  kernel.turns = args.deterministic ? workspace.turns : nullptr;
  kernel.heads = static_cast<int>(problem.heads_q);
  kernel.seq = static_cast<int>(problem.seq_q);
  kernel.stride = static_cast<int>(tiles * Shape::kTile);
  kernel.rows = problem.batch * problem.heads_q * kernel.stride;
  kernel.head_size = static_cast<int>(problem.head_size);
  constexpr int kRows = kQueryThreads / (Shape::kD / 8);
  const int64_t blocks = (kernel.rows + kRows - 1) / kRows;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of queries";
  return launch(start_queries<typename Shape::Element, Shape::kD>, dim3(static_cast<unsigned>(blocks)), kQueryThreads, 0,
                stream, kernel);
}

template <typename Shape>
const char* pass(const Backward& args, const General* general, const OnePassWorkspace& workspace, void* stream) {
  const Problem& problem = args.problem;
  OnePassBackward kernel{};
  FLASH_TRY(tensor_map(kernel.q, problem, args.q, false, Shape::kTile));
  FLASH_TRY(tensor_map(kernel.grad_out, problem, args.grad_out, false, Shape::kTile));
  FLASH_TRY(tensor_map(kernel.k, problem, args.k, true, Shape::kKeys));
  FLASH_TRY(tensor_map(kernel.v, problem, args.v, true, Shape::kKeys));
  kernel.dk = args.dk.data;
  kernel.dv = args.dv.data;
  const int64_t dk_stride[3] = {args.dk.batch_stride, args.dk.head_stride, args.dk.seq_stride};
  const int64_t dv_stride[3] = {args.dv.batch_stride, args.dv.head_stride, args.dv.seq_stride};
  std::copy_n(dk_stride, 3, kernel.dk_stride);
  std::copy_n(dv_stride, 3, kernel.dv_stride);
  kernel.dq = workspace.sums;
  kernel.lse = workspace.lse;
  kernel.negative_delta = workspace.negative_delta;
  kernel.turns = args.deterministic ? workspace.turns : nullptr;
  kernel.batch = static_cast<int>(problem.batch);
  kernel.heads_q = static_cast<int>(problem.heads_q);
  kernel.heads_kv = static_cast<int>(problem.heads_kv);
  kernel.seq_q = static_cast<int>(problem.seq_q);
  kernel.seq_kv = static_cast<int>(problem.seq_kv);
  kernel.head_size = static_cast<int>(problem.head_size);
  kernel.scale = static_cast<float>(problem.scale);
  kernel.causal = problem.causal;
  if (general != nullptr) kernel.general = general[1];
  if constexpr (Shape::kBias) {
    const int64_t row = problem.seq_kv, head = problem.seq_q * row;
    FLASH_TRY(score_map(kernel.bias, problem, const_cast<void*>(kernel.general.bias), kernel.general.bias_stride, Shape::kTile));
    kernel.general.bias_gradient = args.bias_gradient;
    if (args.bias_gradient != nullptr) {
      FLASH_TRY(score_map(kernel.bias_gradient, problem, args.bias_gradient, {problem.heads_q * head, head, row, 1}, Shape::kTile));
    }
  }
  // What the queries of a head take in L2: Q and dO, and the sums, which are read and written.
  const int64_t head_bytes = problem.seq_q * Shape::kD * 8 * (problem.heads_q / problem.heads_kv);
  constexpr int64_t kCacheBytes = int64_t{16} << 20;
  const int64_t heads = problem.batch * problem.heads_kv;
  kernel.heads_together = static_cast<int>(std::clamp<int64_t>(kCacheBytes / head_bytes, 1, heads));
  const int64_t blocks = (problem.seq_kv + Shape::kKeys - 1) / Shape::kKeys * heads;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of keys";
  return launch(backward_one_pass<Shape>, dim3(static_cast<unsigned>(blocks)), Shape::kThreads, Shape::kSharedBytes, stream,
                kernel);
}

template <typename Shape>
const char* finish(const Backward& args, const OnePassWorkspace& workspace, void* stream) {
  const Problem& problem = args.problem;
  const int64_t tiles = (problem.seq_q + Shape::kTile - 1) / Shape::kTile, blocks = problem.batch * problem.heads_q * tiles;
  if (blocks > INT32_MAX) return "flash_attention: more than 2^31 blocks of queries";
  const QueryFinish kernel{reinterpret_cast<const float4*>(workspace.sums),
                           args.dq,
                           static_cast<int>(problem.heads_q),
                           static_cast<int>(problem.seq_q),
                           static_cast<int>(problem.head_size),
                           static_cast<int>(tiles),
                           static_cast<float>(problem.scale)};
  constexpr int kSharedBytes = Shape::kTile * (Shape::kD + 8) * 2;
  return launch(finish_queries<typename Shape::Element, Shape::kD, Shape::kTile>, dim3(static_cast<unsigned>(blocks)),
                kQueryThreads, kSharedBytes, stream, kernel);
}

template <typename Shape>
const char* launch_shape(const Backward& args, const General* general, void* stream) {
  Pieces pieces(args.workspace);
  const OnePassWorkspace workspace = take_one_pass(pieces, args.problem, Shape::kTile);
  FLASH_TRY(start<Shape>(args, workspace, stream));
  FLASH_TRY(pass<Shape>(args, general, workspace, stream));
  return finish<Shape>(args, workspace, stream);
}

template <typename T, Form kForm>
const char* launch_width(const Backward& args, const General* general, void* stream) {
  const int width = head_width(args.problem.head_size);
  if (width == 64) return launch_shape<OnePassShape<T, 64, 128, 96, kForm>>(args, general, stream);
  if constexpr (kForm != Form::kBiased) {  // whose widest heads go by mma.sync: the tiles of the bias have no place
    if (width == 256) return launch_shape<OnePassShape<T, 256, 64, 64, kForm>>(args, general, stream);
  }
  return launch_shape<OnePassShape<T, 128, 128, 64, kForm>>(args, general, stream);
}

template <typename T>
const char* launch_type(const Backward& args, const General* general, void* stream) {
  if (general == nullptr) return launch_width<T, Form::kPlain>(args, nullptr, stream);
  if (general[1].bias != nullptr) return launch_width<T, Form::kBiased>(args, general, stream);
  return general[1].softcap > 0.f ? launch_width<T, Form::kCapped>(args, general, stream)
                                  : launch_width<T, Form::kGeneral>(args, general, stream);
}

}  // namespace

int64_t one_pass_workspace_bytes(const Problem& problem) {
  int64_t most = 0;
  for (const int tile : {64, 96}) {
    Pieces pieces(nullptr);
    take_one_pass(pieces, problem, tile);
    most = std::max(most, pieces.used());
  }
  return most;
}

const char* backward_one_pass(const Backward& args, const General* general, void* stream) {
  return args.problem.dtype == ScalarType::kFloat16 ? launch_type<__half>(args, general, stream)
                                                    : launch_type<__nv_bfloat16>(args, general, stream);
}

}  // namespace custom_ops::flash_attention

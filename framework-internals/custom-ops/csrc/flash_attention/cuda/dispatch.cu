// Selects the kernel for a problem; and the launches at the start of every tensor-core kernel for fp32.

#include <algorithm>

#include "../check.h"
#include "device/find_spans.cuh"
#include "launch.cuh"
#include "row_statistics.cuh"
#include "split.cuh"

namespace custom_ops::flash_attention {
namespace {

bool aligned(const Tensor& tensor) {
  return tensor.batch_stride % 8 == 0 && tensor.head_stride % 8 == 0 && tensor.seq_stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
}

// The stride of a dimension of size one may be anything; this replaces it by one that every kernel supports.
template <typename... Tensors>
void settle_strides(int64_t batch, int64_t heads, int64_t seq, Tensors&... tensors) {
  constexpr int64_t kTaken = 8;  // 16 bytes of a 16-bit type, the smallest stride of a tensor map
  const auto settle = [](int64_t size, int64_t& stride) { stride = size == 1 ? kTaken : stride; };
  (settle(batch, tensors.batch_stride), ...);
  (settle(heads, tensors.head_stride), ...);
  (settle(seq, tensors.seq_stride), ...);
}

template <typename... Tensors>
void settle_queries(const Problem& problem, Tensors&... tensors) {
  settle_strides(problem.batch, problem.heads_q, problem.seq_q, tensors...);
}

template <typename... Tensors>
void settle_keys(const Problem& problem, Tensors&... tensors) {
  settle_strides(problem.batch, problem.heads_kv, problem.seq_kv, tensors...);
}

bool has_queries(const Problem& problem) { return problem.batch > 0 && problem.heads_q > 0 && problem.seq_q > 0; }

// Leaves out what limits nothing, so that the plain kernels serve as many calls as they can.
Problem simplified(Problem problem) {
  Features& with = problem.features;
  if (problem.causal) with.window_right = 0;
  problem.causal = false;
  if (with.cu_seqlens_q == nullptr) {
    if (with.window_left >= problem.seq_kv - 1) with.window_left = -1;  // from the last diagonal to the first key
    if (with.window_right >= problem.seq_q - 1) with.window_right = -1;  // from the first one to the last
    problem.causal = with.window_right == 0 && with.window_left < 0 && problem.seq_q == problem.seq_kv;
    if (problem.causal) with.window_right = -1;
  }
  return problem;
}

// Both of a simplified problem: whether every query sees every key; whether the plain kernels have all of it.
bool sees_all(const Problem& problem) {
  const Features& with = problem.features;
  return !problem.causal && with.window_left < 0 && with.window_right < 0 && with.cu_seqlens_q == nullptr;
}
bool is_plain(const Problem& problem) {
  const Features& with = problem.features;
  return (problem.causal || sees_all(problem)) && with.sinks == nullptr && !changes_scores(with);
}

int64_t bytes_of(ScalarType dtype) { return dtype == ScalarType::kFloat64 ? 8 : dtype == ScalarType::kFloat32 ? 4 : 2; }

// A single query's window is a shorter sequence of keys.
void shorten_window(Forward& args) {
  Problem& problem = args.problem;
  Features& with = problem.features;
  if (problem.seq_q != 1 || with.window_left < 0 || with.cu_seqlens_q != nullptr || with.bias != nullptr || with.alibi_slopes != nullptr) return;
  const int64_t bytes = bytes_of(problem.dtype);
  const int64_t skipped = problem.seq_kv - 1 - with.window_left;
  for (Tensor* tensor : {&args.k, &args.v}) tensor->data = static_cast<char*>(tensor->data) + skipped * tensor->seq_stride * bytes;
  problem.seq_kv -= skipped;
  with.window_left = -1;
}

bool is_decode(const Problem& problem) {
  const Features& with = problem.features;
  return problem.seq_q == 1 && head_width(problem.head_size) <= 128 && problem.dtype != ScalarType::kFloat64 && !is_split(problem) &&
         with.window_left < 0 && with.cu_seqlens_q == nullptr && with.bias == nullptr && with.alibi_slopes == nullptr;
}

// How many parts the keys are taken in where the queries are few, of `keys` each or more: two blocks for each multiprocessor of a
// large GPU.
int64_t parts_of_keys(const Problem& problem, int64_t blocks, int64_t keys) {
  if (problem.seq_q > 64 || blocks == 0) return 1;
  return std::max<int64_t>(1, std::min<int64_t>({264 / blocks, problem.seq_kv / keys, 32}));
}

int64_t parts_of(const Problem& problem) {
  if (!is_decode(problem)) return parts_of_keys(problem, problem.batch * problem.heads_q, 256);
  const int64_t tiles = problem.heads_kv == 0 ? 0 : (problem.heads_q / problem.heads_kv + 15) / 16;
  return parts_of_keys(problem, problem.batch * problem.heads_kv * tiles, 128);
}

int64_t parts_workspace_bytes(const Problem& problem) {
  Problem whole = problem;
  whole.features.window_left = -1;  // see shorten_window
  const int64_t parts = std::max(parts_of(problem), parts_of(whole)), rows = problem.batch * problem.heads_q * problem.seq_q;
  Pieces pieces(nullptr);
  if (parts > 1) pieces.take<float>(rows * parts * head_width(problem.head_size)), pieces.take<float2>(rows * parts);
  return pieces.used();
}

SpanWorkspace take_spans(Pieces& pieces, const Problem& problem) {
  if (is_plain(simplified(problem))) return {};
  return {pieces.take<Span>(problem.seq_q), pieces.take<Span>(problem.seq_kv), pieces.take<int>(problem.seq_q), pieces.take<int>(1)};
}

// Takes the spans from the start of a call's workspace, and fills them.
template <class Call>
const char* prepare_spans(Call& call, SpanWorkspace& spans, void* stream) {
  Pieces pieces(call.workspace);
  spans = take_spans(pieces, call.problem);
  call.problem = simplified(call.problem);
  if (spans.of_queries == nullptr) return nullptr;
  call.workspace = static_cast<char*>(call.workspace) + pieces.used();
  const FindSpans kernel{window_of(call.problem), spans.of_queries, spans.of_keys, spans.diagonals, spans.next_block};
  const int64_t blocks = (std::max(call.problem.seq_q, call.problem.seq_kv) + kSpanThreads - 1) / kSpanThreads;
  return launch(find_spans, dim3(static_cast<unsigned>(blocks)), kSpanThreads, 0, stream, kernel);
}

General general_of(const Problem& problem, const SpanWorkspace& spans, bool keys, void* bias_gradient) {
  const Features& with = problem.features;
  General general{keys ? spans.of_keys : spans.of_queries, spans.diagonals, spans.next_block};
  general.softcap = static_cast<float>(with.softcap * 1.4426950408889634);
  general.sinks = static_cast<const float*>(with.sinks);
  general.bias = with.bias;
  std::copy_n(with.bias_stride, 4, general.bias_stride);
  general.bias_gradient = bias_gradient;
  general.slopes = static_cast<const float*>(with.alibi_slopes);
  general.slopes_batch_stride = with.alibi_batch_stride;
  general.parts = 1;
  return general;
}

// Whether a tensor map of the bias exists, beside no soft cap, and backward one of its gradient.
bool copies_bias(const Problem& problem, const Backward* backward) {
  const Features& with = problem.features;
  bool fits = with.softcap == 0 && reinterpret_cast<uintptr_t>(with.bias) % 16 == 0 && with.bias_stride[3] == 1;
  for (int i = 0; i < 3; ++i) fits = fits && with.bias_stride[i] % 8 == 0;
  if (backward == nullptr) return fits;
  return fits && head_width(problem.head_size) <= 128 && (backward->bias_gradient == nullptr || problem.seq_kv % 8 == 0);
}

// Whether the wgmma kernels have a problem's features; `backward` is null for the forward pass.
bool has_features_wgmma(const Problem& problem, const Backward* backward) {
  if (is_plain(problem)) return true;
  const float scale = static_cast<float>(problem.scale * 1.4426950408889634);
  if (is_split(problem) || !fused_scale(scale) || (backward != nullptr && backward->deterministic)) return false;
  return problem.features.alibi_slopes == nullptr && (problem.features.bias == nullptr || copies_bias(problem, backward));
}

const char* resolve(const Problem& problem, const Tensor* const* tensors, int count, const Backward* backward, Algorithm& algorithm) {
  algorithm = problem.algorithm;
  const char* mma = refuse_mma(problem, tensors, count);
  const char* wgmma = refuse_wgmma(problem, tensors, count);
  if (wgmma == nullptr && !has_features_wgmma(problem, backward)) {
    wgmma = "flash_attention: the wgmma kernels take windows, packed sequences, sinks and either soft caps or aligned biases, of 16-bit "
            "types, with scales up to 11 and sums in any order; backward, biases of heads up to 128";
  }
  if (algorithm == Algorithm::kMma) return mma;
  if (algorithm == Algorithm::kWgmma) return wgmma;
  if (algorithm == Algorithm::kAuto) {
    algorithm = wgmma == nullptr ? Algorithm::kWgmma : mma == nullptr ? Algorithm::kMma : Algorithm::kNaive;
  }
  return nullptr;
}

}  // namespace

const char* refuse_mma(const Problem& problem, const Tensor* const* tensors, int count) {
  if (problem.dtype == ScalarType::kFloat64) return "flash_attention: float64 has no tensor-core kernel";
  if (problem.head_size > 256 || problem.head_size % 8 != 0) {
    return "flash_attention: the tensor-core kernels take head sizes that are multiples of 8 up to 256";
  }
  if (problem.seq_kv == 0) return "flash_attention: the tensor-core kernels need at least one key";
  const Device now = device();
  if (now.capability < 80)
    return "flash_attention: the tensor-core kernels need a GPU of compute capability 8.0 or more";
  if (is_split(problem)) return nullptr;
  for (int i = 0; i < count; ++i) {
    if (!aligned(*tensors[i])) {
      return "flash_attention: the tensor-core kernels of 16-bit types need 16-byte aligned pointers and strides";
    }
  }
  return nullptr;
}

const char* refuse_wgmma(const Problem& problem, const Tensor* const* tensors, int count) {
  FLASH_TRY(refuse_mma(problem, tensors, count));
  if (device().capability != 90) return "flash_attention: the wgmma kernels need a GPU of compute capability 9.0";
  if (is_split(problem) && problem.head_size > 128) {
    return "flash_attention: the wgmma kernels of float32 take head sizes up to 128";
  }
  if (is_split(problem)) return nullptr;
  for (int i = 0; i < count; ++i) {  // a tensor map does not allow a stride of zero
    if (tensors[i]->seq_stride == 0 || tensors[i]->head_stride == 0 || tensors[i]->batch_stride == 0) {
      return "flash_attention: the wgmma kernels of 16-bit types do not take expanded tensors";
    }
  }
  return nullptr;
}

const char* split_tensors(const Problem& problem, const Tensor* const* tensors, int count,
                          const SplitWorkspace& workspace, void* stream) {
  Split args{};
  args.head_size = static_cast<int>(problem.head_size);
  int64_t blocks = 0;
  for (int i = 0; i < count; ++i) {
    const bool keys = i == 1 || i == 2;
    const int64_t heads = keys ? problem.heads_kv : problem.heads_q, seq = keys ? problem.seq_kv : problem.seq_q;
    args.tensor[i] = {static_cast<const float*>(tensors[i]->data),
                      tensors[i]->batch_stride,
                      tensors[i]->head_stride,
                      tensors[i]->seq_stride,
                      workspace.parts[i].high,
                      workspace.parts[i].low,
                      workspace.parts[i].exponent,
                      static_cast<int>(problem.batch),
                      static_cast<int>(heads),
                      static_cast<int>(seq)};
    blocks = std::max(blocks, problem.batch * heads * ((seq + kSplitRows - 1) / kSplitRows));
  }
  if (blocks > INT32_MAX) return "flash_attention: more than 2^38 rows";
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count));
  constexpr int kSharedBytes = kSplitThreads / 32 * sizeof(float);
  switch (head_width(problem.head_size)) {
    case 64: return launch(split_rows<64>, grid, kSplitThreads, kSharedBytes, stream, args);
    case 128: return launch(split_rows<128>, grid, kSplitThreads, kSharedBytes, stream, args);
    default: return launch(split_rows<256>, grid, kSplitThreads, kSharedBytes, stream, args);
  }
}

namespace {

template <typename T>
const char* launch_statistics(const Backward& args, const RowStatistics& to, void* stream) {
  const Problem& problem = args.problem;
  const int64_t rows = problem.batch * problem.heads_q * to.stride;
  const StatisticsArgs kernel{args.out,
                              args.grad_out,
                              static_cast<const float*>(args.lse),
                              static_cast<const float*>(args.grad_lse),
                              to,
                              rows,
                              static_cast<int>(problem.heads_q),
                              static_cast<int>(problem.seq_q),
                              static_cast<int>(problem.head_size)};
  const int64_t blocks = (rows + kStatisticsThreads / 32 - 1) / (kStatisticsThreads / 32);
  if (blocks > INT32_MAX) return "flash_attention: more than 2^34 rows";
  return launch(row_statistics<T>, dim3(static_cast<unsigned>(blocks)), kStatisticsThreads, 0, stream, kernel);
}

}  // namespace

const char* prepare_backward(const Backward& args, BackwardWorkspace& workspace, void* stream) {
  Pieces pieces(args.workspace);
  workspace = {};
  if (is_split(args.problem)) {
    const Tensor* tensors[4] = {&args.q, &args.k, &args.v, &args.grad_out};
    workspace.split = take_parts(pieces, args.problem, 4);
    FLASH_TRY(split_tensors(args.problem, tensors, 4, workspace.split, stream));
  }
  workspace.statistics = take_statistics(pieces, args.problem);
  switch (args.problem.dtype) {
    case ScalarType::kFloat16: return launch_statistics<__half>(args, workspace.statistics, stream);
    case ScalarType::kBFloat16: return launch_statistics<__nv_bfloat16>(args, workspace.statistics, stream);
    default: return launch_statistics<float>(args, workspace.statistics, stream);
  }
}

int64_t forward_workspace_bytes(const Problem& problem) {
  Pieces pieces(nullptr), spans(nullptr);
  if (is_split(problem)) take_parts(pieces, problem, 3);
  take_spans(spans, problem);
  return spans.used() + std::max(pieces.used() + parts_workspace_bytes(problem), naive_workspace_bytes(problem, false));
}

int64_t backward_workspace_bytes(const Problem& problem) {
  Pieces pieces(nullptr), spans(nullptr);
  take_spans(spans, problem);
  if (is_split(problem)) take_parts(pieces, problem, 4);
  take_statistics(pieces, problem);
  const int64_t one_pass = is_split(problem) ? 0 : one_pass_workspace_bytes(problem);
  return spans.used() + std::max({pieces.used(), naive_workspace_bytes(problem, true), one_pass});
}

const char* forward_cuda(const Forward& call, void* stream) {
  FLASH_TRY(check(call.problem));
  if (!has_queries(call.problem)) return nullptr;
  Forward args = call;
  args.problem = simplified(args.problem);
  settle_keys(args.problem, args.k, args.v);
  shorten_window(args);
  settle_queries(args.problem, args.q, args.out);
  const Tensor* tensors[] = {&args.q, &args.k, &args.v, &args.out};
  const int parts = call.problem.algorithm == Algorithm::kAuto ? static_cast<int>(parts_of(args.problem)) : 1;
  if (call.problem.algorithm == Algorithm::kAuto && is_decode(args.problem) && refuse_mma(args.problem, tensors, 4) == nullptr) {
    return decode_mma(args, parts, stream);
  }
  SpanWorkspace spans;
  FLASH_TRY(prepare_spans(args, spans, stream));
  Algorithm algorithm;
  FLASH_TRY(resolve(args.problem, tensors, 4, nullptr, algorithm));
  if (algorithm == Algorithm::kNaive) return forward_naive(args, spans, stream);
  General general = general_of(args.problem, spans, false, nullptr);
  if (parts > 1) {
    general.parts = parts;
    return forward_mma(args, &general, stream);
  }
  const General* const given = is_plain(args.problem) ? nullptr : &general;
  return algorithm == Algorithm::kWgmma ? forward_wgmma(args, given, stream) : forward_mma(args, given, stream);
}

const char* backward_cuda(const Backward& call, void* stream) {
  FLASH_TRY(check(call.problem));
  Backward args = call;
  args.problem.features.sinks = nullptr;  // lse has their part
  SpanWorkspace spans;
  FLASH_TRY(prepare_spans(args, spans, stream));
  if (!has_queries(call.problem)) return backward_naive(args, spans, stream);  // zeros into dk and dv
  settle_queries(args.problem, args.q, args.out, args.grad_out, args.dq);
  settle_keys(args.problem, args.k, args.v, args.dk, args.dv);
  const Tensor* tensors[] = {&args.q, &args.k, &args.v, &args.grad_out, &args.out, &args.dq, &args.dk, &args.dv};
  Algorithm algorithm;
  FLASH_TRY(resolve(args.problem, tensors, 8, &args, algorithm));
  if (args.bias_gradient != nullptr && !(algorithm == Algorithm::kWgmma && sees_all(args.problem))) {  // else every tile is written
    const int64_t scores = args.problem.batch * args.problem.heads_q * args.problem.seq_q * args.problem.seq_kv;
    FLASH_TRY(clear(args.bias_gradient, scores * bytes_of(args.problem.dtype), stream));
  }
  if (algorithm == Algorithm::kNaive) return backward_naive(args, spans, stream);
  const General general[] = {general_of(args.problem, spans, false, args.bias_gradient), general_of(args.problem, spans, true, nullptr)};
  const General* const given = is_plain(args.problem) ? nullptr : general;
  if (algorithm == Algorithm::kMma) return backward_mma(args, given, stream);
  return is_split(args.problem) ? backward_wgmma(args, stream) : backward_one_pass(args, given, stream);
}

}  // namespace custom_ops::flash_attention

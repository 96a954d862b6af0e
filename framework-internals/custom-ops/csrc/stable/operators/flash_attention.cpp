// flash_attention and its derivative as operators.

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "../../flash_attention/flash_attention.h"
#include "../boxing.h"
#include "../cpu_tasks.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

namespace flash = custom_ops::flash_attention;

constexpr const char* kOp = "flash_attention";
using Results = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Optional = std::optional<Tensor>;

void check_like_q(const char* op, const Argument& q, const Argument& other) {
  check_device(op, q, other);
  check_dtype(op, q, other);
}

void check_dimensions(const char* op, const Argument& x) {
  if (x.tensor.dim() != 4) {
    fail(op, ": argument '", x.name, "': expected four dimensions (batch, heads, sequence, head size), got ",
         name_of_shape(x.tensor.sizes()));
  }
}

// Checks lse and its gradient, which have the dtype in which q is computed.
void check_of_rows(const char* op, const Argument& q, const Argument& x) {
  check_device(op, q, x);
  check_wide_dtype(op, q, x);
  const Sizes rows(q.tensor.sizes().data(), 3);
  if (!equal_sizes(rows, x.tensor.sizes())) {
    fail(op, ": argument '", x.name, "': expected shape ", name_of_shape(rows), ", an element for each query of 'q', got ",
         name_of_shape(x.tensor.sizes()));
  }
}

// The arguments behind the scale; flash_attention.h says what they mean.
struct More {
  int64_t left = -1, right = -1;
  double softcap = 0;
  Optional sinks, bias, slopes, cu_seqlens_q, cu_seqlens_k;
};

void check_numbers(const char* op, const Argument& q, const Argument& x, int64_t batch) {
  check_device(op, q, x);
  check_wide_dtype(op, q, x);
  const int64_t sizes[] = {batch, q.tensor.size(1)};
  const Sizes of_heads(sizes + 1, 1), of_batch(sizes, 2);
  if (!equal_sizes(x.tensor.sizes(), of_heads) && (batch < 0 || !equal_sizes(x.tensor.sizes(), of_batch))) {
    fail(op, ": argument '", x.name, "': expected shape ", name_of_shape(of_heads), batch < 0 ? "" : " or " + name_of_shape(of_batch),
         ", an element for each head of 'q', got ", name_of_shape(x.tensor.sizes()));
  }
}

void check_bias(const char* op, const Argument& q, const Tensor& k, const Argument& bias) {
  check_device(op, q, bias);
  check_dtype(op, q, bias);
  const int64_t sizes[] = {q.tensor.size(0), q.tensor.size(1), q.tensor.size(2), k.size(2)};
  bool fits = bias.tensor.dim() == 4;
  for (int64_t d = 0; d < 4 && fits; ++d) fits = bias.tensor.size(d) == sizes[d] || bias.tensor.size(d) == 1;
  if (!fits) {
    fail(op, ": argument 'attn_mask': expected shape ", name_of_shape({sizes, 4}), ", or 1 for any of these, got ", name_of_shape(bias.tensor.sizes()));
  }
}

void check_sequences(const char* op, const Argument& q, const Argument& x, int64_t total) {
  check_device(op, q, x);
  if (x.tensor.dtype() != codes.int32) fail(op, ": argument '", x.name, "': expected dtype torch.int32, got ", name_of_dtype(x.tensor.dtype()));
  if (x.tensor.dim() != 1 || x.tensor.numel() < 2 || !x.tensor.is_contiguous()) {
    fail(op, ": argument '", x.name, "': expected a contiguous vector of two elements or more, got shape ", name_of_shape(x.tensor.sizes()));
  }
  if (q.tensor.size(0) != 1) fail(op, ": argument '", x.name, "': expected a batch of one beside it, got ", q.tensor.size(0));
  if (!x.tensor.is_cpu()) return;  // on a GPU, reading them would wait for it
  const auto* const starts = static_cast<const int32_t*>(x.tensor.const_data_ptr());
  const int64_t count = x.tensor.numel();
  bool fits = starts[0] == 0 && starts[count - 1] == total;
  for (int64_t i = 1; i < count; ++i) fits = fits && starts[i] >= starts[i - 1];
  if (!fits) fail(op, ": argument '", x.name, "': expected numbers that ascend from 0 to ", total, ", the rows of all sequences");
}

flash::Features features_of(const char* op, const Tensor& q, const Tensor& k, const More& more) {
  const Argument of_q{"q", q};
  flash::Features with;
  for (const auto& [name, side] : {std::pair{"window_left", more.left}, std::pair{"window_right", more.right}}) {
    if (side < -1) fail(op, ": argument '", name, "': expected a number of keys, or -1 for no limit, got ", side);
  }
  if (!(more.softcap >= 0) || std::isinf(more.softcap)) fail(op, ": argument 'softcap': expected a finite number of 0 or more, got ", more.softcap);
  with.window_left = more.left;
  with.window_right = more.right;
  with.softcap = more.softcap;
  if (more.sinks) {
    check_numbers(op, of_q, {"sinks", *more.sinks}, -1);
    with.sinks = more.sinks->const_data_ptr();
  }
  if (more.bias) {
    check_bias(op, of_q, k, {"attn_mask", *more.bias});
    with.bias = more.bias->const_data_ptr();
    for (int64_t d = 0; d < 4; ++d) with.bias_stride[d] = more.bias->size(d) == 1 ? 0 : more.bias->stride(d);
  }
  if (more.slopes) {
    check_numbers(op, of_q, {"alibi_slopes", *more.slopes}, q.size(0));
    with.alibi_slopes = more.slopes->const_data_ptr();
    with.alibi_batch_stride = more.slopes->dim() == 2 ? q.size(1) : 0;
  }
  if (more.cu_seqlens_q.has_value() != more.cu_seqlens_k.has_value()) {
    fail(op, ": argument 'cu_seqlens_k': expected one where there is 'cu_seqlens_q', and none elsewhere");
  }
  if (more.cu_seqlens_q) {
    check_sequences(op, of_q, {"cu_seqlens_q", *more.cu_seqlens_q}, q.size(2));
    check_sequences(op, of_q, {"cu_seqlens_k", *more.cu_seqlens_k}, k.size(2));
    if (more.cu_seqlens_q->numel() != more.cu_seqlens_k->numel()) {
      fail(op, ": argument 'cu_seqlens_k': expected ", more.cu_seqlens_q->numel(), " elements like 'cu_seqlens_q', got ", more.cu_seqlens_k->numel());
    }
    with.cu_seqlens_q = static_cast<const int32_t*>(more.cu_seqlens_q->const_data_ptr());
    with.cu_seqlens_k = static_cast<const int32_t*>(more.cu_seqlens_k->const_data_ptr());
    with.sequences = more.cu_seqlens_q->numel() - 1;
  }
  return with;
}

// The kernels read vectors in order.
void settle(More& more) {
  for (Optional* vector : {&more.sinks, &more.slopes}) {
    if (*vector) **vector = in_order(std::move(**vector));
  }
}

flash::Problem problem_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                          std::optional<double> scale, const More& more) {
  const Argument of_q{"q", q}, of_k{"k", k}, of_v{"v", v};
  for (const Argument& argument : {of_q, of_k, of_v}) check_dimensions(op, argument);
  check_like_q(op, of_q, of_k);
  check_like_q(op, of_q, of_v);
  if (k.size(0) != q.size(0) || k.size(3) != q.size(3)) {
    fail(op, ": argument 'k': expected batch ", q.size(0), " and head size ", q.size(3), " like 'q', got shape ", name_of_shape(k.sizes()));
  }
  if (equal_sizes({k.sizes().data(), 3}, {v.sizes().data(), 3}) && v.size(3) != k.size(3)) {
    fail(op, ": argument 'v': expected head size ", k.size(3), " like 'k', got ", v.size(3),
         " (another size has no kernel; fill the smaller up with zeros)");
  }
  check_shape(op, of_k, of_v);
  if (q.size(3) > 256) fail(op, ": argument 'q': expected a head size of at most 256, got ", q.size(3));
  if (k.size(1) == 0 ? q.size(1) != 0 : q.size(1) % k.size(1) != 0) {
    fail(op, ": argument 'k': expected a number of heads that divides the ", q.size(1), " of 'q', got ", k.size(1));
  }
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  if (!std::isfinite(factor)) fail(op, ": argument 'scale': expected a finite number, got ", factor);
  return {static_cast<flash::ScalarType>(dtype_of(op, of_q)), q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), factor, causal,
          flash::Algorithm::kAuto, features_of(op, q, k, more)};
}

// This package and the attention kernels use the same dtypes, in the same order.
static_assert(static_cast<int>(flash::ScalarType::kFloat32) == static_cast<int>(Dtype::kFloat32));
static_assert(static_cast<int>(flash::ScalarType::kFloat64) == static_cast<int>(Dtype::kFloat64));
static_assert(static_cast<int>(flash::ScalarType::kFloat16) == static_cast<int>(Dtype::kFloat16));
static_assert(static_cast<int>(flash::ScalarType::kBFloat16) == static_cast<int>(Dtype::kBFloat16));

// A tensor in the layout that the kernels read: adjacent elements of a head, and 16-byte rows for the 16-bit types.
Tensor readable(Tensor&& x) {
  bool fits = x.stride(3) == 1 || x.size(3) == 1;
  if (x.is_cuda() && (x.dtype() == codes.float16 || x.dtype() == codes.bfloat16)) {
    if (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 != 0) return copied(x);
    for (int64_t d = 0; d < 3; ++d) fits = fits && (x.size(d) == 1 || x.stride(d) % 8 == 0);
  }
  return fits ? std::move(x) : contiguous(x);
}

// A result in the memory order of its operand: heads are adjacent in each token if they are so there, as in a view of the
// projections of a layer. The next product then reads it as a matrix, without a copy.
Tensor make_in_order_of(const Tensor& x) {
  if (x.stride(1) >= x.stride(2)) return make_like(x);
  const auto at_least_one = [&](int64_t of) { return x.size(of) > 0 ? x.size(of) : 1; };
  const int64_t width = at_least_one(3), row = at_least_one(1) * width;
  const int64_t strides[] = {at_least_one(2) * row, width, row, 1};
  return make_strided(x, x.sizes(), strides, x.numel(), x.dtype());
}

flash::Tensor view(const Tensor& x) { return {const_cast<void*>(x.const_data_ptr()), x.stride(0), x.stride(1), x.stride(2)}; }

void check_status(const char* status) {
  if (status != nullptr) fail(kOp, ": ", status);
}

struct OnCpu {
  explicit OnCpu(const Tensor&) {}
  int64_t forward_bytes(const flash::Problem& problem) const { return flash::forward_cpu_workspace_bytes(problem); }
  int64_t backward_bytes(const flash::Problem& problem) const { return flash::backward_cpu_workspace_bytes(problem); }
  void forward(const flash::Forward& call) const { check_status(share_steps(flash::forward_cpu_steps(call.problem), call)); }
  void backward(const flash::Backward& call) const { check_status(share_steps(flash::backward_cpu_steps(call.problem), call)); }
};

#ifdef CUSTOM_OPS_CUDA
struct OnGpu {
  explicit OnGpu(const Tensor& q) : on(q) {}
  int64_t forward_bytes(const flash::Problem& problem) const { return flash::forward_workspace_bytes(problem); }
  int64_t backward_bytes(const flash::Problem& problem) const { return flash::backward_workspace_bytes(problem); }
  void forward(const flash::Forward& call) const { check_status(flash::forward_cuda(call, on.stream())); }
  void backward(const flash::Backward& call) const { check_status(flash::backward_cuda(call, on.stream())); }
  const OnDevice on;
};
#endif

// torch's allocators align to 64 bytes on the CPU and 512 on a GPU.
void* data_of(const Tensor& workspace) { return workspace.numel() == 0 ? nullptr : workspace.mutable_data_ptr(); }

// An element for each score, or nothing if there is no gradient to write. The CPU's kernels write only those that a query sees.
Tensor make_bias_gradient(const Tensor& q, const Tensor& k, bool needed) {
  const int64_t sizes[] = {q.size(0), q.size(1), q.size(2), k.size(2)}, none = 0;
  if (!needed) return make(q, {&none, 1}, q.dtype());
  Tensor dbias = make(q, {sizes, 4}, q.dtype());
  if (!dbias.is_cuda() || q.numel() == 0) TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(dbias.get()));
  return dbias;
}

template <class Device>
Results run_forward(Tensor q_any, Tensor k_any, Tensor v_any, bool causal, std::optional<double> scale, int64_t algorithm, More more = {}) {
  settle(more);
  flash::Problem problem = problem_of(kOp, q_any, k_any, v_any, causal, scale, more);
  if (algorithm < 0 || algorithm > 3) fail(kOp, ": argument 'algorithm': expected 0 to 3, got ", algorithm);
  problem.algorithm = static_cast<flash::Algorithm>(algorithm);
  const Device device(q_any);
  Tensor out = make_in_order_of(q_any);
  const Tensor q = readable(std::move(q_any)), k = readable(std::move(k_any)), v = readable(std::move(v_any));
  Tensor lse = make(q, {q.sizes().data(), 3}, wide(q.dtype()));
  if (lse.numel() == 0) return {std::move(out), std::move(lse)};
  const Tensor workspace = make_bytes(q, device.forward_bytes(problem));
  device.forward({problem, view(q), view(k), view(v), view(out), lse.mutable_data_ptr(), data_of(workspace)});
  return {std::move(out), std::move(lse)};
}

template <class Device>
Gradients run_backward(Tensor grad_any, std::optional<Tensor> grad_lse_any, Tensor q_any, Tensor k_any, Tensor v_any, Tensor out_any,
                       Tensor lse_any, bool causal, std::optional<double> scale, bool deterministic, int64_t left, int64_t right,
                       double softcap, Optional bias, Optional slopes, Optional cu_seqlens_q, Optional cu_seqlens_k, bool bias_gradient) {
  const char* op = "flash_attention_backward";
  More more{left, right, softcap, std::nullopt, std::move(bias), std::move(slopes), std::move(cu_seqlens_q), std::move(cu_seqlens_k)};
  settle(more);
  const flash::Problem problem = problem_of(op, q_any, k_any, v_any, causal, scale, more);
  const Argument of_q{"q", q_any};
  for (const Argument& argument : {Argument{"grad_out", grad_any}, Argument{"out", out_any}}) {
    check_like_q(op, of_q, argument);
    check_shape(op, of_q, argument);
  }
  check_of_rows(op, of_q, {"lse", lse_any});
  if (grad_lse_any) check_of_rows(op, of_q, {"grad_lse", *grad_lse_any});
  const Device device(q_any);
  Tensor dq = make_in_order_of(q_any), dk = make_in_order_of(k_any), dv = make_in_order_of(v_any);
  const Tensor q = readable(std::move(q_any)), k = readable(std::move(k_any)), v = readable(std::move(v_any));
  const Tensor out = readable(std::move(out_any)), grad = readable(std::move(grad_any)), lse = in_order(std::move(lse_any));
  const std::optional<Tensor> grad_lse = grad_lse_any ? std::optional<Tensor>(in_order(*std::move(grad_lse_any))) : std::nullopt;
  Tensor dbias = make_bias_gradient(q, k, bias_gradient && more.bias);
  if (q.numel() == 0 && k.numel() == 0) return {std::move(dq), std::move(dk), std::move(dv), std::move(dbias)};
  const Tensor workspace = make_bytes(q, device.backward_bytes(problem));
  device.backward({problem, view(q), view(k), view(v), view(out), view(grad), lse.const_data_ptr(),
                   grad_lse ? grad_lse->const_data_ptr() : nullptr, view(dq), view(dk), view(dv), data_of(workspace), deterministic,
                   dbias.numel() == 0 ? nullptr : dbias.mutable_data_ptr()});
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dbias)};
}

// The operators of a device: one plain function each, as `boxed` requires.
template <class Device> struct Operators {
  static Results forward(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> scale, int64_t left, int64_t right, double softcap,
                         Optional sinks, Optional bias, Optional slopes, Optional cu_seqlens_q, Optional cu_seqlens_k) {
    More more{left, right, softcap, std::move(sinks), std::move(bias), std::move(slopes), std::move(cu_seqlens_q), std::move(cu_seqlens_k)};
    return run_forward<Device>(std::move(q), std::move(k), std::move(v), causal, scale, 0, std::move(more));
  }
  static Results forward_by(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> scale, int64_t algorithm) {
    return run_forward<Device>(std::move(q), std::move(k), std::move(v), causal, scale, algorithm);
  }
  static void add_to(Library& library) {
    library.impl("flash_attention", boxed<&forward>);
    library.impl("flash_attention.algorithm", boxed<&forward_by>);
    library.impl("flash_attention_backward", boxed<&run_backward<Device>>);
  }
};

}  // namespace

void implement_flash_attention_cpu(Library& library) { Operators<OnCpu>::add_to(library); }

#ifdef CUSTOM_OPS_CUDA
void implement_flash_attention_cuda(Library& library) { Operators<OnGpu>::add_to(library); }
#endif

}  // namespace custom_ops::stable

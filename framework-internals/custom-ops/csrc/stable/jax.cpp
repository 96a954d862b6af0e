// The same kernels for JAX, as handlers of XLA's foreign function interface, whose C structs are stable like torch's.
//
// Under vmap, every operand gets leading batch dimensions (broadcast_all in jax_operators.py), so a bias may be
// (batch..., columns). A handler runs its kernel once per batch element; outside of vmap there is one.

#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "../bias_gelu/kernels.h"
#include "../conv_bn_relu/kernels.h"
#include "../flash_attention/flash_attention.h"
#include "cpu_tasks.h"
#include "../scale/kernels.h"
#include "../vector_add/kernels.h"
#include "tensors.h"

namespace custom_ops::jax {
namespace {

namespace ffi = xla::ffi;
namespace flash = custom_ops::flash_attention;
using ffi::AnyBuffer;
using Result = ffi::Result<AnyBuffer>;
using torch::stable::parallel_for;

constexpr int64_t kGrain = custom_ops::stable::kGrain;

// Runs a handler's work and converts its exceptions, which must not reach XLA.
template <typename Work> ffi::Error guarded(Work work) {
  try {
    work();
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, error.what());
  }
}

Dtype dtype_of(const AnyBuffer& x) {
  switch (x.element_type()) {
    case ffi::F32: return Dtype::kFloat32;
    case ffi::F64: return Dtype::kFloat64;
    case ffi::F16: return Dtype::kFloat16;
    case ffi::BF16: return Dtype::kBFloat16;
    default: custom_ops::stable::fail("expected float32, float64, float16 or bfloat16");
  }
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2; }
int64_t wide_size(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : 4; }

char* at(void* data, int64_t bytes) { return static_cast<char*>(data) + bytes; }

// Where a handler runs: on a CPU in torch's threads, or on a CUDA stream.
struct Cpu {
  void add(const Operands& call) const {
    parallel_for(0, call.count, kGrain, [&](int64_t begin, int64_t end) { add_cpu(call, begin, end); });
  }
  void scale(const ScaleCall& call) const {
    parallel_for(0, call.count, kGrain, [&](int64_t begin, int64_t end) { scale_cpu(call, begin, end); });
  }
  void bias_gelu(const BiasGelu& call) const {
    parallel_for(0, call.rows * call.columns, kGrain / 4, [&](int64_t begin, int64_t end) { bias_gelu_cpu(call, begin, end); });
  }
  void bias_gelu_backward(BiasGeluBackward call) const {
    std::vector<char> workspace(static_cast<size_t>(bias_gelu_backward_workspace_cpu(call)));
    call.workspace = workspace.data();
    parallel_for(0, bias_gelu_backward_groups(call.rows), 1,
                 [&](int64_t begin, int64_t end) { bias_gelu_backward_rows_cpu(call, begin, end); });
    parallel_for(0, bias_gelu_backward_blocks(call.columns), kGrain / 64 / kColumnBlock,
                 [&](int64_t begin, int64_t end) { bias_gelu_backward_columns_cpu(call, begin, end); });
  }
  void scale_shift_relu(const ScaleShiftRelu& call, const void* from, int64_t bytes) const {
    std::copy_n(static_cast<const char*>(from), bytes, static_cast<char*>(call.x));
    parallel_for(0, call.outer * call.channels * call.inner, kGrain,
                 [&](int64_t begin, int64_t end) { scale_shift_relu_cpu(call, begin, end); });
  }
  void attention(flash::Forward call) const {
    std::vector<char> workspace(static_cast<size_t>(flash::forward_cpu_workspace_bytes(call.problem)));
    call.workspace = workspace.data();
    check(stable::share_steps(flash::forward_cpu_steps(call.problem), call));
  }
  void attention_backward(flash::Backward call) const {
    std::vector<char> workspace(static_cast<size_t>(flash::backward_cpu_workspace_bytes(call.problem)));
    call.workspace = workspace.data();
    check(stable::share_steps(flash::backward_cpu_steps(call.problem), call));
  }
  static void check(const char* status) {
    if (status != nullptr) custom_ops::stable::fail("flash_attention: ", status);
  }
};

#ifdef CUSTOM_OPS_CUDA
}  // namespace
}  // namespace custom_ops::jax

typedef struct CUstream_st* cudaStream_t;

namespace custom_ops::jax {
namespace {

struct Gpu {
  cudaStream_t stream;
  ffi::ScratchAllocator* scratch;

  void add(const Operands& call) const { stable::check_launch("vector_add", add_cuda(call, stream)); }
  void scale(const ScaleCall& call) const { stable::check_launch("scale", scale_cuda(call, stream)); }
  void bias_gelu(const BiasGelu& call) const { stable::check_launch("bias_gelu", bias_gelu_cuda(call, stream)); }
  void bias_gelu_backward(BiasGeluBackward call) const {
    call.workspace = workspace(bias_gelu_backward_workspace_cuda(call));
    stable::check_launch("bias_gelu_backward", bias_gelu_backward_cuda(call, stream));
  }
  void scale_shift_relu(const ScaleShiftRelu& call, const void* from, int64_t bytes) const {
    if (from != call.x) stable::copy_on_device(call.x, from, bytes, stream);
    stable::check_launch("conv_bn_relu", scale_shift_relu_cuda(call, stream));
  }
  void attention(flash::Forward call) const {
    call.workspace = workspace(flash::forward_workspace_bytes(call.problem));
    Cpu::check(flash::forward_cuda(call, stream));
  }
  void attention_backward(flash::Backward call) const {
    call.workspace = workspace(flash::backward_workspace_bytes(call.problem));
    Cpu::check(flash::backward_cuda(call, stream));
  }

 private:
  // The kernels expect what cudaMalloc gives, a multiple of 256; XLA refuses to promise more than 16.
  void* workspace(int64_t bytes) const {
    if (bytes == 0) return nullptr;
    constexpr uintptr_t asked = 16, needed = 256;
    const auto found = scratch->Allocate(static_cast<size_t>(bytes) + needed - asked, asked);
    if (!found) stable::fail("XLA gave no workspace of ", bytes, " bytes");
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(*found) + needed - 1) / needed * needed);
  }
};
#endif

// ---- each operator's work on its buffers, for both devices

int64_t product(ffi::Span<const int64_t> dimensions, size_t begin, size_t end) {
  return std::accumulate(dimensions.begin() + begin, dimensions.begin() + end, int64_t{1}, std::multiplies<int64_t>());
}

template <class On> void vector_add(const On& on, AnyBuffer a, AnyBuffer b, Result out) {
  on.add({dtype_of(a), a.untyped_data(), b.untyped_data(), out->untyped_data(), static_cast<int64_t>(a.element_count())});
}

template <class On> void scale(const On& on, AnyBuffer x, Result out, double alpha) {
  on.scale({dtype_of(x), x.untyped_data(), alpha, out->untyped_data(), static_cast<int64_t>(x.element_count())});
}

// Takes x (batch..., rows..., columns) and bias (batch..., columns).
struct Rows {
  int64_t batches, rows, columns, bytes, bias_bytes;
};

Rows rows_of(const AnyBuffer& x, const AnyBuffer& bias) {
  const int64_t columns = bias.dimensions().back(), size = size_of(dtype_of(x));
  if (columns == 0 || bias.element_count() == 0) return {0, 0, columns, 0, 0};
  const int64_t batches = static_cast<int64_t>(bias.element_count()) / columns;
  const int64_t rows = static_cast<int64_t>(x.element_count()) / columns / batches;
  return {batches, rows, columns, rows * columns * size, columns * size};
}

template <class On> void bias_gelu(const On& on, AnyBuffer x, AnyBuffer bias, Result out) {
  const Rows rows = rows_of(x, bias);
  for (int64_t i = 0; i < rows.batches; ++i) {
    on.bias_gelu({dtype_of(x), at(x.untyped_data(), i * rows.bytes), at(bias.untyped_data(), i * rows.bias_bytes),
                  at(out->untyped_data(), i * rows.bytes), rows.rows, rows.columns});
  }
}

template <class On> void bias_gelu_backward(const On& on, AnyBuffer grad, AnyBuffer x, AnyBuffer bias, Result dx, Result dbias) {
  const Rows rows = rows_of(x, bias);
  for (int64_t i = 0; i < rows.batches; ++i) {
    BiasGeluBackward call{dtype_of(x), at(grad.untyped_data(), i * rows.bytes), at(x.untyped_data(), i * rows.bytes),
                          at(bias.untyped_data(), i * rows.bias_bytes), at(dx->untyped_data(), i * rows.bytes),
                          at(dbias->untyped_data(), i * rows.bias_bytes), nullptr, rows.rows, rows.columns};
    on.bias_gelu_backward(call);
  }
}

// Takes y (batch..., images, channels, height, width), scale and shift (batch..., channels).
template <class On> void scale_shift_relu(const On& on, AnyBuffer y, AnyBuffer scale, AnyBuffer shift, Result out) {
  const auto sizes = y.dimensions();
  const size_t last = sizes.size();
  const int64_t channels = sizes[last - 3], pixels = product(sizes, last - 2, last), images = sizes[last - 4];
  const int64_t batches = product(sizes, 0, last - 4);
  const Dtype dtype = dtype_of(y);
  const int64_t bytes = images * channels * pixels * size_of(dtype), channel_bytes = channels * wide_size(dtype);
  for (int64_t i = 0; i < batches; ++i) {
    on.scale_shift_relu({dtype, at(out->untyped_data(), i * bytes), at(scale.untyped_data(), i * channel_bytes),
                         at(shift.untyped_data(), i * channel_bytes), images, channels, pixels},
                        at(y.untyped_data(), i * bytes), bytes);
  }
}

flash::Tensor heads(const AnyBuffer& x) {
  const auto sizes = x.dimensions();
  const size_t last = sizes.size();
  const int64_t head = sizes[last - 1] * sizes[last - 2];
  return {x.untyped_data(), head * sizes[last - 3], head, sizes[last - 1]};
}

flash::Problem problem_of(const AnyBuffer& q, const AnyBuffer& k, bool causal, double scale) {
  const auto of_q = q.dimensions(), of_k = k.dimensions();
  const size_t last = of_q.size();
  return {static_cast<flash::ScalarType>(dtype_of(q)), product(of_q, 0, last - 3), of_q[last - 3], of_k[last - 3], of_q[last - 2],
          of_k[last - 2], of_q[last - 1], scale, causal};
}

template <class On>
void attention(const On& on, AnyBuffer q, AnyBuffer k, AnyBuffer v, Result out, Result lse, bool causal, double scale) {
  if (lse->element_count() == 0) return;
  on.attention({problem_of(q, k, causal, scale), heads(q), heads(k), heads(v), heads(*out), lse->untyped_data(), nullptr});
}

template <class On>
void attention_backward(const On& on, AnyBuffer grad_out, AnyBuffer grad_lse, AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer out,
                        AnyBuffer lse, Result dq, Result dk, Result dv, bool causal, double scale) {
  if (q.element_count() == 0 && k.element_count() == 0) return;
  on.attention_backward({problem_of(q, k, causal, scale), heads(q), heads(k), heads(v), heads(out), heads(grad_out), lse.untyped_data(),
                         grad_lse.untyped_data(), heads(*dq), heads(*dk), heads(*dv), nullptr});
}

// ---- the handlers: a list of each operator's bindings, used once per device

#define CUSTOM_OPS_BIND_vector_add .Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>()
#define CUSTOM_OPS_BIND_scale .Arg<AnyBuffer>().Ret<AnyBuffer>().Attr<double>("alpha")
#define CUSTOM_OPS_BIND_bias_gelu .Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>()
#define CUSTOM_OPS_BIND_bias_gelu_backward .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>()
#define CUSTOM_OPS_BIND_scale_shift_relu .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>()
#define CUSTOM_OPS_BIND_attention \
  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>().Attr<bool>("causal").Attr<double>("scale")
#define CUSTOM_OPS_BIND_attention_backward                                                                                  \
  .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()   \
      .Ret<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>().Attr<bool>("causal").Attr<double>("scale")

#define CUSTOM_OPS_HANDLERS(define)                                                            \
  define(vector_add) define(scale) define(bias_gelu) define(bias_gelu_backward) define(scale_shift_relu) \
  define(attention) define(attention_backward)

#define CUSTOM_OPS_CPU(name) \
  constexpr auto name##_on_cpu = [](auto... buffers) { return guarded([&] { name(Cpu{}, buffers...); }); };
CUSTOM_OPS_HANDLERS(CUSTOM_OPS_CPU)

#ifdef CUSTOM_OPS_CUDA
#define CUSTOM_OPS_GPU(name)                                                                                 \
  constexpr auto name##_on_gpu = [](cudaStream_t stream, ffi::ScratchAllocator scratch, auto... buffers) {   \
    return guarded([&] { name(Gpu{stream, &scratch}, buffers...); });                                        \
  };
CUSTOM_OPS_HANDLERS(CUSTOM_OPS_GPU)
#endif

}  // namespace
}  // namespace custom_ops::jax

#pragma GCC visibility push(default)
#define CUSTOM_OPS_EXPORT_CPU(name)                                                      \
  extern "C" XLA_FFI_Error* custom_ops_jax_##name##_cpu(XLA_FFI_CallFrame* frame) {      \
    using namespace custom_ops::jax;                                                     \
    static auto* handler = ffi::Ffi::Bind() CUSTOM_OPS_BIND_##name.To(name##_on_cpu).release(); \
    return handler->Call(frame);                                                         \
  }
CUSTOM_OPS_HANDLERS(CUSTOM_OPS_EXPORT_CPU)

#ifdef CUSTOM_OPS_CUDA
#define CUSTOM_OPS_EXPORT_GPU(name)                                                                        \
  extern "C" XLA_FFI_Error* custom_ops_jax_##name##_cuda(XLA_FFI_CallFrame* frame) {                       \
    using namespace custom_ops::jax;                                                                       \
    static auto* handler = ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::ScratchAllocator>() \
        CUSTOM_OPS_BIND_##name.To(name##_on_gpu).release();                                                \
    return handler->Call(frame);                                                                           \
  }
CUSTOM_OPS_HANDLERS(CUSTOM_OPS_EXPORT_GPU)
#endif
#pragma GCC visibility pop

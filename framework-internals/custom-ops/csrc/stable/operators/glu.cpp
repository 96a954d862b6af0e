// swiglu, geglu and their derivatives as operators: checks, and operands whose rows are read in place.

#include <optional>
#include <string>
#include <tuple>

#include "../../bias_gelu/glu/kernels.h"
#include "../boxing.h"
#include "../registration.h"

namespace custom_ops::stable {
namespace {

const char* forward_name(Activation activation) { return activation == Activation::kSilu ? "swiglu" : "geglu"; }
const char* backward_name(Activation activation) { return activation == Activation::kSilu ? "swiglu_backward" : "geglu_backward"; }

// A tensor as rows that lie at one distance from one another, which is `row`.
struct Rows {
  Tensor tensor;
  int64_t row;
};

Rows rows_of(Tensor tensor) {
  const int64_t last = tensor.dim() - 1, columns = tensor.size(last);
  if (tensor.is_contiguous()) return {std::move(tensor), columns};
  bool in_place = columns == 1 || tensor.stride(last) == 1;
  int64_t row = columns;
  std::optional<int64_t> next;  // the distance that the dimension before has to have, which is 0 before repeated rows
  for (int64_t of = last; in_place && of-- > 0;) {
    if (tensor.size(of) == 1) continue;
    if (!next) row = tensor.stride(of);
    else in_place = tensor.stride(of) == *next;
    next = tensor.stride(of) * tensor.size(of);
  }
  if (in_place && row >= columns) return {std::move(tensor), row};
  return {contiguous(tensor), columns};
}

// The operands: two tensors of one shape, or one whose rows hold the gate and then the other factor.
struct Operands {
  Rows gate;
  std::optional<Rows> up;
  Dtype dtype;
  int64_t rows, columns;

  const void* gate_data() const { return gate.tensor.const_data_ptr(); }
  const void* up_data() const {
    if (up) return up->tensor.const_data_ptr();
    return static_cast<const char*>(gate_data()) + columns * bytes_of(dtype);
  }
  int64_t up_row() const { return up ? up->row : gate.row; }
  static int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2; }
};

Operands operands_of(const char* op, Tensor gate, std::optional<Tensor> up) {
  const Dtype dtype = dtype_of(op, {"gate", gate});
  if (gate.dim() < 1) fail(op, ": argument 'gate': expected one dimension or more, got []");
  const int64_t last = gate.size(gate.dim() - 1), columns = up ? last : last / 2;
  if (up) {
    check_device(op, {"gate", gate}, {"up", *up});
    check_dtype(op, {"gate", gate}, {"up", *up});
    check_shape(op, {"gate", gate}, {"up", *up});
  } else if (last % 2 != 0) {
    fail(op, ": argument 'gate': expected an even last size, two halves where 'up' is None, got ", name_of_shape(gate.sizes()));
  }
  const int64_t rows = columns == 0 ? 0 : gate.numel() / last;
  std::optional<Rows> other;
  if (up) other.emplace(rows_of(std::move(*up)));
  return {rows_of(std::move(gate)), std::move(other), dtype, rows, columns};
}

// A new tensor of the shape of the gate but for its last size.
Tensor make_result(const Tensor& gate, int64_t columns) {
  std::vector<int64_t> shape(gate.sizes().begin(), gate.sizes().end());
  shape.back() = columns;
  return make(gate, {shape.data(), shape.size()}, gate.dtype());
}

struct Cpu {
  explicit Cpu(const Tensor&) {}
  void operator()(const char*, const Glu& call) const { run(call, &glu_cpu); }
  void operator()(const char*, const GluBackward& call) const { run(call, &glu_backward_cpu); }

 private:
  template <class Call> static void run(const Call& call, void (*kernel)(const Call&, int64_t, int64_t)) {
    torch::stable::parallel_for(0, call.rows * call.columns, kGrain / 4, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  }
};

#ifdef CUSTOM_OPS_CUDA
struct Gpu {
  explicit Gpu(const Tensor& tensor) : on(tensor) {}
  void operator()(const char* op, const Glu& call) const { check_launch(op, glu_cuda(call, on.stream())); }
  void operator()(const char* op, const GluBackward& call) const { check_launch(op, glu_backward_cuda(call, on.stream())); }
  const OnDevice on;
};
#endif

template <class Device> Tensor forward(Activation activation, Tensor gate, std::optional<Tensor> up) {
  const char* op = forward_name(activation);
  const Device device(gate.is_cuda() || !up ? gate : *up);
  const Operands operands = operands_of(op, std::move(gate), std::move(up));
  Tensor out = make_result(operands.gate.tensor, operands.columns);
  device(op, Glu{operands.dtype, activation, operands.gate_data(), operands.up_data(), out.mutable_data_ptr(), operands.rows, operands.columns,
                 operands.gate.row, operands.up_row()});
  return out;
}

using Gradients = std::tuple<Tensor, Tensor>;

// With one operand there is one gradient, and the second tensor is empty.
template <class Device> Gradients backward(Activation activation, Tensor grad_any, Tensor gate, std::optional<Tensor> up) {
  const char* op = backward_name(activation);
  const Device device(gate.is_cuda() ? gate : grad_any);
  const Operands operands = operands_of(op, std::move(gate), std::move(up));
  const Tensor& like = operands.gate.tensor;
  const bool packed = !operands.up;
  Tensor dgate = make_like(like), dup = packed ? make_result(like, 0) : make_like(like);
  const Tensor grad = in_order(std::move(grad_any));
  check_device(op, {"gate", like}, {"grad", grad});
  check_dtype(op, {"gate", like}, {"grad", grad});
  std::vector<int64_t> shape(like.sizes().begin(), like.sizes().end());
  shape.back() = operands.columns;
  if (!equal_sizes({shape.data(), shape.size()}, grad.sizes())) {
    fail(op, ": argument 'grad': expected shape ", name_of_shape({shape.data(), shape.size()}), ", that of the result, got ",
         name_of_shape(grad.sizes()));
  }
  char* const to = static_cast<char*>(dgate.mutable_data_ptr());
  void* const to_up = packed ? to + operands.columns * Operands::bytes_of(operands.dtype) : dup.mutable_data_ptr();
  device(op, GluBackward{operands.dtype, activation, grad.const_data_ptr(), operands.gate_data(), operands.up_data(), to, to_up, operands.rows,
                         operands.columns, operands.gate.row, operands.up_row(), packed ? 2 * operands.columns : operands.columns});
  return {std::move(dgate), std::move(dup)};
}

Activation gelu_of(bool tanh) { return tanh ? Activation::kGeluTanh : Activation::kGelu; }

template <class Device> Tensor swiglu(Tensor gate, std::optional<Tensor> up) {
  return forward<Device>(Activation::kSilu, std::move(gate), std::move(up));
}
template <class Device> Tensor geglu(Tensor gate, std::optional<Tensor> up, bool tanh) {
  return forward<Device>(gelu_of(tanh), std::move(gate), std::move(up));
}
template <class Device> Gradients swiglu_backward(Tensor grad, Tensor gate, std::optional<Tensor> up) {
  return backward<Device>(Activation::kSilu, std::move(grad), std::move(gate), std::move(up));
}
template <class Device> Gradients geglu_backward(Tensor grad, Tensor gate, std::optional<Tensor> up, bool tanh) {
  return backward<Device>(gelu_of(tanh), std::move(grad), std::move(gate), std::move(up));
}

template <class Device> void implement(Library& library) {
  library.impl("swiglu", boxed<&swiglu<Device>>);
  library.impl("swiglu_backward", boxed<&swiglu_backward<Device>>);
  library.impl("geglu", boxed<&geglu<Device>>);
  library.impl("geglu_backward", boxed<&geglu_backward<Device>>);
}

}  // namespace

void implement_glu_cpu(Library& library) { implement<Cpu>(library); }

#ifdef CUSTOM_OPS_CUDA
void implement_glu_cuda(Library& library) { implement<Gpu>(library); }
#endif

}  // namespace custom_ops::stable

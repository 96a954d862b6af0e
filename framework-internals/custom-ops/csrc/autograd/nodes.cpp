// The derivatives of vector_add, axpb, scale, bias_gelu, swiglu, geglu, rotary, mm and flash_attention as autograd nodes in C++, for one
// version of torch.
//
// The stable ABI has no nodes, and a node that torch.library registers from Python makes a call 10 us slower. Like torch's
// generated code for its own operators, these run between the dispatcher and the library's kernels. A call passes its
// arguments on as they are on the stack, boxed; this file knows nothing about the kernels.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using Arguments = c10::ArrayRef<c10::IValue>;
namespace autograd = torch::autograd;

template <class Signature> c10::TypedOperatorHandle<Signature> operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// alpha * x by the library's kernel, which is itself differentiable.
Tensor scaled(const Tensor& x, double alpha) {
  static const auto scale = operator_named<Tensor(const Tensor&, double)>("custom_ops::scale");
  return scale.call(x, alpha);
}

struct VectorAddBackward : autograd::Node {
  static constexpr size_t kTensors = 2;
  explicit VectorAddBackward(Arguments) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override { return {gradients[0], gradients[0]}; }
  std::string name() const override { return "CustomOpsVectorAddBackward"; }
};

struct AxpbBackward : autograd::Node {
  static constexpr size_t kTensors = 2;
  explicit AxpbBackward(Arguments arguments) : alpha(arguments[2].toDouble()) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {Tensor(), Tensor()};
    return {task_should_compute_output(0) ? scaled(gradient, alpha) : Tensor(), gradient};
  }
  std::string name() const override { return "CustomOpsAxpbBackward"; }

  const double alpha;
};

struct ScaleBackward : autograd::Node {
  static constexpr size_t kTensors = 1;
  explicit ScaleBackward(Arguments arguments) : alpha(arguments[1].toDouble()) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    return {gradients[0].defined() ? scaled(gradients[0], alpha) : Tensor()};
  }
  std::string name() const override { return "CustomOpsScaleBackward"; }

  const double alpha;
};

// The tensor of an argument; undefined where it is None or no tensor.
Tensor tensor_of(const c10::IValue& argument) { return argument.isTensor() ? argument.toTensor() : Tensor(); }

// A node that keeps two of its operator's arguments.
struct WithTwoSaved : autograd::Node {
  WithTwoSaved(const c10::IValue& first, const c10::IValue& second)
      : saved_first(tensor_of(first), /*is_output=*/false), saved_second(tensor_of(second), /*is_output=*/false) {}

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved_first.reset_data();
    saved_second.reset_data();
  }

  autograd::SavedVariable saved_first, saved_second;
};

struct BiasGeluBackward : WithTwoSaved {
  static constexpr size_t kTensors = 2;
  explicit BiasGeluBackward(Arguments arguments) : WithTwoSaved(arguments[0], arguments[1]) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    static const auto kernel = operator_named<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&)>("custom_ops::bias_gelu_backward");
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {Tensor(), Tensor()};
    const Tensor x = saved_first.unpack(), bias = saved_second.unpack();
    if (at::GradMode::is_enabled()) {  // create_graph=True: torch's own operators have second derivatives
      const Tensor dx = at::gelu_backward(gradient, at::add(x, bias), "tanh");
      return {dx, dx.sum_to_size_symint(bias.sym_sizes())};
    }
    auto [dx, dbias] = kernel.call(gradient, x, bias);
    return {dx, dbias};
  }
  std::string name() const override { return "CustomOpsBiasGeluBackward"; }
};

// Of swiglu and geglu. Without a second operand, the first holds both in its halves.
template <bool kSilu> struct GluBackward : WithTwoSaved {
  static constexpr size_t kTensors = 2;
  explicit GluBackward(Arguments arguments) : WithTwoSaved(arguments[0], arguments[1]), tanh(!kSilu && arguments[2].toBool()) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {Tensor(), Tensor()};
    const Tensor gate = saved_first.unpack(), up = saved_second.unpack();
    if (!at::GradMode::is_enabled()) {
      auto [dgate, dup] = kernel(gradient, gate, up);
      return {dgate, up.defined() ? dup : Tensor()};
    }
    if (up.defined()) return by_formula(gradient, gate, up);
    const std::vector<Tensor> halves = gate.chunk(2, -1);
    return {at::cat(by_formula(gradient, halves[0], halves[1]), -1), Tensor()};
  }
  std::string name() const override { return kSilu ? "CustomOpsSwigluBackward" : "CustomOpsGegluBackward"; }

  const bool tanh;

 private:
  std::tuple<Tensor, Tensor> kernel(const Tensor& gradient, const Tensor& gate, const Tensor& up) const {
    const auto other = up.defined() ? std::optional<Tensor>(up) : std::nullopt;
    if constexpr (kSilu) {
      static const auto op = operator_named<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const std::optional<Tensor>&)>("custom_ops::swiglu_backward");
      return op.call(gradient, gate, other);
    } else {
      static const auto op = operator_named<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const std::optional<Tensor>&, bool)>("custom_ops::geglu_backward");
      return op.call(gradient, gate, other, tanh);
    }
  }
  // create_graph=True: torch's own operators have second derivatives.
  autograd::variable_list by_formula(const Tensor& gradient, const Tensor& gate, const Tensor& up) const {
    const Tensor of_gate = gradient * up;
    if constexpr (kSilu) {  // at::silu_backward has no derivative
      const Tensor sigmoid = at::sigmoid(gate);
      return {of_gate * sigmoid * (1 + gate * (1 - sigmoid)), gradient * at::silu(gate)};
    }
    const char* const form = tanh ? "tanh" : "none";
    return {at::gelu_backward(of_gate, gate, form), gradient * at::gelu(gate, form)};
  }
};

struct RotaryBackward : WithTwoSaved {
  static constexpr size_t kTensors = 3;
  explicit RotaryBackward(Arguments arguments) : WithTwoSaved(arguments[1], arguments[2]), inverse(arguments[3].toBool()), interleaved(arguments[4].toBool()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!arguments[1].toTensor().requires_grad() && !arguments[2].toTensor().requires_grad(),
                                "custom_ops::rotary has no derivative for its tables");
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    static const auto kernel = operator_named<Tensor(const Tensor&, const Tensor&, const Tensor&, bool, bool)>("custom_ops::rotary");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!gradients[0].defined()) return {Tensor(), Tensor(), Tensor()};
    return {kernel.call(gradients[0], saved_first.unpack(), saved_second.unpack(), !inverse, interleaved), Tensor(), Tensor()};
  }
  std::string name() const override { return "CustomOpsRotaryBackward"; }

  const bool inverse, interleaved;
};

struct MmBackward : WithTwoSaved {
  static constexpr size_t kTensors = 3;
  explicit MmBackward(Arguments arguments) : WithTwoSaved(arguments[0], arguments[1]) {}

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& gradient = gradients[0];
    autograd::variable_list found(3);
    if (!gradient.defined()) return found;
    const Tensor a = saved_first.unpack(), b = saved_second.unpack();
    if (task_should_compute_output(0)) found[0] = product(gradient, b.t());
    // The gradient of a transposed weight lies as the weight does.
    if (task_should_compute_output(1)) found[1] = b.stride(0) == 1 ? product(gradient.t(), a).t() : product(a.t(), gradient);
    if (task_should_compute_output(2)) found[2] = gradient.sum(0);
    return found;
  }
  std::string name() const override { return "CustomOpsMmBackward"; }

 private:
  static Tensor product(const Tensor& a, const Tensor& b) {
    static const auto kernel = operator_named<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&)>("custom_ops::mm");
    return kernel.call(a, b, std::nullopt);
  }
};

// torch counts the references to a node in a std::shared_ptr; later versions count them in the node. Earlier versions need
// deleteNode for a long graph: otherwise the nodes' destructors call one another until the stack overflows.
using NodePointer = decltype(autograd::Edge::function);

template <class Pointer = NodePointer> Pointer own(autograd::Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<autograd::Node>>) return Pointer(node, [](auto* last) { deleteNode(last); });
  else return Pointer::unsafe_steal_from_new(node);
}

// One more reference to a node that has some.
template <class Pointer = NodePointer, class Node> Pointer another(Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<autograd::Node>>) return node->shared_from_this();
  else return Pointer::reclaim_copy(node);
}

// With the gradients of the sinks and of a bias.
struct FlashAttentionBackward : autograd::Node {
  static constexpr size_t kTensors = 13;  // all arguments; numbers have no gradient
  static constexpr size_t kSinks = 8, kBias = 9, kSlopes = 10;

  explicit FlashAttentionBackward(Arguments arguments) : numbers(arguments.begin(), arguments.end()) {
    TORCH_CHECK_VALUE(!tensor_of(arguments[kSlopes]).defined() || !arguments[kSlopes].toTensor().requires_grad(),
                      "flash_attention: argument 'alibi_slopes': the slopes have no gradient; use .detach()");
    for (size_t i = 0; i < kTensors; ++i) {
      if (!arguments[i].isTensor()) continue;
      saved[i] = autograd::SavedVariable(arguments[i].toTensor(), /*is_output=*/false);
      numbers[i] = c10::IValue();
    }
  }
  void save_results(Arguments results) {
    saved_out = autograd::SavedVariable(results[0].toTensor(), /*is_output=*/true);
    saved_lse = autograd::SavedVariable(results[1].toTensor(), /*is_output=*/true);
  }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    const Tensor &of_out = gradients[0], &of_lse = gradients[1];
    if (!of_out.defined() && !of_lse.defined()) return autograd::variable_list(kTensors);
    torch::jit::Stack arguments = numbers;
    Tensor out, lse;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < kTensors; ++i) {
        if (Tensor tensor = saved[i].unpack(); tensor.defined()) arguments[i] = std::move(tensor);
      }
      out = saved_out.unpack(another(this));
      lse = saved_lse.unpack(another(this));
    }
    const Tensor grad_out = of_out.defined() ? of_out : at::zeros_like(out);
    if (at::GradMode::is_enabled()) return with_graph(arguments, grad_out, of_lse);
    return by_kernel(arguments, grad_out, of_lse, out, lse);
  }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (autograd::SavedVariable& variable : saved) variable.reset_data();
    saved_out.reset_data();
    saved_lse.reset_data();
  }
  std::string name() const override { return "CustomOpsFlashAttentionBackward"; }

  torch::jit::Stack numbers;  // the arguments that are no tensors
  std::array<autograd::SavedVariable, kTensors> saved;
  autograd::SavedVariable saved_out, saved_lse;

 private:
  autograd::variable_list by_kernel(const torch::jit::Stack& of, const Tensor& grad_out, const Tensor& grad_lse, const Tensor& out, const Tensor& lse) {
    static const c10::OperatorHandle kernel = c10::Dispatcher::singleton().findSchemaOrThrow("custom_ops::flash_attention_backward", "");
    const bool biased = of[kBias].isTensor() && task_should_compute_output(kBias);
    torch::jit::Stack stack{grad_out, grad_lse.defined() ? c10::IValue(grad_lse) : c10::IValue(), of[0], of[1], of[2], out, lse, of[3], of[4],
                            at::globalContext().deterministicAlgorithms(), of[5], of[6], of[7], of[kBias], of[kSlopes], of[11], of[12], biased};
    kernel.callBoxed(stack);
    autograd::variable_list found(kTensors);
    for (size_t i = 0; i < 3; ++i) found[i] = stack[i].toTensor();
    if (biased) found[kBias] = stack[3].toTensor().sum_to_size_symint(of[kBias].toTensor().sym_sizes());
    if (of[kSinks].isTensor() && task_should_compute_output(kSinks)) found[kSinks] = of_sinks(of[kSinks].toTensor(), grad_out, grad_lse, out, lse);
    return found;
  }
  // A sink's share of the softmax, times what the scores' gradients are relative to: out·dout, less that of lse.
  static Tensor of_sinks(const Tensor& sinks, const Tensor& grad_out, const Tensor& grad_lse, const Tensor& out, const Tensor& lse) {
    const at::ScalarType wide = lse.scalar_type();
    Tensor delta = (grad_out.to(wide) * out.to(wide)).sum(-1);
    if (grad_lse.defined()) delta = delta - grad_lse;
    const Tensor share = (sinks.view({-1, 1}) - lse).exp().masked_fill(lse == -std::numeric_limits<double>::infinity(), 0);  // a sink of -inf and no key
    return -(share * delta).sum(at::IntArrayRef{0, 2});
  }
  // By Python's formula, which records a graph.
  autograd::variable_list with_graph(const torch::jit::Stack& arguments, const Tensor& grad_out, const Tensor& grad_lse) {
    const pybind11::gil_scoped_acquire interpreter;
    pybind11::tuple values(kTensors), wanted(kTensors);
    for (size_t i = 0; i < kTensors; ++i) {
      values[i] = to_python(arguments[i]);
      wanted[i] = arguments[i].isTensor() && task_should_compute_output(i);
    }
    autograd::variable_list found(kTensors);
    try {
      const auto formula = pybind11::module_::import("custom_ops.operators.flash_attention").attr("gradients_with_graph");
      const pybind11::tuple computed = formula(to_python(grad_out), to_python(grad_lse), values, wanted);
      for (size_t i = 0; i < kTensors; ++i) {
        if (!computed[i].is_none()) found[i] = THPVariable_Unpack(pybind11::object(computed[i]).ptr());
      }
    } catch (pybind11::error_already_set& error) {
      error.restore();
      python_error kept;
      kept.persist();
      throw std::move(kept);
    }
    return found;
  }
  static pybind11::object to_python(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(value.toTensor()));
    if (value.isBool()) return pybind11::bool_(value.toBool());
    if (value.isInt()) return pybind11::int_(value.toInt());
    if (value.isDouble()) return pybind11::float_(value.toDouble());
    return pybind11::none();
  }
};

// The kernel for autograd's keys: calls the operator below them, and attaches the node if a gradient is needed.
template <class Backward> void differentiable(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Arguments arguments = torch::jit::last(*stack, op.schema().arguments().size());
  bool wanted = false;
  for (const c10::IValue& argument : arguments.slice(0, Backward::kTensors)) {
    const Tensor tensor = tensor_of(argument);
    if (!tensor.defined()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(), op.schema().name(),
                                " has no forward-mode derivative; use reverse mode");
    wanted = wanted || tensor.requires_grad();
  }
  NodePointer node;
  Backward* made = nullptr;
  if (wanted && at::GradMode::is_enabled()) {
    made = new Backward(arguments);
    node = own(made);
    autograd::edge_list edges;
    for (const c10::IValue& argument : arguments.slice(0, Backward::kTensors)) {
      const Tensor tensor = tensor_of(argument);
      edges.push_back(tensor.defined() ? autograd::impl::gradient_edge(tensor) : autograd::Edge());
    }
    node->set_next_edges(std::move(edges));
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (!node) return;
  const Arguments results = torch::jit::last(*stack, op.schema().returns().size());
  for (const c10::IValue& result : results) autograd::set_history(result.toTensor(), node);
  if constexpr (requires { made->save_results(results); }) made->save_results(results);
}

// The kernel for autograd's keys of an operator without a derivative. Without it torch would drop a tangent, and only warn in
// the backward pass. Operators that are not public return results that need no gradient.
template <bool kPublic> void without_derivative(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  autograd::edge_list edges;
  const auto visit = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(), schema.name(), " has no forward-mode derivative");
    if (kPublic && tensor.requires_grad() && at::GradMode::is_enabled()) edges.push_back(autograd::impl::gradient_edge(tensor));
  };
  for (const c10::IValue& argument : torch::jit::last(*stack, schema.arguments().size())) {
    if (argument.isTensor()) visit(argument.toTensor());
    if (argument.isTensorList()) {
      for (const Tensor& tensor : argument.toTensorVector()) visit(tensor);
    }
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (edges.empty()) return;
  const NodePointer node = own(new autograd::NotImplemented(c10::toString(op.operator_name()), std::move(edges)));
  for (const c10::IValue& result : torch::jit::last(*stack, schema.returns().size())) autograd::set_history(result.toTensor(), node);
}

constexpr std::string_view kSchemas[] = {
#include "../../src/custom_ops/operators/schemas.inc"
};

template <class Backward> torch::CppFunction with() { return torch::CppFunction::makeFromBoxedFunction<&differentiable<Backward>>(); }

void implement_nodes(torch::Library& library) {
  library.impl("vector_add", with<VectorAddBackward>());
  library.impl("axpb", with<AxpbBackward>());
  library.impl("scale", with<ScaleBackward>());
  library.impl("bias_gelu", with<BiasGeluBackward>());
  library.impl("swiglu", with<GluBackward<true>>());
  library.impl("geglu", with<GluBackward<false>>());
  library.impl("rotary", with<RotaryBackward>());
  library.impl("mm", with<MmBackward>());
  library.impl("flash_attention", with<FlashAttentionBackward>());
}

template <bool kPublic> void implement_others(torch::Library& library, std::initializer_list<std::string_view> except = {}) {
  for (const std::string_view schema : kSchemas) {
    const std::string name(schema.substr(0, schema.find('(')));
    if (std::find(except.begin(), except.end(), name) != except.end()) continue;
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&without_derivative<kPublic>>());
  }
}

}  // namespace

// Python registers its derivatives at Autograd when the package is imported; a kernel for a device has precedence over them.
#define CUSTOM_OPS_AUTOGRAD(key)                                                                                     \
  TORCH_LIBRARY_IMPL(custom_ops, key, library) {                                                                     \
    implement_nodes(library);                                                                                        \
    implement_others<true>(library, {"vector_add", "axpb", "scale", "bias_gelu", "swiglu", "geglu", "rotary", "mm", "conv_bn_relu", "flash_attention"}); \
  }                                                                                                                  \
  TORCH_LIBRARY_IMPL(custom_ops_kernels, key, library) { implement_others<false>(library); }
CUSTOM_OPS_AUTOGRAD(AutogradCPU)
CUSTOM_OPS_AUTOGRAD(AutogradCUDA)

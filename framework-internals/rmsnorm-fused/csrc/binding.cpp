// The compiled extension: registers the kernels of one type of device and their derivative, and has an entry point for
// Python (pybind11) that calls the dispatcher without its argument parser. ops/operators.py defines the schemas.
//
// The derivative of the forward pass is an autograd node in C++, like those that torch generates for its own operators; with
// a node registered from Python, a call takes 10 to 20 us longer. Only small torch headers are included, because
// torch/extension.h takes four times as long to compile.
#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "operators.h"
#include "stream.h"

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
namespace autograd = torch::autograd;

#ifdef RMS_NORM_CUDA
constexpr bool kCuda = true;
#else
constexpr bool kCuda = false;
#endif

// ATen as the interface of operators.h.
struct Aten {
  using Tensor = at::Tensor;

  static rms_norm::Kernels kernels() { return {&rms_norm::forward, &rms_norm::backward_workspace, &rms_norm::backward}; }
#ifdef RMS_NORM_CUDA
  static void* stream(const Tensor& tensor) { return rms_norm::current_stream(tensor.get_device()); }
#else
  static void* stream(const Tensor&) { return nullptr; }
#endif
  static Tensor empty(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type) { return at::empty(sizes, like.options().dtype(type)); }
  static Tensor contiguous(const Tensor& tensor) { return tensor.contiguous(); }
  static Tensor converted(const Tensor& tensor, at::ScalarType type) { return tensor.to(type); }
  static Tensor fill(const Tensor& tensor, double value) { return tensor.fill_(value); }
  template <class... Message> static void check(bool holds, const Message&... message) { TORCH_CHECK_VALUE(holds, message...); }
};

using Operators = rms_norm::Operators<Aten>;
using rms_norm::Options;
constexpr auto wide = Operators::wide;

// ---- the derivative of the forward pass

template <class Signature> c10::TypedOperatorHandle<Signature> handle_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

const auto& forward_operator() {
  static const auto handle = handle_of<decltype(Operators::forward)>("rmsnorm_fused::native_forward");
  return handle;
}
const auto& forward_add_operator() {
  static const auto handle = handle_of<decltype(Operators::forward_add)>("rmsnorm_fused::native_forward_add");
  return handle;
}
const auto& backward_operator() {
  static const auto handle = handle_of<decltype(Operators::backward)>("rmsnorm_fused::native_backward");
  return handle;
}

// The gradients of x (and the residual), the weight and the bias; undefined where not needed.
struct Gradients {
  Tensor dx, dweight, dbias;
};

// The gradients as a formula in torch's operators, which is differentiable again; used with create_graph=True.
Gradients gradients_with_a_graph(const Tensor& dy, const OptionalTensor& ds, const Tensor& s, const Tensor& weight, const Options& options,
                                 bool needs_dweight, bool needs_dbias) {
  const Tensor wide_s = s.to(wide(s)), dy_ = dy.to(wide(s));
  const auto rounded = [&](const Tensor& values) { return options.llama ? values.to(s.scalar_type()).to(wide(s)) : values; };
  const auto mean = [](const Tensor& rows) { return rows.mean(at::IntArrayRef{-1}, /*keepdim=*/true); };
  const auto centred = [&](const Tensor& rows) { return options.centred ? rows.sub(mean(rows)) : rows; };
  const auto over_rows = [](const Tensor& terms) { return terms.dim() > 1 ? terms.flatten(0, -2).sum(0) : terms; };
  const Tensor s_ = centred(wide_s), rstd = mean(s_.square()).add(options.eps).rsqrt(), normalised = s_.mul(rstd);
  const Tensor g = weight.defined() ? rounded(dy_.mul(weight.to(wide(s)).add(options.offset))) : dy_;
  Tensor dx = rstd.mul(centred(g).sub(normalised.mul(mean(g.mul(normalised))))).to(s.scalar_type());
  if (ds) dx = dx.add(*ds);
  Tensor dweight = needs_dweight ? over_rows(dy_.mul(rounded(normalised))).to(weight.scalar_type()) : Tensor();
  return {dx, dweight, needs_dbias ? over_rows(dy_) : Tensor()};
}

// torch counts the references to a node in a std::shared_ptr; later versions count them in the node.
using NodePointer = decltype(autograd::Edge::function);
template <class Pointer> constexpr bool kCountsOutside = std::is_same_v<Pointer, std::shared_ptr<autograd::Node>>;

template <class Pointer = NodePointer, class Node = autograd::Node> Pointer owner_of(Node* node) {
  if constexpr (kCountsOutside<Pointer>) return node->shared_from_this();
  else return Pointer::reclaim_copy(node);
}

template <class Pointer = NodePointer> Pointer own(autograd::Node* node) {
  // deleteNode: otherwise the destructors of a long graph's nodes call one another until the stack overflows.
  if constexpr (kCountsOutside<Pointer>) return Pointer(node, [](auto* last) { deleteNode(last); });
  else return Pointer::unsafe_steal_from_new(node);
}

// Edges to x, residual, weight and bias; empty ones where a tensor is absent.
struct RmsNormFusedBackward : autograd::Node {
  RmsNormFusedBackward(const Options& options, bool has_residual) : options(options), has_residual(has_residual) {}

  autograd::variable_list apply(autograd::variable_list&& incoming) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& dy = incoming[0];
    const OptionalTensor ds = has_residual && incoming[1].defined() ? OptionalTensor(incoming[1]) : std::nullopt;
    autograd::variable_list results(4);
    if (!dy.defined()) {  // y was not used; only the sum has a gradient
      if (ds) results[0] = results[1] = *ds;
      return results;
    }
    const Tensor weight = saved_weight.unpack();
    const bool needs_dweight = weight.defined() && task_should_compute_output(2), needs_dbias = task_should_compute_output(3);
    const Tensor s = saved_s.unpack(owner_of<NodePointer, autograd::Node>(this)), kept = saved_kept.unpack();
    const Gradients gradients = at::GradMode::is_enabled() ? gradients_with_a_graph(dy, ds, s, weight, options, needs_dweight, needs_dbias)
                                                           : kernels_gradients(dy, ds, s, weight, kept, needs_dweight, needs_dbias);
    results[0] = gradients.dx;
    if (has_residual) results[1] = gradients.dx;
    if (needs_dweight) results[2] = gradients.dweight;
    if (needs_dbias) results[3] = gradients.dbias;
    return results;
  }

  Gradients kernels_gradients(const Tensor& dy, const OptionalTensor& ds, const Tensor& s, const Tensor& weight, const Tensor& kept, bool needs_dweight,
                              bool needs_dbias) const {
    const at::AutoDispatchBelowADInplaceOrView below;
    const OptionalTensor w = weight.defined() ? OptionalTensor(weight) : std::nullopt;
    const auto [dx, dresidual, dparameters] = backward_operator().call(dy, ds, s, w, kept, options.offset, options.llama, options.centred,
                                                                       needs_dweight || needs_dbias, at::globalContext().deterministicAlgorithms());
    if (!options.centred) return {dx, dparameters, Tensor()};
    return {dx, needs_dweight ? dparameters.select(0, 0) : Tensor(), needs_dbias ? dparameters.select(0, 1) : Tensor()};
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&saved_s, &saved_weight, &saved_kept}) saved->reset_data();
  }

  std::string name() const override { return options.centred ? "LayerNormFusedBackward" : "RmsNormFusedBackward"; }

  const Options options;
  const bool has_residual;
  autograd::SavedVariable saved_s, saved_weight, saved_kept;
};

bool wants_gradient(const char* name, std::initializer_list<const Tensor*> inputs) {
  bool wanted = false;
  for (const Tensor* input : inputs) {
    if (!input->defined()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(!input->_fw_grad(/*level=*/0).defined(), name,
                                " has no forward-mode derivative in its kernels; use backend=\"pytorch\"");
    wanted = wanted || input->requires_grad();
  }
  return wanted && at::GradMode::is_enabled();
}

// The node of a call, if it needs one, until its results are known.
class Recorded {
 public:
  Recorded(const Options& options, const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias) {
    if (!wants_gradient(options.centred ? "layer_norm" : "rms_norm", {&x, &residual, &weight, &bias})) return;
    node_ = new RmsNormFusedBackward(options, residual.defined());
    owner_ = own(node_);
    node_->set_next_edges(autograd::collect_next_edges(x, residual, weight, bias));
    if (!residual.defined()) node_->saved_s = autograd::SavedVariable(x, false);
    node_->saved_weight = autograd::SavedVariable(weight, false);
  }

  void results(const Tensor& y, const Tensor& s, const Tensor& kept) const {
    if (!node_) return;
    autograd::set_history(y, owner_);
    if (node_->has_residual) {
      autograd::set_history(s, owner_);
      node_->saved_s = autograd::SavedVariable(s, true);
    }
    node_->saved_kept = autograd::SavedVariable(kept, false);
  }

 private:
  RmsNormFusedBackward* node_ = nullptr;
  NodePointer owner_;
};

std::tuple<Tensor, Tensor> differentiable_forward(c10::DispatchKeySet keys, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                                  double eps, double offset, bool llama, bool centred) {
  const Recorded recorded({eps, offset, llama, centred}, x, Tensor(), weight.value_or(Tensor()), bias.value_or(Tensor()));
  auto [y, kept] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward_operator().redispatch(keys & c10::after_autograd_keyset, x, weight, bias, eps, offset, llama, centred);
  }();
  recorded.results(y, Tensor(), kept);
  return {y, kept};
}

std::tuple<Tensor, Tensor, Tensor> differentiable_forward_add(c10::DispatchKeySet keys, const Tensor& x, const Tensor& residual,
                                                              const OptionalTensor& weight, const OptionalTensor& bias, double eps, double offset,
                                                              bool llama, bool centred) {
  const Recorded recorded({eps, offset, llama, centred}, x, residual, weight.value_or(Tensor()), bias.value_or(Tensor()));
  auto [y, s, kept] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward_add_operator().redispatch(keys & c10::after_autograd_keyset, x, residual, weight, bias, eps, offset, llama, centred);
  }();
  recorded.results(y, s, kept);
  return {y, s, kept};
}

// ---- the entry for Python

// An exact tensor or parameter: a subclass may override the call (__torch_function__).
bool is_plain(const py::handle& object) { return THPVariable_CheckExact(object.ptr()); }

bool is_taken(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

// The arguments of a call, if all of them are ordinary.
class Ordinary {
 public:
  explicit Ordinary(const py::handle& x, const py::handle& eps, double default_eps) {
    if (at::impl::torch_function_mode_enabled() || !is_plain(x) || !(eps.is_none() || PyFloat_CheckExact(eps.ptr()))) return;
    this->x = THPVariable_Unpack(x.ptr());
    this->eps = eps.is_none() ? default_eps : PyFloat_AS_DOUBLE(eps.ptr());
    holds_ = this->x.is_cuda() == kCuda && (kCuda || this->x.is_cpu()) && this->x.dim() > 0 && is_taken(this->x.scalar_type()) && this->eps >= 0 &&
             std::isfinite(this->eps);
  }

  OptionalTensor residual(const py::handle& object) {
    return taken(object, [this](const Tensor& residual) { return residual.scalar_type() == x.scalar_type() && residual.sizes() == x.sizes(); });
  }
  OptionalTensor parameter(const py::handle& object) {
    return taken(object, [this](const Tensor& weight) { return is_taken(weight.scalar_type()) && weight.dim() == 1 && weight.size(0) == x.size(-1); });
  }
  void require(bool holds) { holds_ = holds_ && holds; }
  explicit operator bool() const { return holds_; }

  Tensor x;
  double eps = 0;

 private:
  template <class Fits> OptionalTensor taken(const py::handle& object, const Fits& fits) {
    if (!holds_ || object.is_none()) return std::nullopt;
    holds_ = is_plain(object);
    if (!holds_) return std::nullopt;
    const Tensor& tensor = THPVariable_Unpack(object.ptr());
    holds_ = tensor.device() == x.device() && fits(tensor);
    return tensor;
  }

  bool holds_ = false;
};

py::object normalised(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& bias,
                      const Options& options) {
  const auto& [eps, offset, llama, centred] = options;
  Tensor y, s;
  {
    const py::gil_scoped_release release;
    if (residual) std::tie(y, s, std::ignore) = forward_add_operator().call(x, *residual, weight, bias, eps, offset, llama, centred);
    else std::tie(y, std::ignore) = forward_operator().call(x, weight, bias, eps, offset, llama, centred);
  }
  if (residual) return py::make_tuple(std::move(y), std::move(s));
  return py::cast(std::move(y));
}

// Returns the result of rms_norm(x, weight, eps=, residual=, weight_offset=). If an argument is unusual, it does nothing and
// returns None; Python then handles the argument or reports the error.
py::object rms_norm_or_none(const py::handle& x_object, const py::handle& residual_object, const py::handle& weight_object, const py::handle& eps_object,
                            const py::handle& offset_object) {
  Ordinary call(x_object, eps_object, std::numeric_limits<float>::epsilon());
  call.require(PyFloat_CheckExact(offset_object.ptr()));
  const OptionalTensor weight = call.parameter(weight_object), residual = call.residual(residual_object);
  const double offset = call ? PyFloat_AS_DOUBLE(offset_object.ptr()) : 0;
  if (!call || !std::isfinite(offset)) return py::none();
  return normalised(call.x, residual, weight, std::nullopt, {call.eps, offset, false, false});
}

// The same for layer_norm(x, weight, bias, eps=, residual=).
py::object layer_norm_or_none(const py::handle& x_object, const py::handle& residual_object, const py::handle& weight_object,
                              const py::handle& bias_object, const py::handle& eps_object) {
  Ordinary call(x_object, eps_object, 1e-5);
  const OptionalTensor weight = call.parameter(weight_object), bias = call.parameter(bias_object), residual = call.residual(residual_object);
  call.require(!weight || !bias || weight->scalar_type() == bias->scalar_type());
  if (!call) return py::none();
  return normalised(call.x, residual, weight, bias, {call.eps, 0, false, true});
}

}  // namespace

#ifdef RMS_NORM_CUDA
TORCH_LIBRARY_IMPL(rmsnorm_fused, CUDA, library) {
#else
TORCH_LIBRARY_IMPL(rmsnorm_fused, CPU, library) {
#endif
  library.impl("native_forward", TORCH_FN(Operators::forward));
  library.impl("native_forward_add", TORCH_FN(Operators::forward_add));
  library.impl("native_backward", TORCH_FN(Operators::backward));
  library.impl("native_quantize", TORCH_FN(Operators::quantize));
}

#ifdef RMS_NORM_CUDA
TORCH_LIBRARY_IMPL(rmsnorm_fused, AutogradCUDA, library) {
#else
TORCH_LIBRARY_IMPL(rmsnorm_fused, AutogradCPU, library) {
#endif
  library.impl("native_forward", TORCH_FN(differentiable_forward));
  library.impl("native_forward_add", TORCH_FN(differentiable_forward_add));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("rms_norm", &rms_norm_or_none, pybind11::arg("x"), pybind11::arg("residual"), pybind11::arg("weight"), pybind11::arg("eps"),
             pybind11::arg("weight_offset"));
  module.def("layer_norm", &layer_norm_or_none, pybind11::arg("x"), pybind11::arg("residual"), pybind11::arg("weight"), pybind11::arg("bias"),
             pybind11::arg("eps"));
}

// The operators of a device: tensors of any shape and strides in the form of the kernels' arguments, and their results. Written
// once for two interfaces of torch, ATen (binding.cpp) and LibTorch's stable ABI (stable.cpp), and without a header of either.
// ops/operators.py has the schemas. Python checks arguments and words the errors; what is checked here guards the kernels' memory
// against a direct call of torch.ops.
//
// `Api` is an interface and a device:
//   Tensor                                       with dim, numel, size(s), stride(s), scalar_type, is_cuda, get_device, …
//   kernels(), stream(tensor)                    the kernels of rms_norm.h, and the GPU's current stream
//   empty(like, sizes, type)                     a contiguous tensor on the device of another
//   contiguous(tensor), converted(tensor, type), fill(tensor, value)
//   check(holds, message...)                     ends the call with an error
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include <native_build/memory.h>

#include "rms_norm.h"

namespace rms_norm {

// The scalars of a normalisation. Layer normalisation (`centred`) takes no offset, and no rounding of `llama`.
struct Options {
  double eps, offset;
  bool llama, centred;
};

template <class Api> class Operators {
  using Tensor = typename Api::Tensor;
  using OptionalTensor = std::optional<Tensor>;
  using ScalarType = torch::headeronly::ScalarType;
  using Sizes = std::vector<int64_t>;

 public:
  static std::tuple<Tensor, Tensor> forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps, double offset,
                                            bool llama, bool centred) {
    Tensor y = contiguous_like(x), kept = Api::empty(x, sizes_of_rows(x, centred ? 2 : 0), wide(x));
    if (x.numel() == 0) return {y, Api::fill(kept, 0)};
    run_forward(x, std::nullopt, weight, bias, {eps, offset, llama, centred}, y, std::nullopt, &kept, nullptr);
    return {y, kept};
  }

  static std::tuple<Tensor, Tensor, Tensor> forward_add(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                                        const OptionalTensor& bias, double eps, double offset, bool llama, bool centred) {
    Tensor y = contiguous_like(x), s = contiguous_like(x), kept = Api::empty(x, sizes_of_rows(x, centred ? 2 : 0), wide(x));
    if (x.numel() == 0) return {y, s, Api::fill(kept, 0)};
    run_forward(x, residual, weight, bias, {eps, offset, llama, centred}, y, s, &kept, nullptr);
    return {y, s, kept};
  }

  static std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                                     const OptionalTensor& scale, double eps, double offset, bool llama, ScalarType dtype) {
    Api::check(dtype == ScalarType::Float8_e4m3fn, "expected a result of torch.float8_e4m3fn");
    Api::check(!scale || (scale->numel() == 1 && scale->scalar_type() == ScalarType::Float), "expected a scale of one float32 element");
    Tensor y = Api::empty(x, sizes_of(x), dtype), s = residual ? contiguous_like(x) : nothing(x);
    Tensor row_scales = Api::empty(x, scale ? Sizes{0} : sizes_of_rows(x, 1), ScalarType::Float);
    if (x.numel() == 0) return {y, s, Api::fill(row_scales, 1)};
    const Quantised quantised{scale ? static_cast<const float*>(scale->const_data_ptr()) : nullptr,
                              scale ? nullptr : static_cast<float*>(row_scales.mutable_data_ptr())};
    run_forward(x, residual, weight, std::nullopt, {eps, offset, llama, false}, y, s, nullptr, &quantised);
    return {y, s, row_scales};
  }

  // dx, nothing for the gradient of a wider residual, which these kernels do not take, and the gradients of the parameters.
  static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, const OptionalTensor& ds, const Tensor& s, const OptionalTensor& weight,
                                                     const Tensor& kept, double offset, bool llama, bool centred, bool needs_dparameters,
                                                     bool deterministic) {
    const FittedWeight fitted(s, weight, offset);
    Api::check(weight || centred || !needs_dparameters, "expected a weight, whose gradient is asked for");
    OptionalTensor dparameters;
    if (needs_dparameters) dparameters = Api::empty(s, centred ? Sizes{2, s.size(-1)} : Sizes{s.size(-1)}, weight ? fitted.scalar_type(s) : wide(s));
    Tensor dx = run_backward(dy, ds, s, fitted, kept, {0, offset, llama, centred}, deterministic, dparameters);
    if (!needs_dparameters) return {dx, nothing(s), nothing(s)};
    return {dx, nothing(s), weight ? Api::converted(*dparameters, weight->scalar_type()) : *dparameters};
  }

  static ScalarType wide(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

 private:
  static Type type_of(ScalarType type) {
    switch (type) {
      case ScalarType::Float: return Type::float32;
      case ScalarType::Double: return Type::float64;
      case ScalarType::Half: return Type::float16;
      case ScalarType::BFloat16: return Type::bfloat16;
      default: Api::check(false, "rms_norm kernels take float32, float64, float16 or bfloat16"); return Type::float32;
    }
  }

  static Sizes sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

  // The dimensions before the last one, and one of `values` numbers of each row, if there are several.
  static Sizes sizes_of_rows(const Tensor& x, int64_t values = 0) {
    Sizes sizes = sizes_of(x);
    if (values) sizes.back() = values;
    else sizes.pop_back();
    return sizes;
  }

  static Tensor contiguous_like(const Tensor& x) {
    Tensor made = Api::empty(x, sizes_of(x), x.scalar_type());
    if (!x.is_cuda()) native_build::use_large_pages(made.mutable_data_ptr(), made.numel() * static_cast<int64_t>(made.element_size()));
    return made;
  }

  static Tensor nothing(const Tensor& like) { return Api::empty(like, {0}, like.scalar_type()); }

  // The rows of a tensor at two strides, if its dimensions before the last one can be merged into two.
  static std::optional<Rows> rows_in_place(const Tensor& tensor) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    const int64_t last = tensor.dim() - 1;
    if (sizes[last] > 1 && strides[last] != 1) return std::nullopt;
    std::array<int64_t, 2> size = {1, 1}, stride = {0, 0};  // the inner stride first
    int merged = 0;
    for (int64_t d = last - 1; d >= 0; --d) {
      if (sizes[d] == 1) continue;
      if (merged > 0 && strides[d] == size[merged - 1] * stride[merged - 1]) {
        size[merged - 1] *= sizes[d];
      } else {
        if (merged == 2) return std::nullopt;
        size[merged] = sizes[d];
        stride[merged++] = strides[d];
      }
    }
    return Rows{tensor.const_data_ptr(), size[0], stride[1], stride[0]};
  }

  // A tensor's rows, in place or in a contiguous copy that lives as long as this object.
  class RowsOf {
   public:
    explicit RowsOf(const OptionalTensor& tensor) {
      if (!tensor) return;
      if (const auto rows = rows_in_place(*tensor)) {
        rows_ = *rows;
      } else {
        copy_ = Api::contiguous(*tensor);
        rows_ = *rows_in_place(*copy_);
      }
    }
    const Rows& get() const { return rows_; }

   private:
    OptionalTensor copy_;
    Rows rows_ = {nullptr, 1, 0, 0};
  };

  // A weight of a type that the kernels support: that of x or the accumulating one; on a CPU, only the latter. Both are exact.
  class FittedWeight {
   public:
    FittedWeight(const Tensor& x, const OptionalTensor& weight, double offset) : offset_(offset) {
      if (!weight) return;
      Api::check(weight->dim() == 1 && weight->size(0) == x.size(-1), "expected a weight of ", x.size(-1), " elements");
      const bool as_it_is = weight->scalar_type() == wide(x) || (x.is_cuda() && weight->scalar_type() == x.scalar_type());
      weight_ = Api::contiguous(as_it_is ? *weight : Api::converted(*weight, wide(x)));
    }
    Weight get() const { return {weight_ ? weight_->const_data_ptr() : nullptr, offset_}; }
    ScalarType scalar_type(const Tensor& x) const { return (weight_ ? *weight_ : x).scalar_type(); }

   private:
    OptionalTensor weight_;
    double offset_;
  };

  static Shape shape_of(const Tensor& x, const FittedWeight& weight) {
    return {x.numel() / x.size(-1), x.size(-1), type_of(x.scalar_type()), type_of(weight.scalar_type(x)), x.is_cuda() ? x.get_device() : 0,
            Api::stream(x)};
  }

  static void check_like(const char* name, const Tensor& tensor, const Tensor& x) {
    Api::check(tensor.scalar_type() == x.scalar_type() && sizes_of(tensor) == sizes_of(x) && tensor.is_cuda() == x.is_cuda() &&
                   tensor.get_device() == x.get_device(),
               "expected ", name, " of the shape, dtype and device of the rows");
  }

  static void run_forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& bias,
                          const Options& options, const Tensor& y, const OptionalTensor& s, const Tensor* kept, const Quantised* quantised) {
    const FittedWeight fitted(x, weight, options.offset), fitted_bias(x, bias, 0);
    if (residual) check_like("a residual", *residual, x);
    Api::check(options.centred ? options.offset == 0 && !options.llama : !bias, "expected an offset or llama of rms_norm alone, a bias of layer_norm alone");
    Api::check(!weight || !bias || fitted.scalar_type(x) == fitted_bias.scalar_type(x), "expected a bias of the dtype of the weight");
    const RowsOf x_rows(x), residual_rows(residual);
    Api::kernels().forward({shape_of(x, bias ? fitted_bias : fitted), x_rows.get(), residual_rows.get(), fitted.get(), options.eps,
                            options.llama, y.mutable_data_ptr(), residual ? s->mutable_data_ptr() : nullptr,
                            kept ? kept->mutable_data_ptr() : nullptr, quantised, options.centred, fitted_bias.get().data});
  }

  // dx; fills `dparameters` if there are some.
  static Tensor run_backward(const Tensor& dy, const OptionalTensor& ds, const Tensor& s, const FittedWeight& weight, const Tensor& of_rows,
                             const Options& options, bool deterministic, const OptionalTensor& dparameters) {
    Tensor dx = contiguous_like(s);
    if (s.numel() == 0) {
      if (dparameters) Api::fill(*dparameters, 0);
      return dx;
    }
    check_like("dy", dy, s);
    if (ds) check_like("ds", *ds, s);
    const Tensor kept = Api::contiguous(of_rows);
    Api::check(kept.numel() == s.numel() / s.size(-1) * (options.centred ? 2 : 1) && kept.scalar_type() == wide(s),
               "expected what the forward pass keeps of each row");
    const RowsOf dy_rows(dy), ds_rows(ds), s_rows(s);
    Shape shape = shape_of(s, weight);
    if (dparameters) shape.weight_type = type_of(dparameters->scalar_type());
    Backward call{shape, dy_rows.get(), ds_rows.get(), s_rows.get(), weight.get(), kept.const_data_ptr(), options.llama,
                  deterministic, dx.mutable_data_ptr(), dparameters ? dparameters->mutable_data_ptr() : nullptr, nullptr, options.centred};
    const Tensor workspace = Api::empty(s, {Api::kernels().backward_workspace(call)}, ScalarType::Byte);
    call.workspace = workspace.mutable_data_ptr();
    Api::kernels().backward(call);
    return dx;
  }
};

}  // namespace rms_norm

// Tensors as the operators check, make and hand them on: LibTorch's stable ABI, which one binary shares with many versions.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/dtype.h"

#ifdef CUSTOM_OPS_CUDA
// Weak, because it is in torch's CUDA library: this file then loads under a CPU build of torch too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace custom_ops::stable {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Elements that are worth a thread of their own: what PyTorch's element-wise operators use.
constexpr int64_t kGrain = 32768;

template <typename... Parts> [[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  ((message << parts), ...);
  throw std::runtime_error(message.str());
}

// ---- what an error says

inline std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "torch.float32";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::Half: return "torch.float16";
    case ScalarType::BFloat16: return "torch.bfloat16";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    case ScalarType::Bool: return "torch.bool";
    case ScalarType::ComplexFloat: return "torch.complex64";
    case ScalarType::ComplexDouble: return "torch.complex128";
    default: return "another dtype";
  }
}

template <typename Sizes> std::string name_of_shape(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (const int64_t size : sizes) {
    text << separator << size;
    separator = ", ";
  }
  text << ']';
  return text.str();
}

inline int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

inline std::string name_of_device(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "another device";
}

template <typename First, typename Second> bool equal_sizes(const First& a, const Second& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i]) return false;
  return true;
}

// ---- checks, in the words of custom_ops/checks.py: a test holds them together

// An argument by the name that the schema gives it.
struct Argument {
  const char* name;
  const Tensor& tensor;
};

inline Dtype dtype_of(const char* op, const Argument& x) {
  switch (x.tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::Double: return Dtype::kFloat64;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    default:
      fail(op, ": argument '", x.name, "': expected dtype torch.float32, torch.float64, torch.float16 or torch.bfloat16, got ",
           name_of(x.tensor.scalar_type()));
  }
}

inline void check_device(const char* op, const Argument& first, const Argument& other) {
  if (device_type(other.tensor) != device_type(first.tensor) || other.tensor.get_device_index() != first.tensor.get_device_index()) {
    fail(op, ": argument '", other.name, "': expected device ", name_of_device(first.tensor), " like '", first.name, "', got ",
         name_of_device(other.tensor), " (move it there with .to())");
  }
}

inline void check_dtype(const char* op, const Argument& first, const Argument& other) {
  if (other.tensor.scalar_type() != first.tensor.scalar_type()) {
    fail(op, ": argument '", other.name, "': expected dtype ", name_of(first.tensor.scalar_type()), " like '", first.name, "', got ",
         name_of(other.tensor.scalar_type()), " (dtypes are not promoted; use .to())");
  }
}

inline void check_shape(const char* op, const Argument& first, const Argument& other) {
  if (!equal_sizes(first.tensor.sizes(), other.tensor.sizes())) {
    fail(op, ": argument '", other.name, "': expected shape ", name_of_shape(first.tensor.sizes()), " like '", first.name, "', got ",
         name_of_shape(other.tensor.sizes()), " (shapes are not broadcast; use .expand())");
  }
}

// ---- making tensors

// Through the C function itself: torch::stable::new_empty goes through the dispatcher by name, a microsecond more.
inline Tensor make(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
                                                  device_type(like), like.is_cpu() ? 0 : like.get_device_index(), &made));
  return Tensor(made);
}

inline Tensor make_like(const Tensor& like) { return make(like, {like.sizes().begin(), like.sizes().end()}, like.scalar_type()); }

// The kernels walk memory in order: a transposed or sliced operand is copied.
inline Tensor in_order(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

inline ScalarType wide(ScalarType type) { return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

// ---- where a kernel runs

#ifdef CUSTOM_OPS_CUDA
// The device of a tensor made current, and torch's current stream on it: on another stream the operands may still be being
// written.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    if (aoti_torch_get_current_cuda_stream == nullptr) fail("this torch has no CUDA");
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
  }
  void* stream() const { return stream_; }

 private:
  const torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

// Both in runtime.cu. The first throws with CUDA's own words.
void check_launch(const char* op, int status);
void copy_on_device(void* to, const void* from, int64_t bytes, void* stream);
#endif

}  // namespace custom_ops::stable

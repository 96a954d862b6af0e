// How the operators check, create and return tensors, through LibTorch's stable ABI, which many torch versions share.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <native_build/memory.h>

#include "../common/dtype.h"

#ifdef CUSTOM_OPS_CUDA
// Weak, because the symbol is in torch's CUDA library; this file then also loads under a CPU build of torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace custom_ops::stable {

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// The number of elements that justifies another thread; PyTorch's elementwise operators use the same.
constexpr int64_t kGrain = 32768;

template <typename... Parts> [[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  ((message << parts), ...);
  throw std::runtime_error(message.str());
}

// ---- tensors

// torch's numbers for dtypes and devices. They may change between versions, so they are queried, and queried once:
// torch::stable::Tensor::scalar_type() queries one after another until one matches.
struct Codes {
  const int32_t float32 = aoti_torch_dtype_float32(), float64 = aoti_torch_dtype_float64();
  const int32_t float16 = aoti_torch_dtype_float16(), bfloat16 = aoti_torch_dtype_bfloat16();
  const int32_t uint8 = aoti_torch_dtype_uint8(), int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64();
  const int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
};
inline const Codes codes;

// The result of one of torch's C functions for a tensor; `what` is for the error message.
template <typename T> T asked(AOTITorchError (*function)(AtenTensorHandle, T*), AtenTensorHandle handle, const char* what) {
  T answer{};
  if (function(handle, &answer) != TORCH_SUCCESS) fail("torch does not say what the ", what, " of this tensor is");
  return answer;
}

// A tensor that a call received or created, with one owner (boxing.h).
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  int64_t dim() const { return asked(aoti_torch_get_dim, handle_, "number of dimensions"); }
  int64_t numel() const { return asked(aoti_torch_get_numel, handle_, "number of elements"); }
  Sizes sizes() const { return {asked(aoti_torch_get_sizes, handle_, "shape"), static_cast<size_t>(dim())}; }
  int64_t size(int64_t of) const { return sizes()[of]; }
  int64_t stride(int64_t of) const { return asked(aoti_torch_get_strides, handle_, "layout")[of]; }
  bool is_contiguous() const { return asked(aoti_torch_is_contiguous, handle_, "layout"); }
  int32_t dtype() const { return asked(aoti_torch_get_dtype, handle_, "dtype"); }
  int32_t device_type() const { return asked(aoti_torch_get_device_type, handle_, "device"); }
  int32_t device_index() const { return asked(aoti_torch_get_device_index, handle_, "device"); }
  bool is_cpu() const { return device_type() == codes.cpu; }
  bool is_cuda() const { return device_type() == codes.cuda; }
  const void* const_data_ptr() const { return asked(torch_get_const_data_ptr, handle_, "memory"); }
  void* mutable_data_ptr() const { return asked(torch_get_mutable_data_ptr, handle_, "memory"); }

 private:
  AtenTensorHandle handle_;
};

inline AtenTensorHandle another_handle(AtenTensorHandle handle) {
  AtenTensorHandle another = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &another));
  return another;
}

// ---- error messages

inline std::string name_of_dtype(int32_t code) {
  using torch::headeronly::ScalarType;
  switch (torch::stable::detail::to<ScalarType>(torch::stable::detail::from(code))) {
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

inline std::string name_of_shape(Sizes sizes) {
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

inline std::string name_of_device(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.device_index());
  return "another device";
}

inline bool equal_sizes(Sizes a, Sizes b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i]) return false;
  return true;
}

// ---- checks, with the messages of custom_ops/operators/checks.py; a test compares the two

// An argument and its name in the schema.
struct Argument {
  const char* name;
  const Tensor& tensor;
};

inline Dtype dtype_of(const char* op, const Argument& x) {
  const int32_t code = x.tensor.dtype();
  if (code == codes.float32) return Dtype::kFloat32;
  if (code == codes.bfloat16) return Dtype::kBFloat16;
  if (code == codes.float16) return Dtype::kFloat16;
  if (code == codes.float64) return Dtype::kFloat64;
  fail(op, ": argument '", x.name, "': expected dtype torch.float32, torch.float64, torch.float16 or torch.bfloat16, got ",
       name_of_dtype(code));
}

inline void check_device(const char* op, const Argument& first, const Argument& other) {
  if (other.tensor.device_type() != first.tensor.device_type() || other.tensor.device_index() != first.tensor.device_index()) {
    fail(op, ": argument '", other.name, "': expected device ", name_of_device(first.tensor), " like '", first.name, "', got ",
         name_of_device(other.tensor), " (move it there with .to())");
  }
}

inline void check_dtype(const char* op, const Argument& first, const Argument& other) {
  if (other.tensor.dtype() != first.tensor.dtype()) {
    fail(op, ": argument '", other.name, "': expected dtype ", name_of_dtype(first.tensor.dtype()), " like '", first.name, "', got ",
         name_of_dtype(other.tensor.dtype()), " (dtypes are not promoted; use .to())");
  }
}

inline int32_t wide(int32_t dtype) { return dtype == codes.float64 ? dtype : codes.float32; }

inline void check_wide_dtype(const char* op, const Argument& first, const Argument& other) {
  const int32_t dtype = first.tensor.dtype(), expected = wide(dtype);
  if (other.tensor.dtype() != expected) {
    fail(op, ": argument '", other.name, "': expected dtype ", name_of_dtype(expected), ", in which ", name_of_dtype(dtype),
         " is computed, got ", name_of_dtype(other.tensor.dtype()));
  }
}

inline void check_shape(const char* op, const Argument& first, const Argument& other) {
  if (!equal_sizes(first.tensor.sizes(), other.tensor.sizes())) {
    fail(op, ": argument '", other.name, "': expected shape ", name_of_shape(first.tensor.sizes()), " like '", first.name, "', got ",
         name_of_shape(other.tensor.sizes()), " (shapes are not broadcast; use .expand())");
  }
}

// ---- new tensors

// Calls the C function directly: torch::stable::new_empty looks up the operator by name, which takes a microsecond more.
// `count` is the number of elements.
inline Tensor make_strided(const Tensor& like, Sizes sizes, const int64_t* strides, int64_t count, int32_t dtype) {
  const int32_t device_type = like.device_type();
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, dtype, device_type,
                                                  device_type == codes.cpu ? 0 : like.device_index(), &made));
  Tensor tensor(made);
  if (device_type == codes.cpu && count >= kGrain) {
    native_build::use_large_pages(tensor.mutable_data_ptr(), asked(aoti_torch_get_storage_size, made, "memory"));
  }
  return tensor;
}

inline Tensor make(const Tensor& like, Sizes sizes, int32_t dtype) {
  constexpr size_t kFew = 8;  // up to this many dimensions, the strides need no heap memory
  int64_t few[kFew];
  std::vector<int64_t> many(sizes.size() > kFew ? sizes.size() : 0);
  int64_t* const strides = many.empty() ? few : many.data();
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  return make_strided(like, sizes, strides, stride, dtype);
}

inline Tensor make_like(const Tensor& like) { return make(like, like.sizes(), like.dtype()); }

inline Tensor make_bytes(const Tensor& like, int64_t count) { return make(like, {&count, 1}, codes.uint8); }

inline Tensor contiguous(const Tensor& tensor) {
  const torch::stable::Tensor copy = torch::stable::contiguous(torch::stable::Tensor(another_handle(tensor.get())));
  return Tensor(another_handle(copy.get()));
}

// The kernels read memory in order, so a transposed or sliced operand is copied.
inline Tensor in_order(Tensor&& tensor) { return tensor.is_contiguous() ? std::move(tensor) : contiguous(tensor); }

// Copies into new memory, which is aligned; contiguous() would return a contiguous tensor as it is, even if unaligned.
inline Tensor copied(const Tensor& tensor) {
  Tensor copy = make_like(tensor);
  torch::stable::Tensor to(another_handle(copy.get()));
  torch::stable::copy_(to, torch::stable::Tensor(another_handle(tensor.get())));
  return copy;
}

// ---- where a kernel runs

#ifdef CUSTOM_OPS_CUDA
// Makes the tensor's device current and finds torch's current stream on it; on another stream, the operands might not be
// complete yet.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) {
    if (aoti_torch_get_current_cuda_stream == nullptr) fail("this torch has no CUDA");
    const int32_t wanted = tensor.device_index();
    int32_t current = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_device_index(&current));
    if (current != wanted) guard_.emplace(wanted);
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(wanted, &stream_));
  }
  void* stream() const { return stream_; }

 private:
  std::optional<const torch::stable::accelerator::DeviceGuard> guard_;  // only if another device is current; it uses the heap
  void* stream_ = nullptr;
};

// Both are in runtime.cu. The first throws an exception with CUDA's message.
void check_launch(const char* op, int status);
void copy_on_device(void* to, const void* from, int64_t bytes, void* stream);
#endif

}  // namespace custom_ops::stable

// Adapts a function of tensors to the stable ABI, in which arguments and results are 64-bit words on a stack.
//
// torch's TORCH_BOX does the same for torch::stable::Tensor, which counts its owners in a std::shared_ptr in addition to
// torch's reference count, and returns a result as a second handle. Here every tensor has one owner and passes its handle.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu_levels.h"
#include "tensors.h"

namespace custom_ops::stable {

// A function owns the stack values that it takes.
template <typename T> struct Take {
  static T from(StableIValue word) { return torch::stable::detail::to<T>(word); }
};
template <> struct Take<Tensor> {
  static Tensor from(StableIValue word) { return Tensor(torch::stable::detail::to<AtenTensorHandle>(word)); }
};
template <> struct Take<std::optional<Tensor>> {
  static std::optional<Tensor> from(StableIValue word) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(word);
    return handle ? std::optional<Tensor>(std::in_place, *handle) : std::nullopt;
  }
};

template <> struct Take<std::vector<Tensor>> {
  static std::vector<Tensor> from(StableIValue word) {
    std::vector<Tensor> tensors;
    for (const AtenTensorHandle handle : torch::stable::detail::to<std::vector<AtenTensorHandle>>(word)) tensors.emplace_back(handle);
    return tensors;
  }
};

inline StableIValue word_of(AtenTensorHandle handle) { return torch::stable::detail::from<AtenTensorHandle>(handle); }

inline void put(StableIValue* stack, Tensor&& result) { stack[0] = word_of(result.release()); }

template <typename... Results> void put(StableIValue* stack, std::tuple<Results...>&& results) {
  std::apply([&](auto&... each) { ((*stack++ = word_of(each.release())), ...); }, results);
}

template <auto kFunction, typename Signature = decltype(kFunction)> struct Boxed;

template <auto kFunction, typename Result, typename... Parameters> struct Boxed<kFunction, Result (*)(Parameters...)> {
  static void call(StableIValue* stack, uint64_t given, uint64_t) {
    if (given != sizeof...(Parameters)) fail("a schema has ", given, " arguments, and its kernel takes ", sizeof...(Parameters));
    if (const char* error = level_error()) fail(error);
    run(stack, std::index_sequence_for<Parameters...>{});
  }

 private:
  template <size_t... kIndex> static void run(StableIValue* stack, std::index_sequence<kIndex...>) {
    std::tuple<std::decay_t<Parameters>...> arguments{Take<std::decay_t<Parameters>>::from(stack[kIndex])...};
    if constexpr (std::is_void_v<Result>) {
      kFunction(std::get<kIndex>(std::move(arguments))...);
    } else {
      put(stack, kFunction(std::get<kIndex>(std::move(arguments))...));
    }
  }
};

// For Library::impl.
template <auto kFunction> constexpr auto boxed = &Boxed<kFunction>::call;

}  // namespace custom_ops::stable

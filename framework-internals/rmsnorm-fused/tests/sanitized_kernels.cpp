// Calls the CPU kernels on operands that end where their memory ends, for scripts/sanitize_cpu.sh: a sanitizer then finds each
// access beyond them.

#include "../csrc/cpu/rms_norm.cpp"

#include <cstdio>
#include <initializer_list>
#include <random>
#include <vector>

namespace rms_norm {

void parallel_for(int64_t count, int64_t, void (*task)(int64_t begin, int64_t end, void* context), void* context) {
  for (int64_t i = 0; i < count; i += 3) task(i, std::min(i + 3, count), context);  // ranges of several tasks
}
int64_t threads() { return 4; }

}  // namespace rms_norm

using namespace rms_norm;
namespace {

std::mt19937 generator(0);

template <typename T> std::vector<T> drawn(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) {
    if constexpr (std::is_same_v<T, double>) value = normal(generator);
    else native_build::narrow(normal(generator), value);
  }
  return values;
}

template <typename T> void norm(Type type, int64_t rows, int64_t columns, bool residual, bool weighted, bool llama) {
  using A = native_build::Wide<T>;
  // A misaligned first row, and an element between rows.
  std::vector<T> x = drawn<T>(rows * (columns + 1)), other = drawn<T>(rows * columns), dy = drawn<T>(rows * columns), ds = drawn<T>(rows * columns);
  std::vector<T> y(static_cast<size_t>(rows * columns)), s(y.size()), dx(y.size());
  std::vector<A> weight = drawn<A>(columns), dweight(weight.size()), rstd(static_cast<size_t>(rows));
  const Shape shape{rows, columns, type, type == Type::float64 ? Type::float64 : Type::float32, 0, nullptr};
  const Rows none{nullptr, 1, 0, 0}, of_other{other.data(), rows, 0, columns};
  const Weight of_weight{weighted ? weight.data() : nullptr, 1.0};
  Forward forward_call{shape, {x.data() + 1, rows, 0, columns + 1}, residual ? of_other : none, of_weight, 1e-6, llama, y.data(), residual ? s.data() : nullptr, rstd.data(), nullptr};
  forward(forward_call);
  Backward call{shape, {dy.data(), rows, 0, columns}, residual ? Rows{ds.data(), rows, 0, columns} : none, of_other, of_weight, rstd.data(), llama, true,
                dx.data(), weighted ? dweight.data() : nullptr, nullptr};
  std::vector<char> workspace(static_cast<size_t>(backward_workspace(call)));
  call.workspace = workspace.data();
  backward(call);
  std::vector<A> moments(static_cast<size_t>(2 * rows)), dparameters(static_cast<size_t>(2 * columns));
  Forward centred = forward_call;
  centred.weight.offset = 0;
  centred.centred = true;
  centred.bias = llama ? weight.data() : nullptr;
  centred.rstd = moments.data();
  forward(centred);
  Backward backward_of_centred = call;
  backward_of_centred.weight.offset = 0;
  backward_of_centred.centred = true;
  backward_of_centred.rstd = moments.data();
  backward_of_centred.dweight = weighted ? dparameters.data() : nullptr;
  std::vector<char> more(static_cast<size_t>(backward_workspace(backward_of_centred)));
  backward_of_centred.workspace = more.data();
  backward(backward_of_centred);
  if constexpr (!std::is_same_v<T, double>) {
    std::vector<uint8_t> quantised(y.size());
    std::vector<float> scales(static_cast<size_t>(rows));
    const Quantised how{nullptr, scales.data()};
    forward_call.quantised = &how;
    forward_call.y = quantised.data();
    forward(forward_call);
  }
}

template <typename T> void all(Type type) {
  for (const int64_t rows : {1, 3, 130}) {
    for (const int64_t columns : {1, 7, 32, 64, 65, 1024, 1100}) {
      for (const int choice : {0, 1, 2, 3, 4, 5, 6, 7}) norm<T>(type, rows, columns, choice & 1, choice & 2, choice & 4);
    }
  }
  norm<T>(type, 2, 70001, true, true, false);
}

}  // namespace

int main() {
  all<float>(Type::float32);
  all<double>(Type::float64);
  all<native_build::Half>(Type::float16);
  all<native_build::BFloat16>(Type::bfloat16);
  std::puts("rmsnorm-fused: every kernel ran");
}

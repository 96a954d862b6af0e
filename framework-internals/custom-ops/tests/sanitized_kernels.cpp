// Calls every CPU kernel on operands that end where their memory ends, for scripts/sanitize_cpu.sh: a sanitizer then finds each
// access beyond them. Compiled together with the cpu.cpp of each.

#include "../csrc/adamw/kernels.h"
#include "../csrc/bias_gelu/glu/kernels.h"
#include "../csrc/bias_gelu/kernels.h"
#include "../csrc/common/cpu.h"
#include "../csrc/conv_bn_relu/kernels.h"
#include "../csrc/cross_entropy/kernels.h"
#include "../csrc/flash_attention/flash_attention.h"
#include "../csrc/mm/kernels.h"
#include "../csrc/rotary/kernels.h"
#include "../csrc/scale/kernels.h"
#include "../csrc/vector_add/kernels.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using namespace custom_ops;
namespace flash = custom_ops::flash_attention;

namespace {

std::mt19937 generator(0);

// `count` elements of a type in memory of exactly that size, after `offset` others: a misaligned operand.
template <typename T> class Operand {
 public:
  explicit Operand(int64_t count, int64_t offset = 0) : offset_(offset), values_(static_cast<size_t>(count + offset)) {
    std::normal_distribution<float> normal;
    for (T& value : values_) {
      if constexpr (std::is_same_v<T, double>) value = normal(generator);
      else native_build::narrow(normal(generator), value);
    }
  }
  T* data() { return values_.data() + offset_; }

 private:
  int64_t offset_;
  std::vector<T> values_;
};

template <typename T> void elementwise(Dtype dtype, int64_t rows, int64_t columns, int64_t offset) {
  using W = Wide<T>;
  Operand<T> x(rows * columns, offset), grad(rows * columns, offset), out(rows * columns, offset), bias(columns, offset), dbias(columns, offset);
  bias_gelu_cpu({dtype, x.data(), bias.data(), out.data(), rows, columns}, 0, rows * columns);
  BiasGeluBackward call{dtype, grad.data(), x.data(), bias.data(), out.data(), dbias.data(), nullptr, rows, columns};
  std::vector<char> workspace(static_cast<size_t>(bias_gelu_backward_workspace_cpu(call)));
  call.workspace = workspace.data();
  bias_gelu_backward_rows_cpu(call, 0, bias_gelu_backward_groups(rows));
  bias_gelu_backward_columns_cpu(call, 0, bias_gelu_backward_blocks(columns));
  Operand<T> packed(rows * 2 * columns, offset), dpacked(rows * 2 * columns, offset);
  T *const gate = packed.data(), *const dgate = dpacked.data();
  for (const Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    glu_cpu({dtype, activation, gate, gate + columns, out.data(), rows, columns, 2 * columns, 2 * columns}, 0, rows * columns);
    glu_backward_cpu({dtype, activation, grad.data(), gate, gate + columns, dgate, dgate + columns, rows, columns, 2 * columns, 2 * columns, 2 * columns}, 0, rows * columns);
  }
  scale_cpu({dtype, x.data(), 1.5, out.data(), rows * columns}, 0, rows * columns);
  add_cpu({dtype, x.data(), grad.data(), out.data(), rows * columns}, 0, rows * columns);
  axpb_cpu({dtype, x.data(), grad.data(), out.data(), rows * columns}, 1.5, 0, rows * columns);
  Operand<W> factor(columns), shift(columns);
  for (const bool last : {false, true}) {
    const int64_t channels = last ? columns : 1, inner = last ? 1 : columns;
    scale_shift_relu_cpu({dtype, out.data(), factor.data(), shift.data(), rows, channels, inner}, 0, rows * columns);
  }
  std::vector<int64_t> targets(static_cast<size_t>(rows), columns - 1);
  Operand<W> losses(rows);
  for (const bool gradient : {false, true}) {
    cross_entropy_cpu({dtype, x.data(), targets.data(), losses.data(), rows, columns, columns, -100, gradient}, 0, rows);
  }
}

template <class Steps, class Call> void run(const Steps& steps, const Call& call) {
  for (const auto& step : steps) {
    std::atomic<int64_t> next{0};
    if (step.tasks > 0) step.run(call, next);
  }
}

template <typename T> void attention(flash::ScalarType dtype, int64_t head_size, int64_t queries, int64_t keys, bool causal, bool features = false) {
  using W = Wide<T>;
  const int64_t heads = 2, batch = 1;
  flash::Problem problem{dtype, batch, heads, 1, queries, keys, head_size, 0.3, causal};
  Operand<W> sinks(heads), slopes(heads);
  Operand<T> bias(heads * queries * keys), bias_gradient(heads * queries * keys);
  const std::vector<int32_t> of_queries = {0, static_cast<int32_t>(queries / 3), static_cast<int32_t>(queries)}, of_keys = {0, static_cast<int32_t>(keys / 2), static_cast<int32_t>(keys)};
  if (features) {
    problem.features = {5, 3, 2.0, sinks.data(), bias.data(), {0, queries * keys, keys, 1}, slopes.data(), 0, of_queries.data(), of_keys.data(), 2};
  }
  Operand<T> q(heads * queries * head_size), k(keys * head_size), v(keys * head_size), out(heads * queries * head_size), grad(heads * queries * head_size);
  Operand<T> dq(heads * queries * head_size), dk(keys * head_size), dv(keys * head_size);
  Operand<W> lse(heads * queries);
  const auto view = [&](T* data, int64_t of_heads, int64_t length) {
    return flash::Tensor{data, of_heads * length * head_size, length * head_size, head_size};
  };
  // of exactly the size that is asked for
  std::vector<char> forward_space(static_cast<size_t>(flash::forward_cpu_workspace_bytes(problem)));
  std::vector<char> backward_space(static_cast<size_t>(flash::backward_cpu_workspace_bytes(problem)));
  run(flash::forward_cpu_steps(problem), flash::Forward{problem, view(q.data(), heads, queries), view(k.data(), 1, keys), view(v.data(), 1, keys),
                                                        view(out.data(), heads, queries), lse.data(), forward_space.data()});
  run(flash::backward_cpu_steps(problem),
      flash::Backward{problem, view(q.data(), heads, queries), view(k.data(), 1, keys), view(v.data(), 1, keys), view(out.data(), heads, queries),
                      view(grad.data(), heads, queries), lse.data(), nullptr, view(dq.data(), heads, queries), view(dk.data(), 1, keys), view(dv.data(), 1, keys), backward_space.data(),
                      false, features ? bias_gradient.data() : nullptr});
}

// Two parameters, the second of one element; the first ends inside a chunk, at its end, or behind it.
template <typename T, typename G = T, typename C = G>
void optimizer(Dtype dtype, Dtype gradient_dtype, Dtype copy_dtype, int64_t count, int64_t offset) {
  const int64_t counts[] = {count, 1};
  std::vector<Operand<T>> values, means, squares, maxima;
  std::vector<Operand<G>> gradients;
  std::vector<Operand<C>> copies;
  GradientNorm norm{dtype, {}, 0, nullptr, nullptr};
  AdamW update{dtype, gradient_dtype, copy_dtype, {}, 0, nullptr, nullptr, 0.1, 0.9, 0.99, 1e-8, 0.01, 1, false, true};
  const float step = 1;
  for (const int64_t each : counts) {
    for (auto* of : {&values, &means, &squares, &maxima}) of->emplace_back(each, offset);
    gradients.emplace_back(each, offset);
    copies.emplace_back(each, offset);
    T* const squares_data = squares.back().data();
    for (int64_t i = 0; i < each; ++i) squares_data[i] *= squares_data[i];
    norm.gradients.push_back({gradients.back().data(), each, norm.chunks, gradient_dtype});
    update.parameters.push_back({values.back().data(), gradients.back().data(), means.back().data(), squares_data, maxima.back().data(),
                                 copies.back().data(), &step, each, norm.chunks});
    norm.chunks += (each + kChunk - 1) / kChunk;
  }
  std::vector<double> sums(static_cast<size_t>(norm.chunks));
  norm.sums = sums.data();
  gradient_norm_chunks_cpu(norm, 0, norm.chunks);
  const T total = static_cast<T>(sums[0]);
  for (const void* clip : {static_cast<const void*>(nullptr), static_cast<const void*>(&total)}) {
    update.norm = clip;
    update.chunks = norm.chunks;
    for (const bool amsgrad : {false, true}) {
      update.amsgrad = amsgrad;
      adamw_cpu(update, 0, update.chunks);
    }
  }
}

// The heads of one of three slices of a projection.
template <typename T> void positions(Dtype dtype, int64_t tokens, int64_t heads, int64_t size) {
  Operand<T> projection(tokens * 3 * heads * size), out(tokens * heads * size);
  Operand<Wide<T>> cos(tokens * size / 2), sin(tokens * size / 2);
  for (const bool inverse : {false, true}) {
    rotary_cpu({dtype, projection.data() + 2 * heads * size, cos.data(), sin.data(), out.data(), 1, tokens, heads, size, 0, 3 * heads * size, size, inverse}, 0, tokens);
  }
}

// Both operands in order, and both transposed.
template <typename T> void products(Dtype dtype, int64_t rows, int64_t columns, int64_t depth) {
  Operand<T> a(rows * depth), b(depth * columns), bias(columns), out(rows * columns);
  for (const int64_t threads : {1, 3}) {
    mm_cpu({dtype, a.data(), depth, 1, b.data(), columns, 1, nullptr, out.data(), rows, columns, depth, threads}, 0, threads);
    mm_cpu({dtype, a.data(), 1, rows, b.data(), 1, depth, bias.data(), out.data(), rows, columns, depth, threads}, 0, threads);
  }
}

template <typename T> void all(Dtype dtype) {
  for (const int64_t size : {2, 6, 64, 130}) positions<T>(dtype, 5, 3, size);
  for (const int64_t rows : {1, 6, 17, 500}) {
    for (const int64_t columns : {1, 31, 64, 300}) {
      for (const int64_t depth : {0, 1, 16, 177, 400}) products<T>(dtype, rows, columns, depth);
    }
  }
  for (const int64_t rows : {1, 2, 17, 70}) {
    for (const int64_t columns : {1, 3, 31, 32, 64, 65, 130, 1025}) {
      for (const int64_t offset : {0, 1}) elementwise<T>(dtype, rows, columns, offset);
    }
  }
  for (const int64_t head_size : {1, 7, 16, 33, 64, 128, 256}) {
    for (const int64_t queries : {0, 1, 63, 130}) {
      for (const int64_t keys : {0, 1, 66, 300}) {
        for (const bool causal : {false, true}) attention<T>(static_cast<flash::ScalarType>(dtype), head_size, queries, keys, causal);
        if (head_size == 33 || head_size == 64) attention<T>(static_cast<flash::ScalarType>(dtype), head_size, queries, keys, true, true);
      }
    }
  }
}

}  // namespace

int main() {
  for (const int64_t count : {int64_t{1}, int64_t{17}, kChunk, kChunk + 33}) {
    for (const int64_t offset : {0, 1}) {
      optimizer<float>(Dtype::kFloat32, Dtype::kFloat32, Dtype::kFloat32, count, offset);
      optimizer<double>(Dtype::kFloat64, Dtype::kFloat64, Dtype::kFloat64, count, offset);
      optimizer<float, BFloat16>(Dtype::kFloat32, Dtype::kBFloat16, Dtype::kBFloat16, count, offset);
      optimizer<float, Half>(Dtype::kFloat32, Dtype::kFloat16, Dtype::kFloat16, count, offset);
      optimizer<float, float, BFloat16>(Dtype::kFloat32, Dtype::kFloat32, Dtype::kBFloat16, count, offset);
      optimizer<float, Half, float>(Dtype::kFloat32, Dtype::kFloat16, Dtype::kFloat32, count, offset);
    }
  }
  all<float>(Dtype::kFloat32);
  all<double>(Dtype::kFloat64);
  all<Half>(Dtype::kFloat16);
  all<BFloat16>(Dtype::kBFloat16);
  std::puts("custom-ops: every kernel ran");
}

// Compares CPU kernels with plain loops in float64, within bounds derived from the roundings of each formula. Compiled together with the
// cpu.cpp of each, for any processor: scripts/tests/test_aarch64.py runs it for this one and, emulated, for arm64. Prints what
// differs, and returns whether anything does.

#include "../csrc/adamw/kernels.h"
#include "../csrc/bias_gelu/glu/kernels.h"
#include "../csrc/bias_gelu/kernels.h"
#include "../csrc/common/cpu.h"
#include "../csrc/flash_attention/flash_attention.h"
#include "../csrc/mm/kernels.h"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

using namespace custom_ops;
namespace flash = custom_ops::flash_attention;

namespace {

int failures = 0;
std::mt19937 generator(0);

// The largest relative error of a rounding to the type, and the largest absolute one of its subnormal numbers.
template <typename T> constexpr double kUnit = std::is_same_v<T, double> ? 0x1p-53 : std::is_same_v<T, float> ? 0x1p-24 : std::is_same_v<T, Half> ? 0x1p-11 : 0x1p-8;
template <typename T> constexpr double kTiny = std::is_same_v<T, Half> ? 0x1p-25 : 0x1p-134;

template <typename T> struct Values {
  std::vector<T> of;
  explicit Values(int64_t count) : of(static_cast<size_t>(count)) {
    std::normal_distribution<double> normal;
    for (T& value : of) native_build::narrow(static_cast<Wide<T>>(normal(generator)), value);
  }
  T* data() { return of.data(); }
  double operator[](int64_t i) const { return static_cast<double>(widen(of[static_cast<size_t>(i)])); }
};

// `computed`: the error before the result is rounded to T.
template <typename T> void expect(const char* what, int64_t at, double got, double exact, double computed) {
  const double bound = computed + kUnit<T> * (std::fabs(exact) + computed) + kTiny<T>;
  if (std::fabs(got - exact) <= bound) return;  // NaN is not
  if (++failures <= 20) std::printf("%s, %zu bytes, element %lld: expected %.9g within %.2g, got %.9g\n", what, sizeof(T), static_cast<long long>(at), exact, bound, got);
}

// ---- bias_gelu

constexpr double kRoot = 0.7978845608028654, kCubic = 0.044715;  // sqrt(2 / pi)

template <typename T> void check_bias_gelu(Dtype dtype, int64_t rows, int64_t columns) {
  using W = Wide<T>;
  // Beside float32's own roundings, a 16-bit result may come from a shorter polynomial: its error stands in csrc/bias_gelu/gelu.h.
  const double unit = kUnit<W>, shorter = sizeof(T) == 2 ? 0x1p-13 : 0, absolute = sizeof(T) == 2 ? 0x1p-24 : 0;
  Values<T> x(rows * columns), bias(columns), grad(rows * columns), out(rows * columns), dbias(columns);
  bias_gelu_cpu({dtype, x.data(), bias.data(), out.data(), rows, columns}, 0, rows * columns);
  std::vector<double> sums(static_cast<size_t>(columns)), bounds(static_cast<size_t>(columns));
  std::vector<double> exact(static_cast<size_t>(rows * columns)), errors(exact.size());
  for (int64_t i = 0; i < rows * columns; ++i) {
    const double b = bias[i % columns], u = x[i] + b, z = kRoot * (u + kCubic * u * u * u), s = 1 / (1 + std::exp(-2 * z));
    // The exponent has a dozen roundings, each of at most |2z|, and the polynomial of the power an error of two of the eight; the slope is below 1.2, and the slope's slope below 1.
    const double rounding = unit * (2 * (std::fabs(x[i]) + std::fabs(b)) + (8 + 12 * std::fabs(2 * z)) * std::fabs(u) * s);
    expect<T>("bias_gelu", i, out[i], u * s, rounding + shorter * std::fabs(u * s) + absolute);
    const double slope = s + u * s * (1 - s) * 2 * kRoot * (1 + 3 * kCubic * u * u);
    const size_t at = static_cast<size_t>(i);
    exact[at] = grad[i] * slope;
    errors[at] = std::fabs(grad[i]) * (unit * (2 * (std::fabs(x[i]) + std::fabs(b)) + 40 * (1 + std::fabs(2 * z))) + (sizeof(T) == 2 ? 0x1p-18 : 0));
  }
  BiasGeluBackward call{dtype, grad.data(), x.data(), bias.data(), out.data(), dbias.data(), nullptr, rows, columns};
  std::vector<char> workspace(static_cast<size_t>(bias_gelu_backward_workspace_cpu(call)));
  call.workspace = workspace.data();
  bias_gelu_backward_rows_cpu(call, 0, bias_gelu_backward_groups(rows));
  bias_gelu_backward_columns_cpu(call, 0, bias_gelu_backward_blocks(columns));
  for (int64_t i = 0; i < rows * columns; ++i) {
    const size_t at = static_cast<size_t>(i), column = static_cast<size_t>(i % columns);
    expect<T>("bias_gelu's dx", i, out[i], exact[at], errors[at]);
    sums[column] += exact[at];
    bounds[column] += errors[at] + static_cast<double>(rows) * unit * std::fabs(exact[at]);
  }
  for (int64_t i = 0; i < columns; ++i) expect<T>("bias_gelu's dbias", i, dbias[i], sums[static_cast<size_t>(i)], bounds[static_cast<size_t>(i)]);
}

// ---- swiglu and geglu, of both halves of packed rows

struct Activated {
  double value, slope, value_error, slope_error;
};
template <typename T> Activated activated(Activation activation, double u) {
  const double unit = kUnit<Wide<T>>;
  if (activation == Activation::kGelu) {
    // The exponent of the density has two roundings, each of at most u^2 / 2; the error of float32's polynomial stands in normal.h.
    const double whole = 0.5 * std::erfc(-u * std::sqrt(0.5)), tail = 0.5 * std::erfc(std::fabs(u) * std::sqrt(0.5)), density = 0.3989422804014327 * std::exp(-u * u / 2);
    const double relative = unit * (40 + 2 * u * u) + (sizeof(Wide<T>) == 8 ? 0 : 7e-8);
    return {u * whole, whole + u * density, relative * std::fabs(u) * tail + unit * std::fabs(u * whole), relative * (tail + std::fabs(u) * density) + 4 * unit};
  }
  const bool tanh = activation == Activation::kGeluTanh;
  const double twice = tanh ? 2 * kRoot * (u + kCubic * u * u * u) : u, steep = tanh ? 2 * kRoot * (1 + 3 * kCubic * u * u) : 1;
  const double s = 1 / (1 + std::exp(-twice)), value = std::fabs(u * s);
  const bool shorter = tanh && sizeof(T) == 2;  // as for bias_gelu
  return {u * s, s + u * s * (1 - s) * steep, unit * (8 + 12 * std::fabs(twice)) * value + (shorter ? 0x1p-13 * value + 0x1p-24 : 0),
          unit * 40 * (1 + std::fabs(twice)) + (shorter ? 0x1p-18 : 0)};
}

template <typename T> void check_glu(Dtype dtype, int64_t rows, int64_t columns) {
  const double unit = kUnit<Wide<T>>;
  Values<T> packed(rows * 2 * columns), gradient(rows * 2 * columns), grad(rows * columns), out(rows * columns);
  T *const gate = packed.data(), *const dgate = gradient.data();
  for (const Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh}) {
    glu_cpu({dtype, activation, gate, gate + columns, out.data(), rows, columns, 2 * columns, 2 * columns}, 0, rows * columns);
    glu_backward_cpu({dtype, activation, grad.data(), gate, gate + columns, dgate, dgate + columns, rows, columns, 2 * columns, 2 * columns, 2 * columns}, 0, rows * columns);
    for (int64_t i = 0; i < rows * columns; ++i) {
      const int64_t at = i / columns * 2 * columns + i % columns;
      const double up = packed[at + columns], both = grad[i] * up;
      const Activated exact = activated<T>(activation, packed[at]);
      expect<T>("glu", i, out[i], exact.value * up, std::fabs(up) * (exact.value_error + unit * std::fabs(exact.value)));
      expect<T>("glu's dgate", i, gradient[at], exact.slope * both, std::fabs(both) * (exact.slope_error + 2 * unit * std::fabs(exact.slope)));
      expect<T>("glu's dup", i, gradient[at + columns], exact.value * grad[i], std::fabs(grad[i]) * (exact.value_error + unit * std::fabs(exact.value)));
    }
  }
}

// ---- AdamW

template <typename T, typename G, typename C> void check_adamw(Dtype dtype, Dtype gradient_dtype, Dtype copy_dtype, int64_t count, bool amsgrad) {
  constexpr bool kCopies = !std::is_same_v<C, T>;
  Values<T> p(count), mean(count), square(count), most(count);
  Values<G> gradient(count);
  Values<C> copy(count);
  for (int64_t i = 0; i < count; ++i) {
    for (auto* moment : {&square, &most}) moment->of[static_cast<size_t>(i)] *= moment->of[static_cast<size_t>(i)];
    if constexpr (kCopies) native_build::narrow(p.of[static_cast<size_t>(i)], copy.of[static_cast<size_t>(i)]);
  }
  const Values<T> old_p = p, old_mean = mean, old_square = square, old_most = most;
  const int64_t chunks = (count + kChunk - 1) / kChunk;
  std::vector<double> sums(static_cast<size_t>(chunks));
  gradient_norm_chunks_cpu({dtype, {{gradient.data(), count, 0, gradient_dtype}}, chunks, sums.data(), nullptr}, 0, chunks);
  double squares = 0, exact_squares = 0;
  for (const double sum : sums) squares += sum;
  for (int64_t i = 0; i < count; ++i) exact_squares += gradient[i] * gradient[i];
  // Up to 64 terms are added in the narrow type before a sum goes on in float64.
  expect<T>("the squared norm", 0, squares, exact_squares, 66 * kUnit<T> * exact_squares);

  const double lr = 0.1, beta1 = 0.9, beta2 = 0.99, eps = 1e-8, decay = 0.01, max_norm = 1, unit = kUnit<T>;
  const float step = 3;
  const T norm = static_cast<T>(std::sqrt(exact_squares));
  AdamW update{dtype, gradient_dtype, copy_dtype, {}, chunks, &norm, nullptr, lr, beta1, beta2, eps, decay, max_norm, amsgrad, false};
  update.parameters.push_back({p.data(), gradient.data(), mean.data(), square.data(), amsgrad ? most.data() : nullptr, kCopies ? copy.data() : nullptr, &step, count, 0});
  adamw_cpu(update, 0, chunks);
  const double clip = std::fmin(1.0, max_norm / (static_cast<double>(norm) + 1e-6));
  for (int64_t i = 0; i < count; ++i) {
    const double g = gradient[i] * clip, m = beta1 * old_mean[i] + (1 - beta1) * g, v = beta2 * old_square[i] + (1 - beta2) * g * g;
    const double w = amsgrad ? std::fmax(old_most[i], v) : v;
    const double change = lr / (1 - std::pow(beta1, step)) * m / (std::sqrt(w) / std::sqrt(1 - std::pow(beta2, step)) + eps);
    const double size_of_m = beta1 * std::fabs(old_mean[i]) + (1 - beta1) * std::fabs(g), spread = std::fabs(m) > 0 ? size_of_m / std::fabs(m) : 0;
    expect<T>("AdamW's mean", i, mean[i], m, 8 * unit * size_of_m);
    expect<T>("AdamW's square", i, square[i], v, 16 * unit * v);
    expect<T>("AdamW's parameter", i, p[i], old_p[i] * (1 - lr * decay) - change, unit * (4 * std::fabs(old_p[i]) + 24 * std::fabs(change) * (1 + spread)));
    if constexpr (kCopies) {
      C rounded;
      native_build::narrow(p.of[static_cast<size_t>(i)], rounded);
      expect<double>("AdamW's copy", i, copy[i], static_cast<double>(widen(rounded)), 0);
    }
  }
}

// ---- products of matrices

template <typename T> void check_mm(Dtype dtype, int64_t rows, int64_t columns, int64_t depth) {
  Values<T> a(rows * depth), b(depth * columns), bias(columns), out(rows * columns);
  for (const bool turned : {false, true}) {
    const int64_t a_row = turned ? 1 : depth, a_step = turned ? rows : 1, b_step = turned ? 1 : columns, b_column = turned ? depth : 1;
    mm_cpu({dtype, a.data(), a_row, a_step, b.data(), b_step, b_column, turned ? bias.data() : nullptr, out.data(), rows, columns, depth, 2}, 0, 2);
    for (int64_t i = 0; i < rows * columns; ++i) {
      double exact = turned ? bias[i % columns] : 0, size = std::fabs(exact);
      for (int64_t k = 0; k < depth; ++k) {
        const double term = a[i / columns * a_row + k * a_step] * b[k * b_step + i % columns * b_column];
        exact += term, size += std::fabs(term);
      }
      expect<T>("mm", i, out[i], exact, static_cast<double>(depth + 1) * kUnit<Wide<T>> * size);
    }
  }
}

// ---- attention

template <class Steps, class Call> void run(const Steps& steps, const Call& call) {
  for (const auto& step : steps) {
    std::atomic<int64_t> next{0};
    if (step.tasks > 0) step.run(call, next);
  }
}

// One number, and a bound of the error of the kernel's.
struct Bounded {
  double exact = 0, error = 0;
};

template <typename T> void check_attention(flash::ScalarType dtype, int64_t size, int64_t queries, int64_t keys, bool causal) {
  using W = Wide<T>;
  const double unit = kUnit<W>, scale = 0.3, terms = static_cast<double>(size) + 8;
  const flash::Problem problem{dtype, 1, 1, 1, queries, keys, size, scale, causal};
  Values<T> q(queries * size), k(keys * size), v(keys * size), grad(queries * size), out(queries * size), dq(queries * size), dk(keys * size), dv(keys * size);
  Values<W> lse(queries);
  const auto view = [&](Values<T>& of) { return flash::Tensor{of.data(), static_cast<int64_t>(of.of.size()), static_cast<int64_t>(of.of.size()), size}; };
  std::vector<char> forward_space(static_cast<size_t>(flash::forward_cpu_workspace_bytes(problem)));
  std::vector<char> backward_space(static_cast<size_t>(flash::backward_cpu_workspace_bytes(problem)));
  run(flash::forward_cpu_steps(problem), flash::Forward{problem, view(q), view(k), view(v), view(out), lse.data(), forward_space.data()});
  run(flash::backward_cpu_steps(problem), flash::Backward{problem, view(q), view(k), view(v), view(out), view(grad), lse.data(), nullptr, view(dq), view(dk), view(dv), backward_space.data()});

  const auto dot = [&](const Values<T>& a, int64_t row_a, const Values<T>& b, int64_t row_b) {
    Bounded sum;
    for (int64_t d = 0; d < size; ++d) {
      const double term = a[row_a * size + d] * b[row_b * size + d];
      sum.exact += term, sum.error += terms * unit * std::fabs(term);
    }
    return sum;
  };
  std::vector<Bounded> dq_all(static_cast<size_t>(queries * size)), dk_all(static_cast<size_t>(keys * size)), dv_all(dk_all.size());
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t seen = causal ? std::min(keys, i + 1 + keys - queries) : keys;  // aligned at the last key
    std::vector<double> p(static_cast<size_t>(seen));
    double total = 0, largest_error = 0, largest = 0;
    for (int64_t j = 0; j < seen; ++j) {
      const Bounded s = dot(q, i, k, j);
      largest_error = std::fmax(largest_error, scale * s.error);
      largest = std::fmax(largest, scale * std::fabs(s.exact));
      total += p[static_cast<size_t>(j)] = std::exp(scale * s.exact);
    }
    expect<W>("attention's lse", i, lse[i], std::log(total), largest_error + unit * (static_cast<double>(seen) + 8 + 4 * largest));
    // The relative error of a probability: of its score, in the numerator and the sum, of the exponents, of the sum, of 2^t.
    const double relative = 2 * largest_error + unit * (static_cast<double>(seen) + 40 + 8 * largest);
    double mean_of_dp = 0, error_of_mean = 0;  // D = sum over d of grad * out
    for (int64_t d = 0; d < size; ++d) {
      Bounded o;
      for (int64_t j = 0; j < seen; ++j) {
        const double term = p[static_cast<size_t>(j)] / total * v[j * size + d];
        o.exact += term, o.error += (relative + unit * static_cast<double>(seen)) * std::fabs(term);
      }
      expect<T>("attention", i * size + d, out[i * size + d], o.exact, o.error);
      const double g = grad[i * size + d];
      mean_of_dp += g * o.exact;
      error_of_mean += std::fabs(g) * (o.error + (kUnit<T> + terms * unit) * (std::fabs(o.exact) + o.error) + kTiny<T>);
    }
    for (int64_t j = 0; j < seen; ++j) {
      const double weight = p[static_cast<size_t>(j)] / total;
      const Bounded dp = dot(grad, i, v, j);
      const double ds = weight * (dp.exact - mean_of_dp);
      const double error = weight * (2 * relative * std::fabs(dp.exact - mean_of_dp) + dp.error + error_of_mean + 4 * unit * (std::fabs(dp.exact) + std::fabs(mean_of_dp)));
      const auto add = [&](Bounded& to, double factor, double its_error, double other, int64_t count) {
        to.exact += factor * other;
        to.error += (its_error + static_cast<double>(count + 4) * unit * std::fabs(factor)) * std::fabs(other);
      };
      for (int64_t d = 0; d < size; ++d) {
        add(dq_all[static_cast<size_t>(i * size + d)], scale * ds, scale * error, k[j * size + d], seen);
        add(dk_all[static_cast<size_t>(j * size + d)], scale * ds, scale * error, q[i * size + d], queries);
        add(dv_all[static_cast<size_t>(j * size + d)], weight, 2 * relative * weight, grad[i * size + d], queries);
      }
    }
  }
  const auto compare = [](const char* what, const Values<T>& got, const std::vector<Bounded>& all) {
    for (size_t i = 0; i < all.size(); ++i) expect<T>(what, static_cast<int64_t>(i), got[static_cast<int64_t>(i)], all[i].exact, all[i].error);
  };
  compare("attention's dq", dq, dq_all);
  compare("attention's dk", dk, dk_all);
  compare("attention's dv", dv, dv_all);
}

template <typename T> void all(Dtype dtype) {
  for (const int64_t columns : {1, 31, 64, 300}) {
    check_bias_gelu<T>(dtype, 37, columns);
    check_glu<T>(dtype, 37, columns);
  }
  for (const int64_t size : {7, 64, 80}) {
    for (const bool causal : {false, true}) check_attention<T>(static_cast<flash::ScalarType>(dtype), size, 70, 131, causal);
  }
  check_attention<T>(static_cast<flash::ScalarType>(dtype), 32, 3, 600, false);  // parts of the keys, merged
  for (const int64_t depth : {1, 177}) check_mm<T>(dtype, 17, 50, depth);
}

}  // namespace

int main() {
  all<float>(Dtype::kFloat32);
  all<double>(Dtype::kFloat64);
  all<Half>(Dtype::kFloat16);
  all<BFloat16>(Dtype::kBFloat16);
  for (const bool amsgrad : {false, true}) {
    check_adamw<float, float, float>(Dtype::kFloat32, Dtype::kFloat32, Dtype::kFloat32, kChunk + 33, amsgrad);
    check_adamw<double, double, double>(Dtype::kFloat64, Dtype::kFloat64, Dtype::kFloat64, 1000, amsgrad);
    check_adamw<float, BFloat16, BFloat16>(Dtype::kFloat32, Dtype::kBFloat16, Dtype::kBFloat16, 1001, amsgrad);
    check_adamw<float, float, Half>(Dtype::kFloat32, Dtype::kFloat32, Dtype::kFloat16, 1001, amsgrad);
  }
  return failures != 0;
}

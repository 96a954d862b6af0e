// Compares the CPU kernels with plain loops in float64, within bounds derived from their roundings. For any processor:
// scripts/tests/test_aarch64.py runs it for this one and, emulated, for arm64. Prints what differs, and returns whether anything does.

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
#ifdef RMS_NORM_CPU_LEVEL
using namespace rms_norm::RMS_NORM_CPU_LEVEL;
#endif
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
  double operator[](int64_t i) const { return static_cast<double>(native_build::widen(of[static_cast<size_t>(i)])); }
};

// `computed`: the error before the result is rounded to T.
template <typename T> void expect(const char* what, int64_t at, double got, double exact, double computed) {
  const double bound = computed + kUnit<T> * (std::fabs(exact) + computed) + kTiny<T>;
  if (std::fabs(got - exact) <= bound) return;  // NaN is not
  if (++failures <= 20) std::printf("%s, %zu bytes, element %lld: expected %.9g within %.2g, got %.9g\n", what, sizeof(T), static_cast<long long>(at), exact, bound, got);
}

template <typename T> void check(Type type, int64_t rows, int64_t columns) {
  using A = Wide<T>;
  constexpr double kEps = 1e-6;
  // A sum of a block of columns is spread over 16 lanes or more, so an element is in at most 64 additions there and 5 across the lanes.
  const double unit = 96 * kUnit<A>;
  Values<T> x(rows * columns), residual(rows * columns), dy(rows * columns), ds(rows * columns), y(rows * columns), s(rows * columns), dx(rows * columns);
  Values<A> weight(columns), dweight(columns), rstd(rows);
  const auto in_order = [&](Values<T>& of) { return Rows{of.data(), rows, 0, columns}; };
  const Shape shape{rows, columns, type, type == Type::float64 ? Type::float64 : Type::float32, 0, nullptr};
  const Weight shifted{weight.data(), 1.0};
  forward({shape, in_order(x), in_order(residual), shifted, kEps, false, y.data(), s.data(), rstd.data(), nullptr});
  Backward call{shape, in_order(dy), in_order(ds), in_order(s), shifted, rstd.data(), false, true, dx.data(), dweight.data(), nullptr};
  std::vector<char> workspace(static_cast<size_t>(backward_workspace(call)));
  call.workspace = workspace.data();
  backward(call);

  std::vector<double> sums(static_cast<size_t>(columns)), sizes(sums.size());
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0, products = 0, size_of_products = 0;
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
      expect<T>("s", i, s[i], x[i] + residual[i], kUnit<A> * std::fabs(x[i] + residual[i]));
      const double product = dy[i] * (weight[i % columns] + 1) * s[i];
      squares += s[i] * s[i], products += product, size_of_products += std::fabs(dy[i] * s[i]) * (std::fabs(weight[i % columns]) + 1);
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(columns) + kEps);
    const double pull = scale * scale * scale * products / static_cast<double>(columns), size_of_pull = scale * scale * scale * size_of_products / static_cast<double>(columns);
    expect<A>("rstd", row, rstd[row], scale, unit * scale);
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
      const double w = weight[i % columns] + 1, size_of_w = std::fabs(weight[i % columns]) + 1;
      expect<T>("y", i, y[i], s[i] * scale * w, unit * std::fabs(s[i]) * scale * size_of_w);
      const double size = scale * std::fabs(dy[i]) * size_of_w + std::fabs(s[i]) * size_of_pull + std::fabs(ds[i]);
      expect<T>("dx", i, dx[i], scale * dy[i] * w - s[i] * pull + ds[i], 4 * unit * size);
      sums[static_cast<size_t>(i % columns)] += dy[i] * s[i] * scale;
      sizes[static_cast<size_t>(i % columns)] += std::fabs(dy[i] * s[i] * scale);
    }
  }
  for (int64_t i = 0; i < columns; ++i) expect<A>("dweight", i, dweight[i], sums[static_cast<size_t>(i)], (unit + 64 * kUnit<A>) * sizes[static_cast<size_t>(i)]);
}

template <typename T> void all(Type type) {
  for (const int64_t rows : {1, 3, 130}) {
    for (const int64_t columns : {1, 7, 64, 65, 1024, 1100}) check<T>(type, rows, columns);
  }
  check<T>(type, 2, 70001);  // blocks of columns, on several threads
}

}  // namespace

int main() {
  all<float>(Type::float32);
  all<double>(Type::float64);
  all<Half>(Type::float16);
  all<BFloat16>(Type::bfloat16);
  return failures != 0;
}

// Attention on the CPU: blocks of 64 rows and tiles of 64, so that the scores stay in the first-level cache. The compiler
// vectorises the inner loops over neighbouring elements. The algorithm is that of the GPU kernels: online softmax in the
// forward pass; in the backward pass, the probabilities are recomputed from the log-sum-exp, once for the gradients of the
// queries and once for those of the keys. No two tasks write to the same place.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../common/cpu.h"
#include "check.h"
#include "flash_attention.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FLASH_AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace custom_ops::flash_attention {
namespace {

constexpr int64_t kBlock = 64;

template <typename T>
CUSTOM_OPS_INLINE T* row_of(const Tensor& tensor, int64_t batch, int64_t head, int64_t row) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride +
         row * tensor.seq_stride;
}

// Rows of one head in the type of the arithmetic: unchanged, or transposed for the right side of the scores.
template <typename Wide>
struct Rows {
  int64_t count = 0;
  std::vector<Wide> plain, turned;

  explicit Rows(int64_t head_size) : plain(kBlock * head_size), turned(kBlock * head_size) {}

  template <typename T>
  CUSTOM_OPS_INLINE void load(const Tensor& tensor, int64_t batch, int64_t head, int64_t first, int64_t end,
                         int64_t head_size) {
    count = std::min(kBlock, end - first);
    std::fill(turned.begin(), turned.end(), Wide{0});
    for (int64_t i = 0; i < count; ++i) {
      const T* row = row_of<const T>(tensor, batch, head, first + i);
      for (int64_t d = 0; d < head_size; ++d) plain[i * head_size + d] = widen(row[d]);
    }
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = 0; d < head_size; ++d) turned[d * kBlock + i] = plain[i * head_size + d];
    }
  }
};

// scores (kBlock x kBlock) = left right^T
template <typename Wide>
CUSTOM_OPS_INLINE void multiply_rows(Wide* scores, const Rows<Wide>& left, const Rows<Wide>& right, int64_t head_size) {
  for (int64_t i = 0; i < left.count; ++i) {
    Wide row[kBlock] = {};
    const Wide* own = left.plain.data() + i * head_size;
    for (int64_t d = 0; d < head_size; ++d) {
      const Wide factor = own[d];
      const Wide* other = right.turned.data() + d * kBlock;
      for (int64_t j = 0; j < kBlock; ++j) row[j] += factor * other[j];
    }
    std::copy(row, row + kBlock, scores + i * kBlock);
  }
}

// sums (rows x head_size) = sums * correction + weights values. A tile's product is summed from zero, so that long rows
// lose fewer bits.
template <typename Wide>
CUSTOM_OPS_INLINE void add_weighted(std::vector<Wide>& sums, const Wide* weights, int64_t rows, const Rows<Wide>& values,
                               const Wide* correction, int64_t head_size, std::vector<Wide>& product) {
  for (int64_t i = 0; i < rows; ++i) {
    std::fill(product.begin(), product.end(), Wide{0});
    for (int64_t j = 0; j < values.count; ++j) {
      const Wide weight = weights[i * kBlock + j];
      const Wide* value = values.plain.data() + j * head_size;
      for (int64_t d = 0; d < head_size; ++d) product[d] += weight * value[d];
    }
    Wide* sum = sums.data() + i * head_size;
    const Wide factor = correction == nullptr ? Wide{1} : correction[i];
    for (int64_t d = 0; d < head_size; ++d) sum[d] = sum[d] * factor + product[d];
  }
}

int64_t blocks_of(int64_t rows) { return (rows + kBlock - 1) / kBlock; }

struct Place {
  int64_t batch, head, first;
};
Place place_of(int64_t task, int64_t rows, int64_t heads) {
  const int64_t blocks = blocks_of(rows);
  return {task / blocks / heads, task / blocks % heads, task % blocks * kBlock};
}

template <typename T>
CUSTOM_OPS_INLINE void forward_block(const Forward& args, int64_t task) {
  using Wide = typename WideOf<T>::type;
  constexpr Wide kInfinity = std::numeric_limits<Wide>::infinity();
  const Problem& problem = args.problem;
  const int64_t head_size = problem.head_size;
  const Place at = place_of(task, problem.seq_q, problem.heads_q);
  const int64_t head_kv = at.head / (problem.heads_q / problem.heads_kv);
  const Wide scale = static_cast<Wide>(problem.scale);

  Rows<Wide> q(head_size), k(head_size), v(head_size);
  q.template load<T>(args.q, at.batch, at.head, at.first, problem.seq_q, head_size);
  std::vector<Wide> out(kBlock * head_size), product(head_size), scores(kBlock * kBlock);
  Wide maximum[kBlock], sum[kBlock] = {}, correction[kBlock];
  std::fill(maximum, maximum + kBlock, -kInfinity);

  const int64_t keys = problem.causal ? std::min(problem.seq_kv, at.first + q.count) : problem.seq_kv;
  for (int64_t first = 0; first < keys; first += kBlock) {
    k.template load<T>(args.k, at.batch, head_kv, first, keys, head_size);
    v.template load<T>(args.v, at.batch, head_kv, first, keys, head_size);
    multiply_rows(scores.data(), q, k, head_size);
    for (int64_t i = 0; i < q.count; ++i) {
      Wide* row = scores.data() + i * kBlock;
      const int64_t visible = problem.causal ? std::clamp<int64_t>(at.first + i + 1 - first, 0, k.count) : k.count;
      Wide largest = maximum[i];
      for (int64_t j = 0; j < visible; ++j) {
        row[j] *= scale;
        largest = row[j] > largest ? row[j] : largest;
      }
      correction[i] = visible == 0 ? Wide{1} : std::exp(maximum[i] - largest);
      Wide added = 0;
      for (int64_t j = 0; j < visible; ++j) added += row[j] = std::exp(row[j] - largest);
      std::fill(row + visible, row + kBlock, Wide{0});
      sum[i] = sum[i] * correction[i] + added;
      maximum[i] = largest;
    }
    add_weighted(out, scores.data(), q.count, v, correction, head_size, product);
  }

  for (int64_t i = 0; i < q.count; ++i) {
    T* row = row_of<T>(args.out, at.batch, at.head, at.first + i);
    for (int64_t d = 0; d < head_size; ++d) narrow(keys == 0 ? Wide{0} : out[i * head_size + d] / sum[i], row[d]);
    if (args.lse == nullptr) continue;
    const int64_t index = (at.batch * problem.heads_q + at.head) * problem.seq_q + at.first + i;
    static_cast<Wide*>(args.lse)[index] = keys == 0 ? -kInfinity : maximum[i] + std::log(sum[i]);
  }
}

// The log-sum-exp and delta (the sum of out times its gradient, minus the gradient of lse) of a range of queries.
template <typename T, typename Wide>
CUSTOM_OPS_INLINE void load_statistics(const Backward& args, int64_t batch, int64_t head, int64_t first, int64_t count,
                                  Wide* lse, Wide* delta) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = (batch * args.problem.heads_q + head) * args.problem.seq_q + first + i;
    const T *out = row_of<const T>(args.out, batch, head, first + i),
            *grad = row_of<const T>(args.grad_out, batch, head, first + i);
    Wide sum = 0;
    for (int64_t d = 0; d < args.problem.head_size; ++d) sum += widen(out[d]) * widen(grad[d]);
    lse[i] = static_cast<const Wide*>(args.lse)[index];
    delta[i] = sum - (args.grad_lse == nullptr ? Wide{0} : static_cast<const Wide*>(args.grad_lse)[index]);
  }
}

template <typename T, typename Wide>
CUSTOM_OPS_INLINE void write_rows(const Tensor& to, const Place& at, int64_t count, const std::vector<Wide>& sums,
                             Wide factor, int64_t head_size) {
  for (int64_t i = 0; i < count; ++i) {
    T* row = row_of<T>(to, at.batch, at.head, at.first + i);
    for (int64_t d = 0; d < head_size; ++d) narrow(sums[i * head_size + d] * factor, row[d]);
  }
}

// One block of rows of dQ (kKeys: of dK and dV), over all tiles of the other side.
template <typename T, bool kKeys>
CUSTOM_OPS_INLINE void backward_block(const Backward& args, int64_t task) {
  using Wide = typename WideOf<T>::type;
  const Problem& problem = args.problem;
  const int64_t head_size = problem.head_size, group = problem.heads_q / problem.heads_kv;
  const Place at = place_of(task, kKeys ? problem.seq_kv : problem.seq_q, kKeys ? problem.heads_kv : problem.heads_q);
  const int64_t rows_end = kKeys ? problem.seq_kv : problem.seq_q, tiles_end = kKeys ? problem.seq_q : problem.seq_kv;
  const Wide scale = static_cast<Wide>(problem.scale);

  Rows<Wide> first(head_size), second(head_size), tile_first(head_size), tile_second(head_size);
  first.template load<T>(kKeys ? args.k : args.q, at.batch, at.head, at.first, rows_end, head_size);
  second.template load<T>(kKeys ? args.v : args.grad_out, at.batch, at.head, at.first, rows_end, head_size);
  std::vector<Wide> sum_first(kBlock * head_size), sum_second(kBlock * head_size), product(head_size);
  std::vector<Wide> p(kBlock * kBlock), ds(kBlock * kBlock);
  Wide lse[kBlock], delta[kBlock];
  if (!kKeys) load_statistics<T>(args, at.batch, at.head, at.first, first.count, lse, delta);

  const int64_t begin = problem.causal && kKeys ? at.first : 0;
  const int64_t end = problem.causal && !kKeys ? std::min(tiles_end, at.first + first.count) : tiles_end;
  const int64_t head_begin = kKeys ? at.head * group : at.head / group,
                head_end = kKeys ? head_begin + group : head_begin + 1;
  for (int64_t head = head_begin; head < head_end; ++head) {
    for (int64_t column = begin; column < end; column += kBlock) {
      tile_first.template load<T>(kKeys ? args.q : args.k, at.batch, head, column, end, head_size);
      tile_second.template load<T>(kKeys ? args.grad_out : args.v, at.batch, head, column, end, head_size);
      if (kKeys) load_statistics<T>(args, at.batch, head, column, tile_first.count, lse, delta);
      multiply_rows(p.data(), first, tile_first, head_size);
      multiply_rows(ds.data(), second, tile_second, head_size);
      for (int64_t i = 0; i < first.count; ++i) {
        for (int64_t j = 0; j < tile_first.count; ++j) {
          const int64_t query = kKeys ? column + j : at.first + i, key = kKeys ? at.first + i : column + j,
                        s = kKeys ? j : i;
          Wide& probability = p[i * kBlock + j];
          probability = problem.causal && key > query ? Wide{0} : std::exp(probability * scale - lse[s]);
          ds[i * kBlock + j] = probability * (ds[i * kBlock + j] - delta[s]);
        }
      }
      add_weighted<Wide>(sum_first, ds.data(), first.count, tile_first, nullptr, head_size, product);
      if (kKeys) add_weighted<Wide>(sum_second, p.data(), first.count, tile_second, nullptr, head_size, product);
    }
  }
  write_rows<T>(kKeys ? args.dk : args.dq, at, first.count, sum_first, scale, head_size);
  if (kKeys) write_rows<T>(args.dv, at, first.count, sum_second, Wide{1}, head_size);
}

int64_t query_blocks(const Problem& problem) { return problem.batch * problem.heads_q * blocks_of(problem.seq_q); }
int64_t key_blocks(const Problem& problem) { return problem.batch * problem.heads_kv * blocks_of(problem.seq_kv); }

template <typename T>
CUSTOM_OPS_INLINE void forward_tasks(const Forward& args, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) forward_block<T>(args, task);
}
template <typename T>
CUSTOM_OPS_INLINE void backward_tasks(const Backward& args, int64_t begin, int64_t end) {
  const int64_t queries = query_blocks(args.problem);
  for (int64_t task = begin; task < end; ++task) {
    if (task < queries) backward_block<T, false>(args, task);
    else backward_block<T, true>(args, task - queries);
  }
}

CUSTOM_OPS_INLINE void run(const Forward& args, int64_t begin, int64_t end) {
  switch (args.problem.dtype) {
    case ScalarType::kFloat32: return forward_tasks<float>(args, begin, end);
    case ScalarType::kFloat64: return forward_tasks<double>(args, begin, end);
    case ScalarType::kFloat16: return forward_tasks<Half>(args, begin, end);
    case ScalarType::kBFloat16: return forward_tasks<BFloat16>(args, begin, end);
  }
}
CUSTOM_OPS_INLINE void run(const Backward& args, int64_t begin, int64_t end) {
  switch (args.problem.dtype) {
    case ScalarType::kFloat32: return backward_tasks<float>(args, begin, end);
    case ScalarType::kFloat64: return backward_tasks<double>(args, begin, end);
    case ScalarType::kFloat16: return backward_tasks<Half>(args, begin, end);
    case ScalarType::kBFloat16: return backward_tasks<BFloat16>(args, begin, end);
  }
}

#ifdef FLASH_AVX2
FLASH_AVX2 void run_avx2(const Forward& args, int64_t begin, int64_t end) { run(args, begin, end); }
FLASH_AVX2 void run_avx2(const Backward& args, int64_t begin, int64_t end) { run(args, begin, end); }
#endif

template <typename Args>
void run_best(const Args& args, int64_t begin, int64_t end) {
#ifdef FLASH_AVX2
  static const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) return run_avx2(args, begin, end);
#endif
  run(args, begin, end);
}

}  // namespace

int64_t forward_cpu_tasks(const Problem& problem) { return query_blocks(problem); }
int64_t backward_cpu_tasks(const Problem& problem) { return query_blocks(problem) + key_blocks(problem); }

const char* forward_cpu(const Forward& args, int64_t begin, int64_t end) {
  if (const char* error = check(args.problem)) return error;
  run_best(args, begin, end);
  return nullptr;
}
const char* backward_cpu(const Backward& args, int64_t begin, int64_t end) {
  if (const char* error = check(args.problem)) return error;
  run_best(args, begin, end);
  return nullptr;
}

}  // namespace custom_ops::flash_attention

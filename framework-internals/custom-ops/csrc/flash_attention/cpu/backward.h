// The backward pass on a CPU: the scores are computed once and serve all three gradients.
//
//   P = exp(S - lse)    dV = P^T dO    dS = P * (dO V^T - delta)    dQ = scale dS K    dK = scale dS^T Q
//
// A task is a part of the queries of the heads that share keys. It adds to sums of dK and dV of its own. Those of the only part of
// its heads are the thread's, which the next task finds in its cache, and are written at once; those of several lie in the
// workspace, and finish_tasks adds the parts up, in their order. The number of parts depends on the problem alone, so the gradients
// do not depend on the number of threads.
#pragma once

#include <atomic>

#include "forward.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace flash_attention {
namespace {

// A block of rows of queries or of their gradients, in the layouts of the products.
template <class Product> struct Side {
  using Unit = typename Product::Unit;
  using Element = typename Product::Element;

  explicit Side(int64_t width) : rows(kQueries * width), turned(kQueries * width / Product::kDepth), paired(Product::kDepth == 1 ? 0 : kQueries / 2 * width) {}

  template <typename T> void load(const T* from, int64_t stride, int64_t count, int64_t columns, int64_t size, int64_t width, double scale) {
    copy_rows<Element>(from, stride, count, size, width, static_cast<Element*>(rows));
    turn_rows(static_cast<Element*>(rows), count * width, scale);
    clear(rows + count * width, (columns - count) * width);
    transpose(reinterpret_cast<const Unit*>(static_cast<Element*>(rows)), width / Product::kDepth, columns, width / Product::kDepth, static_cast<Unit*>(turned), kQueries);
#if defined(__AVX512BF16__)
    if constexpr (Product::kDepth == 2) pair_rows(rows, width, columns, columns, width, width, paired);
#endif
  }
  // The rows as the right side of a product that sums over them.
  const Unit* right() const {
    if constexpr (Product::kDepth == 1) return rows;
    else return paired;
  }

  Buffer<Element> rows;    // (queries, width)
  Buffer<Unit> turned;     // (width, queries)
  Buffer<int32_t> paired;  // pairs of neighbouring rows
};

// In the workspace: the sums of dK and dV of each task of several parts, (seq_kv up to a multiple of 16, width) each; then, where the
// keys are several chunks, those of dQ, transposed, of every block.
template <typename Sum> Sum* sums_of(const Backward& args, int64_t task) {
  return static_cast<Sum*>(args.workspace) + task * 2 * rounded_up(args.problem.seq_kv, 16) * width_cpu(args.problem);
}

template <typename T, typename Sum> void write_sums(const Tensor& to, int64_t batch, int64_t head, int64_t row, const Sum* sums, Sum factor, int64_t size) {
  T* out = row_of<T>(to, batch, head, row);
  for (int64_t d = 0; d < size; d += simd::kLanes<Sum>) simd::store(simd::load(sums + d) * factor, out + d, size - d);
}

// A block of keys: which = 0 is dK, 1 is dV.
template <typename T, typename Sum> void write_keys(const Backward& args, int64_t batch, int64_t head_kv, int64_t first, int which, const Sum* sums) {
  const Problem& problem = args.problem;
  const Sum factor = which == 0 ? static_cast<Sum>(std::fabs(problem.scale)) : Sum{1};
  for (int64_t i = 0; i < smaller(kQueries, problem.seq_kv - first); ++i) {
    write_sums<T>(which == 0 ? args.dk : args.dv, batch, head_kv, first + i, sums + i * width_cpu(problem), factor, problem.head_size);
  }
}

template <typename T> class BackwardTask {
  using Product = typename ProductOf<T>::type;
  using Unit = typename Product::Unit;
  using Sum = typename Product::Sum;
  using Element = typename Product::Element;
  using Vector = simd::Vector<Sum>;
  static constexpr int64_t kDepth = Product::kDepth;
  static constexpr Sum kLog2E = Sum(1.44269504088896340736);

 public:
  explicit BackwardTask(const Backward& args)
      : args_(args), problem_(args.problem), size_(problem_.head_size), width_(width_cpu(problem_)),
        chunk_(backward_cpu_chunk(problem_)), q_(width_), grad_(width_),
        keys_(kKeys * width_), values_(kKeys * width_), packed_(kDepth == 1 ? 0 : chunk_ / 2 * width_), buffer_(kDepth == 1 ? 0 : kKeys / 2 * width_),
        scores_(kKeys * kQueries), grads_(kKeys * kQueries), rows_p_(kDepth == 1 ? 0 : kKeys * kQueries),
        rows_ds_(kDepth == 1 ? 0 : kKeys * kQueries), more_(2 * kKeys * kQueries), bent_(problem_.features.softcap == 0 ? nullptr : static_cast<Sum*>(more_)),
        whole_(args.bias_gradient == nullptr ? nullptr : more_ + kKeys * kQueries), pairs_(kDepth == 1 ? 0 : kKeys / 2 * kQueries), out_(kQueries * width_),
        sums_(backward_cpu_parts(problem_) == 1 ? 2 * rows_ * width_ : 0), dq_(chunk_ >= problem_.seq_kv ? kQueries * width_ : 0) {}

  void run(int64_t task) {
    const int64_t parts = backward_cpu_parts(problem_), batch = task / parts / problem_.heads_kv, head_kv = task / parts % problem_.heads_kv;
    if (parts > 1) return run_part(batch, head_kv, task % parts, parts, sums_of<Sum>(args_, task));
    run_part(batch, head_kv, 0, 1, sums_);
    for (int64_t first = 0; first < problem_.seq_kv; first += kQueries) {
      for (int which = 0; which < 2; ++which) write_keys<T>(args_, batch, head_kv, first, which, sums_ + (which * rows_ + first) * width_);
    }
  }

 private:
  // The blocks of queries `part`, `part` + `parts`, … of the heads that read head_kv. The keys are taken in chunks that stay in the
  // second-level cache with the sums of their gradients, while all these queries pass.
  void run_part(int64_t batch, int64_t head_kv, int64_t part, int64_t parts, Sum* dk) {
    const int64_t group = problem_.heads_q / problem_.heads_kv, blocks = blocks_cpu(problem_.seq_q);
    Sum* const dv = dk + rows_ * width_;
    clear(dk, 2 * rows_ * width_);
    for (int64_t key = 0; key == 0 || key < problem_.seq_kv; key += chunk_) {
      pack(batch, head_kv, key);
      for (int64_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
        for (int64_t block = part; block < blocks; block += parts) {
          run_block(batch, head, block * kQueries, key, key + chunk_, dk, dv, sums_of_queries((batch * problem_.heads_q + head) * blocks + block));
        }
      }
      if (chunk_ == 0) break;
    }
  }

  Sum* sums_of_queries(int64_t block) {
    if (chunk_ >= problem_.seq_kv) return dq_;
    return sums_of<Sum>(args_, backward_cpu_sums(problem_)) + block * kQueries * width_;
  }

  // The columns of a chunk of keys.
  void pack([[maybe_unused]] int64_t batch, [[maybe_unused]] int64_t head_kv, [[maybe_unused]] int64_t begin) {
#if defined(__AVX512BF16__)
    if constexpr (kDepth == 2) {
      for (int64_t key = begin; key < smaller(begin + chunk_, problem_.seq_kv); key += kKeys) {
        pack_columns<Product>(row_of<const T>(args_.k, batch, head_kv, key), args_.k.seq_stride, smaller(kKeys, problem_.seq_kv - key), size_, width_, buffer_,
                              packed_ + (key - begin) / 2 * width_);
      }
    }
#endif
  }

  // One block of queries and the keys from `begin` to `end` that it sees; dq^T is written with the last of them.
  void run_block(int64_t batch, int64_t head, int64_t first, int64_t begin, int64_t end, Sum* dk, Sum* dv, Sum* dq) {
    count_ = smaller(kQueries, problem_.seq_q - first);
    const Seen seen(problem_, first, count_);
    const int64_t from = begin > seen.low ? begin : seen.low, last = smaller(end, seen.high);
    if (seen.low == seen.high && begin == 0) write(batch, head, first, dq, false);
    if (from >= last) return;
    columns_ = rounded_up(count_, Product::kStep > simd::kLanes<Sum> ? Product::kStep : simd::kLanes<Sum>);
    q_.load(row_of<const T>(args_.q, batch, head, first), args_.q.seq_stride, count_, columns_, size_, width_, problem_.scale);
    grad_.load(row_of<const T>(args_.grad_out, batch, head, first), args_.grad_out.seq_stride, count_, columns_, size_, width_, 1);
    load_statistics(batch, head, first);
    const int64_t head_kv = head / (problem_.heads_q / problem_.heads_kv);
    for (int64_t key = from; key < last; key += kKeys) {
      const int64_t keys = smaller(kKeys, last - key);
      const Rows k = rows_of<Product>(row_of<const T>(args_.k, batch, head_kv, key), args_.k.seq_stride, keys, size_, width_, keys_);
      const Rows v = rows_of<Product>(row_of<const T>(args_.v, batch, head_kv, key), args_.v.seq_stride, keys, size_, width_, values_);
      multiply_turned(k, q_, keys, scores_);
      multiply_turned(v, grad_, keys, grads_);
      if (changes_scores(problem_.features)) change_scores<T, Sum>(problem_, batch, head, first, count_, columns_, key, keys, scores_, bent_);
      seen.hide(static_cast<Sum*>(scores_), key, keys, columns_);
      differentiate(keys);
      if (args_.bias_gradient != nullptr) write_bias_gradient(batch, head, first, key, keys);
      add_queries(kDepth == 1 ? Broadcast{k.data, sizeof(Unit), k.row} : packed_columns<Product>(packed_ + (key - begin) / 2 * width_, width_), keys, dq, key == seen.low);
      add_keys(weights(rows_p_, scores_), grad_, keys, dv + key * width_);
      add_keys(weights(rows_ds_, grads_), q_, keys, dk + key * width_);
    }
    if (last == seen.high) write(batch, head, first, dq, true);
  }

  // The log-sum-exp in powers of two with what its rounding loses, and delta: the sum of out times its gradient, minus the gradient of lse.
  void load_statistics(int64_t batch, int64_t head, int64_t first) {
    const int64_t index = (batch * problem_.heads_q + head) * problem_.seq_q + first;
    for (int64_t i = 0; i < columns_; ++i) {
      const int64_t row = smaller(i, count_ - 1);
      const T *out = row_of<const T>(args_.out, batch, head, first + row), *grad = row_of<const T>(args_.grad_out, batch, head, first + row);
      Vector sum = {};
      for (int64_t d = 0; d < size_; d += simd::kLanes<Sum>) sum = simd::fma(simd::load(out + d, size_ - d), simd::load(grad + d, size_ - d), sum);
      Sum total = 0;
      for (int lane = 0; lane < simd::kLanes<Sum>; ++lane) total += sum[lane];
      if (args_.grad_lse != nullptr) total -= static_cast<const Sum*>(args_.grad_lse)[index + row];
      // A row beyond the last one, or without any key, has no weight.
      const Sum saved = static_cast<const Sum*>(args_.lse)[index + row], infinity = std::numeric_limits<Sum>::infinity();
      const Sum lse = i < count_ && saved != -infinity ? saved : infinity;
      natural_lse_[i] = lse;
      lse_[i] = lse * kLog2E;
      lse_rest_[i] = std::isfinite(lse_[i]) ? std::fma(lse, kLog2E, -lse_[i]) : 0;
      delta_[i] = i < count_ ? total : 0;
    }
  }

  // to (keys x queries) = rows times the transposed queries.
  void multiply_turned(const Rows& rows, const Side<Product>& side, int64_t keys, Sum* to) {
    multiply<Product>({{rows.data, rows.row, sizeof(Unit)}, side.turned, kQueries, rounded_up(size_, Product::kStep) / kDepth, to, kQueries, Old::kNone, nullptr}, keys, columns_);
  }

  // Scores become probabilities, and their gradients those of the scores (divided by the scale): in place, or in bfloat16 rows of
  // both, and pairs of rows of the latter.
  void differentiate(int64_t keys) {
    for (int64_t c = 0; c < columns_; c += simd::kLanes<Sum>) {
      const Vector delta = simd::load(delta_ + c);
      Vector lse_rest = simd::load(lse_rest_ + c);
      Exponents<Sum> exponents = {simd::broadcast(power_factor<Sum>(problem_)), simd::load(lse_ + c)};
      const Vector natural = simd::load(natural_lse_ + c);
      const Vector size = simd::max(natural, -natural);
      if (__builtin_expect(simd::any_above(size < simd::broadcast(std::numeric_limits<Sum>::infinity()) ? size : Vector{}, simd::broadcast(kFar<Sum> / kLog2E)), false)) {
        exponents = far_out<Sum>(scores_ + c, keys, natural_factor<Sum>(problem_), kLog2E, exponents.base, natural, exponents);
        lse_rest = exponents.base == Vector{} ? Vector{} : lse_rest;
      }
      const Vector factor = exponents.factor, lse = exponents.base, rest = lse_rest;
      const auto probability = [&](int64_t j) { return power_of<kIsExact<T>>(simd::fma(simd::load(scores_ + j * kQueries + c), factor, -rest) - lse); };
      const auto gradient = [&](int64_t j, Vector p) {
        const int64_t at = j * kQueries + c;
        const Vector of_score = p * (simd::load(grads_ + at) - delta);
        if (whole_ != nullptr) simd::store(of_score, whole_ + at);
        return bent_ == nullptr ? of_score : of_score * simd::load(bent_ + at);
      };
      if constexpr (kDepth == 1) {
        for (int64_t j = 0; j < keys; ++j) {
          const Vector p = probability(j);
          simd::store(p, scores_ + j * kQueries + c);
          simd::store(gradient(j, p), grads_ + j * kQueries + c);
        }
      } else {
#if defined(__AVX512BF16__)
        for (int64_t j = 0; j < rounded_up(keys, Product::kStep); j += 2) {
          Vector p[2] = {}, ds[2] = {};
          for (int row = 0; row < 2 && j + row < keys; ++row) {
            p[row] = probability(j + row);
            ds[row] = gradient(j + row, p[row]);
          }
          for (int row = 0; row < 2; ++row) {
            const auto narrow_p = _mm512_cvtneps_pbh(p[row]), narrow_ds = _mm512_cvtneps_pbh(ds[row]);
            std::memcpy(static_cast<void*>(rows_p_ + (j + row) * kQueries + c), &narrow_p, sizeof narrow_p);
            std::memcpy(static_cast<void*>(rows_ds_ + (j + row) * kQueries + c), &narrow_ds, sizeof narrow_ds);
          }
          const simd::Ints both = pair(ds[0], ds[1]);
          std::memcpy(pairs_ + j / 2 * kQueries + c, &both, sizeof both);
        }
#endif
      }
    }
  }

  static const char* weights(const BFloat16* rows, const Sum* sums) {
    return kDepth == 1 ? reinterpret_cast<const char*>(sums) : reinterpret_cast<const char*>(rows);
  }

  void write_bias_gradient(int64_t batch, int64_t head, int64_t first, int64_t key, int64_t keys) {
    T* const to = static_cast<T*>(args_.bias_gradient) + ((batch * problem_.heads_q + head) * problem_.seq_q + first) * problem_.seq_kv + key;
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t j = 0; j < keys; ++j) narrow(whole_[j * kQueries + i], to[i * problem_.seq_kv + j]);
    }
  }

  // dQ^T (width x queries) += K^T dS^T
  void add_queries(Broadcast columns, int64_t keys, Sum* dq, bool none_yet) {
    const Unit* right;
    if constexpr (kDepth == 1) right = grads_;
    else right = pairs_;
    multiply<Product>({columns, right, kQueries, rounded_up(keys, Product::kStep) / kDepth, dq, kQueries, none_yet ? Old::kNone : Old::kAdded, nullptr}, size_, columns_);
  }

  // to (keys x width) += the weights' rows times the rows of the side.
  void add_keys(const char* weights, const Side<Product>& side, int64_t keys, Sum* to) {
    const Broadcast left = {weights, kQueries * static_cast<int64_t>(sizeof(Element)), sizeof(Unit)};
    multiply<Product>({left, side.right(), width_, rounded_up(count_, Product::kStep) / kDepth, to, width_, Old::kAdded, nullptr}, keys, width_);
  }

  void write(int64_t batch, int64_t head, int64_t first, Sum* dq, bool any) {
    if (!any) clear(dq, kQueries * width_);
    transpose(static_cast<const Sum*>(dq), kQueries, width_, rounded_up(count_, 8), static_cast<Sum*>(out_), width_);
    for (int64_t i = 0; i < count_; ++i) write_sums<T>(args_.dq, batch, head, first + i, out_ + i * width_, static_cast<Sum>(problem_.scale), size_);
  }

  const Backward& args_;
  const Problem& problem_;
  const int64_t size_, width_, rows_ = rounded_up(problem_.seq_kv, 16), chunk_;
  int64_t count_ = 0, columns_ = 0;
  Side<Product> q_, grad_;
  Buffer<Element> keys_, values_;
  Buffer<int32_t> packed_, buffer_;
  Buffer<Sum> scores_, grads_;
  Buffer<BFloat16> rows_p_, rows_ds_;
  Buffer<Sum> more_;
  Sum* const bent_;   // the derivatives of the soft cap, if there is one
  Sum* const whole_;  // the gradients of the scores before it, if the bias has a gradient
  Buffer<int32_t> pairs_;
  Buffer<Sum> out_;
  Buffer<Sum> sums_, dq_;
  Sum natural_lse_[kQueries], lse_[kQueries], lse_rest_[kQueries], delta_[kQueries];
};

template <typename T> void backward_tasks(const Backward& args, std::atomic<int64_t>& next) {
  const Prepared<typename ProductOf<T>::type> prepared;
  BackwardTask<T> task(args);
  for (int64_t at, tasks = backward_cpu_tasks(args.problem); (at = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task.run(at);
}

// Blocks of keys of several parts: the sums are added and written.
template <typename T> void finish_tasks(const Backward& args, std::atomic<int64_t>& next) {
  using Sum = Wide<T>;
  const Problem& problem = args.problem;
  const int64_t parts = backward_cpu_parts(problem), blocks = blocks_cpu(problem.seq_kv), width = width_cpu(problem), rows = rounded_up(problem.seq_kv, 16);
  const int64_t tasks = problem.batch * problem.heads_kv * blocks;
  for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
    const int64_t head = at / blocks, first = at % blocks * kQueries, count = smaller(kQueries, problem.seq_kv - first);
    for (int which = 0; which < 2; ++which) {
      Sum* const sums = sums_of<Sum>(args, head * parts) + (which * rows + first) * width;
      for (int64_t part = 1; part < parts; ++part) {
        const Sum* others = sums_of<Sum>(args, head * parts + part) + (which * rows + first) * width;
        for (int64_t i = 0; i < count * width; i += simd::kLanes<Sum>) simd::store(simd::load(sums + i) + simd::load(others + i), sums + i);
      }
      write_keys<T>(args, head / problem.heads_kv, head % problem.heads_kv, first, which, sums);
    }
  }
}

}  // namespace
}  // namespace flash_attention
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

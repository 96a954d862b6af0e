// The forward pass on a CPU: a task is a block of queries of one head, and goes over the keys that they see in blocks, or over a
// part of these keys. merge_tasks then puts the parts together, in their order.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>

#include "blocks.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace flash_attention {
namespace {

// Of a head of keys, block `block` of its values, packed after the parts' sums in the workspace; null if each task packs its own.
inline int32_t* packed_block(const Forward& args, int64_t head, int64_t block) {
  const int64_t blocks = packed_blocks_cpu(args.problem), heads = args.problem.batch * args.problem.heads_kv;
  char* const first = static_cast<char*>(args.workspace) + parts_bytes_cpu(args.problem);
  return blocks == 0 ? nullptr : reinterpret_cast<int32_t*>(first) + (head * (blocks / heads) + block) * (kKeys / 2 * width_cpu(args.problem));
}

inline void pack_tasks([[maybe_unused]] const Forward& args, [[maybe_unused]] std::atomic<int64_t>& next) {
#if defined(__AVX512BF16__)
  const Problem& problem = args.problem;
  const int64_t heads = problem.batch * problem.heads_kv, tasks = packed_blocks_cpu(problem), width = width_cpu(problem);
  Buffer<int32_t> buffer(kKeys / 2 * width);
  for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
    const int64_t head = at / (tasks / heads), block = at % (tasks / heads), key = block * kKeys;
    const BFloat16* const from = row_of<const BFloat16>(args.v, head / problem.heads_kv, head % problem.heads_kv, key);
    pack_columns<ProductOf<BFloat16>::type>(from, args.v.seq_stride, smaller(kKeys, problem.seq_kv - key), problem.head_size, width, buffer, packed_block(args, head, block));
  }
#endif
}

template <typename T> class ForwardTask {
  using Product = typename ProductOf<T>::type;
  using Unit = typename Product::Unit;
  using Sum = typename Product::Sum;
  using Element = typename Product::Element;
  using Vector = simd::Vector<Sum>;
  static constexpr int64_t kDepth = Product::kDepth;
  static constexpr bool kWidens = !std::is_same_v<Element, T>;

 public:
  explicit ForwardTask(const Forward& args)
      : args_(args), problem_(args.problem), size_(problem_.head_size), width_(width_cpu(problem_)), parts_(forward_cpu_parts(problem_)),
        factor_(power_factor<Sum>(problem_)),
        rows_(kQueries * width_), queries_(kQueries * width_), keys_(kWidens ? 0 : kKeys * width_), values_(kWidens ? 0 : kKeys * width_),
        scores_(kKeys * kQueries), pairs_(kDepth == 2 ? kKeys / 2 * kQueries : 0), buffer_(kDepth == 2 ? kKeys / 2 * width_ : 0),
        sums_(kQueries * width_), out_(sums_), wide_keys_(problem_, width_), wide_values_(problem_, width_) {}

  // The queries from `first` on, and part `part` of the keys.
  void run(int64_t batch, int64_t head, int64_t first, int64_t part) {
    start(first);
    load_queries(row_of<const T>(args_.q, batch, head, first));
    const int64_t head_kv = head / (problem_.heads_q / problem_.heads_kv), longest = rounded_up((problem_.seq_kv + parts_ - 1) / parts_, kKeys);
    const Seen seen(problem_, first, count_);
    const int64_t begin = part * longest > seen.low ? part * longest : seen.low, end = smaller((part + 1) * longest, seen.high);
    if (parts_ > 1) out_ = sums_of_part(batch, head, first, part);
    for (int64_t key = begin; key < end; key += kKeys) {
      const int64_t keys = smaller(kKeys, end - key);
      score(batch, head_kv, key, keys);
      if (changes_scores(problem_.features)) change_scores<T, Sum>(problem_, batch, head, first, count_, columns_, key, keys, scores_, nullptr);
      seen.hide(static_cast<Sum*>(scores_), key, keys, columns_);
      soften<Product, kIsExact<T>>(scores_, pairs_, keys, columns_, factor_, softmax_);
      add_values(batch, head_kv, key, keys, key == begin);
    }
    if (begin >= end) clear(out_, kQueries * width_);
    if (parts_ == 1) return write(batch, head, first);
    std::memcpy(out_ + kQueries * width_, softmax_.top, sizeof softmax_.top);
    std::memcpy(out_ + kQueries * (width_ + 1), softmax_.total, sizeof softmax_.total);
  }

  // The result from the parts' sums.
  void merge(int64_t batch, int64_t head, int64_t first) {
    start(first);
    out_ = sums_;
    clear(out_, kQueries * width_);
    const Vector factors = simd::broadcast(factor_);
    for (int64_t c = 0; c < columns_; c += simd::kLanes<Sum>) {
      const auto at = [&](int64_t part, int64_t row) { return simd::load(sums_of_part(batch, head, first, part) + row * kQueries + c); };
      Vector top = simd::load(softmax_.top + c), total = {};
      for (int64_t part = 0; part < parts_; ++part) top = simd::max(at(part, width_), top);
      for (int64_t part = 0; part < parts_; ++part) {
        const auto rounded = [&](Vector score) { return simd::fma(score, factors, Vector{}); };  // a plain product may be fused with the difference
        const Vector power = rounded(top), near = rounded(at(part, width_)) - simd::max(power, simd::broadcast(std::numeric_limits<Sum>::lowest()));
        Vector behind = near;
        for (int lane = 0; lane < simd::kLanes<Sum>; ++lane) behind[lane] = is_far<Sum>(power[lane]) ? (at(part, width_)[lane] - top[lane]) * factor_ : near[lane];
        const Vector weight = power_of<true>(behind);
        total = simd::fma(at(part, width_ + 1), weight, total);
        for (int64_t d = 0; d < size_; ++d) {
          Sum* const sum = out_ + d * kQueries + c;
          simd::store(simd::fma(at(part, d), weight, simd::load(sum)), sum);
        }
      }
      simd::store(top, softmax_.top + c);
      simd::store(total, softmax_.total + c);
    }
    write(batch, head, first);
  }

 private:
  void start(int64_t first) {
    count_ = smaller(kQueries, problem_.seq_q - first);
    columns_ = rounded_up(count_, simd::kLanes<Sum>);
    for (int64_t i = 0; i < kQueries; ++i) {
      softmax_.top[i] = -std::numeric_limits<Sum>::infinity();
      softmax_.total[i] = 0;
    }
  }

  Sum* sums_of_part(int64_t batch, int64_t head, int64_t first, int64_t part) const {
    const int64_t block = (batch * problem_.heads_q + head) * blocks_cpu(problem_.seq_q) + first / kQueries;
    return static_cast<Sum*>(args_.workspace) + (block * parts_ + part) * (width_ + 2) * kQueries;
  }

  // The transposed queries, with the last one repeated where there are fewer than a block.
  void load_queries(const T* from) {
    copy_rows<Element>(from, args_.q.seq_stride, count_, size_, width_, static_cast<Element*>(rows_));
    turn_rows(static_cast<Element*>(rows_), count_ * width_, problem_.scale);
    for (int64_t i = count_; i < columns_; ++i) std::memcpy(rows_ + i * width_, rows_ + (count_ - 1) * width_, static_cast<size_t>(width_) * sizeof(Element));
    transpose(reinterpret_cast<const Unit*>(static_cast<Element*>(rows_)), width_ / kDepth, columns_, width_ / kDepth, static_cast<Unit*>(queries_), kQueries);
  }

  Rows block(const Tensor& tensor, int64_t batch, int64_t head_kv, int64_t key, int64_t keys, WidenedBlocks<Element, T>& wide, Element* buffer) {
    const T* const from = row_of<const T>(tensor, batch, head_kv, key);
    if constexpr (kWidens) return wide.block(batch * problem_.heads_kv + head_kv, from, tensor.seq_stride, key);
    else return rows_of<Product>(from, tensor.seq_stride, keys, size_, width_, buffer);
  }

  void score(int64_t batch, int64_t head_kv, int64_t key, int64_t keys) {
    const Rows rows = block(args_.k, batch, head_kv, key, keys, wide_keys_, keys_);
    multiply<Product>({{rows.data, rows.row, sizeof(Unit)}, queries_, kQueries, rounded_up(size_, Product::kStep) / kDepth, scores_, kQueries, Old::kNone, nullptr}, keys, columns_);
  }

  void add_values(int64_t batch, int64_t head_kv, int64_t key, int64_t keys, bool none_yet) {
    Broadcast values;
    const Unit* weights;
    if constexpr (kDepth == 1) {
      const Rows rows = block(args_.v, batch, head_kv, key, keys, wide_values_, values_);
      values = {rows.data, sizeof(Unit), rows.row};
      weights = scores_;
    } else {
      int32_t* packed = packed_block(args_, batch * problem_.heads_kv + head_kv, key / kKeys);
      if (packed == nullptr) {
        packed = reinterpret_cast<int32_t*>(static_cast<Element*>(values_));
        pack_columns<Product>(row_of<const T>(args_.v, batch, head_kv, key), args_.v.seq_stride, keys, size_, width_, buffer_, packed);
      }
      values = packed_columns<Product>(packed, width_);
      weights = pairs_;
    }
    const Old old = none_yet ? Old::kNone : Old::kScaled;
    multiply<Product>({values, weights, kQueries, rounded_up(keys, Product::kStep) / kDepth, out_, kQueries, old, softmax_.correction}, size_, columns_);
  }

  // The largest score in powers of two becomes natural where it is far out.
  void leave_units() {
    const Sum unit = natural_factor<Sum>(problem_);
    for (int64_t i = 0; i < columns_; ++i) {
      const Sum power = softmax_.top[i] * factor_;
      far_[i] = is_far<Sum>(power);
      softmax_.top[i] = far_[i] ? softmax_.top[i] * unit : power;
    }
  }

  // The sink is a key with a score of its own and without a value.
  void add_sink(Sum sink) {
    constexpr Sum kLog2E = Sum(1.44269504088896340736);
    for (int64_t i = 0; i < columns_; ++i) {
      if (!far_[i] && sink * kLog2E > kFar<Sum>) {
        far_[i] = true;
        softmax_.top[i] /= kLog2E;
      }
      const Sum score = far_[i] ? sink : sink * kLog2E, factor = far_[i] ? kLog2E : Sum{1};
      const Sum top = std::max({softmax_.top[i], score, std::numeric_limits<Sum>::lowest()});  // -inf less -inf is NaN
      softmax_.correction[i] = std::exp2((softmax_.top[i] - top) * factor);
      softmax_.total[i] = softmax_.total[i] * softmax_.correction[i] + std::exp2((score - top) * factor);
      softmax_.top[i] = top;
    }
  }

  void write(int64_t batch, int64_t head, int64_t first) {
    Sum* const lse = args_.lse == nullptr ? nullptr : static_cast<Sum*>(args_.lse) + (batch * problem_.heads_q + head) * problem_.seq_q + first;
    Sum* const rows = reinterpret_cast<Sum*>(static_cast<Unit*>(queries_));
    const bool sink = problem_.features.sinks != nullptr;
    // What the total is at least: a query without any key has sums and a total of zero.
    const Vector least = simd::broadcast(hides_rows(problem_) || problem_.seq_kv == 0 ? std::numeric_limits<Sum>::min() : -std::numeric_limits<Sum>::infinity());
    leave_units();
    if (sink) add_sink(static_cast<const Sum*>(problem_.features.sinks)[head]);
    for (int64_t c = 0; c < columns_; c += simd::kLanes<Sum>) {
      Vector inverse = Sum{1} / simd::max(least, simd::load(softmax_.total + c));
      if (sink) inverse *= simd::load(softmax_.correction + c);
      for (int64_t d = 0; d < size_; ++d) simd::store(simd::load(out_ + d * kQueries + c) * inverse, out_ + d * kQueries + c);
    }
    transpose(static_cast<const Sum*>(out_), kQueries, width_, rounded_up(count_, 8), rows, width_);
    for (int64_t i = 0; i < count_; ++i) {
      T* to = row_of<T>(args_.out, batch, head, first + i);
      for (int64_t d = 0; d < size_; d += simd::kLanes<Sum>) simd::store(simd::load(rows + i * width_ + d), to + d, size_ - d);
      if (lse != nullptr) lse[i] = std::fma(softmax_.top[i], far_[i] ? Sum{1} : Sum(0.69314718055994530942), std::log(softmax_.total[i]));
    }
  }

  const Forward& args_;
  const Problem& problem_;
  const int64_t size_, width_, parts_;
  const Sum factor_;
  int64_t count_ = 0, columns_ = 0;
  Buffer<Element> rows_;
  Buffer<Unit> queries_;
  Buffer<Element> keys_, values_;
  Buffer<Sum> scores_;
  Buffer<int32_t> pairs_, buffer_;
  Buffer<Sum> sums_;
  Sum* out_;  // (width, queries)
  WidenedBlocks<Element, T> wide_keys_, wide_values_;
  Softmax<Sum> softmax_;
  bool far_[kQueries];
};

template <typename T> void forward_tasks(const Forward& args, std::atomic<int64_t>& next) {
  const Problem& problem = args.problem;
  const int64_t blocks = blocks_cpu(problem.seq_q), parts = forward_cpu_parts(problem), tasks = query_blocks_cpu(problem) * parts;
  const Prepared<typename ProductOf<T>::type> prepared;
  ForwardTask<T> task(args);
  for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
    // The last block comes first, which a causal mask makes the longest.
    const int64_t block = at / parts, head = block / blocks;
    task.run(head / problem.heads_q, head % problem.heads_q, (blocks - 1 - block % blocks) * kQueries, at % parts);
  }
}

template <typename T> void merge_tasks(const Forward& args, std::atomic<int64_t>& next) {
  const Problem& problem = args.problem;
  const int64_t blocks = blocks_cpu(problem.seq_q), tasks = query_blocks_cpu(problem);
  ForwardTask<T> task(args);
  for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
    task.merge(at / blocks / problem.heads_q, at / blocks % problem.heads_q, at % blocks * kQueries);
  }
}

}  // namespace
}  // namespace flash_attention
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

// The forward pass on a CPU: a task is a block of queries of one head, and goes over the keys that they see in blocks.
#pragma once

#include <atomic>

#include "cpu_blocks.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace flash_attention {
namespace {

template <typename T> class ForwardTask {
  using Product = typename ProductOf<T>::type;
  using Unit = typename Product::Unit;
  using Sum = typename Product::Sum;
  using Element = typename Product::Element;
  static constexpr int64_t kDepth = Product::kDepth;

 public:
  explicit ForwardTask(const Forward& args)
      : args_(args), problem_(args.problem), size_(problem_.head_size), width_(rounded_up(size_, 16)),
        factor_(factor_of<Sum>(problem_.scale)),
        rows_(kQueries * width_), queries_(kQueries * width_), keys_(kKeys * width_), values_(kKeys * width_),
        scores_(kKeys * kQueries), pairs_(kDepth == 2 ? kKeys / 2 * kQueries : 0), out_(kQueries * width_) {}

  void run(int64_t batch, int64_t head, int64_t first) {
    count_ = smaller(kQueries, problem_.seq_q - first);
    columns_ = rounded_up(count_, simd::kLanes<Sum>);
    load_queries(row_of<const T>(args_.q, batch, head, first));
    for (int64_t i = 0; i < kQueries; ++i) {
      softmax_.top[i] = -std::numeric_limits<Sum>::infinity();
      softmax_.total[i] = 0;
    }
    const int64_t head_kv = head / (problem_.heads_q / problem_.heads_kv);
    const int64_t end = problem_.causal ? smaller(problem_.seq_kv, first + count_) : problem_.seq_kv;
    for (int64_t key = 0; key < end; key += kKeys) {
      const int64_t keys = smaller(kKeys, end - key);
      score(row_of<const T>(args_.k, batch, head_kv, key), keys);
      if (problem_.causal) {
        for (int64_t j = 0; j < keys; ++j) hide_before(scores_ + j * kQueries, key + j - first, columns_);
      }
      soften<Product>(scores_, pairs_, keys, columns_, factor_, softmax_);
      add_values(row_of<const T>(args_.v, batch, head_kv, key), keys, key == 0);
    }
    write(batch, head, first, end != 0);
  }

 private:
  // The transposed queries, with the last one repeated where there are fewer than a block.
  void load_queries(const T* from) {
    copy_rows<Element>(from, args_.q.seq_stride, count_, size_, width_, static_cast<Element*>(rows_));
    turn_rows(static_cast<Element*>(rows_), count_ * width_, problem_.scale);
    for (int64_t i = count_; i < columns_; ++i) std::memcpy(rows_ + i * width_, rows_ + (count_ - 1) * width_, static_cast<size_t>(width_) * sizeof(Element));
    transpose(reinterpret_cast<const Unit*>(static_cast<Element*>(rows_)), width_ / kDepth, columns_, width_ / kDepth, static_cast<Unit*>(queries_), kQueries);
  }

  void score(const T* from, int64_t keys) {
    const Rows rows = rows_of<Product>(from, args_.k.seq_stride, keys, size_, width_, keys_);
    multiply<Product>({{rows.data, rows.row, sizeof(Unit)}, queries_, kQueries, (size_ + kDepth - 1) / kDepth, scores_, kQueries, Old::kNone, nullptr}, keys, columns_);
  }

  void add_values(const T* from, int64_t keys, bool none_yet) {
    const Old old = none_yet ? Old::kNone : Old::kScaled;
    Broadcast values;
    const Unit* weights;
    if constexpr (kDepth == 1) {
      const Rows rows = rows_of<Product>(from, args_.v.seq_stride, keys, size_, width_, values_);
      values = {rows.data, sizeof(Unit), rows.row};
      weights = scores_;
    } else {
      int32_t* const paired = reinterpret_cast<int32_t*>(static_cast<Element*>(values_));
      pair_rows(from, args_.v.seq_stride, keys, size_, width_, paired);
      values = {reinterpret_cast<const char*>(paired), sizeof(Unit), width_ * static_cast<int64_t>(sizeof(Unit))};
      weights = pairs_;
    }
    multiply<Product>({values, weights, kQueries, (keys + kDepth - 1) / kDepth, out_, kQueries, old, softmax_.correction}, size_, columns_);
  }

  void write(int64_t batch, int64_t head, int64_t first, bool any) {
    Sum* const lse = args_.lse == nullptr ? nullptr : static_cast<Sum*>(args_.lse) + (batch * problem_.heads_q + head) * problem_.seq_q + first;
    Sum* const rows = reinterpret_cast<Sum*>(static_cast<Unit*>(queries_));
    if (any) {
      for (int64_t c = 0; c < columns_; c += simd::kLanes<Sum>) {
        const simd::Vector<Sum> inverse = Sum{1} / simd::load(softmax_.total + c);
        for (int64_t d = 0; d < size_; ++d) simd::store(simd::load(out_ + d * kQueries + c) * inverse, out_ + d * kQueries + c);
      }
    } else {
      for (int64_t i = 0; i < kQueries * width_; ++i) out_[i] = 0;
    }
    transpose(static_cast<const Sum*>(out_), kQueries, width_, rounded_up(count_, 8), rows, width_);
    for (int64_t i = 0; i < count_; ++i) {
      T* to = row_of<T>(args_.out, batch, head, first + i);
      for (int64_t d = 0; d < size_; d += simd::kLanes<Sum>) simd::store(simd::load(rows + i * width_ + d), to + d, size_ - d);
      if (lse != nullptr) lse[i] = std::fma(softmax_.top[i], Sum(0.69314718055994530942), std::log(softmax_.total[i]));
    }
  }

  const Forward& args_;
  const Problem& problem_;
  const int64_t size_, width_;
  const Sum factor_;
  int64_t count_ = 0, columns_ = 0;
  Buffer<Element> rows_;
  Buffer<Unit> queries_;
  Buffer<Element> keys_, values_;
  Buffer<Sum> scores_;
  Buffer<int32_t> pairs_;
  Buffer<Sum> out_;
  Softmax<Sum> softmax_;
};


template <typename T> void forward_tasks(const Forward& args, std::atomic<int64_t>& next) {
  const Problem& problem = args.problem;
  const int64_t blocks = blocks_cpu(problem.seq_q), tasks = problem.batch * problem.heads_q * blocks;
  ForwardTask<T> task(args);
  for (int64_t at; (at = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
    // The last block comes first, which a causal mask makes the longest.
    task.run(at / blocks / problem.heads_q, at / blocks % problem.heads_q, (blocks - 1 - at % blocks) * kQueries);
  }
}

}  // namespace
}  // namespace flash_attention
CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

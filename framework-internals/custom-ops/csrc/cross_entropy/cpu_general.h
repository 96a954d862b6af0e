// The CPU kernels of the loss with more than cross-entropy in it (kernels.h). cpu.cpp includes this file in its level's namespace.
#pragma once

// tanh, to a few units in the last place: below 0.6 an odd polynomial, since 1 − 2 / (1 + e^2t) would lose digits there.
inline simd::Floats tanh_of(simd::Floats t) {
  const simd::Floats power = simd::exp2(t * simd::broadcast(static_cast<float>(2 * kLog2E)));
  const simd::Floats far = 1.0f - 2.0f / (power + 1.0f), square = t * t;
  simd::Floats near = simd::fma(simd::broadcast(-5.8521675e-3f), square, simd::broadcast(2.0753628e-2f));
  near = simd::fma(near, square, simd::broadcast(-5.3768706e-2f));
  near = simd::fma(near, square, simd::broadcast(1.3331689e-1f));
  near = simd::fma(near, square, simd::broadcast(-3.3333284e-1f));
  near = simd::fma(near * square, t, t);
  return square < simd::broadcast(0.36f) ? near : far;
}
inline simd::Doubles tanh_of(simd::Doubles t) {
  for (int i = 0; i < kLanes<double>; ++i) t[i] = std::tanh(t[i]);
  return t;
}

template <typename T> class GeneralRows {
  using W = Wide<T>;

 public:
  explicit GeneralRows(const GeneralParts& parts, int64_t classes)
      : parts_(parts), softcap_(static_cast<W>(parts.softcap)), inverse_(static_cast<W>(parts.softcap == 0 ? 0 : 1 / parts.softcap)),
        share_(static_cast<W>(parts.share)), capped_(new W[classes]) {}

  // The whole row.
  void run(const GeneralCrossEntropy& call, int64_t at) {
    const CrossEntropy& rows = call.rows;
    T* const row = static_cast<T*>(rows.logits) + at * rows.columns;
    W& loss = static_cast<W*>(rows.losses)[at];
    W* const statistics = static_cast<W*>(call.statistics) + 2 * at;
    const int64_t target = rows.targets[at];
    if (target == rows.ignore_index) {
      loss = statistics[0] = statistics[1] = 0;
      if (rows.gradient) std::fill(row, row + rows.columns, T{});
      return;
    }
    cap(row, rows.classes);
    statistics[1] = parts_.accuracy ? hit(row, rows.classes, highest_of(row, rows.classes), target) : 0;
    const bool inside = target >= 0 && target < rows.classes;
    const W nan = std::numeric_limits<W>::quiet_NaN(), chosen = inside ? capped_[target] : nan;
    const W highest = highest_of(capped_.get(), rows.classes);
    const W sum = sum_of_powers<false>(capped_.get(), rows.classes, highest, static_cast<W*>(nullptr));
    const W logarithm = std::log(sum), *factors = static_cast<const W*>(call.factors) + 3 * at;
    const W normaliser = statistics[0] = highest + logarithm;
    loss = factors[0] * (logarithm + (highest - chosen)) + factors[2] * normaliser * normaliser;
    if (share_ != 0) loss += factors[1] * normaliser - share_ * weighted_sum(0, rows.classes);
    if (!rows.gradient) return;
    const W scale = inside ? (factors[0] + factors[1] + 2 * factors[2] * normaliser) / sum : nan;
    write_gradient(row, 0, rows.classes, highest, scale, inside ? target : -1, factors[0]);
    std::fill(row + rows.classes, row + rows.columns, T{});
  }

  // A row of a block.
  void run(const CrossEntropyBlock& call, int64_t at) {
    T* const row = static_cast<T*>(call.logits) + at * call.columns;
    const bool ignored = call.targets[at] == call.ignore_index;
    const int64_t target = call.targets[at] - call.first;
    const bool inside = target >= 0 && target < call.classes;
    if (ignored && call.gradient) std::fill(row, row + call.columns, T{});
    if (ignored) return;
    cap(row, call.classes);
    if (call.gradient) {
      const W* const scales = static_cast<const W*>(call.sums) + 3 * at;
      write_gradient(row, call.first, call.classes, scales[0], scales[1], inside ? target : -1, scales[2]);
      std::fill(row + call.classes, row + call.columns, T{});
      return;
    }
    W* const sums = static_cast<W*>(call.sums) + 5 * at;
    const W highest = highest_of(capped_.get(), call.classes), reference = highest > sums[0] ? highest : sums[0];
    const W sum = sum_of_powers<false>(capped_.get(), call.classes, reference, static_cast<W*>(nullptr));
    sums[1] = sums[1] * power_of(sums[0] - reference) + sum;
    sums[0] = reference;
    if (share_ != 0) sums[2] += weighted_sum(call.first, call.classes);
    if (parts_.accuracy) {
      const W best = highest_of(row, call.classes);
      if (best > sums[3] || call.first == 0) {
        sums[3] = best;
        sums[4] = hit(row, call.classes, best, target);
      }
    }
    if (inside) static_cast<W*>(call.chosen)[at] = capped_[target];
  }

 private:
  void cap(const T* row, int64_t classes) {
    each_vector(row, classes, [&](const Vector<W>& x, int, int64_t at, int64_t count) {
      simd::store(softcap_ == 0 ? x : tanh_of(x * inverse_) * softcap_, capped_.get() + at, count);
    });
  }
  // 1 if the target is the first class with the highest logit, else 0.
  static W hit(const T* row, int64_t classes, W highest, int64_t target) {
    if (target < 0 || target >= classes || widen(row[target]) != highest) return 0;
    return std::none_of(row, row + target, [&](T logit) { return widen(logit) == highest; });
  }
  Vector<W> weights(int64_t of, int64_t count) const {
    const W* const all = static_cast<const W*>(parts_.class_weight);
    return all == nullptr ? simd::broadcast(W(1)) : simd::load(all + of, count);
  }
  W weighted_sum(int64_t first, int64_t classes) const {
    Vector<W> sums[kUnrolled] = {};
    for (int64_t at = 0, i = 0; at < classes; at += kLanes<W>, i = (i + 1) % kUnrolled) {
      const int64_t count = classes - at;
      Vector<W> w = weights(first + at, count);
      for (int64_t lane = count; lane < kLanes<W>; ++lane) w[lane] = 0;
      sums[i] += w * simd::load(capped_.get() + at, count);
    }
    return simd::sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  // The slope of the cap is 1 − t² with t = capped / softcap, and 1 without a cap.
  void write_gradient(T* row, int64_t first, int64_t classes, W reference, W scale, int64_t target, W of_target) const {
    const Vector<W> factor = simd::broadcast(static_cast<W>(kLog2E)), from = simd::broadcast(reference);
    for (int64_t at = 0; at < classes; at += kLanes<W>) {
      const int64_t count = classes - at;
      const Vector<W> x = simd::load(capped_.get() + at, count), t = softcap_ == 0 ? Vector<W>{} : x * inverse_;  // -inf * 0 is NaN
      Vector<W> gradient = exp2_of((x - from) * factor) * scale;
      if (share_ != 0) gradient -= weights(first + at, count) * share_;
      if (target >= at && target < at + kLanes<W>) gradient[target - at] -= of_target;
      simd::store(gradient * (W(1) - t * t), row + at, count);
    }
  }

  const GeneralParts& parts_;
  const W softcap_, inverse_, share_;
  const std::unique_ptr<W[]> capped_;
};

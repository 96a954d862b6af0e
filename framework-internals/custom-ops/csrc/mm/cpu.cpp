// The CPU kernel: tiles of the result in registers, b packed by panels of columns, and a packed where its rows are not in order.
// 16-bit types are widened as they are packed, so that their products are float32's.
//
// After Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008): a panel of b stays in the level-1 or
// level-2 cache while all rows of a pass over it, and a block of a stays in the level-2 cache for all panels.

#include <algorithm>
#include <memory>

#include "../common/cpu_products.h"
#include "kernels.h"

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL
namespace {

using namespace products;

// Terms of a sum that are added in registers, and rows and columns of a block. Long sums are taken in parts, which loses fewer bits.
constexpr int64_t kDepth = 176, kRows = 480, kColumns = 256;
static_assert(kRows % kTileRows == 0);

template <typename T> constexpr int64_t kPanel = kTileVectors * simd::kLanes<T>;

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part `index` of `parts` of a length, in whole steps.
Range part_of(int64_t length, int64_t step, int64_t index, int64_t parts) {
  const int64_t steps = (length + step - 1) / step;
  return {std::min(length, steps * index / parts * step), std::min(length, steps * (index + 1) / parts * step)};
}

// The whole vectors of neighbouring elements, widened; returns how many elements they have.
template <typename T> int64_t widen_vectors(const T* from, int64_t count, Wide<T>* to) {
  int64_t i = 0;
  for (; i + simd::kLanes<T> <= count; i += simd::kLanes<T>) simd::store(simd::load(from + i), to + i);
  return i;
}
// Elements that lie `step` apart, widened.
template <typename T> void widen_row(const T* from, int64_t step, int64_t count, Wide<T>* to) {
  for (int64_t i = step == 1 ? widen_vectors(from, count, to) : 0; i < count; ++i) to[i] = widen(from[i * step]);
}

// What one thread computes: some rows and columns of the result.
template <typename T> class Part {
  using Sum = Wide<T>;
  static constexpr bool kWidens = !std::is_same_v<T, Sum>;

 public:
  Part(const MatMul& call, Range rows, Range columns)
      : call_(call), rows_(rows), columns_(columns), packs_a_(kWidens || call.a_step != 1), turned_(call.a_row == 1 && call.a_step != 1),
        longest_(std::min(call.depth, kDepth)), most_(std::min(rows.size(), kRows)), line_(((most_ + 15) / 16 * 16) | 16), b_(new Sum[longest_ * kPanel<T>]),
        a_(packs_a_ ? new Sum[(kWidens && turned_ ? line_ : most_ + kTileRows) * longest_] : nullptr), block_(kWidens ? new Sum[most_ * kColumns] : nullptr) {}

  // By blocks of the result, whose sums stay in the level-2 cache for all their terms; those of 16-bit types are rounded then.
  void run() {
    for (int64_t row = rows_.begin; row < rows_.end; row += kRows) {
      for (int64_t column = columns_.begin; column < columns_.end; column += kColumns) {
        const Range rows{row, std::min(rows_.end, row + kRows)}, columns{column, std::min(columns_.end, column + kColumns)};
        add_block(rows, columns);
        if constexpr (kWidens) round_block(rows, columns);
      }
    }
  }

 private:
  void add_block(Range rows, Range columns) {
    start_sums(rows, columns);
    for (first_ = 0; first_ < call_.depth; first_ += kDepth) {
      depth_ = std::min(kDepth, call_.depth - first_);
      if constexpr (kWidens) widen_a(rows);
      else if (packs_a_) pack_a(rows);
      for (int64_t column = columns.begin; column < columns.end; column += kPanel<T>) {
        pack_b(column);
        multiply_panel(rows, column);
      }
    }
  }

  void round_block(Range rows, Range columns) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const Sum* const from = sums_at(row, columns.begin);
      T* const to = static_cast<T*>(call_.out) + row * call_.columns + columns.begin;
      for (int64_t j = 0; j < columns.size(); j += simd::kLanes<T>) simd::store(simd::load(from + j), to + j, columns.size() - j);
    }
  }

  // The sums of some rows and columns start from the bias, if there is one.
  void start_sums(Range rows, Range columns) {
    if constexpr (kWidens) {
      origin_ = {rows.begin, columns.begin, kColumns};
      sums_ = block_.get();
    } else {
      origin_ = {0, 0, call_.columns};
      sums_ = static_cast<Sum*>(call_.out);
    }
    started_ = call_.bias != nullptr || call_.depth == 0;
    for (int64_t row = rows.begin; started_ && row < rows.end; ++row) {
      Sum* const to = sums_at(row, columns.begin);
      if (call_.bias != nullptr) widen_row(static_cast<const T*>(call_.bias) + columns.begin, 1, columns.size(), to);
      else std::fill(to, to + columns.size(), Sum{0});
    }
  }
  Sum* sums_at(int64_t row, int64_t column) const { return sums_ + (row - origin_.row) * origin_.stride + column - origin_.column; }

  // A block of a in its own order: its rows, or, where it is turned, its columns, `line_` apart. That is an odd number of cache lines,
  // so that a tile's columns share no cache sets.
  void widen_a(Range rows) {
    const T* const a = static_cast<const T*>(call_.a) + rows.begin * call_.a_row + first_ * call_.a_step;
    if (turned_) {
      for (int64_t k = 0; k < depth_; ++k) widen_row(a + k * call_.a_step, 1, rows.size(), a_.get() + k * line_);
    } else {
      for (int64_t i = 0; i < rows.size(); ++i) widen_row(a + i * call_.a_row, call_.a_step, depth_, a_.get() + i * depth_);
    }
  }

  // Groups of kTileRows rows, term by term. Several terms at a time, because rows of a that lie apart share cache sets.
  void pack_a(Range rows) {
    constexpr int64_t kTerms = 8;
    const T* const a = static_cast<const T*>(call_.a) + first_ * call_.a_step;
    for (int64_t some = 0; some < depth_; some += kTerms) {
      const int64_t end = std::min(depth_, some + kTerms);
      for (int64_t row = rows.begin; row < rows.end; row += kTileRows) {
        T* const to = a_.get() + (row - rows.begin) * depth_;
        const int64_t count = std::min<int64_t>(kTileRows, rows.end - row);
        for (int64_t k = some; k < end; ++k) {
          const T* const from = a + row * call_.a_row + k * call_.a_step;
          if (count == kTileRows && call_.a_row == 1) {
            std::memcpy(to + k * kTileRows, from, kTileRows * sizeof(T));
          } else {
            for (int64_t i = 0; i < count; ++i) to[k * kTileRows + i] = from[i * call_.a_row];
          }
        }
      }
    }
  }

  // A panel of columns, term by term; columns that are not there are zero.
  void pack_b(int64_t column) {
    const T* const b = static_cast<const T*>(call_.b) + first_ * call_.b_step + column * call_.b_column;
    const int64_t count = std::min(kPanel<T>, call_.columns - column);
    Sum* const to = b_.get();
    int64_t done = 0;  // terms
    if (count == kPanel<T> && call_.b_column == 1) {
      for (; done < depth_; ++done) widen_vectors(b + done * call_.b_step, kPanel<T>, to + done * kPanel<T>);
    } else if (count == kPanel<T> && call_.b_step == 1) {
      done = depth_ / 16 * 16;
      transpose(b, call_.b_column, kPanel<T>, done, to, kPanel<T>);
    }
    for (; done < depth_; ++done) {
      for (int64_t i = 0; i < kPanel<T>; ++i) to[done * kPanel<T> + i] = i < count ? widen(b[done * call_.b_step + i * call_.b_column]) : Sum{0};
    }
  }

  Broadcast packed_a(Range rows) const {
    constexpr int64_t kSize = sizeof(Sum);
    const char* const packed = reinterpret_cast<const char*>(a_.get());
    if (!packs_a_) return {reinterpret_cast<const char*>(static_cast<const T*>(call_.a) + rows.begin * call_.a_row + first_), call_.a_row * kSize, kSize};
    if (!kWidens) return {packed, kSize, kTileRows * kSize, kTileRows * depth_ * kSize};
    return turned_ ? Broadcast{packed, kSize, line_ * kSize} : Broadcast{packed, depth_ * kSize, kSize};
  }

  void multiply_panel(Range rows, int64_t column) {
    const int64_t count = std::min(kPanel<T>, call_.columns - column), vectors = (count + simd::kLanes<T> - 1) / simd::kLanes<T>;
    const Broadcast a = packed_a(rows);
    const Old old = first_ == 0 && !started_ ? Old::kNone : Old::kAdded;
    Sum* const sums = sums_at(rows.begin, column);
    if (kWidens || count == kPanel<T>) {  // a block has room for whole panels
      return multiply_columns(Job<Singles<Sum>>{a, b_.get(), kPanel<T>, depth_, sums, origin_.stride, old, nullptr}, rows.size(), vectors);
    }
    Sum edge[kTileRows * kPanel<T>];
    for (int64_t row = 0; row < rows.size(); row += kTileRows) {
      const int64_t height = std::min<int64_t>(kTileRows, rows.size() - row);
      const Broadcast tile{a.data + row / kTileRows * a.tile, a.row, a.step};
      multiply_columns(Job<Singles<Sum>>{tile, b_.get(), kPanel<T>, depth_, edge, kPanel<T>, Old::kNone, nullptr}, height, vectors);
      for (int64_t i = 0; i < height; ++i) {
        for (int64_t j = 0; j < count; ++j) {
          Sum& to = sums[(row + i) * origin_.stride + j];
          to = old == Old::kNone ? edge[i * kPanel<T> + j] : to + edge[i * kPanel<T> + j];
        }
      }
    }
  }

  const MatMul& call_;
  const Range rows_, columns_;
  const bool packs_a_, turned_;
  const int64_t longest_, most_, line_;  // terms and rows of a block of a, and elements between its columns
  const std::unique_ptr<Sum[]> b_, a_, block_;
  int64_t first_ = 0, depth_ = 0;  // the terms of the sums that are added now
  Sum* sums_ = nullptr;            // of the row and column `origin_`, and their rows' distance
  struct {
    int64_t row, column, stride;
  } origin_{};
  bool started_ = false;
};

// Into how many parts the rows and the columns are divided.
struct Grid {
  int64_t down, across;
};

// The cheapest grid, in cycles a term of the sums: 24 for a tile, where each register takes one, and what packing takes.
template <typename T> Grid grid_of(const MatMul& call) {
  constexpr int64_t kTile = 24, kPackedB = 12, kPackedA = 3;
  const int64_t tiles = (call.rows + kTileRows - 1) / kTileRows, panels = (call.columns + kPanel<T> - 1) / kPanel<T>;
  Grid best{1, 1};
  for (int64_t across = 1, least = INT64_MAX; across <= std::min(call.threads, panels); ++across) {
    const int64_t down = std::min(call.threads / across, tiles);
    const int64_t height = (tiles + down - 1) / down, width = (panels + across - 1) / across;
    const int64_t cost = kTile * height * width + kPackedB * width + (call.a_step == 1 ? 0 : kPackedA * height);
    if (cost >= least) continue;
    least = cost;
    best = {down, across};
  }
  return best;
}

template <typename T> void parts(const MatMul& call, int64_t begin, int64_t end) {
  const Grid grid = grid_of<T>(call);
  for (int64_t part = begin; part < std::min(end, grid.down * grid.across); ++part) {
    const Range rows = part_of(call.rows, kTileRows, part / grid.across, grid.down);
    const Range columns = part_of(call.columns, kPanel<T>, part % grid.across, grid.across);
    if (rows.begin < rows.end && columns.begin < columns.end) Part<T>(call, rows, columns).run();
  }
}

}  // namespace

void mm_cpu(const MatMul& call, int64_t begin, int64_t end) {
  for_dtype(call.dtype, [&](auto tag) { parts<typename decltype(tag)::type>(call, begin, end); });
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

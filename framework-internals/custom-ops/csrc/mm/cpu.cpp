// The CPU kernel: tiles of the result in registers, b packed by panels of columns, and a packed where its rows are not in order.
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

// Terms of a sum that are added in registers, and rows of a block of a. Long sums are taken in parts, which loses fewer bits.
constexpr int64_t kDepth = 176, kRows = 480;
static_assert(kRows % kTileRows == 0);

template <typename T> constexpr int64_t kPanel = kTileVectors * simd::kLanes<T>;

struct Range {
  int64_t begin, end;
};

// Part `index` of `parts` of a length, in whole steps.
Range part_of(int64_t length, int64_t step, int64_t index, int64_t parts) {
  const int64_t steps = (length + step - 1) / step;
  return {std::min(length, steps * index / parts * step), std::min(length, steps * (index + 1) / parts * step)};
}

// What one thread computes: some rows and columns of the result.
template <typename T> class Part {
 public:
  Part(const MatMul& call, Range rows, Range columns)
      : call_(call), rows_(rows), columns_(columns), packs_a_(call.a_step != 1), b_(new T[std::min(call.depth, kDepth) * kPanel<T>]),
        a_(packs_a_ ? new T[(std::min(rows.end - rows.begin, kRows) + kTileRows) * std::min(call.depth, kDepth)] : nullptr) {}

  void run() {
    for (first_ = 0; first_ < call_.depth; first_ += kDepth) {
      depth_ = std::min(kDepth, call_.depth - first_);
      const int64_t block = packs_a_ ? kRows : rows_.end - rows_.begin;
      for (int64_t row = rows_.begin; row < rows_.end; row += block) {
        const Range rows{row, std::min(rows_.end, row + block)};
        if (packs_a_) pack_a(rows);
        for (int64_t column = columns_.begin; column < columns_.end; column += kPanel<T>) {
          pack_b(column);
          multiply_panel(rows, column);
        }
      }
    }
  }

 private:
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
    T* const to = b_.get();
    int64_t done = 0;  // terms
    if (count == kPanel<T> && call_.b_column == 1) {
      for (; done < depth_; ++done) std::memcpy(to + done * kPanel<T>, b + done * call_.b_step, kPanel<T> * sizeof(T));
    } else if (count == kPanel<T> && call_.b_step == 1) {
      done = depth_ / 16 * 16;
      transpose(b, call_.b_column, kPanel<T>, done, to, kPanel<T>);
    }
    for (; done < depth_; ++done) {
      for (int64_t i = 0; i < kPanel<T>; ++i) to[done * kPanel<T> + i] = i < count ? b[done * call_.b_step + i * call_.b_column] : T(0);
    }
  }

  void multiply_panel(Range rows, int64_t column) {
    constexpr int64_t kSize = sizeof(T);
    T edge[kTileRows * kPanel<T>];
    const int64_t count = std::min(kPanel<T>, call_.columns - column);
    for (int64_t row = rows.begin; row < rows.end; row += kTileRows) {
      const int64_t height = std::min<int64_t>(kTileRows, rows.end - row);
      const Broadcast a = packs_a_ ? Broadcast{reinterpret_cast<const char*>(a_.get() + (row - rows.begin) * depth_), kSize, kTileRows * kSize}
                                   : Broadcast{reinterpret_cast<const char*>(static_cast<const T*>(call_.a) + row * call_.a_row + first_), call_.a_row * kSize, kSize};
      T* const out = static_cast<T*>(call_.out) + row * call_.columns + column;
      if (count == kPanel<T>) {
        const Job<Singles<T>> job{a, b_.get(), kPanel<T>, depth_, out, call_.columns, first_ == 0 ? Old::kNone : Old::kAdded, nullptr};
        multiply_columns(job, height, kTileVectors);
        continue;
      }
      const int64_t vectors = (count + simd::kLanes<T> - 1) / simd::kLanes<T>;
      const Job<Singles<T>> job{a, b_.get(), kPanel<T>, depth_, edge, kPanel<T>, Old::kNone, nullptr};
      multiply_columns(job, height, vectors);
      for (int64_t i = 0; i < height; ++i) {
        for (int64_t j = 0; j < count; ++j) {
          T& to = out[i * call_.columns + j];
          to = first_ == 0 ? edge[i * kPanel<T> + j] : to + edge[i * kPanel<T> + j];
        }
      }
    }
  }

  const MatMul& call_;
  const Range rows_, columns_;
  const bool packs_a_;
  const std::unique_ptr<T[]> b_, a_;
  int64_t first_ = 0, depth_ = 0;  // the terms of the sums that are added now
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
  call.dtype == Dtype::kFloat32 ? parts<float>(call, begin, end) : parts<double>(call, begin, end);
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

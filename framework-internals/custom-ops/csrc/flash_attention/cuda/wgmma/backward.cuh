// Backward of fp32 on Hopper (sm_90a): the formulas and the two directions of ../mma/backward.cuh, with wgmma and TMA.
//
// A block keeps 128 rows of two operands (queries: Q, dO; keys: K, V), 64 per warpgroup; a producer warp loads tiles of the
// other two into two rings. P and dS are computed in the orientation in which they are the left operand of the products
// that follow, from registers, so they never pass through shared memory.
//
//   issue S_j                | products of tile j - 1 end
//   issue dP_j               | P_j = exp2(S_j - lse) under it
//   issue dV += P_j dO       | dS_j = P_j (dP_j - delta) under it
//   issue dK += dS_j Q       | runs on under S_{j+1}
//
// Operands are split in two as in forward.cuh, each product of a tile is summed from zero, and dS is scaled row by row. This
// takes seven products of tiles. For head sizes above 64, the sums of dK and dV do not fit in the registers together: they
// take two launches, with eight products. 16-bit types have one_pass.cuh.
#pragma once

#include "../backward_math.cuh"
#include "tiles.cuh"

namespace custom_ops::flash_attention {

struct WgmmaBackward {
  TensorMap operand[4][2];  // the rows' two, then the tiles': queries Q, dO, K, V; keys K, V, Q, dO; high and low parts
  void* first;              // dQ or dK
  void* second;             // dV
  int64_t first_stride[3], second_stride[3];  // batch, head, sequence
  const float *lse, *delta;                   // see row_statistics.cuh
  int64_t statistics_stride;                  // a head
  const int* exponent[4];                     // of each operand, as split.cuh writes them
  int heads_rows, heads_tiles, seq_rows, seq_tiles, head_size;
  float scale;
  bool causal;
};

template <int kD_, int kTile_, int kFirstSlots_, int kSecondSlots_, bool kKeys_, bool kFirst_,
          bool kSecond_>
struct WgmmaBackwardShape {
  static constexpr int kParts = 2, kD = kD_, kTile = kTile_;
  static constexpr int kFirstSlots = kFirstSlots_, kSecondSlots = kSecondSlots_;
  static constexpr bool kKeys = kKeys_, kFirst = kFirst_, kSecond = kSecond_;  // as in MmaBackwardShape
  static constexpr int kConsumers = 2, kRows = 64 * kConsumers, kThreads = 128 * (kConsumers + 1);
  static constexpr int kRowBytes = kParts * kRows * kD * 2, kTileBytes = kParts * kTile * kD * 2;
  static constexpr int kRowOperands = kFirst ? 2 : 1;
  static constexpr int kStatisticsBytes = kKeys ? 2 * kTile * 4 : 0;  // for lse and delta of a tile of queries
  static constexpr int kBarriers = 1 + 2 * (kFirstSlots + kSecondSlots);
  static constexpr int kSharedBytes = 1024 + kRowOperands * kRowBytes + (kFirstSlots + kSecondSlots) * kTileBytes +
                                      kFirstSlots * kStatisticsBytes + 8 * kBarriers;
};

template <typename Shape>
struct WgmmaBackwardMemory {
  SharedAddress rows, first, second, statistics, barriers;
  FLASH_DEVICE explicit WgmmaBackwardMemory(const void* memory)
      : rows((shared_address(memory) + 1023) & ~SharedAddress{1023}),
        first(rows + Shape::kRowOperands * Shape::kRowBytes),
        second(first + Shape::kFirstSlots * Shape::kTileBytes),
        statistics(second + Shape::kSecondSlots * Shape::kTileBytes),
        barriers(statistics + Shape::kFirstSlots * Shape::kStatisticsBytes) {}
  FLASH_DEVICE SharedAddress rows_full() const { return barriers; }
  FLASH_DEVICE SharedAddress first_full(int slot) const { return barriers + 8 + 8 * slot; }
  FLASH_DEVICE SharedAddress first_empty(int slot) const { return first_full(slot + Shape::kFirstSlots); }
  FLASH_DEVICE SharedAddress second_full(int slot) const { return first_full(slot + 2 * Shape::kFirstSlots); }
  FLASH_DEVICE SharedAddress second_empty(int slot) const { return second_full(slot + Shape::kSecondSlots); }
};

// The work of a block: its rows, and the number of tiles and heads of the other side.
template <typename Shape>
struct BackwardBlock {
  int batch, head, row, first_tile, tiles, steps, group, head_ratio;

  FLASH_DEVICE explicit BackwardBlock(const WgmmaBackward& args) {
    const int blocks = (args.seq_rows + Shape::kRows - 1) / Shape::kRows, index = blockIdx.x;
    batch = index / blocks / args.heads_rows;
    head = index / blocks % args.heads_rows;
    // Causal: late queries attend to many keys, and early keys have many queries; the longest blocks go first.
    row = (args.causal && !Shape::kKeys ? blocks - 1 - index % blocks : index % blocks) * Shape::kRows;
    group = Shape::kKeys ? args.heads_tiles / args.heads_rows : 1;
    head_ratio = Shape::kKeys ? 1 : args.heads_rows / args.heads_tiles;
    first_tile = args.causal && Shape::kKeys ? min(row, args.seq_tiles) / Shape::kTile : 0;
    const int end = args.causal && !Shape::kKeys ? min(args.seq_tiles, row + Shape::kRows) : args.seq_tiles;
    tiles = max(0, (end + Shape::kTile - 1) / Shape::kTile - first_tile);
    steps = tiles * group;
  }
  FLASH_DEVICE int tile_head(int step) const { return Shape::kKeys ? head * group + step / tiles : head / head_ratio; }
  FLASH_DEVICE int tile_row(int step) const { return (first_tile + step % tiles) * Shape::kTile; }
};

template <typename Shape>
FLASH_DEVICE void produce_backward(const WgmmaBackward& args, const WgmmaBackwardMemory<Shape>& memory,
                                   const BackwardBlock<Shape>& block) {
  barrier_arrive_expect(memory.rows_full(), Shape::kRowOperands * Shape::kRowBytes);
  for (int i = 0; i < Shape::kRowOperands; ++i) {
    copy_rows<Shape::kParts, Shape::kRows, Shape::kD>(memory.rows + i * Shape::kRowBytes, args.operand[i],
                                                      memory.rows_full(), block.row, block.head, block.batch);
  }
  RingPlace<Shape::kFirstSlots> first;
  RingPlace<Shape::kSecondSlots> second;
  for (int step = 0; step < block.steps; ++step) {
    const int head = block.tile_head(step), row = block.tile_row(step);
    const SharedAddress first_full = memory.first_full(first.stage), second_full = memory.second_full(second.stage);
    barrier_wait(memory.first_empty(first.stage), first.turn ^ 1);
    barrier_arrive_expect(first_full, Shape::kTileBytes + Shape::kStatisticsBytes);
    copy_rows<Shape::kParts, Shape::kTile, Shape::kD>(memory.first + first.stage * Shape::kTileBytes, args.operand[2],
                                                      first_full, row, head, block.batch);
    if constexpr (Shape::kKeys) {
      const SharedAddress to = memory.statistics + first.stage * Shape::kStatisticsBytes;
      const int64_t place = (int64_t{block.batch} * args.heads_tiles + head) * args.statistics_stride + row;
      bulk_copy(to, args.lse + place, Shape::kTile * 4, first_full);
      bulk_copy(to + Shape::kTile * 4, args.delta + place, Shape::kTile * 4, first_full);
    }
    first.advance();
    barrier_wait(memory.second_empty(second.stage), second.turn ^ 1);
    barrier_arrive_expect(second_full, Shape::kTileBytes);
    copy_rows<Shape::kParts, Shape::kTile, Shape::kD>(memory.second + second.stage * Shape::kTileBytes, args.operand[3],
                                                      second_full, row, head, block.batch);
    second.advance();
  }
}

template <typename Shape>
struct BackwardConsumer {
  using T = __half;
  static constexpr int kParts = Shape::kParts, kD = Shape::kD, kTile = Shape::kTile, kRows = Shape::kRows;
  static constexpr bool kKeys = Shape::kKeys, kFirst = Shape::kFirst, kSecond = Shape::kSecond;
  static constexpr int kScores = kTile / 2;
  static constexpr int kColumns = kD < 128 ? kD : 128, kPieces = kD / kColumns, kSums = kColumns / 2;
  using Sums = float[kPieces][kSums];
  using Weights = uint32_t[kParts][kTile / 16][4];

  const WgmmaBackward& args;
  const WgmmaBackwardMemory<Shape>& memory;
  const BackwardBlock<Shape>& block;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  const int lane = threadIdx.x % 32;
  const int warp_row = group * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  RingPlace<Shape::kFirstSlots> first;
  RingPlace<Shape::kSecondSlots> second;
  float row_lse[2] = {}, row_delta[2] = {};

  FLASH_DEVICE SharedAddress first_tile() const { return memory.first + first.stage * Shape::kTileBytes; }
  FLASH_DEVICE SharedAddress second_tile() const { return memory.second + second.stage * Shape::kTileBytes; }
  FLASH_DEVICE void release_first() {
    sync_warp();  // the arrival of one lane stands for what all lanes have read
    if (lane == 0) barrier_arrive(memory.first_empty(first.stage));
    first.advance();
  }
  FLASH_DEVICE void release_second() {
    if (lane == 0) barrier_arrive(memory.second_empty(second.stage));
    second.advance();
  }

  FLASH_DEVICE void load_row_statistics() {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = min(block.row + warp_row + lane / 4 + e * 8, args.seq_rows - 1);
      const int64_t place = (int64_t{block.batch} * args.heads_rows + block.head) * args.statistics_stride + query;
      row_lse[e] = args.lse[place];
      row_delta[e] = args.delta[place];
    }
  }

  // lse (which = 0) or delta (which = 1) of column 8 n + 2 (lane % 4) and the next one.
  FLASH_DEVICE float2 column_pair(SharedAddress statistics, int which, int n) const {
    return load_shared_pair(statistics + (which * kTile + n * 8 + lane % 4 * 2) * 4);
  }

  FLASH_DEVICE void probabilities(float (&score)[kScores], SharedAddress statistics, float scale, int tile_row) {
    const bool diagonal =
        args.causal && (kKeys ? tile_row < block.row + warp_row + 16 : tile_row + kTile > block.row + warp_row);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float2 lse = kKeys ? column_pair(statistics, 0, n) : float2{0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = score[4 * n + i];
        s = probability(s, scale, kKeys ? (i % 2 == 0 ? lse.x : lse.y) : row_lse[i / 2]);
        const int row = block.row + warp_row + lane / 4 + i / 2 * 8, column = tile_row + n * 8 + lane % 4 * 2 + i % 2;
        if (diagonal && (kKeys ? row > column : column > row)) s = 0.f;
      }
    }
  }

  // Writes dS to `product`, which contains dP in units of 1 / unit.
  FLASH_DEVICE void score_gradients(float (&product)[kScores], const float (&p)[kScores], SharedAddress statistics,
                                    float unit) {
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float2 delta = kKeys ? column_pair(statistics, 1, n) : float2{0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& d = product[4 * n + i];
        d = p[4 * n + i] * fmaf(d, unit, -(kKeys ? (i % 2 == 0 ? delta.x : delta.y) : row_delta[i / 2]));
      }
    }
  }

  FLASH_DEVICE void add(Sums& sums, const Sums& product, float unit, const float (&undo)[2]) {
    const float factor[2] = {unit * undo[0], unit * undo[1]};
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[piece][i] = fmaf(product[piece][i], factor[i / 2 % 2], sums[piece][i]);
  }

  FLASH_DEVICE void write(void* to, const int64_t (&stride)[3], const Sums& sums, float factor) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = block.row + warp_row + lane / 4 + e * 8;
      if (row >= args.seq_rows) continue;
      auto* start =
          static_cast<float*>(to) + block.batch * stride[0] + block.head * stride[1] + row * stride[2];
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
        for (int i = 2 * e; i < kSums; i += 4) {
          write_pair<T>(start, piece * kColumns + i / 4 * 8 + lane % 4 * 2, args.head_size, sums[piece][i] * factor,
                        sums[piece][i + 1] * factor);
        }
    }
  }

  FLASH_DEVICE SplitUnits units(int step) const {
    float unit[4];
    const int row = min(block.row + group * 64, args.seq_rows - 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int heads = i < 2 ? args.heads_rows : args.heads_tiles, head = i < 2 ? block.head : block.tile_head(step);
      unit[i] = split_unit(args.exponent[i], i < 2 ? args.seq_rows : args.seq_tiles, block.batch * heads + head,
                           i < 2 ? row : block.tile_row(step));
    }
    return SplitUnits(unit);
  }

  FLASH_DEVICE void consume() {
    constexpr float kOne[2] = {1.f, 1.f};
    const SharedAddress rows_first = memory.rows + group * 64 * kTileRowBytes,
                        rows_second = rows_first + Shape::kRowBytes;
    Sums first_sums, second_sums, part;  // `part`: the product of one tile
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
      for (int i = 0; i < kSums; ++i) first_sums[piece][i] = second_sums[piece][i] = 0.f;
    float score[kScores], product[kScores], undo[2] = {1.f, 1.f};
    Weights weights, first_weights;
    SplitUnits unit;
    if constexpr (!kKeys) load_row_statistics();
    barrier_wait(memory.rows_full(), 0);

    // The last product of the previous tile, which ran while the scores of the next one were computed.
    auto settle = [&] {
      wgmma_keep(part);
      if constexpr (kFirst) {
        add(first_sums, part, kSecond ? unit.first * SplitUnits::kFromScaled : unit.first, undo);
        release_first();
      } else {
        add(second_sums, part, unit.second, kOne);
        release_second();
      }
    };

    RingPlace<Shape::kFirstSlots> next = first;  // `first` stays behind until the tile is released
    for (int step = 0; step < block.steps; ++step) {
      const SharedAddress tile = memory.first + next.stage * Shape::kTileBytes;
      const SharedAddress statistics = memory.statistics + next.stage * Shape::kStatisticsBytes;
      barrier_wait(memory.first_full(next.stage), next.turn);
      next.advance();
      wgmma_begin();
      multiply_parts<T, kParts, kD, kRows, kTile>(score, rows_first, tile);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        settle();
      }
      unit = units(step);
      const float scale = args.scale * unit.score * kLog2e;
      if constexpr (kFirst) {
        barrier_wait(memory.second_full(second.stage), second.turn);
        wgmma_begin();
        multiply_parts<T, kParts, kD, kRows, kTile>(product, rows_second, second_tile());
        wgmma_commit();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      wgmma_keep(score);
      probabilities(score, statistics, scale, block.tile_row(step));
      if constexpr (kSecond) {
        scale_probabilities<kParts>(score);
        to_weights<T, kParts>(weights, score);
        if constexpr (!kFirst) {
          release_first();
          barrier_wait(memory.second_full(second.stage), second.turn);
        }
        wgmma_begin();
        weigh_parts<T, kParts, kD, kTile>(part, weights, second_tile());
        wgmma_commit();
      }
      if constexpr (kFirst) {
        if constexpr (kSecond) wgmma_wait<1>();
        else wgmma_wait<0>();
        wgmma_keep(product);
        if constexpr (!kSecond) release_second();
        score_gradients(product, score, statistics, unit.product);
        scale_rows(product, undo);
        to_weights<T, kParts>(first_weights, product);
        if constexpr (kSecond) {
          wgmma_wait<0>();
          wgmma_keep(part);
          add(second_sums, part, unit.second, kOne);
          release_second();
        }
        wgmma_begin();
        weigh_parts<T, kParts, kD, kTile>(part, first_weights, tile);
        wgmma_commit();
      }
    }
    wgmma_wait<0>();
    if (block.steps > 0) settle();
    if constexpr (kFirst) {
      wgmma_keep(first_sums);
      write(args.first, args.first_stride, first_sums, args.scale);
    }
    if constexpr (kSecond) {
      wgmma_keep(second_sums);
      write(args.second, args.second_stride, second_sums, 1.f);
    }
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_wgmma(const __grid_constant__ WgmmaBackward args) {
#if FLASH_HOPPER
  FLASH_SHARED_MEMORY(shared);
  const WgmmaBackwardMemory<Shape> memory(shared);
  if (threadIdx.x == 0) {
    barrier_init(memory.rows_full(), 1);
    for (int slot = 0; slot < Shape::kFirstSlots; ++slot) {
      barrier_init(memory.first_full(slot), 1);
      barrier_init(memory.first_empty(slot), 4 * Shape::kConsumers);  // one lane of every consuming warp
    }
    for (int slot = 0; slot < Shape::kSecondSlots; ++slot) {
      barrier_init(memory.second_full(slot), 1);
      barrier_init(memory.second_empty(slot), 4 * Shape::kConsumers);
    }
    fence_async_proxy();
  }
  __syncthreads();
  const BackwardBlock<Shape> block(args);
  if (threadIdx.x < 128) {
    registers_release<24>();
    if (threadIdx.x == 0) produce_backward<Shape>(args, memory, block);
  } else {
    registers_acquire<240>();
    BackwardConsumer<Shape>{args, memory, block}.consume();
  }
#endif
}

}  // namespace custom_ops::flash_attention

// Backward with mma.sync, for any GPU from sm_80 on.
//
//   P = exp(S - lse)    dV = P^T dO    dP = dO V^T    dS = P (dP - delta)    dQ = scale dS K    dK = scale dS^T Q
//   delta = sum over head_size of out * dO, minus the gradient of lse
//
// One kernel computes both directions. A block keeps 16 rows per warp of two operands (queries: Q and dO; keys: K and V),
// loops over tiles of the other two, and recomputes P and dP in that orientation. The results for its rows are summed in
// registers and written once. This needs no atomics and has a fixed order of summation, but computes S and dP twice. If
// several query heads share a key head, the block of keys loops over all of them.
//
// kParts = 2: fp32 as fp16 parts, see ../wgmma/forward.cuh. P is at most one and is scaled by 2^15; dS has no such bound, so
// each row of a tile has its own power of two.
#pragma once

#include "../backward_math.cuh"
#include "../features.cuh"
#include "tiles.cuh"

namespace custom_ops::flash_attention {

struct MmaBackward {
  MmaOperand operand[4];                      // the rows' two, then the tiles': queries Q, dO, K, V; keys K, V, Q, dO
  void* first;                                // dQ or dK
  void* second;                               // dV
  int64_t first_stride[3], second_stride[3];  // batch, head, sequence
  const float *lse, *delta;                   // see row_statistics.cuh
  int64_t statistics_stride;                  // a head
  const int* exponent[4];                     // kParts = 2: exponents of each operand, as split.cuh writes them
  int head_size, out_head_size;               // of the operands, which may be padded, and of the gradients
  float scale;                                // scale of the scores, without the factor log2(e)
  bool causal;
  General general;  // only of general shapes
};

template <typename T, int kParts_, int kD_, int kTile_, int kWarps_, int kStages_, bool kKeys_, bool kFirst_,
          bool kSecond_, bool kGeneral_>
struct MmaBackwardShape {
  static constexpr bool kGeneral = kGeneral_;
  using Element = T;
  using Out = std::conditional_t<kParts_ == 2, float, T>;
  static constexpr int kParts = kParts_, kD = kD_, kTile = kTile_, kWarps = kWarps_, kStages = kStages_;
  static constexpr bool kKeys = kKeys_;      // the rows are keys
  static constexpr bool kFirst = kFirst_;    // writes dQ or dK
  static constexpr bool kSecond = kSecond_;  // writes dV
  static constexpr int kThreads = 32 * kWarps, kRows = 16 * kWarps;
  static constexpr int kRowBytes = kParts * kRows * kD * 2, kTileBytes = kParts * kTile * kD * 2;
  static constexpr int kSharedBytes = 2 * kRowBytes + 2 * kStages * kTileBytes;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) backward_mma(const MmaBackward args) {
  using T = typename Shape::Element;
  constexpr int kParts = Shape::kParts, kD = Shape::kD, kTile = Shape::kTile, kStages = Shape::kStages;
  constexpr bool kKeys = Shape::kKeys, kFirst = Shape::kFirst, kSecond = Shape::kSecond;
  FLASH_SHARED_MEMORY(shared);
  const SharedAddress rows_first = shared_address(shared), rows_second = rows_first + Shape::kRowBytes;
  const SharedAddress tiles_first = rows_second + Shape::kRowBytes;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const int seq_rows = args.operand[0].seq, seq_tiles = args.operand[2].seq;
  const int blocks = (seq_rows + Shape::kRows - 1) / Shape::kRows;
  const int batch = blockIdx.x / blocks / args.operand[0].heads, head = blockIdx.x / blocks % args.operand[0].heads;
  // Causal: late queries attend to many keys, and early keys have many queries; the longest blocks go first.
  const int block = args.causal && !kKeys ? blocks - 1 - blockIdx.x % blocks : blockIdx.x % blocks;
  const int row = block * Shape::kRows;

  const int group = kKeys ? args.operand[2].heads / args.operand[0].heads : 1;  // heads of the other side to loop over
  int first_tile = args.causal && kKeys ? min(row, seq_tiles) / kTile : 0;
  const int end = args.causal && !kKeys ? min(seq_tiles, row + Shape::kRows) : seq_tiles;
  int tiles = (end + kTile - 1) / kTile - first_tile;  // of one head
  Span seen[2];
  if constexpr (Shape::kGeneral) {
    const Span* const spans = args.general.spans;
    const int last = min(row + Shape::kRows, seq_rows) - 1;
    first_tile = first_tile_of(spans, row, kTile);
    tiles = tiles_of(spans, row, last, kTile);
    for (int e = 0; e < 2; ++e) seen[e] = spans[min(row + warp_row + lane / 4 + e * 8, last)];
  }
  const int steps = tiles > 0 ? tiles * group : 0;
  auto tile_head = [&](int step) {
    return kKeys ? head * group + step / tiles : head / (args.operand[0].heads / args.operand[2].heads);
  };

  auto copy_tiles = [&](int step) {
    if (step < steps) {
      const SharedAddress to = tiles_first + step % kStages * 2 * Shape::kTileBytes;
      const int first = (first_tile + step % tiles) * kTile;
      copy_tile<T, kParts, kTile, kD, Shape::kThreads>(to, args.operand[2], batch, tile_head(step), first,
                                                       args.head_size);
      copy_tile<T, kParts, kTile, kD, Shape::kThreads>(to + Shape::kTileBytes, args.operand[3], batch, tile_head(step),
                                                       first, args.head_size);
    }
    copy_commit();
  };
  copy_tile<T, kParts, Shape::kRows, kD, Shape::kThreads>(rows_first, args.operand[0], batch, head, row,
                                                          args.head_size);
  if (kFirst)
    copy_tile<T, kParts, Shape::kRows, kD, Shape::kThreads>(rows_second, args.operand[1], batch, head, row,
                                                            args.head_size);
  for (int stage = 0; stage < kStages; ++stage) copy_tiles(stage);

  float sum_first[kFirst ? kD / 8 : 1][4] = {}, sum_second[kSecond ? kD / 8 : 1][4] = {};
  float row_lse[2] = {}, row_delta[2] = {};
  if constexpr (!kKeys) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = min(row + warp_row + lane / 4 + e * 8, seq_rows - 1);
      const int64_t place = (int64_t{batch} * args.operand[0].heads + head) * args.statistics_stride + query;
      row_lse[e] = args.lse[place];
      row_delta[e] = args.delta[place];
    }
  }

  for (int step = 0; step < steps; ++step) {
    copy_wait<kStages - 1>();
    __syncthreads();
    const SharedAddress tile_first = tiles_first + step % kStages * 2 * Shape::kTileBytes;
    const SharedAddress tile_second = tile_first + Shape::kTileBytes;
    const int column = (first_tile + step % tiles) * kTile, other_head = tile_head(step);
    SplitUnits unit;
    if constexpr (kParts == 2) {
      float units[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const MmaOperand& operand = args.operand[i];
        units[i] = split_unit(args.exponent[i], operand.seq, batch * operand.heads + (i < 2 ? head : other_head),
                              i < 2 ? row : column);
      }
      unit = SplitUnits(units);
    }

    float score[kTile / 8][4], product[kFirst ? kTile / 8 : 1][4];
    multiply_rows<T, kParts, Shape::kRows, kTile, kD>(score, rows_first, warp_row, tile_first);
    if constexpr (kFirst)
      multiply_rows<T, kParts, Shape::kRows, kTile, kD>(product, rows_second, warp_row, tile_second);

    const float scale = args.scale * unit.score * kLog2e;
    const int64_t column_place =
        (int64_t{batch} * args.operand[2].heads + other_head) * args.statistics_stride + column;
    if constexpr (Shape::kGeneral) {
      const int own_row[2] = {row + warp_row + lane / 4, row + warp_row + lane / 4 + 8};
      const auto column_of = [&](int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; };  // in the tile
      const auto lse_of = [&](int i) { return kKeys ? args.lse[column_place + column_of(i)] : row_lse[i / 2 % 2]; };
      const auto delta_of = [&](int i) { return kKeys ? args.delta[column_place + column_of(i)] : row_delta[i / 2 % 2]; };
      auto& s = reinterpret_cast<float (&)[kTile / 2]>(score);
      auto& d = reinterpret_cast<float (&)[kFirst ? kTile / 2 : 4]>(product);
      const General& with = args.general;
      const bool cap = with.softcap > 0.f;
      float slope[kFirst && !kKeys ? kTile / 2 : 1];
      const ScorePlace place{batch, kKeys ? other_head : head, {min(own_row[0], seq_rows - 1), min(own_row[1], seq_rows - 1)}, column + lane % 4 * 2, seq_tiles};
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        s[i] *= scale;
        if constexpr (kFirst) d[i] = fmaf(d[i], unit.product, -delta_of(i));
      }
      if (cap) {
#pragma unroll
        for (int i = 0; i < kTile / 2; ++i) {
          float of_cap;
          s[i] = capped(s[i], with.softcap, of_cap);
          if constexpr (kFirst && kKeys) d[i] *= of_cap;
          if constexpr (kFirst && !kKeys) slope[i] = of_cap;
        }
      }
      if (with.bias != nullptr) add_bias<typename Shape::Out, kKeys>(s, with, place);
      if (with.slopes != nullptr) add_alibi<kKeys>(s, with, place);
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        const bool seen_here = sees(seen[i / 2 % 2], column + column_of(i));
        s[i] = seen_here ? probability(s[i], 1.f, lse_of(i)) : 0.f;
        if constexpr (kFirst) d[i] *= s[i];
        if constexpr (kFirst && !kKeys) {
          const int r = own_row[i / 2 % 2];
          if (with.bias_gradient != nullptr && seen_here && r < seq_rows) {
            const int64_t to = ((int64_t{batch} * args.operand[0].heads + head) * seq_rows + r) * seq_tiles + column + column_of(i);
            static_cast<typename Shape::Out*>(with.bias_gradient)[to] = d[i];
          }
        }
      }
      if constexpr (kFirst && !kKeys) {
        if (cap) {
#pragma unroll
          for (int i = 0; i < kTile / 2; ++i) d[i] *= slope[i];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        const int r = row + warp_row + lane / 4 + i / 2 % 2 * 8, c = column + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const float lse = kKeys ? args.lse[column_place + c - column] : row_lse[i / 2 % 2];
        float& s = score[i / 4][i % 4];
        s = args.causal && (kKeys ? r > c : c > r) ? 0.f : probability(s, scale, lse);
        if constexpr (kFirst) {
          const float delta = kKeys ? args.delta[column_place + c - column] : row_delta[i / 2 % 2];
          float& d = product[i / 4][i % 4];
          d = s * fmaf(d, unit.product, -delta);
        }
      }
    }

    uint32_t weights[kParts][kTile / 16][4];
    if constexpr (kSecond) {
      scale_probabilities<kParts>(reinterpret_cast<float (&)[kTile / 2]>(score));
      to_weights<T, kParts, kTile>(weights, score);
      multiply_weights<T, kParts, kTile, kD>(weights, tile_second, [&](int n, const float (&part)[2][4]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& sum = sum_second[2 * n + i / 4][i % 4];
          sum = fmaf(part[i / 4][i % 4], unit.second, sum);
        }
      });
    }
    if constexpr (kFirst) {
      float undo[2] = {1.f, 1.f};
      if constexpr (kParts == 2) scale_rows(reinterpret_cast<float (&)[kTile / 2]>(product), undo);
      to_weights<T, kParts, kTile>(weights, product);
      multiply_weights<T, kParts, kTile, kD>(weights, tile_first, [&](int n, const float (&part)[2][4]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& sum = sum_first[2 * n + i / 4][i % 4];
          sum = fmaf(part[i / 4][i % 4] * unit.first, undo[i / 2 % 2], sum);
        }
      });
    }
    __syncthreads();  // before the tile's memory is overwritten
    copy_tiles(step + kStages);
  }
  copy_wait<0>();

#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int r = row + warp_row + lane / 4 + e * 8;
    if (r >= seq_rows) continue;
    using Out = typename Shape::Out;
    auto start = [&](void* to, const int64_t (&stride)[3]) {
      return static_cast<Out*>(to) + batch * stride[0] + head * stride[1] + r * stride[2];
    };
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      const int column = n * 8 + lane % 4 * 2;
      if constexpr (kFirst) {
        write_pair<T>(start(args.first, args.first_stride), column, args.out_head_size,
                      sum_first[n][2 * e] * args.scale, sum_first[n][2 * e + 1] * args.scale);
      }
      if constexpr (kSecond) {
        write_pair<T>(start(args.second, args.second_stride), column, args.out_head_size, sum_second[n][2 * e],
                      sum_second[n][2 * e + 1]);
      }
    }
  }
}

}  // namespace custom_ops::flash_attention

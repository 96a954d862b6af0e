// Forward with mma.sync and cp.async, for any GPU from sm_80 on: four warps per block, with 16 query rows each.
//
// Q stays in shared memory. Tiles of K are loaded one step ahead, and a tile of V while its scores are computed. kParts = 2
// is fp32 as two fp16 parts, see ../wgmma/forward.cuh; P V of a tile is summed from zero and then added to the output.
#pragma once

#include "../features.cuh"
#include "tiles.cuh"

namespace custom_ops::flash_attention {

struct MmaForward {
  MmaOperand q, k, v;
  void* out;  // T, or float where kParts is 2
  int64_t out_batch_stride, out_head_stride, out_seq_stride;
  float* lse;
  const int* exponent[3];        // kParts = 2: exponents of q, k and v, as split.cuh writes them
  int head_size, out_head_size;  // of the operands, which may be padded, and of the output
  float scale;                   // times log2(e)
  bool causal;
  General general;  // only of general shapes
  float* part_out;  // of parts, see merge.cuh
  float2* part_state;
};

template <typename T, int kParts_, int kD_, int kBlockN_, int kKStages_, bool kGeneral_>
struct MmaShape {
  static constexpr bool kGeneral = kGeneral_;
  using Element = T;
  using Out = std::conditional_t<kParts_ == 2, float, T>;
  static constexpr int kParts = kParts_, kD = kD_, kBlockN = kBlockN_, kKStages = kKStages_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlockM = 16 * kWarps;
  static constexpr int kQBytes = kParts * kBlockM * kD * 2, kTileBytes = kParts * kBlockN * kD * 2;
  static constexpr int kSharedBytes = kQBytes + (kKStages + 1) * kTileBytes;
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) forward_mma(const MmaForward args) {
  using T = typename Shape::Element;
  constexpr int kParts = Shape::kParts, kD = Shape::kD, kBlockN = Shape::kBlockN, kKStages = Shape::kKStages;
  constexpr float kShift = kParts == 2 ? kSplitProbabilityExponent : 0.f;
  FLASH_SHARED_MEMORY(shared);
  const SharedAddress q = shared_address(shared), k = q + Shape::kQBytes, v = k + kKStages * Shape::kTileBytes;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const int blocks = (args.q.seq + Shape::kBlockM - 1) / Shape::kBlockM;
  const unsigned index = Shape::kGeneral ? blockIdx.x / static_cast<unsigned>(args.general.parts) : blockIdx.x;
  const int batch = index / blocks / args.q.heads, head = index / blocks % args.q.heads;
  const int head_kv = head / (args.q.heads / args.k.heads);
  // The longest causal rows first: the blocks that start last should be short.
  const int row = (args.causal ? blocks - 1 - index % blocks : index % blocks) * Shape::kBlockM;
  const int keys = args.causal ? min(args.k.seq, row + Shape::kBlockM) : args.k.seq;
  int first_tile = 0, tiles = (keys + kBlockN - 1) / kBlockN;  // and the end of the tiles
  Span seen[2];
  if constexpr (Shape::kGeneral) {
    const Span* const spans = args.general.spans;
    const int last = min(row + Shape::kBlockM, args.q.seq) - 1;
    if (spans != nullptr) {
      first_tile = first_tile_of(spans, row, kBlockN);
      tiles = first_tile + tiles_of(spans, row, last, kBlockN);
    }
    for (int e = 0; e < 2; ++e) {
      seen[e] = spans != nullptr ? spans[min(row + warp_row + lane / 4 + e * 8, last)] : Span{0, args.k.seq};
    }
    const int of_part = (tiles - first_tile + args.general.parts - 1) / args.general.parts;
    first_tile += static_cast<int>(blockIdx.x % static_cast<unsigned>(args.general.parts)) * of_part;
    tiles = min(tiles, first_tile + of_part);
  }

  const int head_of_keys = batch * args.k.heads + head_kv;
  float scale = args.scale;
  if constexpr (kParts == 2) scale *= split_unit(args.exponent[0], args.q.seq, batch * args.q.heads + head, row);
  auto copy_k = [&](int tile) {
    if (tile < tiles) {
      copy_tile<T, kParts, kBlockN, kD, Shape::kThreads>(k + tile % kKStages * Shape::kTileBytes, args.k, batch,
                                                         head_kv, tile * kBlockN, args.head_size);
    }
    copy_commit();
  };

  RowState state;
  if constexpr (Shape::kGeneral) state.maximum[0] = state.maximum[1] = kNoMaximum;
  float out[kD / 8][4] = {};
  copy_tile<T, kParts, Shape::kBlockM, kD, Shape::kThreads>(q, args.q, batch, head, row, args.head_size);
  copy_k(first_tile);  // one group with Q
  for (int tile = first_tile; tile < tiles; ++tile) {
    __syncthreads();  // the last tile's V has been read
    copy_tile<T, kParts, kBlockN, kD, Shape::kThreads>(v, args.v, batch, head_kv, tile * kBlockN, args.head_size);
    copy_commit();
    copy_wait<1>();
    __syncthreads();  // K has arrived, including the parts of all threads
    float score[kBlockN / 8][4];
    multiply_rows<T, kParts, Shape::kBlockM, kBlockN, kD>(score, q, warp_row, k + tile % kKStages * Shape::kTileBytes);
    if constexpr (kKStages == 1) __syncthreads();
    copy_k(tile + 1);

    float correction[2], tile_scale = scale, unit = 1.f;
    if constexpr (kParts == 2) {
      tile_scale *= split_unit(args.exponent[1], args.k.seq, head_of_keys, tile * kBlockN);
      unit = split_unit(args.exponent[2], args.k.seq, head_of_keys, tile * kBlockN);
    }
    const int last_key = (tile + 1) * kBlockN - 1;
    if constexpr (Shape::kGeneral) {
      auto& flat = reinterpret_cast<float (&)[kBlockN / 2]>(score);
      const int first = tile * kBlockN + lane % 4 * 2;
      const ScorePlace place{batch, head, {min(row + warp_row + lane / 4, args.q.seq - 1), min(row + warp_row + lane / 4 + 8, args.q.seq - 1)}, first, args.k.seq};
      float slope;
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) flat[i] *= tile_scale;
      if (args.general.softcap > 0.f) {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) flat[i] = capped(flat[i], args.general.softcap, slope);
      }
      if (args.general.bias != nullptr) add_bias<typename Shape::Out, false>(flat, args.general, place);
      if (args.general.slopes != nullptr) add_alibi<false>(flat, args.general, place);
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) {
        if (!sees(seen[i / 2 % 2], first + i / 4 * 8 + i % 2)) flat[i] = -kInfinity;
      }
      tile_scale = 1.f;
    } else if (last_key >= args.k.seq || (args.causal && last_key > row + warp_row)) {
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) {
        const int key = tile * kBlockN + i / 4 * 8 + lane % 4 * 2 + i % 2,
                  query = row + warp_row + lane / 4 + i / 2 % 2 * 8;
        if (key >= args.k.seq || (args.causal && key > query)) score[i / 4][i % 4] = -kInfinity;
      }
    }
    online_softmax<false>(reinterpret_cast<float (&)[kBlockN / 2]>(score), state, correction, tile_scale, kShift,
                          Shape::kGeneral || fused_scale(args.scale));
    uint32_t weights[kParts][kBlockN / 16][4];
    to_weights<T, kParts, kBlockN>(weights, score);
    copy_wait<1>();
    __syncthreads();  // V has arrived
    multiply_weights<T, kParts, kBlockN, kD>(weights, v, [&](int n, const float (&product)[2][4]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& sum = out[2 * n + i / 4][i % 4];
        sum = fmaf(sum, correction[i / 2 % 2], product[i / 4][i % 4] * unit);
      }
    });
  }
  copy_wait<0>();

#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float sum = quad_sum(state.sum[e]);
    const int query = row + warp_row + lane / 4 + e * 8;
    if (query >= args.q.seq) continue;
    if constexpr (Shape::kGeneral) {
      if (args.general.parts > 1) {
        const int64_t place = ((int64_t{batch} * args.q.heads + head) * args.q.seq + query) * args.general.parts + blockIdx.x % static_cast<unsigned>(args.general.parts);
        float* const to = args.part_out + place * kD;
#pragma unroll
        for (int n = 0; n < kD / 8; ++n) {
          *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) = float2{out[n][2 * e], out[n][2 * e + 1]};
        }
        if (lane % 4 == 0) args.part_state[place] = float2{state.maximum[e], sum};
        continue;
      }
    }
    float factor;
    if constexpr (Shape::kGeneral) factor = end_row(state.maximum[e], sum, kShift, args.general.sinks == nullptr ? nullptr : args.general.sinks + head);
    else factor = 1.f / sum;
    auto* to = static_cast<typename Shape::Out*>(args.out) + batch * args.out_batch_stride +
               head * args.out_head_stride + query * args.out_seq_stride;
#pragma unroll
    for (int n = 0; n < kD / 8; ++n) {
      write_pair<T>(to, n * 8 + lane % 4 * 2, args.out_head_size, out[n][2 * e] * factor, out[n][2 * e + 1] * factor);
    }
    if (args.lse != nullptr && lane % 4 == 0) {
      args.lse[(int64_t{batch} * args.q.heads + head) * args.q.seq + query] =
          (state.maximum[e] + log2f(sum) - kShift) * kLn2;
    }
  }
}

}  // namespace custom_ops::flash_attention

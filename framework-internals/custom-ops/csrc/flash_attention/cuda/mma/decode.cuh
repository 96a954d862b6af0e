// One query of a head beside many keys, 16-bit types: memory is the limit. The heads that share keys are the rows of one tile.
//
// Four warps of a block take 16 keys each in turn, straight from global memory to the fragments, 16 bytes a load and without shared
// memory: a product's sum may go over the head's columns in any order, and its columns may lie in any order, so each lane loads
// neighbours. A lane's 8 columns of Q and K serve two products; its 8 columns of four values are the columns of eight.
#pragma once

#include "../../flash_attention.h"
#include "../device/platform.cuh"
#include "../features.cuh"
#include "tiles.cuh"

namespace custom_ops::flash_attention {

struct Decode {
  Tensor q, k, v, out;
  float* lse;
  const float* sinks;
  float* part_out;  // of parts, see merge.cuh
  float2* part_state;
  int heads_q, heads_kv, seq_kv, head_size, parts;
  float scale, softcap;  // times log2(e)
};

constexpr int kDecodeWarps = 4, kDecodeRows = 16;

template <int kD>
constexpr int decode_shared_bytes() {
  return kDecodeWarps * kDecodeRows * (kD * 4 + 8);
}

// Halves of two words: the lower ones, or the upper ones.
FLASH_DEVICE uint32_t halves(uint32_t low, uint32_t high, bool upper) {
  return upper ? low >> 16 | (high & 0xffff0000u) : (low & 0xffffu) | high << 16;
}

template <typename T, int kD>
struct DecodeWarp {
  static constexpr int kSteps = kD / 32, kColumns = kD / 64;
  const Decode& args;
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  uint32_t q[kSteps][2][4];
  uint4 k[2][kSteps] = {}, v[kColumns][4] = {};
  float out[kD / 8][4] = {};
  RowState state;

  FLASH_DEVICE uint4 load(const T* start, int column) const {
    return column < args.head_size ? *reinterpret_cast<const uint4*>(start + column) : uint4{0, 0, 0, 0};
  }

  FLASH_DEVICE void load_queries(int batch, int head, int rows) {
    const T* const start = static_cast<const T*>(args.q.data) + batch * args.q.batch_stride + head * args.q.head_stride;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = row + 8 * e;
        const uint4 x = r < rows ? load(start + r * args.q.head_stride, step * 32 + quad * 8) : uint4{0, 0, 0, 0};
        q[step][0][e] = x.x, q[step][0][2 + e] = x.y;
        q[step][1][e] = x.z, q[step][1][2 + e] = x.w;
      }
    }
    state.maximum[0] = state.maximum[1] = kNoMaximum;
  }

  // Columns past the head size stay zero.
  FLASH_DEVICE void load_keys(const T* keys, int first) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const T* const start = keys + min(first + t * 8 + row, args.seq_kv - 1) * args.k.seq_stride;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int column = step * 32 + quad * 8;
        if (column < args.head_size) k[t][step] = *reinterpret_cast<const uint4*>(start + column);
      }
    }
  }
  FLASH_DEVICE void load_values(const T* values, int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* const start = values + min(first + quad * 2 + i % 2 + i / 2 * 8, args.seq_kv - 1) * args.v.seq_stride;
#pragma unroll
      for (int t = 0; t < kColumns; ++t) {
        const int column = t * 64 + row * 8;
        if (column < args.head_size) v[t][i] = *reinterpret_cast<const uint4*>(start + column);
      }
    }
  }

  // The 16 keys from `first` on, which have been loaded; those from `end` on without a weight. Registers that a product has read take
  // the next keys at once, so that loads are in flight all the time.
  FLASH_DEVICE void add(const T* keys, const T* values, int first, int end) {
    const int next = first + 16 * kDecodeWarps;
    float score[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        mma<T>(score[t], q[step][0], k[t][step].x, k[t][step].y);
        mma<T>(score[t], q[step][1], k[t][step].z, k[t][step].w);
      }
    }
    if (next < end) load_keys(keys, next);
    float correction[2], scale = args.scale;
    auto& flat = reinterpret_cast<float (&)[8]>(score);
    const bool cap = args.softcap > 0.f;
    if (cap) {
      float slope;
#pragma unroll
      for (int i = 0; i < 8; ++i) flat[i] = capped(flat[i] * scale, args.softcap, slope);
      scale = 1.f;
    }
    if (first + 16 > end) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first + i / 4 * 8 + quad * 2 + i % 2 >= end) flat[i] = -kInfinity;
      }
    }
    online_softmax<true>(flat, state, correction, scale, 0.f, cap || fused_scale(scale));
    uint32_t weights[1][1][4];
    to_weights<T, 1, 16>(weights, score);
    if (warp_any(correction[0] != 1.f || correction[1] != 1.f)) {
#pragma unroll
      for (int n = 0; n < kD / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][i] *= correction[i / 2];
    }
#pragma unroll
    for (int t = 0; t < kColumns; ++t) {
      uint32_t word[4][4];
      memcpy(word, v[t], sizeof word);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        mma<T>(out[t * 8 + j], weights[0][0], halves(word[0][j / 2], word[1][j / 2], j % 2), halves(word[2][j / 2], word[3][j / 2], j % 2));
      }
    }
    if (next < end) load_values(values, next);
  }

  FLASH_DEVICE void store(float* to, float2* state_to) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int r = row + 8 * e;
#pragma unroll
      for (int t = 0; t < kColumns; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 8; j += 4) {
            *reinterpret_cast<float4*>(to + r * kD + t * 64 + (quad * 2 + i) * 8 + j) =
                float4{out[t * 8 + j][2 * e + i], out[t * 8 + j + 1][2 * e + i], out[t * 8 + j + 2][2 * e + i], out[t * 8 + j + 3][2 * e + i]};
          }
      const float sum = quad_sum(state.sum[e]);
      if (quad == 0) state_to[r] = float2{state.maximum[e], sum};
    }
  }
};

template <typename T, int kD>
__global__ void __launch_bounds__(32 * kDecodeWarps) decode(const Decode args) {
  FLASH_SHARED_MEMORY(memory);
  float* const outs = reinterpret_cast<float*>(memory);
  float2* const states = reinterpret_cast<float2*>(outs + kDecodeWarps * kDecodeRows * kD);
  const int group = args.heads_q / args.heads_kv, tiles = (group + kDecodeRows - 1) / kDecodeRows, warp = threadIdx.x / 32;
  const int part = static_cast<int>(blockIdx.x) % args.parts, index = static_cast<int>(blockIdx.x) / args.parts;
  const int head_kv = index / tiles % args.heads_kv, batch = index / tiles / args.heads_kv;
  const int head = head_kv * group + index % tiles * kDecodeRows, rows = min(kDecodeRows, (head_kv + 1) * group - head);
  const int of_part = ((args.seq_kv + args.parts - 1) / args.parts + 15) / 16 * 16, end = min(args.seq_kv, (part + 1) * of_part);
  const T* const keys = static_cast<const T*>(args.k.data) + batch * args.k.batch_stride + head_kv * args.k.head_stride;
  const T* const values = static_cast<const T*>(args.v.data) + batch * args.v.batch_stride + head_kv * args.v.head_stride;
  {
    DecodeWarp<T, kD> one{args};
    one.load_queries(batch, head, rows);
    int first = part * of_part + warp * 16;
    if (first < end) one.load_keys(keys, first), one.load_values(values, first);
    for (; first < end; first += 16 * kDecodeWarps) one.add(keys, values, first, end);
    one.store(outs + warp * kDecodeRows * kD, states + warp * kDecodeRows);
  }
  __syncthreads();
  const int column = threadIdx.x;
  for (int r = 0; r < rows; ++r) {
    float top = kNoMaximum, total = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) top = fmaxf(top, states[w * kDecodeRows + r].x);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float2 of = states[w * kDecodeRows + r];
      const float weight = exp2_approx(of.x - top);
      total = fmaf(of.y, weight, total);
      if (column < kD) sum = fmaf(outs[(w * kDecodeRows + r) * kD + column], weight, sum);
    }
    const int64_t place = int64_t{batch} * args.heads_q + head + r;
    if (args.parts > 1) {
      if (column < kD) args.part_out[(place * args.parts + part) * kD + column] = sum;
      if (column == 0) args.part_state[place * args.parts + part] = float2{top, total};
      continue;
    }
    const float factor = end_row(top, total, 0.f, args.sinks == nullptr ? nullptr : args.sinks + head + r);
    if (column < args.head_size) {
      const uint32_t both = pack<T>(sum * factor, 0.f);
      memcpy(static_cast<T*>(args.out.data) + batch * args.out.batch_stride + (head + r) * args.out.head_stride + column, &both, 2);
    }
    if (args.lse != nullptr && column == 0) args.lse[place] = (top + log2f(total)) * kLn2;
  }
}

}  // namespace custom_ops::flash_attention

// Forward on Hopper (sm_90a): warp-specialised, one persistent block a multiprocessor.
//
// One warp copies tiles of K and V into two rings of shared memory (TMA, mbarriers); two or three warpgroups each own 64
// query rows, whose output stays in registers. For key tile j a warpgroup issues S_j = Q K_j^T and, behind it, the product
// of the tile before, O += P_{j-1} V_{j-1}; while the second runs it computes the softmax of S_j. Named barriers hand the
// tensor cores from warpgroup to warpgroup, so that one's softmax runs under another's products.
//
//   issue S_0                          | softmax 0
//   issue S_1, O += P_0 V_0            | softmax 1 (under the product), O *= correction
//   ...
//   O += P_last V_last, O / sum, lse
//
// kParts = 1: 16-bit tensors. kParts = 2: fp32 as fp16 high and low parts, a product being low * high + high * low +
// high * high (low * low is below fp32's last bit). The small products go first: the tensor core truncates each sum to
// the bits of its accumulator, so that only the last third of the additions loses anything. For the same reason every
// tile's P V starts from zero and is added to O by ordinary rounded arithmetic: accumulated in place over a long row, the
// truncations, all towards zero, would add up.
//
// Shared memory: blocks of 64 columns (128 bytes) by all rows of the tile, 128-byte swizzled, as TMA writes and wgmma reads
// them. K-major operands (Q, K) step 32 bytes for 16 columns; V is read with its rows as the summed dimension, 2048 bytes
// for 16 rows, its 64-column blocks the leading offset.
//
// Floor: 4 * seq_q * seq_kv * head_size operations a head (three times as many for fp32, half when causal) over the tensor
// cores' rate.
#pragma once

#include "platform.cuh"
#include "softmax.cuh"

namespace custom_ops::flash_attention {

struct WgmmaForward {
  TensorMap q[2], k[2], v[2];  // (head_size, sequence, heads, batch); [0] the tensor or its high part, [1] the low part
  void* out;                   // T, or float where kParts is 2
  int64_t out_batch_stride, out_head_stride, out_seq_stride;
  float* lse;                  // may be null
  const uint32_t* largest;     // kParts = 2: largest magnitudes of q, k and v a head, each heads_q * batch apart
  int batch, heads_q, heads_kv, seq_q, seq_kv, head_size;
  int group;                   // heads that are worked on together, so that their K and V stay in the L2 cache
  float scale;                 // times log2(e)
  bool causal;
};

template <typename T, int kParts_, int kD_, int kBlockN_, int kConsumers_, int kStages_>
struct WgmmaShape {
  using Element = T;
  static constexpr int kParts = kParts_, kD = kD_, kBlockN = kBlockN_, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kRowBytes = 128;  // of a block of 64 columns
  static constexpr int kColumnBlocks = kD / 64;
  static constexpr int kQPart = kBlockM * kD * 2, kTilePart = kBlockN * kD * 2;
  static constexpr int kQBytes = kParts * kQPart, kTileBytes = kParts * kTilePart;
  static constexpr int kBarriers = 2 + 4 * kStages;
  static constexpr int kSharedBytes = 1024 + kQBytes + 2 * kStages * kTileBytes + 8 * kBarriers;
  // 65,536 registers: the producer's warpgroup gives up what the consumers need.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
};

struct BlockOfRows {
  int row, head, batch, tiles;
};

// Blocks of a head follow one another, since they read the same K and V. Causal blocks differ in length: within a group of
// heads the longest go first, so that the last to finish are short.
template <typename Shape>
FLASH_DEVICE BlockOfRows block_of_rows(const WgmmaForward& args, int index) {
  const int blocks = (args.seq_q + Shape::kBlockM - 1) / Shape::kBlockM;
  int head, block;
  if (args.causal) {
    const int first = index / (args.group * blocks) * args.group;
    const int heads = min(args.group, args.batch * args.heads_q - first);
    const int rest = index - first * blocks;
    head = first + rest % heads;
    block = blocks - 1 - rest / heads;
  } else {
    head = index / blocks;
    block = index % blocks;
  }
  const int row = block * Shape::kBlockM;
  const int keys = args.causal ? min(args.seq_kv, row + Shape::kBlockM) : args.seq_kv;
  return {row, head % args.heads_q, head / args.heads_q, (keys + Shape::kBlockN - 1) / Shape::kBlockN};
}

template <typename Shape>
struct WgmmaMemory {
  SharedAddress q, k, v, barriers;
  FLASH_DEVICE explicit WgmmaMemory(const void* memory)
      : q((shared_address(memory) + 1023) & ~SharedAddress{1023}),
        k(q + Shape::kQBytes),
        v(k + Shape::kStages * Shape::kTileBytes),
        barriers(v + Shape::kStages * Shape::kTileBytes) {}
  FLASH_DEVICE SharedAddress q_full() const { return barriers; }
  FLASH_DEVICE SharedAddress q_empty() const { return barriers + 8; }
  FLASH_DEVICE SharedAddress k_full(int stage) const { return barriers + 16 + 8 * stage; }
  FLASH_DEVICE SharedAddress k_empty(int stage) const { return k_full(stage + Shape::kStages); }
  FLASH_DEVICE SharedAddress v_full(int stage) const { return k_full(stage + 2 * Shape::kStages); }
  FLASH_DEVICE SharedAddress v_empty(int stage) const { return k_full(stage + 3 * Shape::kStages); }
};

// A place in a ring: which stage, and how often the ring has been round.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t turn = 0;
  FLASH_DEVICE void advance() {
    if (++stage == kStages) stage = 0, turn ^= 1;
  }
};

FLASH_DEVICE uint64_t matrix_descriptor(SharedAddress start, int leading_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t((leading_bytes >> 4) & 0x3fff) << 16 | uint64_t((start >> 4) & 0x3fff);
}

template <typename Shape>
FLASH_DEVICE void copy_rows(SharedAddress to, const TensorMap (&maps)[2], SharedAddress barrier, int rows, int row, int head,
                            int batch) {
#pragma unroll
  for (int part = 0; part < Shape::kParts; ++part) {
#pragma unroll
    for (int block = 0; block < Shape::kColumnBlocks; ++block) {
      tensor_copy(to, maps[part], barrier, block * 64, row, head, batch);
      to += rows * Shape::kRowBytes;
    }
  }
}

template <typename Shape>
FLASH_DEVICE void produce(const WgmmaForward& args, const WgmmaMemory<Shape>& memory, int blocks) {
  RingPlace<Shape::kStages> k_place, v_place;
  uint32_t q_turn = 0;
  for (int index = blockIdx.x; index < blocks; index += gridDim.x) {
    const BlockOfRows block = block_of_rows<Shape>(args, index);
    const int head_kv = block.head / (args.heads_q / args.heads_kv);
    auto copy_k = [&](int tile) {
      barrier_wait(memory.k_empty(k_place.stage), k_place.turn ^ 1);
      barrier_arrive_expect(memory.k_full(k_place.stage), Shape::kTileBytes);
      copy_rows<Shape>(memory.k + k_place.stage * Shape::kTileBytes, args.k, memory.k_full(k_place.stage), Shape::kBlockN,
                       tile * Shape::kBlockN, head_kv, block.batch);
      k_place.advance();
    };
    auto copy_v = [&](int tile) {
      barrier_wait(memory.v_empty(v_place.stage), v_place.turn ^ 1);
      barrier_arrive_expect(memory.v_full(v_place.stage), Shape::kTileBytes);
      copy_rows<Shape>(memory.v + v_place.stage * Shape::kTileBytes, args.v, memory.v_full(v_place.stage), Shape::kBlockN,
                       tile * Shape::kBlockN, head_kv, block.batch);
      v_place.advance();
    };
    copy_k(0);  // before Q: the ring has room while the last block's consumers still read their Q
    barrier_wait(memory.q_empty(), q_turn ^ 1);
    barrier_arrive_expect(memory.q_full(), Shape::kQBytes);
    copy_rows<Shape>(memory.q, args.q, memory.q_full(), Shape::kBlockM, block.row, block.head, block.batch);
    q_turn ^= 1;
    for (int tile = 1; tile < block.tiles; ++tile) {
      copy_k(tile);
      copy_v(tile - 1);
    }
    copy_v(block.tiles - 1);
  }
}

// score (+)= (part of Q's 64 rows) (part of a K tile)^T
template <typename Shape, int kCount>
FLASH_DEVICE void multiply_qk(float (&score)[kCount], SharedAddress q, SharedAddress k, bool accumulate) {
#pragma unroll
  for (int step = 0; step < Shape::kD / 16; ++step) {
    const int block = step / 4, within = step % 4 * 32;
    wgmma<false>(static_cast<typename Shape::Element*>(nullptr), score,
                 matrix_descriptor(q + block * Shape::kBlockM * Shape::kRowBytes + within, 16),
                 matrix_descriptor(k + block * Shape::kBlockN * Shape::kRowBytes + within, 16), accumulate || step != 0);
  }
}

// out (+)= P (part of a V tile)
template <typename Shape, int kOutTiles, int kCount>
FLASH_DEVICE void multiply_pv(float (&out)[kOutTiles][kCount], const uint32_t (&p)[Shape::kBlockN / 16][4], SharedAddress v,
                              bool accumulate) {
#pragma unroll
  for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
    for (int step = 0; step < Shape::kBlockN / 16; ++step) {
      const SharedAddress start = v + tile * (kCount / 32) * Shape::kBlockN * Shape::kRowBytes + step * 16 * Shape::kRowBytes;
      wgmma<true>(static_cast<typename Shape::Element*>(nullptr), out[tile], p[step],
                  matrix_descriptor(start, Shape::kBlockN * Shape::kRowBytes), accumulate || step != 0);
    }
  }
}

template <typename Shape>
struct Consumer {
  using T = typename Shape::Element;
  static constexpr int kParts = Shape::kParts, kBlockN = Shape::kBlockN;
  static constexpr int kOutColumns = Shape::kD < 128 ? Shape::kD : 128, kOutTiles = Shape::kD / kOutColumns;
  static constexpr int kScores = kBlockN / 2, kOuts = kOutColumns / 2;

  const WgmmaForward& args;
  const WgmmaMemory<Shape>& memory;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  const int lane = threadIdx.x % 32;
  const int warp_row = group * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  RingPlace<Shape::kStages> k_place, v_place;
  uint32_t q_turn = 0;

  FLASH_DEVICE void take_tensor_cores() {
    if constexpr (Shape::kConsumers > 1) named_barrier_sync(1 + group, 256);
  }
  FLASH_DEVICE void pass_tensor_cores() {
    if constexpr (Shape::kConsumers > 1) named_barrier_arrive(1 + (group + 1) % Shape::kConsumers, 256);
  }
  FLASH_DEVICE void release(SharedAddress barrier) {
    if (lane == 0) barrier_arrive(barrier);
  }

  FLASH_DEVICE void issue_scores(float (&score)[kScores]) {
    const SharedAddress q = memory.q + group * 64 * Shape::kRowBytes;
    const SharedAddress k = memory.k + k_place.stage * Shape::kTileBytes;
    if constexpr (kParts == 2) {
      multiply_qk<Shape>(score, q + Shape::kQPart, k, false);
      multiply_qk<Shape>(score, q, k + Shape::kTilePart, true);
    }
    multiply_qk<Shape>(score, q, k, kParts == 2);
    wgmma_commit();
  }

  FLASH_DEVICE void issue_output(float (&out)[kOutTiles][kOuts], const uint32_t (&p)[kParts][kBlockN / 16][4]) {
    const SharedAddress v = memory.v + v_place.stage * Shape::kTileBytes;
    if constexpr (kParts == 2) {
      multiply_pv<Shape>(out, p[1], v, false);
      multiply_pv<Shape>(out, p[0], v + Shape::kTilePart, true);
    }
    multiply_pv<Shape>(out, p[0], v, true);
    wgmma_commit();
  }

  FLASH_DEVICE void mask(float (&score)[kScores], int row, int tile) {
    const int first_row = row + warp_row + lane / 4, first_key = tile * kBlockN + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int key = first_key + i / 4 * 8 + i % 2, query = first_row + i / 2 % 2 * 8;
      if (key >= args.seq_kv || (args.causal && key > query)) score[i] = -kInfinity;
    }
  }

  FLASH_DEVICE void softmax(float (&score)[kScores], RowState& state, float (&correction)[2], float scale, int row, int tile) {
    const int last_key = (tile + 1) * kBlockN - 1;
    if (last_key >= args.seq_kv || (args.causal && last_key > row + warp_row)) mask(score, row, tile);
    online_softmax(score, state, correction, scale, kParts == 2 ? kSplitProbabilityExponent : 0.f);
  }

  FLASH_DEVICE void convert(uint32_t (&p)[kParts][kBlockN / 16][4], const float (&score)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const uint32_t high = pack<T>(score[2 * i], score[2 * i + 1]);
      p[0][i / 4][i % 4] = high;
      if constexpr (kParts == 2) {
        const float2 taken = unpack_half(high);
        p[1][i / 4][i % 4] = pack<T>(score[2 * i] - taken.x, score[2 * i + 1] - taken.y);
      }
    }
  }

  FLASH_DEVICE void scale_output(float (&out)[kOutTiles][kOuts], const float (&correction)[2]) {
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[tile][i] *= correction[i / 2 % 2];
  }

  FLASH_DEVICE void add_output(float (&out)[kOutTiles][kOuts], const float (&product)[kOutTiles][kOuts],
                               const float (&correction)[2]) {
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[tile][i] = fmaf(out[tile][i], correction[i / 2 % 2], product[tile][i]);
  }

  FLASH_DEVICE void keep(float (&out)[kOutTiles][kOuts]) {
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) wgmma_keep(out[tile]);
  }

  FLASH_DEVICE void write(const float (&out)[kOutTiles][kOuts], const RowState& state, const BlockOfRows& block, float unit) {
    constexpr float kShift = kParts == 2 ? kSplitProbabilityExponent : 0.f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = quad_sum(state.sum[e]);
      const int row = block.row + warp_row + lane / 4 + e * 8;
      if (row >= args.seq_q) continue;
      const float factor = unit / sum;
      const int64_t start = block.batch * args.out_batch_stride + block.head * args.out_head_stride + row * args.out_seq_stride;
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
        for (int i = 2 * e; i < kOuts; i += 4) {
          const int column = tile * kOutColumns + i / 4 * 8 + lane % 4 * 2;
          if (column >= args.head_size) continue;
          const float x = out[tile][i] * factor, y = out[tile][i + 1] * factor;
          if constexpr (kParts == 2) {
            static_cast<float*>(args.out)[start + column] = x;
            static_cast<float*>(args.out)[start + column + 1] = y;
          } else {
            *reinterpret_cast<uint32_t*>(static_cast<T*>(args.out) + start + column) = pack<T>(x, y);
          }
        }
      }
      if (args.lse != nullptr && lane % 4 == 0) {
        args.lse[(int64_t{block.batch} * args.heads_q + block.head) * args.seq_q + row] =
            (state.maximum[e] + log2f(sum) - kShift) * kLn2;
      }
    }
  }

  FLASH_DEVICE void consume(const BlockOfRows& block) {
    float scale = args.scale, unit = 1.f;
    if constexpr (kParts == 2) {
      const int heads = args.batch * args.heads_q, head = block.batch * args.heads_q + block.head;
      const int head_kv = block.batch * args.heads_kv + block.head / (args.heads_q / args.heads_kv);
      scale *= power_of_two(-split_exponent(args.largest[head]));
      scale *= power_of_two(-split_exponent(args.largest[heads + head_kv]));
      unit = power_of_two(-split_exponent(args.largest[2 * heads + head_kv]));
    }
    RowState state;
    float score[kScores], correction[2], out[kOutTiles][kOuts];
    float product[kParts == 2 ? kOutTiles : 1][kParts == 2 ? kOuts : 1];
    uint32_t p[kParts][kBlockN / 16][4];
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[tile][i] = 0.f;

    barrier_wait(memory.q_full(), q_turn);
    q_turn ^= 1;
    barrier_wait(memory.k_full(k_place.stage), k_place.turn);
    take_tensor_cores();
    wgmma_begin();
    issue_scores(score);
    pass_tensor_cores();
    wgmma_wait<0>();
    wgmma_keep(score);
    release(memory.k_empty(k_place.stage));
    k_place.advance();
    softmax(score, state, correction, scale, block.row, 0);
    convert(p, score);

    for (int tile = 1; tile < block.tiles; ++tile) {
      float next_correction[2];
      barrier_wait(memory.k_full(k_place.stage), k_place.turn);
      take_tensor_cores();
      wgmma_begin();
      issue_scores(score);
      barrier_wait(memory.v_full(v_place.stage), v_place.turn);
      if constexpr (kParts == 2) issue_output(product, p);
      else issue_output(out, p);
      pass_tensor_cores();
      wgmma_wait<1>();
      wgmma_keep(score);
      release(memory.k_empty(k_place.stage));
      k_place.advance();
      softmax(score, state, next_correction, scale, block.row, tile);
      wgmma_wait<0>();
      if constexpr (kParts == 2) {
        keep(product);
        release(memory.v_empty(v_place.stage));
        add_output(out, product, correction);
      } else {
        keep(out);
        release(memory.v_empty(v_place.stage));
        scale_output(out, next_correction);
      }
      v_place.advance();
      convert(p, score);
      correction[0] = next_correction[0];
      correction[1] = next_correction[1];
    }
    release(memory.q_empty());

    barrier_wait(memory.v_full(v_place.stage), v_place.turn);
    wgmma_begin();
    if constexpr (kParts == 2) issue_output(product, p);
    else issue_output(out, p);
    wgmma_wait<0>();
    if constexpr (kParts == 2) {
      keep(product);
      add_output(out, product, correction);
    } else {
      keep(out);
    }
    release(memory.v_empty(v_place.stage));
    v_place.advance();
    write(out, state, block, unit);
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) forward_wgmma(const __grid_constant__ WgmmaForward args) {
#if FLASH_HOPPER
  FLASH_SHARED_MEMORY(shared);
  const WgmmaMemory<Shape> memory(shared);
  if (threadIdx.x == 0) {
    barrier_init(memory.q_full(), 1);
    barrier_init(memory.q_empty(), 4 * Shape::kConsumers);  // one lane of every consuming warp
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(memory.k_full(stage), 1);
      barrier_init(memory.v_full(stage), 1);
      barrier_init(memory.k_empty(stage), 4 * Shape::kConsumers);
      barrier_init(memory.v_empty(stage), 4 * Shape::kConsumers);
    }
    barrier_init_visible();
  }
  __syncthreads();
  const int blocks = (args.seq_q + Shape::kBlockM - 1) / Shape::kBlockM * args.batch * args.heads_q;
  if (threadIdx.x < 128) {
    registers_release<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Shape>(args, memory, blocks);
  } else {
    registers_acquire<Shape::kConsumerRegisters>();
    Consumer<Shape> consumer{args, memory};
    if (consumer.group == Shape::kConsumers - 1) consumer.pass_tensor_cores();  // the first may begin
    for (int index = blockIdx.x; index < blocks; index += gridDim.x) consumer.consume(block_of_rows<Shape>(args, index));
    if (consumer.group == 0) consumer.take_tensor_cores();  // no arrival is left behind
  }
#endif
}

}  // namespace custom_ops::flash_attention

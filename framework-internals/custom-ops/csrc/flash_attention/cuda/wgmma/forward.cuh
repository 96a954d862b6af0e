// Forward on Hopper (sm_90a): warp-specialised, with one persistent block per multiprocessor.
//
// One warp copies tiles of K and V into two rings of shared memory (TMA, mbarriers). Two or three warpgroups each own 64
// query rows, whose output stays in registers. For key tile j, a warpgroup issues S_j = Q K_j^T and then the product of the
// previous tile, O += P_{j-1} V_{j-1}. While the second product runs, it computes the softmax of S_j. Named barriers pass
// the tensor cores from one warpgroup to the next, so that the softmax of one overlaps the products of another.
//
//   issue S_0                          | softmax 0
//   issue S_1, O += P_0 V_0            | softmax 1 (under the product), O *= correction
//   ...
//   O += P_last V_last, O / sum, lse
//
// kParts = 1: 16-bit tensors. kParts = 2: fp32 as fp16 high and low parts; a product is low * high + high * low +
// high * high (low * low is below fp32's last bit). The small products come first: the tensor core truncates each sum to
// the bits of its accumulator, so only the last third of the additions loses bits. For the same reason, every tile's P V
// starts from zero and is added to O with ordinary rounding. Accumulated in place over a long row, the truncations, all
// towards zero, would add up.
//
// Lower bound of the time: 4 * seq_q * seq_kv * head_size operations per head (three times as many for fp32, half if
// causal), divided by the rate of the tensor cores.
#pragma once

#include "tiles.cuh"

namespace custom_ops::flash_attention {

struct WgmmaForward {
  TensorMap q[2], k[2], v[2];  // (head_size, sequence, heads, batch); [0] the tensor or its high part, [1] the low part
  void* out;                   // T, or float where kParts is 2
  int64_t out_batch_stride, out_head_stride, out_seq_stride;
  float* lse;              // may be null
  const int* exponent[3];  // kParts = 2: exponents of q, k and v, as split.cuh writes them
  int batch, heads_q, heads_kv, seq_q, seq_kv, head_size;
  float scale;  // times log2(e)
  bool causal;
};

template <typename T, int kParts_, int kD_, int kBlockN_, int kConsumers_, int kStages_>
struct WgmmaShape {
  using Element = T;
  static constexpr int kParts = kParts_, kD = kD_, kBlockN = kBlockN_, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kQPart = kBlockM * kD * 2, kTilePart = kBlockN * kD * 2;
  static constexpr int kQBytes = kParts * kQPart, kTileBytes = kParts * kTilePart;
  static constexpr int kBarriers = 2 + 4 * kStages;
  static constexpr int kSharedBytes = 1024 + kQBytes + 2 * kStages * kTileBytes + 8 * kBarriers;
  // 65,536 registers: the producer's warpgroup releases registers for the consumers.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
};

struct BlockOfRows {
  int row, head, batch, tiles;
};

// The blocks of a head are consecutive because they read the same K and V; they are assigned to the multiprocessors in
// rounds. Causal blocks differ in length: within a head, long and short blocks alternate, so two rounds balance.
template <typename Shape>
struct Schedule {
  const WgmmaForward& args;
  const int blocks = (args.seq_q + Shape::kBlockM - 1) / Shape::kBlockM;  // of a head
  const int shares = args.causal ? (blocks + 1) / 2 : blocks;
  const int rounds_a_share = args.causal ? 2 : 1;
  const int rounds = (args.batch * args.heads_q * shares + gridDim.x - 1) / gridDim.x * rounds_a_share;

  // Whether this multiprocessor has a block in a round, and which one.
  FLASH_DEVICE bool find(int round, BlockOfRows& found) const {
    const int share = round / rounds_a_share * gridDim.x + blockIdx.x, head = share / shares;
    const int other = blocks - 1 - share % shares;
    const bool second = round % rounds_a_share == 1;
    const int block = args.causal && !second ? other : share % shares;
    if (head >= args.batch * args.heads_q || (second && block == other)) return false;
    const int row = block * Shape::kBlockM, keys = args.causal ? min(args.seq_kv, row + Shape::kBlockM) : args.seq_kv;
    found = {row, head % args.heads_q, head / args.heads_q, (keys + Shape::kBlockN - 1) / Shape::kBlockN};
    return true;
  }
};

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

template <typename Shape>
FLASH_DEVICE void produce(const WgmmaForward& args, const WgmmaMemory<Shape>& memory, const Schedule<Shape>& schedule) {
  RingPlace<Shape::kStages> k_place, v_place;
  uint32_t q_turn = 0;
  BlockOfRows block;
  for (int round = 0; round < schedule.rounds; ++round) {
    if (!schedule.find(round, block)) continue;
    const int head_kv = block.head / (args.heads_q / args.heads_kv);
    auto copy_k = [&](int tile) {
      barrier_wait(memory.k_empty(k_place.stage), k_place.turn ^ 1);
      barrier_arrive_expect(memory.k_full(k_place.stage), Shape::kTileBytes);
      copy_rows<Shape::kParts, Shape::kBlockN, Shape::kD>(memory.k + k_place.stage * Shape::kTileBytes, args.k,
                                                          memory.k_full(k_place.stage), tile * Shape::kBlockN, head_kv,
                                                          block.batch);
      k_place.advance();
    };
    auto copy_v = [&](int tile) {
      barrier_wait(memory.v_empty(v_place.stage), v_place.turn ^ 1);
      barrier_arrive_expect(memory.v_full(v_place.stage), Shape::kTileBytes);
      copy_rows<Shape::kParts, Shape::kBlockN, Shape::kD>(memory.v + v_place.stage * Shape::kTileBytes, args.v,
                                                          memory.v_full(v_place.stage), tile * Shape::kBlockN, head_kv,
                                                          block.batch);
      v_place.advance();
    };
    copy_k(0);  // before Q: the ring has space while the previous block's consumers still read their Q
    barrier_wait(memory.q_empty(), q_turn ^ 1);
    barrier_arrive_expect(memory.q_full(), Shape::kQBytes);
    copy_rows<Shape::kParts, Shape::kBlockM, Shape::kD>(memory.q, args.q, memory.q_full(), block.row, block.head,
                                                        block.batch);
    q_turn ^= 1;
    for (int tile = 1; tile < block.tiles; ++tile) {
      copy_k(tile);
      copy_v(tile - 1);
    }
    copy_v(block.tiles - 1);
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
    multiply_parts<T, kParts, Shape::kD, Shape::kBlockM, kBlockN>(score, memory.q + group * 64 * kTileRowBytes,
                                                                  memory.k + k_place.stage * Shape::kTileBytes);
    wgmma_commit();
  }

  FLASH_DEVICE void issue_output(float (&out)[kOutTiles][kOuts], const uint32_t (&p)[kParts][kBlockN / 16][4]) {
    weigh_parts<T, kParts, Shape::kD, kBlockN>(out, p, memory.v + v_place.stage * Shape::kTileBytes);
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

  FLASH_DEVICE void softmax(float (&score)[kScores], RowState& state, float (&correction)[2], float scale, int row,
                            int tile) {
    const int last_key = (tile + 1) * kBlockN - 1;
    if (last_key >= args.seq_kv || (args.causal && last_key > row + warp_row)) mask(score, row, tile);
    online_softmax(score, state, correction, scale, kParts == 2 ? kSplitProbabilityExponent : 0.f,
                   fused_scale(args.scale));
  }

  FLASH_DEVICE void scale_output(float (&out)[kOutTiles][kOuts], const float (&correction)[2]) {
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[tile][i] *= correction[i / 2 % 2];
  }

  FLASH_DEVICE void add_output(float (&out)[kOutTiles][kOuts], const float (&product)[kOutTiles][kOuts],
                               const float (&correction)[2], float unit) {
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[tile][i] = fmaf(out[tile][i], correction[i / 2 % 2], product[tile][i] * unit);
  }

  FLASH_DEVICE void write(const float (&out)[kOutTiles][kOuts], const RowState& state, const BlockOfRows& block) {
    constexpr float kShift = kParts == 2 ? kSplitProbabilityExponent : 0.f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = quad_sum(state.sum[e]);
      const int row = block.row + warp_row + lane / 4 + e * 8;
      if (row >= args.seq_q) continue;
      const float factor = 1.f / sum;
      const int64_t start =
          block.batch * args.out_batch_stride + block.head * args.out_head_stride + row * args.out_seq_stride;
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
    const int head = block.batch * args.heads_q + block.head;
    const int head_kv = block.batch * args.heads_kv + block.head / (args.heads_q / args.heads_kv);
    // 1 / (the powers of two by which the rows of a tile were scaled); the loads complete during the products issued
    // next.
    auto unit_of = [&](int which, int tile) {
      return kParts == 2 ? split_unit(args.exponent[which], args.seq_kv, head_kv, tile * kBlockN) : 1.f;
    };
    float scale = args.scale;
    if constexpr (kParts == 2)
      scale *= split_unit(args.exponent[0], args.seq_q, head, min(block.row + group * 64, args.seq_q - 1));
    float k_unit = unit_of(1, 0), v_unit = unit_of(2, 0);
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
    softmax(score, state, correction, scale * k_unit, block.row, 0);
    to_weights<T, kParts>(p, score);

    for (int tile = 1; tile < block.tiles; ++tile) {
      float next_correction[2];
      k_unit = unit_of(1, tile);
      const float next_v_unit = unit_of(2, tile);
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
      softmax(score, state, next_correction, scale * k_unit, block.row, tile);
      wgmma_wait<0>();
      if constexpr (kParts == 2) {
        wgmma_keep(product);
        release(memory.v_empty(v_place.stage));
        add_output(out, product, correction, v_unit);
      } else {
        wgmma_keep(out);
        release(memory.v_empty(v_place.stage));
        scale_output(out, next_correction);
      }
      v_place.advance();
      to_weights<T, kParts>(p, score);
      correction[0] = next_correction[0];
      correction[1] = next_correction[1];
      v_unit = next_v_unit;
    }
    release(memory.q_empty());

    barrier_wait(memory.v_full(v_place.stage), v_place.turn);
    wgmma_begin();
    if constexpr (kParts == 2) issue_output(product, p);
    else issue_output(out, p);
    wgmma_wait<0>();
    if constexpr (kParts == 2) {
      wgmma_keep(product);
      add_output(out, product, correction, v_unit);
    } else {
      wgmma_keep(out);
    }
    release(memory.v_empty(v_place.stage));
    v_place.advance();
    write(out, state, block);
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
    fence_async_proxy();
  }
  __syncthreads();
  const Schedule<Shape> schedule{args};
  if (threadIdx.x < 128) {
    registers_release<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Shape>(args, memory, schedule);
  } else {
    registers_acquire<Shape::kConsumerRegisters>();
    Consumer<Shape> consumer{args, memory};
    if (consumer.group == Shape::kConsumers - 1) consumer.pass_tensor_cores();  // the first one may start
    BlockOfRows block;
    for (int round = 0; round < schedule.rounds; ++round) {
      if (schedule.find(round, block)) consumer.consume(block);
    }
    if (consumer.group == 0) consumer.take_tensor_cores();  // no arrival is left behind
  }
#endif
}

}  // namespace custom_ops::flash_attention

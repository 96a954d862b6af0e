// Forward on Hopper (sm_90a): warp-specialised, with one persistent block per multiprocessor.
//
// One warp copies tiles of K and V into two rings of shared memory (TMA, mbarriers). Two to four warpgroups each own 64
// query rows, whose output stays in registers. For key tile j, a warpgroup issues S_j = Q K_j^T and then the product of the
// previous tile, O += P_{j-1} V_{j-1}. While the second product runs, it computes the softmax of S_j. Named barriers pass
// the tensor cores from one warpgroup to the next, so that the softmax of one overlaps the products of another.
//
//   issue S_0                          | softmax 0
//   issue S_1, O += P_0 V_0            | softmax 1 (under the product), O *= correction
//   ...
//   issue S_0 of the next block of rows, O += P_last V_last | its softmax 0; O / sum, lse are written
//
// So the tensor cores see no end of a block. The producer looks a block up and passes it on in shared memory with its Q.
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

#include "../features.cuh"
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
  General general;  // only of general shapes
  TensorMap bias;   // only of shapes with a bias: (keys, queries, heads, batch), 1 of what is broadcast
};

// kTurns: the warpgroups take turns at the tensor cores. Without them, one that needs fewer tiles than the others runs ahead.
// Blocks of all but the plain form (../features.cuh) differ in length in any way, so each multiprocessor takes the next one when it is
// ready. Biased: the producer brings the bias of each tile of scores too, in a third ring.
template <typename T, int kParts_, int kD_, int kBlockN_, int kConsumers_, int kStages_, bool kTurns_ = true, Form kForm = Form::kPlain>
struct WgmmaShape {
  static constexpr bool kGeneral = kForm != Form::kPlain, kCap = kForm == Form::kCapped, kBias = kForm == Form::kBiased;
  using Element = T;
  static constexpr int kParts = kParts_, kD = kD_, kBlockN = kBlockN_, kConsumers = kConsumers_, kStages = kStages_;
  static constexpr bool kTurns = kTurns_;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kQPart = kBlockM * kD * 2, kTilePart = kBlockN * kD * 2;
  static constexpr int kQBytes = kParts * kQPart, kTileBytes = kParts * kTilePart;
  static constexpr int kBiasStages = kBias ? 2 : 0, kBiasBytes = kBlockM * kBlockN * 2;
  static constexpr int bytes(int q_buffers) {
    return 1024 + q_buffers * (kQBytes + 16) + 2 * kStages * kTileBytes + kBiasStages * kBiasBytes +
           8 * (2 * q_buffers + 4 * kStages + 2 * kBiasStages);
  }
  // Where they fit, the queries of the next block are copied while those of this one are in use.
  static constexpr int kQBuffers = bytes(2) <= 227 << 10 ? 2 : 1;
  static constexpr int kSharedBytes = bytes(kQBuffers);
  // 65,536 registers: the producer's warpgroup releases registers for the consumers.
  // The general one has blocks to find.
  static constexpr int kProducerRegisters = kGeneral ? 56 : kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kGeneral ? 224 : kConsumers == 2 ? 240 : kConsumers == 3 ? 160 : 112;
  static_assert(!kGeneral || kConsumers == 2);
};

struct BlockOfRows {
  int row, head, batch, tiles;  // no tiles: there are no more blocks
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
    const int row = block * Shape::kBlockM;
    found = {row, head % args.heads_q, head / args.heads_q, tiles(row, Shape::kBlockM)};
    return true;
  }

  // The next block that no multiprocessor has taken; the last ones of a head first, which a causal mask makes the longest.
  FLASH_DEVICE bool take(BlockOfRows& found) const {
    const int index = take_next(args.general.next_block), head = index / blocks;
    if (head >= args.batch * args.heads_q) return false;
    const int row = (blocks - 1 - index % blocks) * Shape::kBlockM;
    found = {row, head % args.heads_q, head / args.heads_q, tiles_from(row, row, Shape::kBlockM)};
    return true;
  }

  // General: the first tile of a block, and those from there on that `rows` rows of it need; one that is masked if they see no key.
  FLASH_DEVICE int first_tile(int block_row) const { return first_tile_of(args.general.spans, block_row, Shape::kBlockN); }
  FLASH_DEVICE int tiles_from(int block_row, int row, int rows) const {
    if (row >= args.seq_q) return 0;
    const int last = min(args.seq_q, row + rows) - 1;
    return max(1, tiles_of(args.general.spans, block_row, last, Shape::kBlockN));
  }

  // The tiles of keys that rows need; none if all of them lie past the end.
  FLASH_DEVICE int tiles(int row, int rows) const {
    if (row >= args.seq_q) return 0;
    const int keys = args.causal ? min(args.seq_kv, min(args.seq_q, row + rows)) : args.seq_kv;
    return (keys + Shape::kBlockN - 1) / Shape::kBlockN;
  }
};

template <typename Shape>
struct WgmmaMemory {
  SharedAddress q, k, v, bias, blocks, barriers;
  FLASH_DEVICE explicit WgmmaMemory(const void* memory)
      : q((shared_address(memory) + 1023) & ~SharedAddress{1023}),
        k(q + Shape::kQBuffers * Shape::kQBytes),
        v(k + Shape::kStages * Shape::kTileBytes),
        bias(v + Shape::kStages * Shape::kTileBytes),
        blocks(bias + Shape::kBiasStages * Shape::kBiasBytes),
        barriers(blocks + 16 * Shape::kQBuffers) {}
  FLASH_DEVICE SharedAddress q_full(int buffer) const { return barriers + 16 * buffer; }
  FLASH_DEVICE SharedAddress q_empty(int buffer) const { return q_full(buffer) + 8; }
  FLASH_DEVICE SharedAddress k_full(int stage) const { return q_full(Shape::kQBuffers) + 8 * stage; }
  FLASH_DEVICE SharedAddress k_empty(int stage) const { return k_full(stage + Shape::kStages); }
  FLASH_DEVICE SharedAddress v_full(int stage) const { return k_full(stage + 2 * Shape::kStages); }
  FLASH_DEVICE SharedAddress v_empty(int stage) const { return k_full(stage + 3 * Shape::kStages); }
  FLASH_DEVICE SharedAddress bias_full(int stage) const { return k_full(stage + 4 * Shape::kStages); }
  FLASH_DEVICE SharedAddress bias_empty(int stage) const { return bias_full(stage + Shape::kBiasStages); }
};

template <typename Shape>
struct Producer {
  const WgmmaForward& args;
  const WgmmaMemory<Shape>& memory;
  RingPlace<Shape::kStages> k_place, v_place;
  RingPlace<Shape::kQBuffers> q_place;
  RingPlace<Shape::kBiasStages> bias_place;

  FLASH_DEVICE void copy(const TensorMap (&maps)[2], RingPlace<Shape::kStages>& place, SharedAddress tiles,
                         SharedAddress full, SharedAddress empty, const BlockOfRows& block, int tile) {
    const int stage = place.stage, head = block.head / (args.heads_q / args.heads_kv);
    barrier_wait(empty + 8 * stage, place.turn ^ 1);
    barrier_arrive_expect(full + 8 * stage, Shape::kTileBytes);
    copy_rows<Shape::kParts, Shape::kBlockN, Shape::kD>(tiles + stage * Shape::kTileBytes, maps, full + 8 * stage,
                                                        tile * Shape::kBlockN, head, block.batch);
    place.advance();
  }
  FLASH_DEVICE void copy_k(const BlockOfRows& block, int tile) {
    copy(args.k, k_place, memory.k, memory.k_full(0), memory.k_empty(0), block, tile);
  }
  FLASH_DEVICE void copy_v(const BlockOfRows& block, int tile) {
    copy(args.v, v_place, memory.v, memory.v_full(0), memory.v_empty(0), block, tile);
  }

  // Of the queries, one row if the bias is the same for all of them.
  FLASH_DEVICE void copy_bias(const BlockOfRows& block, int tile) {
    if constexpr (Shape::kBias) {
      const int64_t(&stride)[4] = args.general.bias_stride;
      const SharedAddress full = memory.bias_full(bias_place.stage), to = memory.bias + bias_place.stage * Shape::kBiasBytes;
      barrier_wait(memory.bias_empty(bias_place.stage), bias_place.turn ^ 1);
      barrier_arrive_expect(full, stride[2] == 0 ? Shape::kBlockN * 2 : Shape::kBiasBytes);
      for (int column = 0; column < Shape::kBlockN; column += 64) {
        tensor_copy(to + column * Shape::kBlockM * 2, args.bias, full, tile * Shape::kBlockN + column, stride[2] == 0 ? 0 : block.row,
                    stride[1] == 0 ? 0 : block.head, stride[0] == 0 ? 0 : block.batch);
      }
      bias_place.advance();
    }
  }

  // Passes a block on: its Q, or only the word that there are no more.
  FLASH_DEVICE void announce(const BlockOfRows& block) {
    const SharedAddress full = memory.q_full(q_place.stage);
    barrier_wait(memory.q_empty(q_place.stage), q_place.turn ^ 1);
    store_shared(memory.blocks + 16 * q_place.stage, int4{block.row, block.head, block.batch, block.tiles});
    if (block.tiles == 0) return barrier_arrive(full);
    barrier_arrive_expect(full, Shape::kQBytes);
    copy_rows<Shape::kParts, Shape::kBlockM, Shape::kD>(memory.q + q_place.stage * Shape::kQBytes, args.q, full,
                                                        block.row, block.head, block.batch);
    q_place.advance();
  }

  FLASH_DEVICE void copy_block(const BlockOfRows& block, int first) {
    copy_k(block, first);  // before Q: the ring has space while the previous block's consumers still read their Q
    announce(block);
    copy_bias(block, first);
    for (int tile = 1; tile < block.tiles; ++tile) {
      copy_k(block, first + tile);
      copy_bias(block, first + tile);
      copy_v(block, first + tile - 1);
    }
    copy_v(block, first + block.tiles - 1);
  }

  FLASH_DEVICE void run(const Schedule<Shape>& schedule) {
    BlockOfRows block;
    if constexpr (Shape::kGeneral) {
      while (schedule.take(block)) copy_block(block, schedule.first_tile(block.row));
    } else {
      for (int round = 0; round < schedule.rounds; ++round) {
        if (schedule.find(round, block)) copy_block(block, 0);
      }
    }
    announce({0, 0, 0, 0});
  }
};

template <typename Shape, bool kFused>
struct Consumer {
  using T = typename Shape::Element;
  static constexpr int kParts = Shape::kParts, kBlockN = Shape::kBlockN;
  static constexpr int kOutColumns = Shape::kD < 128 ? Shape::kD : 128, kOutTiles = Shape::kD / kOutColumns;
  static constexpr int kScores = kBlockN / 2, kOuts = kOutColumns / 2;

  const WgmmaForward& args;
  const WgmmaMemory<Shape>& memory;
  const Schedule<Shape>& schedule;
  const int group = uniform(static_cast<int>(threadIdx.x) / 128) - 1;
  const int lane = threadIdx.x % 32;
  const int warp_row = group * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  RingPlace<Shape::kStages> k_place, v_place;
  RingPlace<Shape::kQBuffers> q_place;
  RingPlace<Shape::kBiasStages> bias_place;
  // General, of the block whose scores come: its first key, the keys that the lane's two rows see, and those that all rows of its warp see.
  int first_key, all_from, all_to;
  Span seen[2];

  // What the pending product, the last one of `block`, needs. The fragments live in registers from tile to tile.
  BlockOfRows block;
  RowState state;
  float scale, v_unit, correction[2];
  float score[kScores], out[kOutTiles][kOuts], product[kParts == 2 ? kOutTiles : 1][kParts == 2 ? kOuts : 1];
  uint32_t p[kParts][kBlockN / 16][4];

  FLASH_DEVICE void take_tensor_cores() {
    if constexpr (Shape::kTurns) named_barrier_sync(1 + group, 256);
  }
  FLASH_DEVICE void pass_tensor_cores() {
    if constexpr (Shape::kTurns) named_barrier_arrive(1 + (group + 1) % Shape::kConsumers, 256);
  }
  FLASH_DEVICE void release(SharedAddress barrier) {
    if (lane == 0) barrier_arrive(barrier);
  }

  FLASH_DEVICE void issue_scores() {
    const SharedAddress q = memory.q + q_place.stage * Shape::kQBytes + group * 64 * kTileRowBytes;
    multiply_parts<T, kParts, Shape::kD, Shape::kBlockM, kBlockN>(score, q,
                                                                  memory.k + k_place.stage * Shape::kTileBytes);
    wgmma_commit();
  }

  FLASH_DEVICE void issue_output() {
    const SharedAddress tile = memory.v + v_place.stage * Shape::kTileBytes;
    barrier_wait(memory.v_full(v_place.stage), v_place.turn);
    wgmma_begin();
    if constexpr (kParts == 2) weigh_parts<T, kParts, Shape::kD, kBlockN>(product, p, tile);
    else weigh_parts<T, kParts, Shape::kD, kBlockN>(out, p, tile);
    wgmma_commit();
  }

  FLASH_DEVICE void mask(int row, int tile) {
    const int first_key = tile * kBlockN + lane % 4 * 2;
    int visible[2];  // keys of the tile from the lane's first one on
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = row + warp_row + lane / 4 + e * 8;
      visible[e] = (args.causal ? min(args.seq_kv, query + 1) : args.seq_kv) - first_key;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + i % 2 >= visible[i / 2 % 2]) score[i] = -kInfinity;
    }
  }

  FLASH_DEVICE void start_rows() {
    state = {};
    if constexpr (Shape::kGeneral) state.maximum[0] = state.maximum[1] = kNoMaximum;
  }

  // Bends the scores by tanh(x) = 1 - 2 / (1 + exp(2 x)), which is exact to a few 2^-24 of the cap.
  FLASH_DEVICE void cap_scores() {
    const float twice = 2.f * kLog2e * args.scale / args.general.softcap;
#pragma unroll
    for (int i = 0; i < kScores; ++i) score[i] = fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(score[i] * twice)), 1.f);
  }

  // Scales the scores and adds the bias of their tile, which lies as ldmatrix takes it.
  FLASH_DEVICE void add_bias(float factor) {
    const int row = args.general.bias_stride[2] == 0 ? 0 : warp_row + lane % 16;
    const SharedAddress start = memory.bias + bias_place.stage * Shape::kBiasBytes + row * kTileRowBytes;
    barrier_wait(memory.bias_full(bias_place.stage), bias_place.turn);
#pragma unroll
    for (int n = 0; n < kBlockN / 16; ++n) {
      uint32_t word[4];
      load_matrices(word, start + n / 4 * Shape::kBlockM * kTileRowBytes + ((n % 4 * 2 + lane / 16) ^ row % 8) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 bias = unpack<T>(word[i]);
        score[8 * n + 2 * i] = fmaf(bias.x, kLog2e, score[8 * n + 2 * i] * factor);
        score[8 * n + 2 * i + 1] = fmaf(bias.y, kLog2e, score[8 * n + 2 * i + 1] * factor);
      }
    }
    release_bias();
  }

  FLASH_DEVICE void find_keys(int row) {
    const Span* const spans = args.general.spans;
    const int last = args.seq_q - 1, warp_first = min(row + warp_row, last);
    first_key = schedule.first_tile(row) * kBlockN;
    all_from = spans[min(warp_first + 15, last)].begin;
    all_to = spans[warp_first].end;
#pragma unroll
    for (int e = 0; e < 2; ++e) seen[e] = spans[min(warp_first + lane / 4 + e * 8, last)];
  }

  FLASH_DEVICE void general_softmax(float (&factor)[2], int row, int tile) {
    if (Shape::kD == 256 || tile == 0) find_keys(row);  // the widest heads have no registers to keep them in
    const float unit = Shape::kCap ? args.general.softcap : args.scale;
    const int of_tile = first_key + tile * kBlockN;
    if constexpr (Shape::kCap) cap_scores();
    if constexpr (Shape::kBias) add_bias(unit);
    if (of_tile < all_from || of_tile + kBlockN > all_to) {
      const int key = of_tile + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (!sees(seen[i / 2 % 2], key + i / 4 * 8 + i % 2)) score[i] = -kInfinity;
      }
    }
    online_softmax<true>(score, state, factor, Shape::kBias ? 1.f : unit, 0.f, true);
  }

  FLASH_DEVICE void softmax(float (&factor)[2], float unit, int row, int tile) {
    if constexpr (Shape::kGeneral) return general_softmax(factor, row, tile);
    const int last_key = (tile + 1) * kBlockN - 1;
    if (last_key >= args.seq_kv || (args.causal && last_key > row + warp_row)) mask(row, tile);
    online_softmax<kParts == 1>(score, state, factor, scale * unit, kParts == 2 ? kSplitProbabilityExponent : 0.f, kFused);
  }

  FLASH_DEVICE void scale_output(const float (&factor)[2]) {
    if (!warp_any(factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[tile][i] *= factor[i / 2 % 2];
  }

  FLASH_DEVICE void clear_output() {
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[tile][i] = 0.f;
  }

  FLASH_DEVICE void add_product() {
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kOuts; ++i)
        out[tile][i] = fmaf(out[tile][i], correction[i / 2 % 2], product[tile][i] * v_unit);
  }

  // Columns of one of the lane's two rows. 16-bit elements are exchanged among the four lanes of a row, 16 bytes a store.
  FLASH_DEVICE void write_row(const float (&columns)[kOuts], int e, float factor, int64_t start, int column, bool inside) {
    if constexpr (kParts == 2) {
#pragma unroll
      for (int i = 2 * e; i < kOuts; i += 4) {
        const int at = column + i / 4 * 8 + lane % 4 * 2;
        if (!inside || at >= args.head_size) continue;
        static_cast<float*>(args.out)[start + at] = columns[i] * factor;
        static_cast<float*>(args.out)[start + at + 1] = columns[i + 1] * factor;
      }
    } else {
#pragma unroll
      for (int first = 0; first < kOuts; first += 16) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = first + 4 * i + 2 * e;
          word[i] = pack<T>(columns[at] * factor, columns[at + 1] * factor);
        }
        transpose_quad(word, lane);
        const int at = column + (first / 4 + lane % 4) * 8;
        if (inside && at < args.head_size) {
          *reinterpret_cast<uint4*>(static_cast<T*>(args.out) + start + at) = {word[0], word[1], word[2], word[3]};
        }
      }
    }
  }

  FLASH_DEVICE void write(const RowState& rows) {
    constexpr float kShift = kParts == 2 ? kSplitProbabilityExponent : 0.f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = quad_sum(rows.sum[e]), maximum = rows.maximum[e];
      const int row = block.row + warp_row + lane / 4 + e * 8;
      const bool inside = row < args.seq_q;  // all lanes take part: they exchange what they write
      float factor;
      if constexpr (Shape::kGeneral) {
        factor = end_row(maximum, sum, 0.f, args.general.sinks == nullptr ? nullptr : args.general.sinks + block.head);
      } else {
        factor = 1.f / sum;
      }
      const int64_t start =
          block.batch * args.out_batch_stride + block.head * args.out_head_stride + row * args.out_seq_stride;
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) write_row(out[tile], e, factor, start, tile * kOutColumns, inside);
      if (args.lse != nullptr && inside && lane % 4 == 0) {
        args.lse[(int64_t{block.batch} * args.heads_q + block.head) * args.seq_q + row] =
            (maximum + log2f(sum) - kShift) * kLn2;
      }
    }
  }

  // 1 / (the powers of two by which the rows of a tile of keys or values were scaled); the loads complete during the
  // products issued next.
  FLASH_DEVICE float unit_of(int which, const BlockOfRows& of, int tile) {
    if constexpr (kParts == 1) return 1.f;
    const int head = of.batch * args.heads_kv + of.head / (args.heads_q / args.heads_kv);
    return split_unit(args.exponent[which], args.seq_kv, head, tile * kBlockN);
  }

  FLASH_DEVICE void release_k() {
    release(memory.k_empty(k_place.stage));
    k_place.advance();
  }
  FLASH_DEVICE void release_v() {
    release(memory.v_empty(v_place.stage));
    v_place.advance();
  }

  FLASH_DEVICE void release_bias() {
    sync_warp();  // the arrival of one lane stands for what all lanes have read
    release(memory.bias_empty(bias_place.stage));
    bias_place.advance();
  }

  FLASH_DEVICE float scale_of(const BlockOfRows& rows) {
    if constexpr (kParts == 1) return args.scale;
    const int head = rows.batch * args.heads_q + rows.head;
    return args.scale * split_unit(args.exponent[0], args.seq_q, head, rows.row + group * 64);
  }

  // The first tile of a block while no product is pending.
  FLASH_DEVICE void first_tile(const BlockOfRows& next) {
    block = next;
    start_rows();
    scale = scale_of(next);
    clear_output();
    const float k_unit = unit_of(1, block, 0);
    v_unit = unit_of(2, block, 0);
    barrier_wait(memory.k_full(k_place.stage), k_place.turn);
    take_tensor_cores();
    wgmma_begin();
    issue_scores();
    pass_tensor_cores();
    wgmma_wait<0>();
    wgmma_keep(score);
    release_k();
    softmax(correction, k_unit, block.row, 0);
    to_weights<T, kParts>(p, score);
  }

  // A tile of `next`, with the pending product. That may be the last one of another block, which is then complete.
  FLASH_DEVICE void tile_beside_product(const BlockOfRows& next, int tile) {
    const float k_unit = unit_of(1, next, tile), next_v_unit = unit_of(2, next, tile);
    const RowState before = state;
    float next_correction[2];
    barrier_wait(memory.k_full(k_place.stage), k_place.turn);
    take_tensor_cores();
    wgmma_begin();
    issue_scores();
    issue_output();
    pass_tensor_cores();
    wgmma_wait<1>();
    wgmma_keep(score);
    release_k();
    if (tile == 0) {
      start_rows();
      scale = scale_of(next);
    }
    softmax(next_correction, k_unit, next.row, tile);
    wait_for_product();
    if constexpr (kParts == 2) add_product();
    to_weights<T, kParts>(p, score);
    if (tile == 0) {
      write(before);
      block = next;
      clear_output();
    } else if (kParts == 1) {
      scale_output(next_correction);
    }
    correction[0] = next_correction[0];
    correction[1] = next_correction[1];
    v_unit = next_v_unit;
  }

  FLASH_DEVICE void wait_for_product() {
    wgmma_wait<0>();
    if constexpr (kParts == 2) wgmma_keep(product);
    else wgmma_keep(out);
    release_v();
  }

  // Completes a block with its pending product alone.
  FLASH_DEVICE void finish() {
    wgmma_begin();
    issue_output();
    wait_for_product();
    if constexpr (kParts == 2) add_product();
    write(state);
  }

  // A tile that only other warpgroups need.
  FLASH_DEVICE void skip_tile() {
    barrier_wait(memory.k_full(k_place.stage), k_place.turn);
    take_tensor_cores();
    pass_tensor_cores();
    release_k();
    if constexpr (Shape::kBias) {
      barrier_wait(memory.bias_full(bias_place.stage), bias_place.turn);
      release_bias();
    }
    barrier_wait(memory.v_full(v_place.stage), v_place.turn);
    release_v();
  }

  FLASH_DEVICE void run() {
    bool pending = false;
    for (;;) {
      if constexpr (Shape::kQBuffers == 1) {  // the next Q comes when this one is released, and this product need not wait
        if (pending) finish();
        pending = false;
      }
      barrier_wait(memory.q_full(q_place.stage), q_place.turn);
      const int4 words = load_shared_integers(memory.blocks + 16 * q_place.stage);
      const BlockOfRows next{uniform(words.x), uniform(words.y), uniform(words.z), uniform(words.w)};
      int needed = 0;
      if constexpr (Shape::kGeneral) {
        if (next.tiles != 0) needed = schedule.tiles_from(next.row, next.row + group * 64, 64);
      } else if (next.tiles != 0) {
        needed = schedule.tiles(next.row + group * 64, 64);
      }
      if (pending && needed == 0) {
        finish();
        pending = false;
      }
      if (next.tiles == 0) return;
      int tile = 0;
      if (needed > 0 && !pending) {
        first_tile(next);
        tile = 1;
      }
      for (; tile < needed; ++tile) tile_beside_product(next, tile);
      pending = needed > 0;
      sync_warp();  // the arrival of one lane stands for what all lanes have read: the block
      release(memory.q_empty(q_place.stage));
      q_place.advance();
      if (needed < next.tiles && pending) {
        finish();
        pending = false;
      }
      for (tile = needed; tile < next.tiles; ++tile) skip_tile();
    }
  }
};

template <typename Shape, bool kFused>
__global__ void __launch_bounds__(Shape::kThreads, 1) forward_wgmma(const __grid_constant__ WgmmaForward args) {
#if FLASH_HOPPER
  FLASH_SHARED_MEMORY(shared);
  const WgmmaMemory<Shape> memory(shared);
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < Shape::kQBuffers; ++buffer) {
      barrier_init(memory.q_full(buffer), 1);
      barrier_init(memory.q_empty(buffer), 4 * Shape::kConsumers);  // one lane of every consuming warp
    }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      barrier_init(memory.k_full(stage), 1);
      barrier_init(memory.v_full(stage), 1);
      barrier_init(memory.k_empty(stage), 4 * Shape::kConsumers);
      barrier_init(memory.v_empty(stage), 4 * Shape::kConsumers);
    }
    for (int stage = 0; stage < Shape::kBiasStages; ++stage) {
      barrier_init(memory.bias_full(stage), 1);
      barrier_init(memory.bias_empty(stage), 4 * Shape::kConsumers);
    }
    fence_async_proxy();
  }
  __syncthreads();
  const Schedule<Shape> schedule{args};
  if (threadIdx.x < 128) {
    registers_release<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) Producer<Shape>{args, memory}.run(schedule);
  } else {
    registers_acquire<Shape::kConsumerRegisters>();
    Consumer<Shape, kFused> consumer{args, memory, schedule};
    if (consumer.group == Shape::kConsumers - 1) consumer.pass_tensor_cores();  // the first one may start
    consumer.run();
    if (consumer.group == 0) consumer.take_tensor_cores();  // no arrival is left behind
  }
#endif
}

}  // namespace custom_ops::flash_attention

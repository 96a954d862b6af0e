// Backward of 16-bit types on Hopper (sm_90a), in one pass over blocks of keys: five products for each tile of scores.
//
// A block owns 128 keys, 64 a warpgroup, whose dK and dV stay in registers, and visits the tiles of queries. S and dP are
// computed transposed (keys by queries): P and dS are then the left operands of the products for dV and dK, from registers.
// Only dS goes through shared memory, for dQ = dS K. A tile of dQ is a sum over all blocks of keys. It is added to a workspace of
// floats by a bulk copy that adds (TMA), in the order of the registers' fragments; query_ends.cuh clears and converts it.
//
//   P_j = exp2(S_j - lse)           | under dK += dS_{j-1} Q and dP_j
//   issue dV += P_j dO
//   dS_j = P_j (dP_j - delta)       | under it
//   issue S_{j+1}; dS_j to shared memory, where both warpgroups meet
//   issue dQ_j = dS_j K, dK += dS_j Q
//   dQ_j to shared memory           | under dK
//   issue dP_{j+1}                  | its sums start at -delta
//
// The producer's warpgroup has a warp that loads tiles and one that adds dQ. The order in which blocks add is free, so dQ varies
// in its last bits, or ordered: then every tile of dQ has a turn, and the blocks' keys take it one after another. A block waits
// only for blocks before it in the launch: ascending keys, or descending if causal. There the last keys start at the last
// queries, and every block finds its turn come.
//
// Budget of a tile of 64 queries by 128 keys, head size 128, in cycles of a multiprocessor: 5 products 2560; shared memory at 128
// bytes a cycle 2880 (operands 2048, dS 256, dQ 512, loads 256, so it is what limits); exponentials 512; dQ 32 KiB to L2.
#pragma once

#include "../backward_math.cuh"
#include "../features.cuh"
#include "tiles.cuh"

namespace custom_ops::flash_attention {

struct OnePassBackward {
  TensorMap q, grad_out, k, v;
  void *dk, *dv;
  int64_t dk_stride[3], dv_stride[3];  // batch, head, sequence
  float* dq;                           // (batch * heads_q, tiles, 8 warps, fragments)
  const float *lse, *negative_delta;   // (batch * heads_q, tiles * kTile), see query_ends.cuh
  int* turns;                          // (batch * heads_q, tiles, kTile / 8), zeros; null: in any order
  int batch, heads_q, heads_kv, seq_q, seq_kv, head_size;
  int heads_together;  // of keys, see OnePassBlock
  float scale;
  bool causal;
  General general;                // only of general shapes
  TensorMap bias, bias_gradient;  // only of shapes with a bias: (keys, queries, heads, batch); the gradient if general has it
};

// All but the plain form (../features.cuh) sum dQ in any order. Biased: a tile of the bias comes with its queries; dS is its gradient, and
// is copied from where dQ reads it.
template <typename T, int kD_, int kKeys_, int kTile_, Form kForm>
struct OnePassShape {
  static constexpr bool kGeneral = kForm != Form::kPlain, kCap = kForm == Form::kCapped, kBias = kForm == Form::kBiased;
  using Element = T;
  static constexpr bool kWide = kD_ == 256;
  static constexpr int kD = kD_, kTile = kTile_, kSlots = 2;
  static constexpr int kConsumers = 2, kKeys = kKeys_, kThreads = 128 * (kConsumers + 1);
  static constexpr int kKeyBytes = kKeys * kD * 2, kTileBytes = kTile * kD * 2, kStatisticsBytes = kTile * 4;
  static constexpr int kGradientBytes = (kWide ? 2 : 1) * kTile * kKeys * 2;  // dS, and P if kWide
  static constexpr int kSumBytes = kWide ? 0 : kTile * kD * 4;
  static constexpr int kBiasBytes = kBias ? kTile * kKeys * 2 : 0;
  static constexpr int kBarriers = 5 + 4 * kSlots;
  static_assert(!kBias || !kWide);
  static constexpr int kSharedBytes = 1024 + 2 * kKeyBytes + 2 * kSlots * (kTileBytes + kStatisticsBytes) +
                                      kSlots * (kGradientBytes + kBiasBytes) + kSumBytes + 8 * kBarriers;
};

template <typename Shape>
struct OnePassMemory {
  SharedAddress keys, values, queries, grad_outs, gradients, sums, bias, lse, delta, barriers;
  FLASH_DEVICE explicit OnePassMemory(const void* memory)
      : keys((shared_address(memory) + 1023) & ~SharedAddress{1023}),
        values(keys + Shape::kKeyBytes),
        queries(values + Shape::kKeyBytes),
        grad_outs(queries + Shape::kSlots * Shape::kTileBytes),
        gradients(grad_outs + Shape::kSlots * Shape::kTileBytes),
        sums(gradients + Shape::kSlots * Shape::kGradientBytes),
        bias(sums + Shape::kSumBytes),
        lse(bias + Shape::kSlots * Shape::kBiasBytes),
        delta(lse + Shape::kSlots * Shape::kStatisticsBytes),
        barriers(delta + Shape::kSlots * Shape::kStatisticsBytes) {}
  FLASH_DEVICE SharedAddress keys_full() const { return barriers; }
  FLASH_DEVICE SharedAddress values_full() const { return barriers + 8; }
  // A barrier for even and one for odd steps: each has its warp.
  FLASH_DEVICE SharedAddress sums_full(int step) const { return barriers + 16 + step % 2 * 8; }
  FLASH_DEVICE SharedAddress sums_empty() const { return barriers + 32; }
  FLASH_DEVICE SharedAddress query_full(int slot) const { return barriers + 40 + 8 * slot; }
  FLASH_DEVICE SharedAddress query_empty(int slot) const { return query_full(slot + Shape::kSlots); }
  FLASH_DEVICE SharedAddress grad_out_full(int slot) const { return query_full(slot + 2 * Shape::kSlots); }
  FLASH_DEVICE SharedAddress grad_out_empty(int slot) const { return grad_out_full(slot + Shape::kSlots); }
};

// A block's keys, and the tiles of queries that it visits: those of every head that reads these keys. Heads go in groups whose
// queries stay in L2; within a group, one block of keys of every head, then the next one. Causal: the first keys have the most
// queries and start first, unless the order of the sums is fixed.
template <typename Shape>
struct OnePassBlock {
  int batch, head, key, blocks, first_tile, tiles_a_head, end_tile, steps;  // end_tile: general

  FLASH_DEVICE explicit OnePassBlock(const OnePassBackward& args)
      : blocks((args.seq_kv + Shape::kKeys - 1) / Shape::kKeys) {
    const int heads = args.batch * args.heads_kv, round = blockIdx.x / (args.heads_together * blocks);
    const int within = blockIdx.x - round * args.heads_together * blocks;
    const int together = min(args.heads_together, heads - round * args.heads_together);
    const int index = round * args.heads_together + within % together, order = within / together;
    batch = index / args.heads_kv;
    head = index % args.heads_kv;
    key = (args.causal && args.turns != nullptr ? blocks - 1 - order : order) * Shape::kKeys;
    tiles_a_head = (args.seq_q + Shape::kTile - 1) / Shape::kTile;
    if constexpr (Shape::kGeneral) {
      const Span* const spans = args.general.spans;
      first_tile = first_tile_of(spans, key, Shape::kTile);
      end_tile = first_tile + tiles_of(spans, key, min(key + Shape::kKeys, args.seq_kv) - 1, Shape::kTile);
      steps = (end_tile - first_tile) * (args.heads_q / args.heads_kv);
    } else {
      first_tile = args.causal ? min(key / Shape::kTile, tiles_a_head) : 0;
      steps = (tiles_a_head - first_tile) * (args.heads_q / args.heads_kv);
    }
  }
};

template <typename Shape>
struct OnePassStep {
  int head, tile;
  FLASH_DEVICE OnePassStep(const OnePassBackward& args, const OnePassBlock<Shape>& block)
      : head(block.head * (args.heads_q / args.heads_kv)), tile(block.first_tile) {}
  FLASH_DEVICE void advance(const OnePassBlock<Shape>& block) {
    if (++tile == (Shape::kGeneral ? block.end_tile : block.tiles_a_head)) tile = block.first_tile, ++head;
  }
  FLASH_DEVICE int query() const { return tile * Shape::kTile; }
  // Among the tiles of all heads.
  FLASH_DEVICE int64_t place(const OnePassBackward& args, const OnePassBlock<Shape>& block) const {
    return (int64_t{block.batch} * args.heads_q + head) * block.tiles_a_head + tile;
  }
  FLASH_DEVICE int* turns(const OnePassBackward& args, const OnePassBlock<Shape>& block) const {
    return args.turns + place(args, block) * (Shape::kTile / 8);
  }
  // How many blocks of keys add to the tile before this one, if the order is fixed.
  FLASH_DEVICE int turn(const OnePassBackward& args, const OnePassBlock<Shape>& block) const {
    const int number = block.key / Shape::kKeys;
    if (!args.causal) return number;
    return min(block.blocks, (query() + Shape::kTile + Shape::kKeys - 1) / Shape::kKeys) - 1 - number;
  }
};

template <typename Shape>
FLASH_DEVICE void load_one_pass(const OnePassBackward& args, const OnePassMemory<Shape>& memory,
                                const OnePassBlock<Shape>& block) {
  RingPlace<Shape::kSlots> query;
  RingPlace<Shape::kSlots> grad_out;
  const int64_t(&bias_stride)[4] = args.general.bias_stride;
  const int bias_bytes = !Shape::kBias ? 0 : bias_stride[2] == 0 ? Shape::kKeys * 2 : Shape::kBiasBytes;
  const auto load_query = [&](const OnePassStep<Shape>& of) {
    const SharedAddress full = memory.query_full(query.stage);
    barrier_wait(memory.query_empty(query.stage), query.turn ^ 1);
    barrier_arrive_expect(full, Shape::kTileBytes + Shape::kStatisticsBytes + bias_bytes);
    if constexpr (Shape::kBias) {
#pragma unroll
      for (int column = 0; column < Shape::kKeys; column += 64) {
        tensor_copy(memory.bias + query.stage * Shape::kBiasBytes + column * Shape::kTile * 2, args.bias, full, block.key + column,
                    bias_stride[2] == 0 ? 0 : of.query(), bias_stride[1] == 0 ? 0 : of.head, bias_stride[0] == 0 ? 0 : block.batch);
      }
    }
    copy_tile<Shape::kTile, Shape::kD>(memory.queries + query.stage * Shape::kTileBytes, args.q, full, of.query(),
                                       of.head, block.batch);
    bulk_copy(memory.lse + query.stage * Shape::kStatisticsBytes, args.lse + of.place(args, block) * Shape::kTile,
              Shape::kStatisticsBytes, full);
    query.advance();
  };
  OnePassStep<Shape> now(args, block);
  barrier_arrive_expect(memory.keys_full(), Shape::kKeyBytes);
  copy_tile<Shape::kKeys, Shape::kD>(memory.keys, args.k, memory.keys_full(), block.key, block.head, block.batch);
  if (block.steps > 0) load_query(now);
  barrier_arrive_expect(memory.values_full(), Shape::kKeyBytes);
  copy_tile<Shape::kKeys, Shape::kD>(memory.values, args.v, memory.values_full(), block.key, block.head, block.batch);
  for (int step = 0; step < block.steps; ++step) {
    const SharedAddress full = memory.grad_out_full(grad_out.stage);
    barrier_wait(memory.grad_out_empty(grad_out.stage), grad_out.turn ^ 1);
    barrier_arrive_expect(full, Shape::kTileBytes + Shape::kStatisticsBytes);
    copy_tile<Shape::kTile, Shape::kD>(memory.grad_outs + grad_out.stage * Shape::kTileBytes, args.grad_out, full,
                                       now.query(), now.head, block.batch);
    bulk_copy(memory.delta + grad_out.stage * Shape::kStatisticsBytes,
              args.negative_delta + now.place(args, block) * Shape::kTile, Shape::kStatisticsBytes, full);
    grad_out.advance();
    now.advance(block);
    if (step + 1 < block.steps) load_query(now);
  }
}

// What the consuming warps of both forms share. A warp has the scores of 16 keys: of kTile queries or, if kWide, of the half that
// is its warpgroup's.
template <typename Shape>
struct OnePassWarp {
  using T = typename Shape::Element;
  static constexpr int kD = Shape::kD, kTile = Shape::kTile, kKeys = Shape::kKeys;
  static constexpr int kQueries = Shape::kWide ? kTile / 2 : kTile, kScores = kQueries / 2;
  static constexpr int kColumns = (Shape::kWide ? kD / 2 : kD) / 2;
  using Weights = uint32_t[1][kQueries / 16][4];
  struct Sums {
    float dk[1][kColumns], dv[1][kColumns];
  };

  const OnePassBackward& args;
  const OnePassMemory<Shape>& memory;
  const OnePassBlock<Shape>& block;
  const int group = uniform(static_cast<int>(threadIdx.x) / 128 - 1);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32 - 4);
  const int lane = threadIdx.x % 32;
  const int first_key = block.key + (Shape::kWide ? warp % 4 : warp) * 16;
  RingPlace<Shape::kSlots> query, grad_out;
  // General: the queries that see the lane's two keys; those from all_from to all_to see all keys of the warp.
  Span seen[2];
  int all_from, all_to;

  FLASH_DEVICE OnePassWarp(const OnePassBackward& args, const OnePassMemory<Shape>& memory,
                           const OnePassBlock<Shape>& block)
      : args(args), memory(memory), block(block) {
    if constexpr (Shape::kGeneral) {
      const Span* const spans = args.general.spans;
      const int last = args.seq_kv - 1;
      all_from = spans[min(first_key + 15, last)].begin;
      all_to = spans[min(first_key, last)].end;
      for (int e = 0; e < 2; ++e) seen[e] = spans[min(first_key + lane / 4 + e * 8, last)];
    }
  }

  FLASH_DEVICE SharedAddress query_tile() const { return memory.queries + query.stage * Shape::kTileBytes; }
  FLASH_DEVICE SharedAddress grad_out_tile() const { return memory.grad_outs + grad_out.stage * Shape::kTileBytes; }
  FLASH_DEVICE void release(SharedAddress barrier) {
    sync_warp();  // the arrival of one lane stands for what all lanes have read
    if (lane == 0) barrier_arrive(barrier);
  }
  // The statistics of a warp's queries 8 n + 2 (lane % 4) and the next one, which a lane has in its fragments.
  FLASH_DEVICE float2 pair(SharedAddress statistics, int n) const {
    return load_shared_pair(statistics + ((Shape::kWide ? group * kQueries : 0) + n * 8 + lane % 4 * 2) * 4);
  }

  FLASH_DEVICE void probabilities(float (&score)[kScores], int first_query) {
    const float scale = args.scale * kLog2e;
    const SharedAddress lse = memory.lse + query.stage * Shape::kStatisticsBytes;
    if constexpr (Shape::kGeneral) return general_probabilities(score, first_query, scale, lse);
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 of = pair(lse, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) score[4 * n + i] = probability(score[4 * n + i], scale, i % 2 == 0 ? of.x : of.y);
    }
    if constexpr (Shape::kWide) first_query += group * kQueries;
    if (args.causal && first_query < first_key + 15) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int key = first_key + lane / 4 + i / 2 % 2 * 8, column = first_query + i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (key > column) score[i] = 0.f;
      }
    }
  }

  // Where ldmatrix and stmatrix find the rows of a tile of queries by keys, 128-byte swizzled: fragments are transposed.
  FLASH_DEVICE SharedAddress score_rows(SharedAddress tile, int row) const {
    return tile + row * kTileRowBytes + ((warp % 4 * 2 + lane / 8 % 2) ^ row % 8) * 16;
  }

  // Scales the scores and adds their bias.
  FLASH_DEVICE void add_bias(float (&score)[kScores], float factor) {
    const bool same = args.general.bias_stride[2] == 0;  // for all queries
    const SharedAddress start = score_rows(memory.bias + query.stage * Shape::kBiasBytes + group * kTile * kTileRowBytes, same ? 0 : lane / 16 * 8 + lane % 8);
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step) {
      uint32_t word[4];
      load_matrices_transposed(word, start + (same ? 0 : step * 16 * kTileRowBytes));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 bias = unpack<T>(word[i]);
        score[8 * step + 2 * i] = fmaf(bias.x, kLog2e, score[8 * step + 2 * i] * factor);
        score[8 * step + 2 * i + 1] = fmaf(bias.y, kLog2e, score[8 * step + 2 * i + 1] * factor);
      }
    }
  }

  FLASH_DEVICE void general_probabilities(float (&score)[kScores], int first_query, float scale, SharedAddress lse) {
    const float unit = Shape::kBias ? 1.f : Shape::kCap ? args.general.softcap : scale, twice = 2.f * kLog2e * scale / unit;
    if constexpr (Shape::kBias) add_bias(score, scale);
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 of = pair(lse, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = score[4 * n + i];
        if constexpr (Shape::kCap) s = fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(s * twice)), 1.f);
        s = probability(s, unit, i % 2 == 0 ? of.x : of.y);
      }
    }
    if constexpr (Shape::kWide) first_query += group * kQueries;
    if (first_query >= all_from && first_query + kQueries <= all_to) return;
    const int column = first_query + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (!sees(seen[i / 2 % 2], column + i / 4 * 8 + i % 2)) score[i] = 0.f;
    }
  }

  // The derivative of the soft cap from a probability, which spares the registers that its bent scores would take.
  FLASH_DEVICE float cap_slope(float p, float lse, float inverse_cap) const {
    const float bent = fminf(fmaxf((log2_approx(p) + lse) * inverse_cap, -1.f), 1.f);
    return fmaf(-bent, bent, 1.f);
  }

  FLASH_DEVICE void score_gradients(Weights& gradients, const float (&product)[kScores], const float (&p)[kScores]) {
    const SharedAddress delta = memory.delta + grad_out.stage * Shape::kStatisticsBytes;
    const float inverse_cap = Shape::kCap ? 1.f / args.general.softcap : 0.f;
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
      const float2 of = pair(delta, n);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * n + 2 * e;
        float low = p[i] * (product[i] + of.x), high = p[i + 1] * (product[i + 1] + of.y);
        if constexpr (Shape::kCap) {
          const float2 lse = pair(memory.lse + query.stage * Shape::kStatisticsBytes, n);
          low *= cap_slope(p[i], lse.x, inverse_cap);
          high *= cap_slope(p[i + 1], lse.y, inverse_cap);
        }
        gradients[0][n / 2][n % 2 * 2 + e] = pack<T>(low, high);
      }
    }
  }

  // A tile of dS, which other proxies see, to the gradient of the bias.
  FLASH_DEVICE void copy_bias_gradient(SharedAddress tile, const OnePassStep<Shape>& now) const {
    if (warp != 0 || lane != 0 || args.general.bias_gradient == nullptr) return;
#pragma unroll
    for (int column = 0; column < kKeys; column += 64) {
      tensor_store(args.bias_gradient, tile + column * kTile * 2, block.key + column, now.query(), now.head, block.batch);
    }
    bulk_commit();
  }

  // Fragments of a warpgroup's keys by queries to rows of queries with 64 keys each, 128-byte swizzled.
  FLASH_DEVICE void store_transposed(SharedAddress to, const Weights& value) {
    const SharedAddress start = score_rows(to, lane / 16 * 8 + lane % 8);
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step) {
      store_matrices_transposed(start + step * 16 * kTileRowBytes, value[0][step]);
    }
  }

  // The block's dK or dV, of all columns or, if kWide, of the half that is this warpgroup's; zeros if no query reads its keys.
  FLASH_DEVICE void write(void* to, const int64_t (&stride)[3], const float (&sums)[1][kColumns], float factor) {
    const int first_column = Shape::kWide ? group * (kD / 2) : 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = first_key + lane / 4 + e * 8;
      if (row >= args.seq_kv) continue;
      T* start = static_cast<T*>(to) + block.batch * stride[0] + block.head * stride[1] + row * stride[2];
#pragma unroll
      for (int i = 2 * e; i < kColumns; i += 4) {
        write_pair<T>(start, first_column + i / 4 * 8 + lane % 4 * 2, args.head_size, sums[0][i] * factor,
                      sums[0][i + 1] * factor);
      }
    }
  }

  FLASH_DEVICE void write(Sums& sums) {
    if (block.steps == 0) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums.dk[0][i] = sums.dv[0][i] = 0.f;
    }
    wgmma_keep(sums.dk);
    wgmma_keep(sums.dv);
    write(args.dk, args.dk_stride, sums.dk, args.scale);
    write(args.dv, args.dv_stride, sums.dv, 1.f);
  }
};

}  // namespace custom_ops::flash_attention

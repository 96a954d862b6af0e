// One-pass backward of heads up to 256: the sums of 64 keys take the registers of both warpgroups, half of the columns each.
//
// A warpgroup computes S and dP of the block's keys for half of the tile's queries. P and dS go through shared memory, because both
// need all of them. dQ goes from registers to its sum in memory, 16 bytes a lane (red.global): shared memory has no space for it.
#pragma once

#include "one_pass.cuh"

namespace custom_ops::flash_attention {

template <typename Shape>
struct WideConsumer : OnePassWarp<Shape> {
  using Base = OnePassWarp<Shape>;
  using typename Base::Sums, typename Base::T, typename Base::Weights;
  using Base::args, Base::block, Base::grad_out, Base::group, Base::kColumns, Base::kD, Base::kKeys, Base::kQueries,
      Base::kScores, Base::kTile, Base::lane, Base::memory, Base::query, Base::warp;
  static constexpr int kSums = kTile / 2;  // of 64 columns of dQ
  int* previous = nullptr;
  int previous_turn = 0;
  using Base::Base;

  FLASH_DEVICE void issue_product(float (&product)[kScores], SharedAddress rows, SharedAddress tile) {
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      const int block = step / 4, within = step % 4 * 32;
      wgmma<false>(static_cast<T*>(nullptr), product,
                   matrix_descriptor(rows + block * kKeys * kTileRowBytes + within, 16),
                   matrix_descriptor(tile + (block * kTile + group * kQueries) * kTileRowBytes + within, 16), step != 0);
    }
    wgmma_commit();
  }

  // sums (keys x half of the columns) += weights^T (keys x queries) tile; the weights lie as queries by keys.
  FLASH_DEVICE void issue_weighted(float (&sums)[1][kColumns], SharedAddress weights, SharedAddress tile, bool accumulate) {
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      wgmma<true, true>(static_cast<T*>(nullptr), sums[0],
                        matrix_descriptor(weights + step * 16 * kTileRowBytes, kTile * kTileRowBytes),
                        matrix_descriptor(tile + (group * (kD / 128) * kTile + step * 16) * kTileRowBytes,
                                          kTile * kTileRowBytes),
                        accumulate || step != 0);
    }
    wgmma_commit();
  }

  // 64 columns of dQ^T = K^T dS^T, those of a block of K.
  FLASH_DEVICE void issue_sums(float (&sums)[kSums], SharedAddress gradients, int column_block) {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      const SharedAddress left = memory.keys + (column_block * kKeys + step * 16) * kTileRowBytes;
      wgmma<false, true>(static_cast<T*>(nullptr), sums, matrix_descriptor(left, kKeys * kTileRowBytes),
                         matrix_descriptor(gradients + step * 32, 16), step != 0);
    }
  }

  // In order, a tile is passed on only with the next one, when its additions no longer have to be waited for.
  FLASH_DEVICE void add_sums(const float (&sums)[kD / 128][kSums], const OnePassStep<Shape>& now) {
    float* const to = args.dq + now.place(args, block) * (kTile * kD) + warp * (kD / 128 * kSums * 32) + lane * 4;
    if (args.turns != nullptr) {
      pass_previous();
      previous = now.turns(args, block) + warp;
      previous_turn = now.turn(args, block);
      if (lane == 0) wait_turn(previous, previous_turn);
      sync_warp();
    }
#pragma unroll
    for (int part = 0; part < kD / 128; ++part)
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        add_to_memory(to + (part * kSums + i) * 32,
                      float4{sums[part][i], sums[part][i + 1], sums[part][i + 2], sums[part][i + 3]});
      }
  }

  FLASH_DEVICE void pass_previous() {
    if (previous == nullptr) return;
    fence_memory();
    sync_warp();
    if (lane == 0) pass_turn(previous, previous_turn + 1);
  }

  FLASH_DEVICE void add_tile(Sums& to, int step, const OnePassStep<Shape>& now) {
    const SharedAddress gradient_slot = memory.gradients + step % 2 * Shape::kGradientBytes;
    const SharedAddress weight_slot = gradient_slot + kTile * kKeys * 2;
    float score[kScores], product[kScores], sums[kD / 128][kSums];
    Weights weights, gradients;
    barrier_wait(memory.query_full(query.stage), query.turn);
    issue_product(score, memory.keys, this->query_tile());
    barrier_wait(memory.grad_out_full(grad_out.stage), grad_out.turn);
    issue_product(product, memory.values, this->grad_out_tile());
    wgmma_wait<1>();
    wgmma_keep(score);
    this->probabilities(score, now.query());
    to_weights<T, 1>(weights, score);
    this->store_transposed(weight_slot + group * kQueries * kTileRowBytes, weights);
    wgmma_wait<0>();
    wgmma_keep(product);
    this->score_gradients(gradients, product, score);
    this->store_transposed(gradient_slot + group * kQueries * kTileRowBytes, gradients);
    fence_async_proxy();
    named_barrier_sync(1, 128 * Shape::kConsumers);
    wgmma_begin();
    issue_weighted(to.dv, weight_slot, this->grad_out_tile(), step > 0);
#pragma unroll
    for (int part = 0; part < kD / 128; ++part) issue_sums(sums[part], gradient_slot, group * (kD / 128) + part);
    wgmma_commit();
    issue_weighted(to.dk, gradient_slot, this->query_tile(), step > 0);
    wgmma_wait<1>();
    wgmma_keep(sums);
    this->release(memory.grad_out_empty(grad_out.stage));
    grad_out.advance();
    add_sums(sums, now);
    wgmma_wait<0>();
    this->release(memory.query_empty(query.stage));
    query.advance();
  }
};

}  // namespace custom_ops::flash_attention

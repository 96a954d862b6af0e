// One-pass backward of heads up to 128: a warpgroup has 64 of the block's 128 keys, and P and dS stay in its registers as left
// operands. See one_pass.cuh.
#pragma once

#include "one_pass.cuh"

namespace custom_ops::flash_attention {

// Adds dQ of the even or odd steps to the sums. In order, a warp waits until an addition is complete; the other warp has the next.
template <typename Shape>
FLASH_DEVICE void add_sums(const OnePassBackward& args, const OnePassMemory<Shape>& memory,
                           const OnePassBlock<Shape>& block, int first_step) {
  OnePassStep<Shape> now(args, block);
  if (first_step == 1) now.advance(block);
  for (int step = first_step; step < block.steps; step += 2) {
    barrier_wait(memory.sums_full(step), step / 2 % 2);
    if (args.turns != nullptr) wait_turn(now.turns(args, block), now.turn(args, block));
    bulk_add(args.dq + now.place(args, block) * (Shape::kSumBytes / 4), memory.sums, Shape::kSumBytes);
    bulk_wait_read();
    barrier_arrive(memory.sums_empty());
    if (args.turns != nullptr) {
      bulk_wait();
      pass_turn(now.turns(args, block), now.turn(args, block) + 1);
    }
    now.advance(block);
    now.advance(block);
  }
  bulk_wait();
}

template <typename Shape>
struct NarrowConsumer : OnePassWarp<Shape> {
  using Base = OnePassWarp<Shape>;
  using typename Base::Sums, typename Base::T, typename Base::Weights;
  using Base::args, Base::block, Base::grad_out, Base::group, Base::kD, Base::kKeys, Base::kScores, Base::kTile, Base::lane,
      Base::memory, Base::query, Base::warp;
  // dQ^T = K^T dS^T: a warpgroup has 64 columns of the head, of all queries or, for heads of 64, of half of them.
  static constexpr int kSumQueries = kTile * kD / 64 / Shape::kConsumers, kSums = kSumQueries / 2;
  using Base::Base;

  // The product of this warpgroup's rows of K or V and a tile of Q or dO.
  FLASH_DEVICE void issue_product(float (&product)[kScores], SharedAddress rows, SharedAddress tile) {
    wgmma_begin();
    multiply_tiles<T, kD, kKeys, kTile>(product, rows + group * 64 * kTileRowBytes, tile, false);
    wgmma_commit();
  }

  FLASH_DEVICE void issue_sums(float (&sums)[kSums], SharedAddress gradients) {
    constexpr bool kByColumns = kD == 64 * Shape::kConsumers;  // else the warpgroups share the queries
    const SharedAddress left = memory.keys + (kByColumns ? group * kKeys * kTileRowBytes : 0);
    const SharedAddress right = gradients + (kByColumns ? 0 : group * kSumQueries * kTileRowBytes);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      wgmma<false, true>(static_cast<T*>(nullptr), sums,
                         matrix_descriptor(left + step * 16 * kTileRowBytes, kKeys * kTileRowBytes),
                         matrix_descriptor(right + step / 4 * kTile * kTileRowBytes + step % 4 * 32, 16), step != 0);
    }
    wgmma_commit();
  }

  FLASH_DEVICE void store_sums(const float (&sums)[kSums], int step) {
    const SharedAddress to = memory.sums + warp * (kSums * 128) + lane * 16;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      store_shared(to + i * 128, float4{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
    }
    fence_async_proxy();
    sync_warp();
    if (lane == 0) barrier_arrive(memory.sums_full(step));
  }

  FLASH_DEVICE void add_tile(Sums& to, int step, const OnePassStep<Shape>& now) {
    const SharedAddress gradient_slot = memory.gradients + step % 2 * Shape::kGradientBytes;
    float score[kScores], product[kScores], sums[kSums];
    Weights weights, gradients;
    barrier_wait(memory.query_full(query.stage), query.turn);
    issue_product(score, memory.keys, this->query_tile());
    barrier_wait(memory.grad_out_full(grad_out.stage), grad_out.turn);
    issue_product(product, memory.values, this->grad_out_tile());
    wgmma_wait<1>();
    wgmma_keep(score);
    this->probabilities(score, now.query());
    wgmma_wait<0>();
    wgmma_keep(product);
    to_weights<T, 1>(weights, score);
    wgmma_begin();
    weigh_tile<T, kTile>(to.dv, weights[0], this->grad_out_tile(), step > 0);
    wgmma_commit();
    this->score_gradients(gradients, product, score);
    this->store_transposed(gradient_slot + group * kTile * kTileRowBytes, gradients);
    fence_async_proxy();
    if constexpr (Shape::kBias) bulk_wait_read();  // the last tile's copy: the next one is written there
    named_barrier_sync(1, 128 * Shape::kConsumers);
    if constexpr (Shape::kBias) this->copy_bias_gradient(gradient_slot, now);
    wgmma_begin();
    issue_sums(sums, gradient_slot);
    weigh_tile<T, kTile>(to.dk, gradients[0], this->query_tile(), step > 0);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_keep(sums);
    this->release(memory.grad_out_empty(grad_out.stage));
    grad_out.advance();
    barrier_wait(memory.sums_empty(), step % 2 ^ 1);
    store_sums(sums, step);
    wgmma_wait<0>();
    this->release(memory.query_empty(query.stage));
    query.advance();
  }
};

}  // namespace custom_ops::flash_attention

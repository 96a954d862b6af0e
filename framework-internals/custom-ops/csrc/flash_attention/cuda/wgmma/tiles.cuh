// Shared by the Hopper kernels: rings of shared memory, tiles as TMA writes and wgmma reads them, products of tiles.
//
// A tile is kRows x kD 16-bit elements, in blocks of all rows by 64 columns (128 bytes), 128-byte swizzled; kParts = 2: the
// high part, then the low one. If the product keeps the rows (Q and K in the scores), the tile is read K-major, and 16
// columns advance by 32 bytes. If the product sums over the rows (V in P V), 16 rows advance by 2048 bytes, and the leading
// offset separates the 64-column blocks.
#pragma once

#include "../device/platform.cuh"
#include "../softmax.cuh"

namespace custom_ops::flash_attention {

constexpr int kTileRowBytes = 128;

// A position in a ring: the stage, and the number of completed rounds.
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

// Loads a tile, which adds kRows * kD * 2 bytes to the barrier.
template <int kRows, int kD>
FLASH_DEVICE void copy_tile(SharedAddress to, const TensorMap& map, SharedAddress barrier, int row, int head, int batch) {
#pragma unroll
  for (int block = 0; block < kD / 64; ++block) {
    tensor_copy(to + block * kRows * kTileRowBytes, map, barrier, block * 64, row, head, batch);
  }
}

// Loads all parts of a tile.
template <int kParts, int kRows, int kD>
FLASH_DEVICE void copy_rows(SharedAddress to, const TensorMap (&maps)[2], SharedAddress barrier, int row, int head,
                            int batch) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    copy_tile<kRows, kD>(to + part * kRows * kD * 2, maps[part], barrier, row, head, batch);
  }
}

// out (64 x kRightRows) (+)= left right^T, with left 64 rows of a tile of kLeftRows.
template <typename T, int kD, int kLeftRows, int kRightRows>
FLASH_DEVICE void multiply_tiles(float (&out)[kRightRows / 2], SharedAddress left, SharedAddress right,
                                 bool accumulate) {
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const int block = step / 4, within = step % 4 * 32;
    wgmma<false>(static_cast<T*>(nullptr), out,
                 matrix_descriptor(left + block * kLeftRows * kTileRowBytes + within, 16),
                 matrix_descriptor(right + block * kRightRows * kTileRowBytes + within, 16), accumulate || step != 0);
  }
}

// The same for split operands: low * high, high * low, high * high, in this order (see forward.cuh).
template <typename T, int kParts, int kD, int kLeftRows, int kRightRows>
FLASH_DEVICE void multiply_parts(float (&out)[kRightRows / 2], SharedAddress left, SharedAddress right) {
  if constexpr (kParts == 2) {
    multiply_tiles<T, kD, kLeftRows, kRightRows>(out, left + kLeftRows * kD * 2, right, false);
    multiply_tiles<T, kD, kLeftRows, kRightRows>(out, left, right + kRightRows * kD * 2, true);
  }
  multiply_tiles<T, kD, kLeftRows, kRightRows>(out, left, right, kParts == 2);
}

// out (64 x kD, in pieces of kCount registers) (+)= weights (64 x kRows, fragments) tile (kRows x kD)
template <typename T, int kRows, int kPieces, int kCount>
FLASH_DEVICE void weigh_tile(float (&out)[kPieces][kCount], const uint32_t (&weights)[kRows / 16][4],
                             SharedAddress tile, bool accumulate) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      const SharedAddress start = tile + (piece * (kCount / 32) * kRows + step * 16) * kTileRowBytes;
      wgmma<true>(static_cast<T*>(nullptr), out[piece], weights[step], matrix_descriptor(start, kRows * kTileRowBytes),
                  accumulate || step != 0);
    }
  }
}

// The same for split operands, starting from zero; with one part, added to `out`.
template <typename T, int kParts, int kD, int kRows, int kPieces, int kCount>
FLASH_DEVICE void weigh_parts(float (&out)[kPieces][kCount], const uint32_t (&weights)[kParts][kRows / 16][4],
                              SharedAddress tile) {
  if constexpr (kParts == 2) {
    weigh_tile<T, kRows>(out, weights[1], tile, false);
    weigh_tile<T, kRows>(out, weights[0], tile + kRows * kD * 2, true);
  }
  weigh_tile<T, kRows>(out, weights[0], tile, true);
}

// A fragment of floats as the left operand of the next product.
template <typename T, int kParts, int kCount>
FLASH_DEVICE void to_weights(uint32_t (&weights)[kParts][kCount / 8][4], const float (&value)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const uint32_t high = pack<T>(value[2 * i], value[2 * i + 1]);
    weights[0][i / 4][i % 4] = high;
    if constexpr (kParts == 2) {
      const float2 taken = unpack_half(high);
      weights[1][i / 4][i % 4] = pack<T>(value[2 * i] - taken.x, value[2 * i + 1] - taken.y);
    }
  }
}

template <int kPieces, int kCount>
FLASH_DEVICE void wgmma_keep(float (&out)[kPieces][kCount]) {
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) wgmma_keep(out[piece]);
}

}  // namespace custom_ops::flash_attention

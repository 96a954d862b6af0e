// Tiles in shared memory as ldmatrix reads them, and products of a warp's fragments, for the kernels built on mma.sync.
//
// A tile is rows x kD 16-bit elements. The 16-byte chunks of a row are permuted by the row's number, so that the eight rows
// that one ldmatrix reads lie in eight different groups of banks. kParts = 2: the high part, then the low one.
#pragma once

#include "../device/platform.cuh"
#include "../softmax.cuh"

namespace custom_ops::flash_attention {

// A head of a (batch, heads, sequence, head_size) operand: one tensor of 16-bit elements, or the two parts of an fp32
// tensor.
struct MmaOperand {
  const void* part[2];
  int64_t batch_stride, head_stride, seq_stride;
  int heads, seq;
};

template <typename T>
FLASH_DEVICE const T* head_of(const MmaOperand& operand, int part, int batch, int head) {
  return static_cast<const T*>(operand.part[part]) + batch * operand.batch_stride + head * operand.head_stride;
}

template <int kD>
FLASH_DEVICE SharedAddress chunk_address(SharedAddress tile, int row, int chunk) {
  return tile + row * (kD * 2) + ((chunk ^ (row & 7)) << 4);
}

// Loads rows first_row ... first_row + kRows - 1, with zeros past the end of the sequence and past the head size.
template <typename T, int kParts, int kRows, int kD, int kThreads>
FLASH_DEVICE void copy_tile(SharedAddress tile, const MmaOperand& from, int batch, int head, int first_row,
                            int head_size) {
  constexpr int kChunks = kD / 8;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const T* source = head_of<T>(from, part, batch, head);
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool valid = first_row + row < from.seq && chunk * 8 < head_size;
      copy16(chunk_address<kD>(tile + part * kRows * kD * 2, row, chunk),
             source + (valid ? (first_row + row) * from.seq_stride + chunk * 8 : 0), valid);
    }
  }
}

// out (16 x kN of this warp) = rows (16 x kD, from row `first`) times keys (kN x kD)^T. With kParts = 2, the small products
// have a separate sum: the tensor core truncates each sum to the bits of its accumulator, and a small sum keeps more bits.
template <typename T, int kParts, int kLeftRows, int kN, int kD>
FLASH_DEVICE void multiply_rows(float (&out)[kN / 8][4], SharedAddress rows, int first, SharedAddress keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
  float small[kParts == 2 ? kN / 8 : 1][4] = {};
#pragma unroll 4
  for (int k = 0; k < kD / 16; ++k) {
    uint32_t left[kParts][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      load_matrices(left[part],
                    chunk_address<kD>(rows + part * kLeftRows * kD * 2, first + lane % 16, 2 * k + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < kN / 8; n += 2) {
      uint32_t right[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        load_matrices(right[part], chunk_address<kD>(keys + part * kN * kD * 2, n * 8 + lane / 16 * 8 + lane % 8,
                                                     2 * k + lane / 8 % 2));
      }
      if constexpr (kParts == 2) {
        mma<T>(small[n], left[1], right[0][0], right[0][1]);
        mma<T>(small[n + 1], left[1], right[0][2], right[0][3]);
        mma<T>(small[n], left[0], right[1][0], right[1][1]);
        mma<T>(small[n + 1], left[0], right[1][2], right[1][3]);
      }
      mma<T>(out[n], left[0], right[0][0], right[0][1]);
      mma<T>(out[n + 1], left[0], right[0][2], right[0][3]);
    }
  }
  if constexpr (kParts == 2) {
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] += small[n][i];
  }
}

// Calls add(n, product) with weights (16 x kN, fragments) times columns 16 n ... 16 n + 15 of values (kN x kD). With
// kParts = 2 the small products are summed first.
template <typename T, int kParts, int kN, int kD, typename Add>
FLASH_DEVICE void multiply_weights(const uint32_t (&weights)[kParts][kN / 16][4], SharedAddress values, Add add) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kD / 16; ++n) {
    float product[2][4] = {};
#pragma unroll
    for (int pass = kParts == 2 ? 0 : 2; pass < 3; ++pass) {
#pragma unroll
      for (int k = 0; k < kN / 16; ++k) {
        uint32_t right[4];
        const SharedAddress part = values + (pass == 1 ? kN * kD * 2 : 0);
        load_matrices_transposed(right, chunk_address<kD>(part, k * 16 + lane % 16, 2 * n + lane / 16));
        mma<T>(product[0], weights[pass == 0 ? 1 : 0][k], right[0], right[1]);
        mma<T>(product[1], weights[pass == 0 ? 1 : 0][k], right[2], right[3]);
      }
    }
    add(n, product);
  }
}

// A 16 x kN fragment of floats as the left operand of the next product.
template <typename T, int kParts, int kN>
FLASH_DEVICE void to_weights(uint32_t (&weights)[kParts][kN / 16][4], const float (&value)[kN / 8][4]) {
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t high = pack<T>(value[n][2 * e], value[n][2 * e + 1]);
      weights[0][n / 2][n % 2 * 2 + e] = high;
      if constexpr (kParts == 2) {
        const float2 taken = unpack_half(high);
        weights[kParts - 1][n / 2][n % 2 * 2 + e] = pack<T>(value[n][2 * e] - taken.x, value[n][2 * e + 1] - taken.y);
      }
    }
  }
}

}  // namespace custom_ops::flash_attention

// Attention without tensor cores and without tiles: one block per row, with the row's scores in device memory.
//
// The tensor-core kernels are compared with this one. It also handles float64 and head sizes that they do not support. A
// row of probabilities is written to the workspace and read again by every product, and each block reads all of K and V.
// That is about seq_q times the bytes of a tiled kernel.
#pragma once

#include "../flash_attention.h"
#include "device/platform.cuh"
#include "softmax.cuh"

namespace custom_ops::flash_attention {

constexpr int kNaiveThreads = 128;

template <typename T>
struct NaiveTypes {
  using Wide = float;
};
template <>
struct NaiveTypes<double> {
  using Wide = double;
};

struct Naive {
  Tensor q, k, v, out, grad_out, dq, dk, dv;
  const void* grad_lse;
  void* lse;
  void* scratch;  // one row of `Wide` per block
  int64_t row_length;
  int64_t rows;  // over all heads; the blocks share them
  int heads_q, heads_kv, seq_q, seq_kv, head_size;
  double scale;
  bool causal;
  Features with;
  const Span *of_queries, *of_keys;  // null: without a window, and a causal mask of two equal lengths
  const int* diagonals;
  void* bias_gradient;
};

FLASH_DEVICE float widen(float x) { return x; }
FLASH_DEVICE double widen(double x) { return x; }
FLASH_DEVICE float widen(__half x) { return __half2float(x); }
FLASH_DEVICE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
FLASH_DEVICE void narrow(float x, float& out) { out = x; }
FLASH_DEVICE void narrow(double x, double& out) { out = x; }
FLASH_DEVICE void narrow(float x, __half& out) { out = __float2half_rn(x); }
FLASH_DEVICE void narrow(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

template <typename T>
FLASH_DEVICE T* row_of(const Tensor& tensor, int batch, int head, int row) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride +
         row * tensor.seq_stride;
}

template <typename Wide, bool kMaximum>
FLASH_DEVICE Wide combine_block(Wide value, Wide* shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const Wide other = shuffle_xor(value, offset);
    value = kMaximum ? (other > value ? other : value) : value + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int warp = 1; warp < kNaiveThreads / 32; ++warp) {
    value = kMaximum ? (shared[warp] > value ? shared[warp] : value) : value + shared[warp];
  }
  return value;
}

template <typename T, typename Wide = typename NaiveTypes<T>::Wide>
FLASH_DEVICE Wide dot(const T* a, const T* b, int count) {
  Wide sum = 0;
  for (int i = 0; i < count; ++i) sum += widen(a[i]) * widen(b[i]);
  return sum;
}

FLASH_DEVICE Span naive_keys(const Naive& args, int query) {
  if (args.of_queries != nullptr) return args.of_queries[query];
  return {0, args.causal ? min(args.seq_kv, query + 1) : args.seq_kv};
}
FLASH_DEVICE Span naive_queries(const Naive& args, int key) {
  if (args.of_keys != nullptr) return args.of_keys[key];
  return {args.causal ? min(key, args.seq_q) : 0, args.seq_q};
}

// The score of a product; `slope` is the derivative of the soft cap.
template <typename T, typename Wide>
FLASH_DEVICE Wide naive_score(const Naive& args, Wide product, int batch, int head, int query, int key, Wide& slope) {
  const Features& with = args.with;
  Wide score = product * static_cast<Wide>(args.scale);
  slope = 1;
  if (with.softcap > 0) {
    const Wide cap = static_cast<Wide>(with.softcap), bent = tanh(score / cap);
    slope = 1 - bent * bent;
    score = cap * bent;
  }
  if (with.bias != nullptr) {
    score += widen(static_cast<const T*>(with.bias)[batch * with.bias_stride[0] + head * with.bias_stride[1] +
                                                    query * with.bias_stride[2] + key * with.bias_stride[3]]);
  }
  if (with.alibi_slopes != nullptr) {
    const Wide distance = static_cast<Wide>(abs(key - args.diagonals[query]));
    score -= static_cast<const Wide*>(with.alibi_slopes)[batch * with.alibi_batch_stride + head] * distance;
  }
  return score;
}

// exp(score - lse), which is zero for a query without any finite score.
template <typename Wide>
FLASH_DEVICE Wide naive_probability(Wide score, Wide lse) {
  return lse == -kInfinity ? Wide{0} : exp(score - lse);
}

struct NaivePlace {
  int batch, head, head_kv, row;
};
FLASH_DEVICE NaivePlace naive_place(const Naive& args, int64_t index) {
  const int row = static_cast<int>(index % args.seq_q), head = static_cast<int>(index / args.seq_q % args.heads_q);
  return {static_cast<int>(index / args.seq_q / args.heads_q), head, head / (args.heads_q / args.heads_kv), row};
}

template <typename T>
__global__ void __launch_bounds__(kNaiveThreads) forward_naive(const Naive args) {
  using Wide = typename NaiveTypes<T>::Wide;
  FLASH_SHARED_MEMORY(memory);
  Wide* shared = reinterpret_cast<Wide*>(memory);
  Wide* p = static_cast<Wide*>(args.scratch) + blockIdx.x * args.row_length;
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    const NaivePlace at = naive_place(args, index);
    const Span keys = naive_keys(args, at.row);
    const T* q = row_of<const T>(args.q, at.batch, at.head, at.row);
    Wide maximum = -kInfinity;
    if (args.with.sinks != nullptr) maximum = static_cast<const Wide*>(args.with.sinks)[at.head];
    for (int key = keys.begin + static_cast<int>(threadIdx.x); key < keys.end; key += kNaiveThreads) {
      const Wide product = dot(q, row_of<const T>(args.k, at.batch, at.head_kv, key), args.head_size);
      Wide slope;
      p[key] = naive_score<T>(args, product, at.batch, at.head, at.row, key, slope);
      maximum = p[key] > maximum ? p[key] : maximum;
    }
    maximum = combine_block<Wide, true>(maximum, shared);
    Wide sum = 0;
    const bool none = maximum == -kInfinity;  // no key, or none with a finite score
    for (int key = keys.begin + static_cast<int>(threadIdx.x); key < keys.end; key += kNaiveThreads) {
      p[key] = none ? Wide{0} : exp(p[key] - maximum);
      sum += p[key];
    }
    sum = combine_block<Wide, false>(sum, shared);
    if (args.with.sinks != nullptr) sum += exp(static_cast<const Wide*>(args.with.sinks)[at.head] - maximum);
    __syncthreads();
    for (int column = threadIdx.x; column < args.head_size; column += kNaiveThreads) {
      Wide out = 0;
      for (int key = keys.begin; key < keys.end; ++key)
        out += p[key] * widen(row_of<const T>(args.v, at.batch, at.head_kv, key)[column]);
      narrow(none ? Wide{0} : out / sum, row_of<T>(args.out, at.batch, at.head, at.row)[column]);
    }
    if (threadIdx.x == 0 && args.lse != nullptr)
      static_cast<Wide*>(args.lse)[index] = none ? Wide{-kInfinity} : maximum + log(sum);
    __syncthreads();
  }
}

// One query row: writes dS of the row to the scratch, then computes dQ.
template <typename T>
__global__ void __launch_bounds__(kNaiveThreads) backward_naive_queries(const Naive args) {
  using Wide = typename NaiveTypes<T>::Wide;
  Wide* ds = static_cast<Wide*>(args.scratch) + blockIdx.x * args.row_length;
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    const NaivePlace at = naive_place(args, index);
    const Span keys = naive_keys(args, at.row);
    const T *q = row_of<const T>(args.q, at.batch, at.head, at.row),
            *grad = row_of<const T>(args.grad_out, at.batch, at.head, at.row);
    const Wide lse = static_cast<const Wide*>(args.lse)[index], scale = args.scale;
    Wide delta = dot(grad, row_of<const T>(args.out, at.batch, at.head, at.row), args.head_size);
    if (args.grad_lse != nullptr) delta -= static_cast<const Wide*>(args.grad_lse)[index];
    for (int key = keys.begin + static_cast<int>(threadIdx.x); key < keys.end; key += kNaiveThreads) {
      const Wide product = dot(q, row_of<const T>(args.k, at.batch, at.head_kv, key), args.head_size);
      Wide slope;
      const Wide p = naive_probability(naive_score<T>(args, product, at.batch, at.head, at.row, key, slope), lse);
      const Wide of_score = p * (dot(grad, row_of<const T>(args.v, at.batch, at.head_kv, key), args.head_size) - delta);
      if (args.bias_gradient != nullptr) narrow(of_score, static_cast<T*>(args.bias_gradient)[index * args.seq_kv + key]);
      ds[key] = of_score * slope;
    }
    __syncthreads();
    for (int column = threadIdx.x; column < args.head_size; column += kNaiveThreads) {
      Wide sum = 0;
      for (int key = keys.begin; key < keys.end; ++key)
        sum += ds[key] * widen(row_of<const T>(args.k, at.batch, at.head_kv, key)[column]);
      narrow(sum * scale, row_of<T>(args.dq, at.batch, at.head, at.row)[column]);
    }
    __syncthreads();
  }
}

// One key row: for each query head, writes P and dS of its column to the scratch and adds to dK and dV.
template <typename T>
__global__ void __launch_bounds__(kNaiveThreads) backward_naive_keys(const Naive args) {
  using Wide = typename NaiveTypes<T>::Wide;
  constexpr int kColumns = 256 / kNaiveThreads;  // a thread's share of a row, for at most 256 columns at a time
  const int group = args.heads_q / args.heads_kv;
  Wide* p = static_cast<Wide*>(args.scratch) + blockIdx.x * args.row_length;
  Wide* ds = p + args.row_length / 2;
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    const int key = static_cast<int>(index % args.seq_kv),
              head_kv = static_cast<int>(index / args.seq_kv % args.heads_kv);
    const int batch = static_cast<int>(index / args.seq_kv / args.heads_kv);
    const T *k = row_of<const T>(args.k, batch, head_kv, key), *v = row_of<const T>(args.v, batch, head_kv, key);
    const Span queries = naive_queries(args, key);
    const Wide scale = args.scale;
    for (int first_column = 0; first_column < args.head_size; first_column += kColumns * kNaiveThreads) {
      Wide dk[kColumns] = {}, dv[kColumns] = {};
      for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) {
        for (int row = queries.begin + static_cast<int>(threadIdx.x); row < queries.end; row += kNaiveThreads) {
          const T *q = row_of<const T>(args.q, batch, head, row),
                  *grad = row_of<const T>(args.grad_out, batch, head, row);
          const int64_t place = (int64_t{batch} * args.heads_q + head) * args.seq_q + row;
          Wide delta = dot(grad, row_of<const T>(args.out, batch, head, row), args.head_size);
          if (args.grad_lse != nullptr) delta -= static_cast<const Wide*>(args.grad_lse)[place];
          Wide slope;
          const Wide score = naive_score<T>(args, dot(q, k, args.head_size), batch, head, row, key, slope);
          p[row] = naive_probability(score, static_cast<const Wide*>(args.lse)[place]);
          ds[row] = p[row] * (dot(grad, v, args.head_size) - delta) * slope;
        }
        __syncthreads();
        for (int i = 0; i < kColumns; ++i) {
          const int column = first_column + i * kNaiveThreads + static_cast<int>(threadIdx.x);
          if (column >= args.head_size) continue;
          for (int row = queries.begin; row < queries.end; ++row) {
            dv[i] += p[row] * widen(row_of<const T>(args.grad_out, batch, head, row)[column]);
            dk[i] += ds[row] * widen(row_of<const T>(args.q, batch, head, row)[column]);
          }
        }
        __syncthreads();
      }
      for (int i = 0; i < kColumns; ++i) {
        const int column = first_column + i * kNaiveThreads + static_cast<int>(threadIdx.x);
        if (column >= args.head_size) continue;
        narrow(dv[i], row_of<T>(args.dv, batch, head_kv, key)[column]);
        narrow(dk[i] * scale, row_of<T>(args.dk, batch, head_kv, key)[column]);
      }
    }
  }
}

}  // namespace custom_ops::flash_attention

// Which keys a query sees: always a span of them, from a causal mask, a window, or packed sequences alike.
//
// The diagonal of a query is the key of its own place, with the two ends of a sequence aligned (bottom right): query i of S is at
// key i + T - S of T. A window has `left` keys before the diagonal and `right` keys after it. Both ends of the spans ascend with the
// queries, so a block of neighbouring queries sees the keys from the first one's begin to the last one's end, and the queries that
// see a key are a span, too.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASH_SPANS __host__ __device__ static inline
#else
#define FLASH_SPANS static inline
#endif

namespace custom_ops::flash_attention {

struct Span {
  int begin, end;
};

// The lengths, and what limits the spans.
struct Window {
  int64_t seq_q, seq_kv;
  int64_t left, right;                       // -1: no limit
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // null: one sequence; else the first row of each sequence, and the end of the last
  int64_t sequences;
};

struct Sequence {
  int64_t first_query, end_query, first_key, end_key;
};

// The sequence of a query or a key. What lies outside of all sequences has an empty one.
FLASH_SPANS Sequence sequence_of(const Window& window, bool key, int64_t row) {
  if (window.cu_seqlens_q == nullptr) return {0, window.seq_q, 0, window.seq_kv};
  const int32_t* const starts = key ? window.cu_seqlens_k : window.cu_seqlens_q;
  int64_t low = 0, high = window.sequences;  // the last sequence that starts at `row` or before
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (starts[middle] <= row) low = middle;
    else high = middle - 1;
  }
  const int64_t end = low < window.sequences ? low + 1 : low;
  return {window.cu_seqlens_q[low], window.cu_seqlens_q[end], window.cu_seqlens_k[low], window.cu_seqlens_k[end]};
}

FLASH_SPANS int clamp_row(int64_t row, int64_t low, int64_t high, int64_t length) {
  const int64_t within = row < low ? low : row > high ? high : row;
  return static_cast<int>(within < 0 ? 0 : within > length ? length : within);  // wrong sequences read no memory of others
}

FLASH_SPANS int64_t diagonal_of(const Sequence& sequence, int64_t query) { return query - sequence.end_query + sequence.end_key; }

FLASH_SPANS Span keys_of_query(const Window& window, const Sequence& in, int64_t query) {
  const int64_t at = diagonal_of(in, query);
  return {window.left < 0 ? clamp_row(in.first_key, in.first_key, in.end_key, window.seq_kv)
                          : clamp_row(at - window.left, in.first_key, in.end_key, window.seq_kv),
          window.right < 0 ? clamp_row(in.end_key, in.first_key, in.end_key, window.seq_kv)
                           : clamp_row(at + window.right + 1, in.first_key, in.end_key, window.seq_kv)};
}

FLASH_SPANS Span queries_of_key(const Window& window, const Sequence& in, int64_t key) {
  const int64_t at = key - in.end_key + in.end_query;  // the query whose diagonal this key is
  return {window.right < 0 ? clamp_row(in.first_query, in.first_query, in.end_query, window.seq_q)
                           : clamp_row(at - window.right, in.first_query, in.end_query, window.seq_q),
          window.left < 0 ? clamp_row(in.end_query, in.first_query, in.end_query, window.seq_q)
                          : clamp_row(at + window.left + 1, in.first_query, in.end_query, window.seq_q)};
}

}  // namespace custom_ops::flash_attention

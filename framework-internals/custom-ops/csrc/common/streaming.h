// Writes rows of results, with streaming stores if the whole result is larger than the caches: these save the read of each
// line that an ordinary store makes, a third of the traffic of a copy.
#pragma once

#include <initializer_list>
#include <cstdint>
#include <cstdio>

#include "simd.h"

#define CUSTOM_OPS_INLINED __attribute__((always_inline))  // of a lambda

namespace custom_ops {
CUSTOM_OPS_BEGIN_LEVEL

// The bytes of the last-level cache, as Linux found them; glibc's sysconf gave ten times as many on a virtual AMD processor.
CUSTOM_OPS_INLINE int64_t last_level_cache() {
  constexpr const char* kPaths[] = {"/sys/devices/system/cpu/cpu0/cache/index3/size", "/sys/devices/system/cpu/cpu0/cache/index2/size"};
  for (const char* path : kPaths) {
    std::FILE* const file = std::fopen(path, "r");
    if (file == nullptr) continue;
    long kibibytes = 0;
    const int found = std::fscanf(file, "%ldK", &kibibytes);
    std::fclose(file);
    if (found == 1) return int64_t{kibibytes} << 10;
  }
  return int64_t{32} << 20;
}

// Whether a result of so many bytes leaves the caches before anything can read it there.
inline bool exceeds_caches(int64_t bytes) {
  constexpr int64_t kSmall = int64_t{1} << 20;  // answers for a small call without reading anything
  if (bytes <= kSmall) return false;
  static const int64_t available = last_level_cache();
  return bytes > available;
}

// Writes pair_at(i, n) of the elements from i on to `to + i`, for all `count` elements; n is kPair<T>, less for the last pair.
// Ends with simd::end_of_stream(), once for all rows, if `streams`.
template <typename T, typename PairAt> CUSTOM_OPS_INLINE void write_row(T* to, int64_t count, bool streams, PairAt pair_at) {
  constexpr int64_t kPair = simd::kPair<T>;
  const bool streams_here = streams && reinterpret_cast<uintptr_t>(to) % simd::kBytes == 0;
  int64_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    const simd::Pair<T> pair = pair_at(i, kPair);
    if (streams_here) simd::stream_pair(pair, to + i);
    else simd::store_pair(pair, to + i);
  }
  if (i < count) simd::store_pair(pair_at(i, count - i), to + i, count - i);
}

CUSTOM_OPS_END_LEVEL
}  // namespace custom_ops

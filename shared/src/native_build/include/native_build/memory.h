// The caches, and large pages for new results.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace native_build {

// The bytes that a file of Linux names in KiB; 0 if it names none.
static inline int64_t cache_of(const char* path) {
  std::FILE* const file = std::fopen(path, "r");
  if (file == nullptr) return 0;
  long kibibytes = 0;
  const int found = std::fscanf(file, "%ldK", &kibibytes);
  std::fclose(file);
  return found == 1 ? int64_t{kibibytes} << 10 : 0;
}

// The bytes of the last-level cache, as Linux found them; glibc's sysconf gave ten times as many on a virtual AMD processor.
static inline int64_t last_level_cache() {
  for (const char* path : {"/sys/devices/system/cpu/cpu0/cache/index3/size", "/sys/devices/system/cpu/cpu0/cache/index2/size"}) {
    if (const int64_t bytes = cache_of(path)) return bytes;
  }
  return int64_t{32} << 20;
}

// The bytes of the first-level cache of data, which is Linux's first.
static inline int64_t first_level_cache() {
  static const int64_t bytes = cache_of("/sys/devices/system/cpu/cpu0/cache/index0/size");
  return bytes ? bytes : int64_t{48} << 10;
}

// Whether a result of so many bytes is written past the caches: from half of the last-level cache on, where the operator and a reader
// of its result together took less time that way, with operands in the cache or not (rmsnorm-fused's NOTES.md, 2026-11-24).
static inline bool is_streamed(int64_t bytes) {
  constexpr int64_t kSmall = int64_t{1} << 20;  // answers for a small call without reading anything
  if (bytes <= kSmall) return false;
  static const int64_t available = last_level_cache();
  return bytes >= available / 2;
}

// Linux hands out new memory in pages of 4 KiB, each at its first use: beyond malloc's threshold of 32 MiB a result is new
// memory in every call, and this takes longer than the kernel (custom-ops' NOTES.md, 2026-11-24). Where the system offers pages
// of 2 MiB to programs that ask, this asks. Smaller results are in memory that malloc has kept. Contents and addresses do not change.
static inline void use_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kMapped = int64_t{32} << 20;  // glibc's largest threshold
  constexpr uintptr_t kPage = 4096;
  if (bytes < kMapped) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory), first = (begin + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), begin + static_cast<uintptr_t>(bytes) - first, MADV_HUGEPAGE);  // a wish: may fail
#endif
}

}  // namespace native_build

// Large pages for new results on a CPU.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace rms_norm {

// Linux hands out new memory in pages of 4 KiB, each at its first use: beyond malloc's threshold of 32 MiB a result is new
// memory in every call, and this takes longer than the kernel (NOTES.md, 2026-11-24). Where the system offers pages of 2 MiB to
// programs that ask, this asks, as numpy does, and from the same size on. The contents and the addresses do not change.
inline void use_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kWorthwhile = int64_t{4} << 20;
  constexpr uintptr_t kPage = 4096;
  if (bytes < kWorthwhile) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory), first = (begin + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), begin + static_cast<uintptr_t>(bytes) - first, MADV_HUGEPAGE);  // a wish: may fail
#endif
}

}  // namespace rms_norm

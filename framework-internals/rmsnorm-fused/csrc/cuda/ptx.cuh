// Instructions of sm_90 and later without a simple CUDA C++ equivalent: barriers in shared memory that count bytes, bulk
// copies that signal them, and the shared memory of a cluster's other blocks. PTX ISA 8.0, sections 9.7.9 and 9.7.13.
#pragma once

#include <cstdint>

namespace rms_norm::ptx {

// The L2 eviction policy of a load. If x is larger than the cache, a pass that reads x and writes y is 4 % faster on an H200
// when the lines of y are evicted before those of x; the following kernel loses less than that (NOTES.md). If x fits, the
// next kernel may find x or y in the cache, and no policy is set.
__device__ __forceinline__ uint64_t policy_for(bool larger_than_l2) {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  if (larger_than_l2) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Sixteen bytes at a multiple of sixteen.
template <class Loaded> __device__ __forceinline__ Loaded load(const Loaded* from, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  static_assert(sizeof(Loaded) == 16);
  union {
    uint32_t words[4];
    Loaded value;
  } loaded;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(loaded.words[0]), "=r"(loaded.words[1]), "=r"(loaded.words[2]), "=r"(loaded.words[3])
               : "l"(from), "l"(policy));
  return loaded.value;
#else
  return *from;
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Call after barrier_init, before other blocks of the cluster or bulk copies use the barriers.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void fence_for_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and extends the phase until this many more bytes have arrived.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Returns once the phase of that parity is over.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// The same, for data that other blocks of the cluster send.
__device__ __forceinline__ void wait_for_cluster(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// Copies bytes (a multiple of 16, at 16-byte boundaries) from global memory; `barrier` counts them as they arrive.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// The same with an L2 policy.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The address of `shared` of this block in block `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in(const void* shared, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}

// Writes a word into block `rank`; the barrier there counts its four bytes.
__device__ __forceinline__ void send(const void* slot, uint32_t word, uint64_t* barrier, uint32_t rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address_in(slot, rank)), "r"(word),
               "r"(address_in(barrier, rank))
               : "memory");
}

__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives without waiting for this thread's pending operations; barriers that it set up are visible (fence_barrier_init).
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

#endif

// Waits for the previous kernel in the stream if this one was launched before its end (Launch::before_end). Call this first
// in a kernel, before any access to global memory.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in the stream start its set-up during this one, if it was launched that way; it then waits as above.
// Until this kernel ends, the blocks of the next one occupy resources, which slows a grid of more than a few blocks.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace rms_norm::ptx

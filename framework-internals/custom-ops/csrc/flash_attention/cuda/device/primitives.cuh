// The hardware operations of the attention kernels: tensor-core products, copies into shared memory, barriers. The kernels
// use nothing else of CUDA, so that emulator.h can replace this file and run them on a CPU.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <type_traits>

#include "device.h"

#define FLASH_DEVICE __device__ __forceinline__
#define FLASH_HOST_DEVICE __host__ __device__ __forceinline__
#define FLASH_SHARED_MEMORY(name) extern __shared__ __align__(1024) unsigned char name[]

// wgmma, setmaxnreg and the tensor copies exist only for sm_90a; for other architectures the kernel compiles to nothing.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FLASH_HOPPER 1
#else
#define FLASH_HOPPER 0
#endif

namespace custom_ops::flash_attention {

using SharedAddress = uint32_t;
using TensorMap = CUtensorMap;

FLASH_DEVICE SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// ---------------------------------------------------------------------------------------------------------- arithmetic

FLASH_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASH_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASH_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASH_DEVICE int take_next(int* counter) { return atomicAdd(counter, 1); }
FLASH_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
FLASH_DEVICE double shuffle_xor(double value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
FLASH_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
FLASH_DEVICE float shuffle_from(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
FLASH_DEVICE bool warp_any(bool value) { return __any_sync(0xffffffffu, value); }

// --------------------------------------------------------------------------------------------- sm_80: mma.sync,
// cp.async

// Before sm_80 the kernels that use these compile and are never launched (refuse_mma).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define FLASH_AMPERE(...) __VA_ARGS__
#else
#define FLASH_AMPERE(...)
#endif

FLASH_DEVICE void copy16(SharedAddress to, const void* from, bool valid) {  // 16 zero bytes if not valid
  FLASH_AMPERE(asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory"));
}
FLASH_DEVICE void copy_commit() { FLASH_AMPERE(asm volatile("cp.async.commit_group;" ::: "memory")); }
template <int kPending>
FLASH_DEVICE void copy_wait() {
  FLASH_AMPERE(asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"));
}

FLASH_DEVICE void load_matrices(uint32_t (&out)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row)
               : "memory");
}
FLASH_DEVICE void load_matrices_transposed(uint32_t (&out)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row)
               : "memory");
}

#define FLASH_MMA(type)                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "  \
      "{%0, %1, %2, %3};"                                    \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// c (16 x 8) += a (16 x 16) b (16 x 8), the fragments of one warp.
template <typename T>
FLASH_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (__is_same(T, __half)) {
    FLASH_AMPERE(FLASH_MMA("f16"));
  } else {
    FLASH_AMPERE(FLASH_MMA("bf16"));
  }
}
#undef FLASH_MMA

// ---------------------------------------------------------------------- sm_90a: mbarrier, tensor copies, wgmma,
// registers

FLASH_DEVICE void barrier_init(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Ordinary writes to shared memory (barriers too), before the tensor cores or a copy read them.
FLASH_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
FLASH_DEVICE void barrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
FLASH_DEVICE void barrier_arrive_expect(SharedAddress barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
FLASH_DEVICE void barrier_wait(SharedAddress barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// One box of a (d, sequence, head, batch) tensor; the bytes count towards the barrier, rows past the end arrive as
// zeros.
FLASH_DEVICE void tensor_copy(SharedAddress to, const TensorMap& map, SharedAddress barrier, int column, int row,
                              int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Copies contiguous bytes, a multiple of 16, with both sides aligned to 16.
FLASH_DEVICE void bulk_copy(SharedAddress to, const void* from, uint32_t bytes, SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
FLASH_DEVICE float2 load_shared_pair(SharedAddress from) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from) : "memory");
  return pair;
}

FLASH_DEVICE void store_shared(SharedAddress to, int4 value) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
FLASH_DEVICE int4 load_shared_integers(SharedAddress from) {
  int4 value;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}
FLASH_DEVICE void store_shared(SharedAddress to, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(value.x), "f"(value.y), "f"(value.z),
               "f"(value.w)
               : "memory");
}
// Four 8 x 8 matrices of a warp, each transposed; lane i has the address of row i % 8 of matrix i / 8.
FLASH_DEVICE void store_matrices_transposed(SharedAddress row, const uint32_t (&value)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

// Adds contiguous floats to global memory, a multiple of 16 bytes with both sides aligned to 16. A wait covers the copies of
// this thread: until shared memory may be written again, or until the sums are complete.
FLASH_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
FLASH_DEVICE void bulk_add(float* to, SharedAddress from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
  bulk_commit();
}
// The other way of tensor_copy: elements past the ends are not written.
FLASH_DEVICE void tensor_store(const TensorMap& map, SharedAddress from, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(from),
               "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
FLASH_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
FLASH_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

FLASH_DEVICE void add_to_memory(float* to, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
}
FLASH_DEVICE void fence_memory() { __threadfence(); }

// Blocks take turns at a place in global memory: one waits for its number and then passes on the next.
FLASH_DEVICE void wait_turn(const int* turn, int number) {
  int now;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  } while (now != number);
}
FLASH_DEVICE void pass_turn(int* turn, int number) {
  asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(number) : "memory");
}

FLASH_DEVICE void sync_warp() { __syncwarp(); }
// A number that is the same in all lanes, as the compiler then knows.
FLASH_DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

template <int kCount>
FLASH_DEVICE void registers_release() {
#if FLASH_HOPPER
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
FLASH_DEVICE void registers_acquire() {
#if FLASH_HOPPER
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
FLASH_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
FLASH_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

FLASH_DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FLASH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
FLASH_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler does not know that an asynchronous product still writes these registers; this stops it from moving their use
// above this line.
template <int kCount>
FLASH_DEVICE void wgmma_keep(float (&value)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(value[i])::"memory");
}

// Operand lists of wgmma: the accumulator's registers, from %0 on.
#define FLASH_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLASH_D8(i) FLASH_D4(i), FLASH_D4(i + 4)
#define FLASH_D16(i) FLASH_D8(i), FLASH_D8(i + 8)
#define FLASH_F16 FLASH_D16(0)
#define FLASH_F20 FLASH_D16(0), FLASH_D4(16)
#define FLASH_F24 FLASH_D16(0), FLASH_D8(16)
#define FLASH_F32 FLASH_D16(0), FLASH_D16(16)
#define FLASH_F40 FLASH_F32, FLASH_D8(32)
#define FLASH_F48 FLASH_F32, FLASH_D16(32)
#define FLASH_F64 FLASH_F48, FLASH_D16(48)
#define FLASH_N16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FLASH_N20 FLASH_N16 ",%16,%17,%18,%19"
#define FLASH_N24 FLASH_N20 ",%20,%21,%22,%23"
#define FLASH_N32 FLASH_N24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FLASH_N40 FLASH_N32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FLASH_N48 FLASH_N40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FLASH_N64 FLASH_N48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// d (64 x N, one warpgroup's fragment) (+)= a b: a is a descriptor of shared memory or the fragment in registers, b a
// descriptor. i0 ... i6 are the numbers of the operands behind the accumulator's.
#define FLASH_WGMMA_FORMS(T, type, count, shape, i0, i1, i2, i3, i4, i5, i6)                                          \
  template <bool kTransposeB, bool kTransposeA = false>                                                               \
  FLASH_DEVICE void wgmma(T*, float (&d)[count], uint64_t a, uint64_t b, int accumulate) {                            \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " i2 ", 0; wgmma.mma_async.sync.aligned." shape ".f32." type "." type \
                 " {" FLASH_N##count "}, " i0 ", " i1 ", p, 1, 1, " i3 ", " i4 ";}"                                   \
                 : FLASH_F##count                                                                                     \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA ? 1 : 0), "n"(kTransposeB ? 1 : 0));              \
  }                                                                                                                   \
  template <bool kTransposeB>                                                                                         \
  FLASH_DEVICE void wgmma(T*, float (&d)[count], const uint32_t* a, uint64_t b, int accumulate) {                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " i5 ", 0; wgmma.mma_async.sync.aligned." shape ".f32." type "." type \
                 " {" FLASH_N##count "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1, " i6 ";}"                 \
                 : FLASH_F##count                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB ? 1 : 0));    \
  }
#define FLASH_WGMMA(count, shape, ...)                          \
  FLASH_WGMMA_FORMS(__half, "f16", count, shape, __VA_ARGS__) \
  FLASH_WGMMA_FORMS(__nv_bfloat16, "bf16", count, shape, __VA_ARGS__)

FLASH_WGMMA(16, "m64n32k16", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
FLASH_WGMMA(20, "m64n40k16", "%20", "%21", "%22", "%23", "%24", "%25", "%26")
FLASH_WGMMA(24, "m64n48k16", "%24", "%25", "%26", "%27", "%28", "%29", "%30")
FLASH_WGMMA(32, "m64n64k16", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
FLASH_WGMMA(40, "m64n80k16", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
FLASH_WGMMA(48, "m64n96k16", "%48", "%49", "%50", "%51", "%52", "%53", "%54")
FLASH_WGMMA(64, "m64n128k16", "%64", "%65", "%66", "%67", "%68", "%69", "%70")

// ----------------------------------------------------------------------------------------------------------- host side

// The message of an error, or null. CUDA keeps an error until it is queried; otherwise the next check in this process would
// report it.
inline const char* explain(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

inline const char* clear(void* memory, int64_t bytes, void* stream) {
  return explain(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)));
}

template <typename Args>
const char* launch(void (*kernel)(Args), dim3 blocks, int threads, int shared_bytes, void* stream, const Args& args) {
  if (shared_bytes > 48 << 10) {
    if (const char* error =
            explain(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)))
      return error;
  }
  void* arguments[] = {const_cast<Args*>(&args)};
  return explain(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, dim3(threads), arguments, shared_bytes,
                                  static_cast<cudaStream_t>(stream)));
}

// CUDA's properties of a device; empty for an unknown device, which has no tensor-core kernel.
inline Device ask_for_device(int id) {
  const auto attribute = [id](cudaDeviceAttr name) {
    int value = 0;
    return explain(cudaDeviceGetAttribute(&value, name, id)) == nullptr ? value : 0;
  };
  return {attribute(cudaDevAttrMultiProcessorCount),
          10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor)};
}

// The properties of the current device, queried once, because a call needs them several times.
inline Device device() {
  constexpr int kKept = 64;
  static std::array<Device, kKept> devices;
  static std::array<std::once_flag, kKept> asked;
  int id = 0;
  if (explain(cudaGetDevice(&id)) != nullptr) return {};
  if (id >= kKept) return ask_for_device(id);
  std::call_once(asked[id], [id] { devices[id] = ask_for_device(id); });
  return devices[id];
}

// A tensor map of 16-bit elements, with boxes of 64 columns by box_rows and a 128-byte swizzle. The encoder is looked up in
// the driver at run time, because a library that links libcuda would not load on a machine without a driver.
inline const char* make_tensor_map(TensorMap& map, const void* base, const int64_t (&sizes)[4],
                                   const int64_t (&strides)[4], int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const char* error = explain(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    return error == nullptr ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled: it is older than CUDA 12.0";
  cuuint64_t size[4], stride[3];
  for (int i = 0; i < 4; ++i) size[i] = static_cast<cuuint64_t>(sizes[i]);
  for (int i = 0; i < 3; ++i) stride[i] = static_cast<cuuint64_t>(strides[i + 1]) * 2;
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, step[4] = {1, 1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, const_cast<void*>(base), size, stride, box,
                                 step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver refuses the tensor's layout (cuTensorMapEncodeTiled)";
}

}  // namespace custom_ops::flash_attention

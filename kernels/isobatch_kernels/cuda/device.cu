// What only a compiler for NVIDIA GPUs understands, and nothing else: assembly, and words for where memory lies. No file is
// included, so NVRTC needs no headers. tests/cuda_on_cpu has the same names for a CPU.
using fp16 = unsigned short;  // bits
using bf16 = unsigned short;
#define X1_KERNEL extern "C" __global__ void
#define X1_DYNAMIC_SHARED extern __shared__ uint4 shared[]

__device__ __forceinline__ float x1_half_float(fp16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
__device__ __forceinline__ fp16 x1_nearest_half(float f) {
  fp16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
// Pairs of fp16 in a word.
__device__ __forceinline__ unsigned x1_sub_halves(unsigned a, unsigned b) {
  unsigned d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ unsigned x1_fma_halves(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Asynchronous copies of 16 bytes to shared memory, in groups.
__device__ __forceinline__ void x1_copy16(void* to, const void* from) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void x1_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void x1_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// A launch may begin before the one in front of it has ended. x1_after_previous returns when that one is complete and
// visible: nothing that a step writes may be read, and nothing written, before it. x1_let_next_begin allows the next launch
// to begin.
__device__ __forceinline__ void x1_after_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void x1_let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// d += a * b on the tensor core: 16 by 16 fp16, 16 by 8 fp16, 16 by 8 fp32.
__device__ __forceinline__ void mma16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

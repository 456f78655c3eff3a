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
__device__ __forceinline__ void x1_copy16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void x1_copy16(void* to, const void* from) {
  x1_copy16((unsigned)__cvta_generic_to_shared(to), from);
}
__device__ __forceinline__ void x1_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N>
__device__ __forceinline__ void x1_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Copies of warps to shared memory that one barrier waits for: 16-byte pieces, by one lane where there is a copy engine. `from`
// and `to` are the same in all lanes; a barrier is 8 bytes. Each of `warps` calls x1_arrive once, after its last copy, and one
// calls x1_expect with the bytes of all, perhaps after copies have ended: with a copy engine that call alone is an arrival.
__device__ __forceinline__ unsigned x1_shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }
__device__ __forceinline__ void x1_make_barriers(unsigned barriers, int count, int warps, int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    for (int i = 0; i < count; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n" ::"r"(barriers + 8 * i) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  }
#else
  if (lane == 0) {
    for (int i = 0; i < count; i++) {
      asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barriers + 8 * i), "r"(32 * warps) : "memory");
    }
  }
#endif
  __syncwarp();
}
__device__ __forceinline__ void x1_expect(unsigned barrier, int bytes, int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
  }
#endif
}
__device__ __forceinline__ void x1_copy_run(unsigned to, const void* from, int bytes, unsigned barrier, int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
  }
#else
  for (int i = 16 * lane; i < bytes; i += 512) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to + i), "l"((const char*)from + i) : "memory");
  }
#endif
}
// After the last copy that a barrier waits for.
__device__ __forceinline__ void x1_arrive(unsigned barrier) {
#if __CUDA_ARCH__ < 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
#endif
}
// `parity`: 0 and 1 by turns, each time that a barrier is waited for.
__device__ __forceinline__ void x1_wait_for(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}\n"
               ::"r"(barrier), "r"(parity) : "memory");
#else
  asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}\n"
               ::"r"(barrier), "r"(parity) : "memory");
#endif
}

// Sums that the eight warps of a team leave in shared memory, in CLUSTER blocks that have one warp or several of them each. A
// meeting is a barrier of 8 bytes that ends a turn when all of a block's part has come, `bytes` of it. Addresses are those of the
// own block.
template <int CLUSTER>
__device__ __forceinline__ void x1_make_meetings(unsigned meetings, int count, int warps, int bytes, int lane) {
  if (lane == 0) {
    for (int i = 0; i < count; i++) {
      const unsigned at = meetings + 8 * i;
      asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(at), "r"(CLUSTER > 1 ? 1 : warps) : "memory");
#if __CUDA_ARCH__ >= 900
      if (CLUSTER > 1) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(at), "r"(bytes) : "memory");
      }
#endif
    }
#if __CUDA_ARCH__ >= 900
    if (CLUSTER > 1) asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
  }
  __syncwarp();
}
// Of all threads: barriers that were made for other warps, of the block or of the cluster, may be used.
template <int CLUSTER>
__device__ __forceinline__ void x1_barriers_made() {
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  // Relaxed: the fence behind the barriers has released them.
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}
// Where a block of the cluster has what lies there in the own one; only x1_leave16 and x1_leave8 know what to do with it.
template <int CLUSTER>
__device__ __forceinline__ unsigned x1_in_block(unsigned at, int rank) {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(at), "r"(rank));
    return there;
  }
#endif
  return at;
}
template <int CLUSTER>
__device__ __forceinline__ void x1_leave16(unsigned to, float4 v, unsigned meeting) {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];\n" ::"r"(to),
                 "r"(meeting), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
    return;
  }
#endif
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
template <int CLUSTER>
__device__ __forceinline__ void x1_leave8(unsigned to, float a, float b, unsigned meeting) {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];\n" ::"r"(to),
                 "r"(meeting), "f"(a), "f"(b)
                 : "memory");
    return;
  }
#endif
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(to), "f"(a), "f"(b) : "memory");
}
// A warp has left all of its sums.
template <int CLUSTER>
__device__ __forceinline__ void x1_have_left(unsigned meeting, int lane) {
  if (CLUSTER > 1) return;
  __syncwarp();
  if (lane == 0) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(meeting) : "memory");
  }
}
// The next turn's, by one warp of a block.
template <int CLUSTER>
__device__ __forceinline__ void x1_expect_sums(unsigned meeting, int bytes, int lane) {
  if (CLUSTER > 1) x1_expect(meeting, bytes, lane);
}

// A value that is kept, and not found out anew wherever it is used.
__device__ __forceinline__ void x1_keep(int& v) { asm volatile("" : "+r"(v)); }

// What another block has just written.
__device__ __forceinline__ float4 x1_fresh16(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];\n" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
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

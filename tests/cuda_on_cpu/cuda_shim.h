// CUDA's words for a C++20 compiler; what warps exchange goes through slots. Exact where the kernels are; of no use for speed.
// CAPABILITY is the GPU's: 90 has clusters and a copy engine; with 80 all lanes copy, and arrive at barriers.
// The part below `fp16` takes the place of the kernels' device.cu.
#pragma once
#include "cuda_threads.h"

template <class T> T from_lane(T v, int source) {
  uint64_t raw = 0;
  std::memcpy(&raw, &v, sizeof v);
  own->slots[warp_id()][lane_id()] = raw;
  __syncwarp();
  raw = own->slots[warp_id()][source & 31];
  __syncwarp();
  std::memcpy(&v, &raw, sizeof v);
  return v;
}
template <class T> T __shfl_sync(unsigned, T v, int source) { return from_lane(v, source); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) { return from_lane(v, lane_id() ^ mask); }
template <class T> T __shfl_down_sync(unsigned, T v, int delta) {
  return from_lane(v, lane_id() + delta < 32 ? lane_id() + delta : lane_id());
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  for (int m = 16; m; m /= 2) v = max(v, __shfl_xor_sync(0u, v, m));
  return v;
}
inline int __reduce_add_sync(unsigned, int v) {
  for (int m = 16; m; m /= 2) v += __shfl_xor_sync(0u, v, m);
  return v;
}
inline unsigned atomicMin(unsigned* at, unsigned v) { const unsigned old = *at; *at = min(old, v); return old; }
inline unsigned atomicAdd(unsigned* at, unsigned v) { const unsigned old = *at; *at = old + v; return old; }

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using fp16 = uint16_t;  // bits
using bf16 = uint16_t;
inline float x1_half_float(fp16 h) { _Float16 v; std::memcpy(&v, &h, 2); return (float)v; }
inline fp16 x1_nearest_half(float f) { const _Float16 v = (_Float16)f; fp16 h; std::memcpy(&h, &v, 2); return h; }
template <class F> unsigned for_halves(F each) { return each(0) | (unsigned)each(16) << 16; }
inline unsigned x1_sub_halves(unsigned a, unsigned b) {
  return for_halves([&](int at) { return x1_nearest_half(x1_half_float(a >> at) - x1_half_float(b >> at)); });
}
inline unsigned x1_fma_halves(unsigned a, unsigned b, unsigned c) {
  return for_halves([&](int at) {
    return x1_nearest_half(std::fma(x1_half_float(a >> at), x1_half_float(b >> at), x1_half_float(c >> at)));
  });
}
inline void begin_copy(Copy copy, bool ends_later) {
  if (copy.into->has_ended()) result = kEndsEarly;
  if (way == Way::kRandom) {
    copy.lasts = below(once_in(2) ? kShortCopy : kLongCopy);
    std::memset(copy.to, kNonsense, copy.size);
  }
  if (ends_later) {
    own->fibers[threadIdx.x].copies.push_back(copy);
  } else {
    copy.end();
  }
}
inline void copy(void* to, const void* from, int size, Turns* brings) {
  begin_copy({own, to, from, size, brings, own->fibers[threadIdx.x].group}, way != Way::kAtOnce);
}
inline void x1_copy16(void* to, const void* from) { copy(to, from, 16, nullptr); }
inline void x1_commit() { own->fibers[threadIdx.x].group++; }
// Only in the random way do the last N groups go on.
template <int N> void x1_wait() {
  Fiber& fiber = own->fibers[threadIdx.x];
  fiber.end_groups_before(fiber.group - (way == Way::kRandom ? N : 0));
}
inline char* own_bytes(unsigned at) { return (char*)own->memory + at; }
inline void x1_copy16(unsigned to, const void* from) { x1_copy16(own_bytes(to), from); }
inline unsigned x1_shared_address(const void* at) { return (unsigned)((const char*)at - (const char*)own->memory); }
inline Turns& own_turns(unsigned at) { return *(Turns*)own_bytes(at); }
inline void check_copy(unsigned to, const void* from, int bytes) {
  if (bytes <= 0 || (bytes | to | (uintptr_t)from) % 16) result = kBadCopy;
}
#if CAPABILITY >= 90
inline void x1_make_barriers(unsigned at, int count, int, int lane) {
  for (int i = 0; i < count && lane == 0; i++) own_turns(at + 8 * i) = {1, 1, 0, 0};
  __syncwarp();
}
inline void x1_expect(unsigned at, int bytes, int lane) {
  if (lane != 0) return;
  Turns& turns = own_turns(at);
  turns.missing--;
  turns.bytes += bytes;
  turns.end_if_complete();
}
inline void x1_copy_run(unsigned to, const void* from, int bytes, unsigned barrier, int lane) {
  if (lane != 0) return;
  check_copy(to, from, bytes);
  copy(own_bytes(to), from, bytes, &own_turns(barrier));
}
inline void x1_arrive(unsigned) {}
#else
inline void x1_make_barriers(unsigned at, int count, int warps, int lane) {
  const unsigned members = 32 * warps;
  for (int i = 0; i < count && lane == 0; i++) own_turns(at + 8 * i) = {members, members, 0, 0};
  __syncwarp();
}
inline void x1_expect(unsigned, int, int) {}
inline void x1_copy_run(unsigned to, const void* from, int bytes, unsigned, int lane) {
  check_copy(to, from, bytes);
  for (int i = 16 * lane; i < bytes; i += 512) x1_copy16(to + i, (const char*)from + i);
}
inline void x1_arrive(unsigned barrier) { copy(own_bytes(barrier), nullptr, 0, &own_turns(barrier)); }
#endif
inline void x1_wait_for(unsigned at, unsigned parity) {
  Fiber& fiber = own->fibers[threadIdx.x];
  fiber.turns = &own_turns(at);
  fiber.parity = parity;
  leave_thread(fiber);
}
inline float4 x1_fresh16(const float4* from) { return *from; }
// Another block's address: its number above that of a byte of its memory.
constexpr unsigned kRank = 1 << 20;
template <int CLUSTER> unsigned x1_in_block(unsigned at, int rank) { return CLUSTER > 1 ? (rank + 1) * kRank + at : at; }
inline Block* block_of(unsigned at) { return at < kRank ? own : &cluster[at / kRank - 1]; }
inline char* somewhere(unsigned at) { return (char*)block_of(at)->memory + at % kRank; }
template <int CLUSTER> void x1_make_meetings(unsigned at, int count, int warps, int bytes, int lane) {
  for (int i = 0; i < count && lane == 0; i++) {
    const unsigned members = CLUSTER > 1 ? 1 : warps;
    own_turns(at + 8 * i) = {CLUSTER > 1 ? 0 : members, members, 0, CLUSTER > 1 ? bytes : 0};
  }
  __syncwarp();
}
template <int CLUSTER> void x1_barriers_made() {
  __syncthreads();
  if (CLUSTER > 1) meet(cluster_meeting);
}
inline void leave(unsigned to, const void* from, int size, unsigned meeting, bool counts) {
  if (!counts) {
    std::memcpy(somewhere(to), from, size);
    return;
  }
  Copy sums = {block_of(to), somewhere(to), nullptr, size, (Turns*)somewhere(meeting)};
  std::memcpy(sums.values, from, size);
  begin_copy(sums, way == Way::kRandom);
}
template <int CLUSTER> void x1_leave16(unsigned to, float4 v, unsigned meeting) { leave(to, &v, 16, meeting, CLUSTER > 1); }
template <int CLUSTER> void x1_leave8(unsigned to, float a, float b, unsigned meeting) {
  const float v[2] = {a, b};
  leave(to, v, 8, meeting, CLUSTER > 1);
}
template <int CLUSTER> void x1_have_left(unsigned meeting, int lane) {
  if (CLUSTER > 1) return;
  __syncwarp();
  if (lane == 0) {
    own_turns(meeting).missing--;
    own_turns(meeting).end_if_complete();
  }
}
template <int CLUSTER> void x1_expect_sums(unsigned meeting, int bytes, int lane) {
  if (CLUSTER > 1) x1_expect(meeting, bytes, lane);
}
inline void x1_keep(int&) {}
inline void x1_after_previous() {}
inline void x1_let_next_begin() {}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
inline void __threadfence() {}
inline float __ldcg(const float* from) { return *from; }
inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
// Compiled without contraction.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// The tensor core's 16x8x16 product, summed exactly and rounded once: the kernels never let it round.
inline float half_of(unsigned word, int upper) { return x1_half_float((fp16)(upper ? word >> 16 : word)); }
inline void mma16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Operands(&warp)[32] = own->operands[warp_id()];
  warp[lane_id()] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int row = lane_id() / 4, high = i / 2, column = lane_id() % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k++) {
      const Operands &left = warp[row * 4 + k % 8 / 2], &right = warp[column * 4 + k % 8 / 2];
      sum += (double)half_of(left.a[high + k / 8 * 2], k % 2) * half_of(right.b[k / 8], k % 2);
    }
    d[i] = (float)sum;
  }
  __syncwarp();
}

// CUDA's words for a C++20 compiler: a block's threads are contexts that take turns and change at barriers, and what warps
// exchange goes through slots. Blocks run one after another, those of a cluster together. Exact where the kernels are; of no
// use for speed. CAPABILITY is the GPU's: 90 has clusters and a copy engine; with 80 all lanes copy, and arrive at barriers.
// Launches of a kernel take three ways by turns. Late: asynchronous copies end only when they are waited for. At once: they
// end when they are asked for. Random: they end one by one in any order, as do sums that are left in blocks of a cluster, and
// until then nonsense lies where they will write; warps run in any order, and now and then one stands still for long. In every
// way, a block may not end before all that is written to its memory has come.
// The part below `fp16` takes the place of the kernels' device.cu.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((aligned(16)))
#define __align__(n) __attribute__((aligned(n)))
#define X1_KERNEL static void
#define X1_DYNAMIC_SHARED uint4* const shared = own->memory
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T min(T a, T b) { return b < a ? b : a; }

struct Place { int x, y, z; };
inline Place threadIdx, blockIdx, blockDim, gridDim;
constexpr int kMostBlocks = 8, kMostThreads = 1024;  // of a cluster, of a block
constexpr size_t kMemory = 240 * 1024;               // dynamic, of a block
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Operands { unsigned a[4], b[2]; };

enum class Way { kLate, kAtOnce, kRandom };
inline Way way;
inline uint32_t chance;  // of the random way; the library's generators take long to compile
inline unsigned below(unsigned limit) {
  chance ^= chance << 13;
  chance ^= chance >> 17;
  chance ^= chance << 5;
  return chance % limit;
}
inline bool once_in(unsigned times) { return below(times) == 0; }
// In sweeps over all threads: how long a copy lasts at most, a short and a long one; when a warp stalls, and for how long.
constexpr int kShortCopy = 24, kLongCopy = 4000, kStallsOnceIn = 200, kMostStalled = 400;
constexpr int kNonsense = 0xfb;  // bytes that are numbers of every type, far from any sum

// What a launch returns. 1: a barrier that not every thread reaches; 2: memory past what was asked for was written; 3: a copy
// that is empty or not in pieces of 16 bytes; 4: a block that ends before its copies, or before sums that are left in it.
enum Result { kFine, kBarrier, kMemoryPast, kBadCopy, kEndsEarly };
inline Result result;

// Those who must meet: a block or a warp. A thread that has returned is not waited for.
struct Meeting {
  int members = 0, arrived = 0;
  uint64_t round = 0;
  void release_if_complete() {
    if (arrived > 0 && arrived >= members) {
      arrived = 0;
      round++;
    }
  }
};
// A barrier in shared memory: its turn ends when nobody is missing, and no byte.
struct Turns {
  unsigned missing : 12, members : 12, turn : 8;
  int32_t bytes;
  void end_if_complete() {
    if (missing == 0 && bytes == 0) {
      missing = members;
      turn++;
    }
  }
};
static_assert(sizeof(Turns) == 8);
struct Block;
// A copy, whose bytes then arrive at a barrier, where it has one. Without bytes it is an arrival of the thread itself, after
// the copies that it has asked for before.
struct Copy {
  Block* into;
  void* to;
  const void* from;  // null: `values`
  int size;
  Turns* brings;
  int group;  // that is waited for where it has no barrier
  int lasts;  // sweeps, in the random way
  char values[16];
  bool is_arrival() const { return size == 0; }
  void end() const {
    if (is_arrival()) {
      brings->missing--;
    } else {
      std::memcpy(to, from ? from : values, size);
      if (brings) brings->bytes -= size;
    }
    if (brings) brings->end_if_complete();
  }
};
struct Fiber {
  std::vector<Copy> copies;
  int group = 0;       // of the copies that are asked for next
  ucontext_t context;  // to begin with; from then on jumps, which make no system call
  jmp_buf here;
  bool has_begun = false;
  Meeting* waits_for = nullptr;
  uint64_t round = 0;
  const Turns* turns = nullptr;
  unsigned parity = 0;  // of the turn whose end is waited for
  bool done = false;
  bool end_copies() {
    return end_if([](const Copy&) { return true; });
  }
  void end_groups_before(int first) {
    end_if([&](const Copy& copy) { return !copy.brings && copy.group < first; });
  }
  bool end_some_copies() {
    for (Copy& copy : copies) copy.lasts--;
    return end_if([&](const Copy& copy) { return copy.lasts < 0 && (!copy.is_arrival() || &copy == &copies[0]); });
  }
  // In the order in which they were asked for; says whether there was one.
  template <class F> bool end_if(F may_end) {
    bool some = false;
    for (size_t i = 0; i < copies.size();) {
      if (may_end(copies[i])) {
        copies[i].end();
        copies.erase(copies.begin() + i);
        some = true;
      } else {
        i++;
      }
    }
    return some;
  }
  bool is_waiting() const {
    return turns ? (turns->turn & 1u) == parity : waits_for && waits_for->round == round;
  }
};
struct Block {
  uint4 memory[kMemory / 16];
  Meeting all, warps[32];
  uint64_t slots[32][32];
  Operands operands[32][32];
  Fiber fibers[kMostThreads];
  bool has_ended() const { return all.members == 0; }
};
inline Block cluster[kMostBlocks];
inline Block* own = cluster;  // the running thread's
inline Meeting cluster_meeting;
inline int cluster_size;
inline jmp_buf scheduler;
inline void (*fiber_body)();
// Lets the others run; returns when the scheduler chooses this thread again.
inline void leave_thread(Fiber& fiber) {
  if (!_setjmp(fiber.here)) _longjmp(scheduler, 1);
}
inline void enter_thread(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.has_begun) _longjmp(fiber.here, 1);
  fiber.has_begun = true;
  setcontext(&fiber.context);
}
inline int lane_id() { return threadIdx.x & 31; }
inline int warp_id() { return threadIdx.x >> 5; }
inline void meet(Meeting& meeting) {
  Fiber& fiber = own->fibers[threadIdx.x];
  fiber.turns = nullptr;
  fiber.waits_for = &meeting;
  fiber.round = meeting.round;
  meeting.arrived++;
  meeting.release_if_complete();
  leave_thread(fiber);
}
inline void __syncthreads() { meet(own->all); }
inline void __syncwarp() { meet(own->warps[warp_id()]); }
inline bool is_written_to(const Block& block) {
  for (int b = 0; b < cluster_size; b++) {
    for (int t = 0; t < blockDim.x; t++) {
      for (const Copy& copy : cluster[b].fibers[t].copies) {
        if (copy.into == &block) return true;
      }
    }
  }
  return false;
}
inline void fiber_main() {
  Fiber& fiber = own->fibers[threadIdx.x];
  Meeting* meetings[] = {&own->all, &own->warps[warp_id()], &cluster_meeting};
  fiber_body();
  fiber.done = true;
  for (Meeting* meeting : meetings) {
    meeting->members--;
    meeting->release_if_complete();
  }
  if (own->has_ended() && is_written_to(*own)) result = kEndsEarly;
  leave_thread(fiber);
}

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

constexpr size_t kStack = 64 * 1024;
inline void begin_block(Block& block, int threads, char* stacks) {
  std::memset(block.memory, 0xff, kMemory);
  block.all = {threads};
  for (int w = 0; w < threads / 32; w++) block.warps[w] = {32};
  for (int t = 0; t < threads; t++) {
    Fiber& fiber = block.fibers[t];
    fiber.done = fiber.has_begun = false;
    fiber.waits_for = nullptr;
    fiber.turns = nullptr;
    fiber.copies.clear();
    fiber.group = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + t * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, fiber_main, 0);
  }
}
// A warp of a cluster.
struct Warp {
  int block, number;
  unsigned stalled = 0;  // sweeps that it still misses
  bool misses_sweep() {
    if (way != Way::kRandom) return false;
    if (stalled == 0 && once_in(kStallsOnceIn)) stalled = below(kMostStalled);
    if (stalled == 0) return false;
    stalled--;
    return true;
  }
};
// What a sweep over all threads has found.
struct Sweep {
  bool running = false, moved = false;
};
inline void run_warp(Warp& warp, bool backwards, Place place, Sweep& sweep) {
  const bool is_stalled = warp.misses_sweep();
  own = &cluster[warp.block];
  blockIdx = place;
  for (int n = 0; n < 32; n++) {
    const int t = warp.number * 32 + (backwards ? 31 - n : n);
    Fiber& fiber = own->fibers[t];
    if (way == Way::kRandom && fiber.end_some_copies()) sweep.moved = true;
    if (fiber.done) continue;
    sweep.running = true;
    if (fiber.is_waiting()) continue;
    sweep.moved = true;
    if (is_stalled) continue;  // it will go on, so nobody is stuck
    fiber.turns = nullptr;
    fiber.waits_for = nullptr;
    threadIdx = {t, 0, 0};
    enter_thread(fiber);
  }
}
// Nobody is always first.
inline void change_order(std::vector<Warp>& warps) {
  const int count = warps.size();
  if (way == Way::kRandom) {
    for (int i = count - 1; i > 0; i--) std::swap(warps[i], warps[below(i + 1)]);
  } else {
    for (int i = 0; i < count / 2; i++) std::swap(warps[i], warps[count - 1 - i]);
  }
}
inline bool end_copies_of_one(int threads) {
  const int all = cluster_size * threads, first = way == Way::kRandom ? below(all) : 0;
  for (int n = 0; n < all; n++) {
    const int i = (first + n) % all;
    if (cluster[i / threads].fibers[i % threads].end_copies()) return true;
  }
  return false;
}
inline Result run_cluster(int threads, const Place* places, int memory, char* stacks) {
  std::vector<Warp> warps;
  cluster_meeting = {threads * cluster_size};
  for (int b = 0; b < cluster_size; b++) {
    begin_block(cluster[b], threads, stacks + (size_t)b * threads * kStack);
    for (int w = 0; w < threads / 32; w++) warps.push_back({b, w});
  }
  bool backwards = false;
  while (true) {
    Sweep sweep;
    for (Warp& warp : warps) run_warp(warp, backwards, places[warp.block], sweep);
    if (result) return result;
    if (!sweep.running) break;
    if (!sweep.moved && !end_copies_of_one(threads)) return kBarrier;
    change_order(warps);
    backwards = !backwards;
  }
  for (int b = 0; b < cluster_size; b++) {
    for (size_t at = memory; at < kMemory; at++) {
      if (reinterpret_cast<unsigned char*>(cluster[b].memory)[at] != 0xff) return kMemoryPast;
    }
  }
  return kFine;
}
// Clusters of `size` blocks along z; stacks: kStack bytes for every thread of one. `launches` of the kernel came before.
inline int run_blocks(const int* blocks, int threads, int memory, int size, char* stacks, int launches, void (*kernel)()) {
  constexpr Way kWays[] = {Way::kLate, Way::kAtOnce, Way::kRandom};
  way = kWays[launches % 3];
  chance = 2654435761u * (launches + 1);
  result = kFine;
  gridDim = {blocks[0], blocks[1], blocks[2]};
  blockDim = {threads, 1, 1};
  cluster_size = size;
  fiber_body = kernel;
  for (int z = 0; z < blocks[2]; z += size) {
    for (int i = 0; i < blocks[0] * blocks[1]; i++) {
      Place places[kMostBlocks];
      for (int b = 0; b < size; b++) places[b] = {i % blocks[0], i / blocks[0], z + b};
      result = run_cluster(threads, places, memory, stacks);
      if (result) return result;
    }
  }
  return kFine;
}

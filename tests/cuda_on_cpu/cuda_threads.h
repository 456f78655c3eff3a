// Threads, blocks and clusters of a GPU on a CPU, for the words of cuda_shim.h: threads of a block are contexts that take turns
// and change at barriers. Blocks run one after another, those of a cluster together.
// Launches of a kernel take three ways by turns. Late: asynchronous copies end only when they are waited for. At once: they
// end when they are asked for. Random: they end one by one in any order, as do sums that are left in blocks of a cluster, and
// until then nonsense lies where they will write; warps run in any order, and now and then one stands still for long. In every
// way, a block may not end before all that is written to its memory has come.
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

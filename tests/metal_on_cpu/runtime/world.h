// State of one dispatch. All threads of a threadgroup are fibers of one OS thread, so nothing here needs a lock.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emu {

// Same layout as emu_thread in shim/emulation/thread.h.
struct ThreadInfo {
  unsigned position_in_grid[3], position_in_group[3], group_position[3];
  unsigned group_size[3], groups_per_grid[3], grid_size[3], full_group_size[3];
  unsigned index_in_group, lane, simdgroup, simdgroups, lanes;
  char* slots;
};

constexpr int kLanes = 32, kMaxThreads = 1024, kSlotBytes = 64;
constexpr size_t kStackBytes = 256 << 10, kArenaBytes = 128 << 10, kPage = 4096;
constexpr int kThreadgroupLimit = 32768;  // what every Apple GPU has
enum Space { kDevice = 0, kThreadgroup = 1, kSpaces = 2 };
enum class State : uint8_t { kReady, kInSimdgroupOp, kInBarrier, kReturned };

using Combine = void (*)(char* slots, unsigned mask, int lanes, long argument);
using Entry = void (*)(void* const* buffers);

struct Simdgroup;
struct Fiber : ThreadInfo {
  void* stack_pointer;
  Simdgroup* group;
  int stack;  // index, -1 before the first entry
  State state;
  int line;                     // where it waits
  uint32_t passed[kSpaces];     // simdgroup barriers passed that order this memory
};
struct Simdgroup {
  int first, lanes, live;
  unsigned ready, waiting, alive;  // lane masks
  Combine combine;
  long argument;
  int line;
  char* slots;
};

// One access to a byte: who, and how many barriers of each kind lay behind it. thread 0 means none yet.
struct Access { uint32_t group, thread, barriers, simd_barriers; };
struct Cell { Access write, read, older_read; };
struct Region {
  std::string name;
  char *map, *map_end, *begin, *end;
  bool writable;
  std::vector<Cell> cells;
  std::vector<uint8_t> written;
};
struct Site { const void* key; int offset, size; };

// Filled by the launcher; see harness/launcher.py for the same fields.
struct Options { int32_t check, order, flush_subnormals; uint32_t seed; };
struct Counts { uint64_t switches, simdgroup_ops, barriers, threadgroup_bytes; };

struct World {
  Entry entry;
  void* const* buffers;
  Options options;
  Counts counts;
  std::string error;
  sigjmp_buf give_up;
  bool running = false;
  unsigned random;

  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  int threads, live, num_simdgroups;
  int at_barrier, barrier_line, barrier_flags;
  uint32_t group_number;            // of the threadgroup in work, from 1
  uint32_t barriers[kSpaces];       // threadgroup barriers passed that order this memory
  void* scheduler_sp;
  char *stacks = nullptr, *slots = nullptr;
  std::vector<int> free_stacks;
  int leaving_stack;                // of a fiber that returned; reusable after the switch away from it

  std::vector<Region> regions;
  Region arena;
  std::vector<Site> sites;
  int arena_top;
};
extern World world;

extern "C" __thread ThreadInfo* emu_current;
inline Fiber* current() { return static_cast<Fiber*>(emu_current); }
[[noreturn]] void fail(const std::string& message);
void prepare_checker(bool check);

}  // namespace emu

// Fibers, simdgroup operations, barriers and the schedule.
#include "world.h"
#include <sys/mman.h>
#include <csignal>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#error "The runtime switches fibers on x86-64 only so far."
#endif

namespace emu {
World world;
extern "C" {
__thread ThreadInfo* emu_current __attribute__((tls_model("initial-exec"))) = nullptr;
int emu_sum_order = 0;
void emu_switch(void** save, void* to);
}

// Saves what the ABI asks a function to keep, changes stacks, and jumps (a return would miss the predictor).
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %r15
  pushq %r14
  pushq %r13
  pushq %r12
  pushq %rbp
  pushq %rbx
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %rbx
  popq %rbp
  popq %r12
  popq %r13
  popq %r14
  popq %r15
  popq %rdx
  jmpq *%rdx
.size emu_switch, .-emu_switch
)");

void fail(const std::string& message) {
  world.error = message;
  siglongjmp(world.give_up, 1);
}

static std::string place(const Fiber& f) {
  const unsigned* g = f.group_position;
  return "threadgroup (" + std::to_string(g[0]) + "," + std::to_string(g[1]) + "," + std::to_string(g[2]) + ") thread " +
         std::to_string(f.index_in_group);
}

static unsigned draw() { return (world.random = world.random * 747796405u + 2891336453u) >> 13; }

// The next ready lane by the schedule: 0 forward from `after`, 1 highest first, 2 random. -1: none.
static int next_lane(const Simdgroup& s, int after) {
  unsigned ready = s.ready;
  if (!ready) return -1;
  if (world.options.order == 1) return 31 - __builtin_clz(ready);
  int from = world.options.order == 2 ? (int)(draw() % kLanes) : (after + 1) % kLanes;
  unsigned later = ready >> from << from;
  return __builtin_ctz(later ? later : ready);
}

static void fiber_main();
static void* resume_point(Fiber* f) {
  if (f->stack < 0) {
    f->stack = world.free_stacks.back();
    world.free_stacks.pop_back();
    auto** top = (void**)(world.stacks + (size_t)(f->stack + 1) * kStackBytes) - 1;  // entry sees 8 mod 16, as after a call
    *--top = (void*)&fiber_main;
    f->stack_pointer = top - 6;
  }
  world.counts.switches++;
  emu_current = f;
  return f->stack_pointer;
}
static void leave(Fiber* f) {
  int lane = next_lane(*f->group, (int)f->lane);
  void* to = lane < 0 ? world.scheduler_sp : resume_point(&world.fibers[f->group->first + lane]);
  emu_switch(&f->stack_pointer, to);
}

static void release_simdgroup(Simdgroup& s) {
  if (s.combine) s.combine(s.slots, s.waiting, s.lanes, s.argument);
  for (unsigned m = s.waiting; m; m &= m - 1) world.fibers[s.first + __builtin_ctz(m)].state = State::kReady;
  s.ready |= s.waiting;
  s.waiting = 0;
  world.counts.simdgroup_ops++;
}
static void release_barrier() {
  for (int i = 0; i < world.threads; i++) {
    Fiber& f = world.fibers[i];
    if (f.state != State::kInBarrier) continue;
    f.state = State::kReady;
    f.group->ready |= 1u << f.lane;
  }
  world.at_barrier = 0;
  world.counts.barriers++;
  for (int space = 0; space < kSpaces; space++) world.barriers[space] += world.barrier_flags >> space & 1;
}
static void count_simd_barrier(Fiber* f, int flags) {
  for (int space = 0; space < kSpaces; space++) f->passed[space] += flags >> space & 1;
}

extern "C" void emu_simdgroup_op(Combine combine, long argument, int line) {
  Fiber* f = current();
  Simdgroup& s = *f->group;
  if (s.live != s.lanes)
    fail("simdgroup operation at line " + std::to_string(line) + " after a lane returned: " + place(*f));
  if (!s.waiting) { s.combine = combine; s.argument = argument; s.line = line; }
  else if (s.line != line || s.combine != combine || s.argument != argument)
    fail("divergent simdgroup operation: lanes at line " + std::to_string(s.line) + " and at line " + std::to_string(line) +
         ": " + place(*f));
  s.waiting |= 1u << f->lane;
  s.ready &= ~(1u << f->lane);
  f->state = State::kInSimdgroupOp;
  f->line = line;
  if (s.waiting == s.alive) release_simdgroup(s);
  else leave(f);
}
extern "C" void emu_simdgroup_barrier(int flags, int line) {
  Fiber* f = current();
  emu_simdgroup_op(nullptr, flags, line);
  if (flags > 0) count_simd_barrier(f, flags);
}
extern "C" void emu_threadgroup_barrier(int flags, int line) {
  Fiber* f = current();
  if (world.live != world.threads)
    fail("threadgroup_barrier at line " + std::to_string(line) + " after a thread returned: " + place(*f));
  if (world.at_barrier && (world.barrier_line != line || world.barrier_flags != flags))
    fail("divergent threadgroup_barrier: threads at line " + std::to_string(world.barrier_line) + " and at line " +
         std::to_string(line) + ": " + place(*f));
  world.barrier_line = line;
  world.barrier_flags = flags;
  f->state = State::kInBarrier;
  f->line = line;
  f->group->ready &= ~(1u << f->lane);
  count_simd_barrier(f, flags);
  if (++world.at_barrier == world.live) release_barrier();
  else leave(f);
}

static void fiber_main() {
  world.entry(world.buffers);
  Fiber* f = current();
  Simdgroup& s = *f->group;
  f->state = State::kReturned;
  s.live--;
  s.ready &= ~(1u << f->lane);
  s.alive &= ~(1u << f->lane);
  world.live--;
  if (s.waiting) fail("a lane returned while others wait at the simdgroup operation of line " + std::to_string(s.line) + ": " + place(*f));
  if (world.at_barrier)
    fail("a thread returned while others wait at the threadgroup_barrier of line " + std::to_string(world.barrier_line) + ": " + place(*f));
  if (world.leaving_stack >= 0) world.free_stacks.push_back(world.leaving_stack);
  world.leaving_stack = f->stack;
  leave(f);
  abort();
}

static void set_up_group(const unsigned position[3], const unsigned full[3], const unsigned grid[3], const unsigned groups[3]) {
  unsigned size[3];
  for (int d = 0; d < 3; d++) {  // dispatchThreads: groups at the edge are partial
    unsigned left = grid[d] - position[d] * full[d];
    size[d] = left < full[d] ? left : full[d];
  }
  world.threads = world.live = (int)(size[0] * size[1] * size[2]);
  world.num_simdgroups = (world.threads + kLanes - 1) / kLanes;
  world.at_barrier = 0;
  world.barriers[kDevice] = world.barriers[kThreadgroup] = 1;
  world.free_stacks.clear();
  for (int i = world.threads + 1; i >= 0; i--) world.free_stacks.push_back(i);
  world.leaving_stack = -1;
  for (auto& site : world.sites) memset(world.arena.begin + site.offset, 0xFF, site.size);  // NaN in most types
  if (world.options.check) std::fill(world.arena.written.begin(), world.arena.written.end(), 0);
  for (int i = 0; i < world.num_simdgroups; i++) {
    Simdgroup& s = world.simdgroups[i];
    s.first = i * kLanes;
    s.lanes = s.live = world.threads - s.first < kLanes ? world.threads - s.first : kLanes;
    s.ready = s.alive = s.lanes == kLanes ? ~0u : (1u << s.lanes) - 1;
    s.waiting = 0;
    s.slots = world.slots + (size_t)s.first * kSlotBytes;
  }
  for (int i = 0; i < world.threads; i++) {
    Fiber& f = world.fibers[i];
    unsigned at[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int d = 0; d < 3; d++) {
      f.position_in_group[d] = at[d];
      f.group_position[d] = position[d];
      f.position_in_grid[d] = position[d] * full[d] + at[d];
      f.group_size[d] = size[d];
      f.full_group_size[d] = full[d];
      f.groups_per_grid[d] = groups[d];
      f.grid_size[d] = grid[d];
    }
    f.index_in_group = (unsigned)i;
    f.lane = (unsigned)i % kLanes;
    f.simdgroup = (unsigned)i / kLanes;
    f.simdgroups = (unsigned)world.num_simdgroups;
    f.group = &world.simdgroups[i / kLanes];
    f.lanes = (unsigned)f.group->lanes;
    f.slots = f.group->slots;
    f.state = State::kReady;
    f.stack = -1;
    f.passed[kDevice] = f.passed[kThreadgroup] = 1;
  }
}

static std::string describe_deadlock() {
  std::string text = "deadlock:";
  int shown = 0;
  for (int i = 0; i < world.threads && shown < 4; i++) {
    const Fiber& f = world.fibers[i];
    if (i && f.state == world.fibers[i - 1].state && f.line == world.fibers[i - 1].line) continue;
    const char* what = f.state == State::kInSimdgroupOp ? "in a simdgroup operation" : f.state == State::kInBarrier ? "at a barrier" : "returned";
    text += " " + place(f) + " " + what + " of line " + std::to_string(f.line) + ";";
    shown++;
  }
  return text;
}

static void run_group() {
  while (world.live) {
    bool progress = false;
    for (int i = 0; i < world.num_simdgroups; i++) {
      int pick = world.options.order == 1 ? world.num_simdgroups - 1 - i
                 : world.options.order == 2 ? (int)((i + draw()) % (unsigned)world.num_simdgroups) : i;
      Simdgroup& s = world.simdgroups[pick];
      if (!s.ready) continue;
      progress = true;
      emu_switch(&world.scheduler_sp, resume_point(&world.fibers[s.first + next_lane(s, kLanes - 1)]));
    }
    if (progress) continue;
    bool any_ready = false;  // the random schedule may have missed one
    for (int i = 0; i < world.num_simdgroups; i++) any_ready = any_ready || world.simdgroups[i].ready;
    if (!any_ready && world.live) fail(describe_deadlock());
  }
}

static struct sigaction old_segv, old_bus;
static void on_fault(int number, siginfo_t* info, void*) {
  if (!world.running) {
    sigaction(number, number == SIGSEGV ? &old_segv : &old_bus, nullptr);
    return;
  }
  char* at = (char*)info->si_addr;
  std::string what = "access outside every buffer";
  for (auto& r : world.regions) {
    if (at < r.map || at >= r.map_end) continue;
    bool inside = at >= r.begin && at < r.end;
    what = (inside ? "write to input " : "out of bounds: ") + r.name + " byte " + std::to_string(at - r.begin) + " of " +
           std::to_string(r.end - r.begin);
  }
  fail(what + ": " + place(*current()));
}

static void allocate_once() {
  if (world.stacks) return;
  world.fibers.resize(kMaxThreads);
  world.simdgroups.resize(kMaxThreads / kLanes);
  auto map = [](size_t bytes) { return (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0); };
  int stacks = kMaxThreads + 2;
  world.stacks = map(kStackBytes * stacks);
  for (int i = 0; i < stacks; i++) mprotect(world.stacks + (size_t)i * kStackBytes, kPage, PROT_NONE);
  world.slots = map((size_t)kMaxThreads * kSlotBytes);
  char* arena = map(kArenaBytes);
  world.arena = Region{"threadgroup memory", arena, arena + kArenaBytes, arena, arena + kArenaBytes, true, {}, {}};
}

extern "C" int emu_run(Entry entry, void* const* buffers, const unsigned* grid, const unsigned* wanted_group, const Options* options,
                       Counts* counts, char* error, size_t error_bytes) {
  unsigned full[3], groups[3];
  for (int d = 0; d < 3; d++) {
    full[d] = wanted_group[d] < grid[d] ? wanted_group[d] : grid[d];
    groups[d] = (grid[d] + full[d] - 1) / full[d];
  }
  allocate_once();
  world.entry = entry;
  world.buffers = buffers;
  world.options = *options;
  world.counts = {};
  world.error.clear();
  world.random = options->seed * 2 + 1;
  world.sites.clear();
  world.arena_top = 0;
  prepare_checker(options->check);

  static char alternate[1 << 16];
  stack_t stack{}, old_stack{};
  stack.ss_sp = alternate;
  stack.ss_size = sizeof alternate;
  sigaltstack(&stack, &old_stack);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  const unsigned mxcsr = _mm_getcsr();
  if (!sigsetjmp(world.give_up, 1)) {
    if (full[0] * full[1] * full[2] > (unsigned)kMaxThreads) fail("threadgroup of more than 1024 threads");
    world.running = true;
    if (options->flush_subnormals) _mm_setcsr(mxcsr | 0x8040);  // results and operands; fp16 conversions are not touched
    unsigned total = groups[0] * groups[1] * groups[2];
    unsigned start = options->order == 2 ? draw() % total : 0;
    for (unsigned n = 0; n < total; n++) {
      unsigned g = options->order == 1 ? total - 1 - n : (n + start) % total;
      unsigned position[3] = {g % groups[0], g / groups[0] % groups[1], g / groups[0] / groups[1]};
      world.group_number = g + 1;
      set_up_group(position, full, grid, groups);
      run_group();
    }
    for (auto& site : world.sites) world.counts.threadgroup_bytes += (site.size + 15) / 16 * 16;
    if (world.counts.threadgroup_bytes > (uint64_t)kThreadgroupLimit)
      fail("threadgroup memory of " + std::to_string(world.counts.threadgroup_bytes) + " bytes, limit 32768");
  }
  _mm_setcsr(mxcsr);
  world.running = false;
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
  *counts = world.counts;
  strncpy(error, world.error.c_str(), error_bytes - 1);
  return world.error.empty() ? 0 : 1;
}
}  // namespace emu

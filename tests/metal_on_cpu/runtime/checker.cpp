// Check mode: kernels are compiled with -fsanitize=thread, whose calls land here instead of in that tool's own runtime.
// Every byte keeps its last writer and two readers; two accesses by different threads, one of them a write, with no
// barrier for that memory between them, are a race. Atomics are not examined; shuffles give no order.
#include "world.h"
#include <cstring>

namespace emu {
void prepare_checker(bool check) {
  world.arena.cells.assign(check ? kArenaBytes : 0, Cell{});
  world.arena.written.assign(check ? kArenaBytes : 0, 0);
}

static bool happened_before(const Access& earlier, const Fiber* f, Space space) {
  if (!earlier.thread) return true;
  if (earlier.group != world.group_number) return space == kThreadgroup;  // its arena is fresh for every group
  if (earlier.thread == f->index_in_group + 1) return true;
  if (earlier.barriers < world.barriers[space]) return true;
  bool same_simdgroup = (earlier.thread - 1) / kLanes == f->simdgroup;
  return same_simdgroup && earlier.simd_barriers < f->passed[space];
}
static std::string where(const Region& r, const char* at, int bytes) {
  return r.name + " byte " + std::to_string(at - r.begin) + " (" + std::to_string(bytes) + " bytes) of " +
         std::to_string(r.end - r.begin) + ", thread " + std::to_string(current()->index_in_group);
}
static void require_order(const Access& earlier, Space space, const char* kinds, const Region& r, const char* at, int bytes) {
  if (happened_before(earlier, current(), space)) return;
  fail(std::string("data race, ") + kinds + ": " + where(r, at, bytes) + " after threadgroup " + std::to_string(earlier.group - 1) +
       " thread " + std::to_string(earlier.thread - 1));
}
static void touch(const void* pointer, int bytes, bool write) {
  if (!world.running || !world.options.check) return;
  char* at = (char*)pointer;
  Region* r = nullptr;
  Space space = kDevice;
  if (at >= world.arena.begin && at < world.arena.end) {
    r = &world.arena;
    space = kThreadgroup;
    bool inside = false;
    for (auto& s : world.sites) inside = inside || (at >= r->begin + s.offset && at + bytes <= r->begin + s.offset + s.size);
    if (!inside) fail("out of bounds of a threadgroup array: " + where(*r, at, bytes));
  } else {
    for (auto& candidate : world.regions) if (at >= candidate.map && at < candidate.map_end) { r = &candidate; break; }
    if (!r) return;  // a fiber's own stack
    if (at < r->begin || at + bytes > r->end) fail("out of bounds: " + where(*r, at, bytes));
    if (write && !r->writable) fail("write to input " + where(*r, at, bytes));
    if (!r->writable) return;
  }
  Fiber* f = current();
  const Access now{world.group_number, f->index_in_group + 1, world.barriers[space], f->passed[space]};
  for (char* p = at; p < at + bytes; p++) {
    size_t i = (size_t)(p - r->begin);
    Cell& c = r->cells[i];
    require_order(c.write, space, write ? "write after write" : "read after write", *r, p, bytes);
    if (write) {
      require_order(c.read, space, "write after read", *r, p, bytes);
      require_order(c.older_read, space, "write after read", *r, p, bytes);
      c = Cell{now, {}, {}};
      r->written[i] = 1;
    } else {
      if (space == kThreadgroup && !r->written[i]) fail("read of unwritten threadgroup memory: " + where(*r, at, bytes));
      if (c.read.thread != now.thread || c.read.group != now.group) c.older_read = c.read;
      c.read = now;
    }
  }
}

extern "C" {
#define EMU_ACCESS(n)                                                                  \
  void __tsan_read##n(void* p) { touch(p, n, false); }                                 \
  void __tsan_write##n(void* p) { touch(p, n, true); }                                 \
  void __tsan_unaligned_read##n(void* p) { touch(p, n, false); }                       \
  void __tsan_unaligned_write##n(void* p) { touch(p, n, true); }                       \
  void __tsan_read_write##n(void* p) { touch(p, n, false); touch(p, n, true); }        \
  void __tsan_unaligned_read_write##n(void* p) { touch(p, n, false); touch(p, n, true); }
EMU_ACCESS(1) EMU_ACCESS(2) EMU_ACCESS(4) EMU_ACCESS(8) EMU_ACCESS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void* __tsan_memset(void* to, int value, size_t n) { touch(to, (int)n, true); return memset(to, value, n); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  touch(from, (int)n, false);
  touch(to, (int)n, true);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  touch(from, (int)n, false);
  touch(to, (int)n, true);
  return memmove(to, from, n);
}
// What clang calls for bfloat, which an older libgcc lacks: round to nearest even, NaN stays NaN.
__bf16 __truncsfbf2(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  auto h = (uint16_t)(nan ? (u >> 16) | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
  __bf16 r;
  memcpy(&r, &h, 2);
  return r;
}
}
}  // namespace emu

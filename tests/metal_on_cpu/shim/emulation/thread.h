// What a kernel thread knows of itself, and the runtime's entry points. runtime/fibers.h has the same layout.
#pragma once

struct emu_thread {
  uint position_in_grid[3], position_in_group[3], group_position[3];
  uint group_size[3], groups_per_grid[3], grid_size[3], full_group_size[3];
  uint index_in_group, lane, simdgroup, simdgroups, lanes;
  char* slots;  // exchange slots of this simdgroup, emu_slot_bytes apart
};
constexpr int emu_slot_bytes = 64;

extern "C" {
extern __thread emu_thread* emu_current __attribute__((tls_model("initial-exec")));
extern int emu_sum_order;
// Runs `combine` over the slots once every live lane of the simdgroup has come to this line.
typedef void (*emu_combine)(char* slots, unsigned mask, int lanes, long argument);
void emu_simdgroup_op(emu_combine combine, long argument, int line);
void emu_simdgroup_barrier(int flags, int line);
void emu_threadgroup_barrier(int flags, int line);
void* emu_threadgroup_memory(const void* site, size_t size, size_t align);
}

namespace metal {
// A threadgroup variable: one place in the group's arena for each declaration (Site).
template <class T, int Site>
struct emu_site {
  static inline char key;
  static T& get() { return *(T*)emu_threadgroup_memory(&key, sizeof(T), alignof(T)); }
};
METAL_FUNC int emu_lane() { return (int)emu_current->lane; }

enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
METAL_FUNC void threadgroup_barrier(mem_flags f, int line = __builtin_LINE()) { emu_threadgroup_barrier((int)f, line); }
METAL_FUNC void simdgroup_barrier(mem_flags f, int line = __builtin_LINE()) { emu_simdgroup_barrier((int)f, line); }
}  // namespace metal

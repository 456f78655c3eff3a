// Device buffers between guard pages, and the arena of threadgroup variables.
#include "world.h"
#include <sys/mman.h>
#include <cstring>

namespace emu {
// The end of a buffer touches the guard page above, so an access past it faults at once.
extern "C" void* emu_buffer_add(size_t bytes, size_t align, int writable, const char* name) {
  size_t body = (bytes + align - 1) / align * align, mapped = (body + kPage - 1) / kPage * kPage;
  if (!mapped) mapped = kPage;
  char* map = (char*)mmap(nullptr, mapped + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  mprotect(map + kPage, mapped, PROT_READ | PROT_WRITE);
  char* begin = map + kPage + mapped - body;
  world.regions.push_back(Region{name, map, map + mapped + 2 * kPage, begin, begin + bytes, writable != 0, {}, {}});
  return begin;
}
extern "C" void emu_buffers_seal(int check) {
  for (auto& r : world.regions) {
    if (!r.writable) mprotect(r.map + kPage, (size_t)(r.map_end - r.map) - 2 * kPage, PROT_READ);
    if (check && r.writable) {
      r.cells.assign((size_t)(r.end - r.begin), Cell{});
      r.written.assign((size_t)(r.end - r.begin), 0);
    }
  }
}
extern "C" void emu_buffers_clear() {
  for (auto& r : world.regions) munmap(r.map, (size_t)(r.map_end - r.map));
  world.regions.clear();
}
// Bytes of a buffer that no thread wrote; check mode only.
extern "C" long emu_unwritten(int index) {
  long count = 0;
  for (uint8_t w : world.regions[(size_t)index].written) count += !w;
  return count;
}

extern "C" void* emu_threadgroup_memory(const void* key, size_t size, size_t) {
  for (auto& site : world.sites) if (site.key == key) return world.arena.begin + site.offset;
  int offset = (world.arena_top + 255) / 256 * 256;
  if (offset + size + 64 > kArenaBytes) fail("threadgroup variables of more than " + std::to_string(kArenaBytes) + " bytes");
  world.sites.push_back(Site{key, offset, (int)size});
  world.arena_top = offset + (int)size + 64;  // a gap, so that an overrun meets no other array
  memset(world.arena.begin + offset, 0xFF, size);
  return world.arena.begin + offset;
}
}  // namespace emu

#include "cpu_features.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace isobatch {

#if defined(__x86_64__)
namespace {
uint64_t saved_register_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return ((uint64_t)high << 32) | low;
}
bool bit(uint32_t word, int index) { return (word >> index) & 1; }

// Linux gives a process the tiles' registers on request.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
}  // namespace

CpuFeatures detect_cpu_features() {
  CpuFeatures features;
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return features;  // OSXSAVE
  const bool fma = bit(c, 12), avx = bit(c, 28), f16c = bit(c, 29);
  const uint64_t state = saved_register_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
  features.avx2 = ymm && avx && fma && f16c && bit(b, 5);
  features.avx512_vnni = features.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 11);
  const bool tiles = (state & 0x60000) == 0x60000 && bit(d, 24) && bit(d, 25);
  features.amx_int8 = features.avx512_vnni && tiles && may_use_tiles();
  return features;
}
#elif defined(__aarch64__)
CpuFeatures detect_cpu_features() {
  CpuFeatures features;
  features.neon = true;
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP, which old system headers lack
  features.dotprod = (getauxval(AT_HWCAP) & kDotProducts) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  features.dotprod = sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#endif
  return features;
}
#else
CpuFeatures detect_cpu_features() { return {}; }
#endif

int usable_cpus() {
  int count = std::max(1, (int)std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) count = std::max(1, CPU_COUNT(&set));
  std::ifstream quota_file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (quota_file >> quota >> period && quota != "max" && period > 0) {
    count = std::max(1, std::min(count, (int)std::ceil(std::stod(quota) / period)));
  }
#endif
  return count;
}

#if defined(__x86_64__)
ScopedFloatMode::ScopedFloatMode(bool flush_subnormals) : saved_(_mm_getcsr()) {
  constexpr uint32_t kDefault = 0x1f80, kFlush = 0x8040;  // FTZ and DAZ
  _mm_setcsr(flush_subnormals ? kDefault | kFlush : kDefault);
}
ScopedFloatMode::~ScopedFloatMode() { _mm_setcsr((uint32_t)saved_); }
#elif defined(__aarch64__)
ScopedFloatMode::ScopedFloatMode(bool flush_subnormals) {
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
  const uint64_t mode = flush_subnormals ? (uint64_t)1 << 24 : 0;
  __asm__ volatile("msr fpcr, %0" ::"r"(mode));
}
ScopedFloatMode::~ScopedFloatMode() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_)); }
#else
ScopedFloatMode::ScopedFloatMode(bool) : saved_(0) {}
ScopedFloatMode::~ScopedFloatMode() {}
#endif

}  // namespace isobatch

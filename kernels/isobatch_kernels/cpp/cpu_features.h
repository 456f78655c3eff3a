// What this processor can do, and the floating-point mode of a thread.
#pragma once
#include <cstdint>

namespace isobatch {

struct CpuFeatures {
  bool avx2 = false;         // with FMA and F16C
  bool avx512_vnni = false;  // with AVX-512 F, BW, DQ, VL
  bool amx_int8 = false;     // with all of these, and this process may use tiles
  bool neon = false;         // of aarch64
  bool dotprod = false;      // NEON's dot products of bytes
};

// On x86-64 reads cpuid and asks whether the operating system saves the registers; on aarch64 asks the operating system.
// All false on other architectures.
CpuFeatures detect_cpu_features();

// CPUs this process may use: the affinity mask, limited by the control group's quota; at least 1.
int usable_cpus();

// Sets the default floating-point mode (round to nearest, subnormals kept or flushed) while it lives.
class ScopedFloatMode {
 public:
  explicit ScopedFloatMode(bool flush_subnormals);
  ~ScopedFloatMode();
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace isobatch

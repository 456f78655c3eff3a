// The tables that this build and this processor have, the reference apart.
#pragma once
#include <vector>

#include "cpu_features.h"
#include "linear.h"
#include "row_ops.h"

namespace isobatch::testing {

inline std::vector<const RowOps*> row_tables() {
  const CpuFeatures cpu = detect_cpu_features();
  std::vector<const RowOps*> tables{scalar_row_ops()};
  if (cpu.avx2) tables.push_back(avx2_row_ops());
  if (cpu.avx512_vnni) tables.push_back(avx512_row_ops());
  if (cpu.neon) tables.push_back(neon_row_ops());
  return tables;
}

inline std::vector<const LinearOps*> linear_tables() {
  const CpuFeatures cpu = detect_cpu_features();
  std::vector<const LinearOps*> tables{scalar_linear_ops()};
  if (cpu.avx2) tables.push_back(avx2_linear_ops());
  if (cpu.avx512_vnni) tables.push_back(avx512_linear_ops());
  if (cpu.neon) tables.push_back(neon_linear_ops());
  if (cpu.dotprod) tables.push_back(neon_dotprod_linear_ops());
  return tables;
}

inline std::vector<const char*> engine_units() {
  const CpuFeatures cpu = detect_cpu_features();
  std::vector<const char*> units{"scalar"};
  if (cpu.avx2) units.push_back("avx2");
  if (cpu.avx512_vnni) units.push_back("vnni");
  if (cpu.neon) units.push_back("neon");
  return units;
}

}  // namespace isobatch::testing
